"""Losses and gradients of one model trained by many ranks, each seeing part of the tokens.

One convention covers data parallelism (dp) and context parallelism (cp), however the two split the ranks:

* every rank's loss is the sum over its own valid tokens divided by the valid tokens of *all* ranks
  (`token_mean_loss`), so the losses of all ranks add up to the mean over all tokens;
* gradients are therefore *summed* over dp x cp (`reduce_gradients`), never averaged.

Averaging per-rank means instead would weigh a token more on a rank with few valid tokens than elsewhere.
Wrappers that average by themselves need the loss multiplied by the number of ranks that they average over:
`DistributedDataParallel`, and FSDP2's `fully_shard` unless `set_gradient_divide_factor(1.0)` is called on
every sharded module.

A `group` is always all ranks that see different tokens of one batch: dp x cp. `None` means all processes if
torch.distributed is initialised, otherwise a process that works alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from itertools import accumulate
from numbers import Integral

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from laga_attn.agreement import agree
from laga_attn.grid import ContextParallel

__all__ = ["load_balancing_loss", "reduce_gradients", "token_mean_loss"]

_BUCKET_BYTES = 64 * 2**20
_NOTHING_TRAINABLE = "no parameter requires grad, so there is no gradient to reduce"


def token_mean_loss(loss_sum: Tensor, n_valid: int | Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """This rank's share of the mean loss over the valid tokens of all ranks.

    The shares of all ranks add up to the mean; to log it, all-reduce (sum) the detached result.

    Args:
        loss_sum: 0-d sum of the losses of this rank's valid tokens. A rank without valid tokens passes the
            zero that `cross_entropy(..., reduction="sum")` gives it, still attached to the model: backward
            runs collectives, so it has to run on every rank.
        n_valid: how many tokens `loss_sum` counts, int or 0-d integer tensor; may be 0.
        group: dp x cp ranks.

    Returns:
        0-d `loss_sum / sum of n_valid over the group`, differentiable. 0 if no rank has a valid token.

    Raises:
        ValueError: `loss_sum` is no scalar, `n_valid` no integer, or the loss requires grad on some ranks only; on
            every rank.
    """
    error = _misfit(loss_sum, n_valid)
    tally = torch.tensor([0, loss_sum.requires_grad, error is not None], device=loss_sum.device)  # as integers
    if error is None:
        tally[0] = n_valid
    size = _size(group)
    if size > 1:
        dist.all_reduce(tally, group=group)
    total, n_attached, n_wrong = tally.tolist()
    if n_wrong:  # all know, so all can say what
        agree(_ranks(group), {}, error)
    if n_attached not in (0, size):
        raise ValueError(
            f"the loss requires grad on {n_attached} of {size} ranks only, so backward would hang: the other "
            "ranks never join its collectives. Compute loss_sum from the logits on every rank; without valid "
            "tokens, cross_entropy(logits, labels, reduction='sum') is a 0 still attached to the model"
        )
    share: Tensor = loss_sum / max(total, 1)
    return share


def reduce_gradients(
    parameters: nn.Module | Iterable[nn.Parameter],
    group: dist.ProcessGroup | None = None,
    *,
    bucket_bytes: int = _BUCKET_BYTES,
) -> None:
    """Sum the gradients of all ranks, in place; call it once after backward and before clipping or stepping.

    Every element is summed in rank order in fp32 (fp64 for fp64 gradients) by exactly one rank and handed to
    the others, so the result is bitwise equal on all ranks, from run to run and on every backend, and a bf16
    gradient is rounded once. A parameter without a gradient on some ranks (an expert that got no token there)
    counts as zero on those; one without a gradient on any rank keeps None.

    Args:
        parameters: a module, or its parameters in the same order on every rank. Frozen ones are skipped.
        group: dp x cp ranks.
        bucket_bytes: gradients travel in flat buckets of about this size; two buckets of memory are needed.

    Raises:
        ValueError: ranks with different parameters, sparse or sharded gradients, or no parameter that requires grad; on
            every rank.
    """
    size = _size(group)
    trainable = _trainable(parameters)
    if size == 1:
        if not trainable:
            raise ValueError(_NOTHING_TRAINABLE)
        return
    with torch.no_grad():
        present = _agree_on_presence(trainable, group)
        used = [parameter for parameter, there in zip(trainable, present, strict=True) if there]
        for bucket in _buckets(used, bucket_bytes):
            _reduce_bucket(bucket, group, size)


def load_balancing_loss(
    router_probs: Tensor,
    chosen: Tensor,
    group: dist.ProcessGroup | None = None,
    token_mask: Tensor | None = None,
) -> Tensor:
    """This rank's share of the load-balancing loss `E * sum_i f_i * p_i` over the tokens of all ranks.

    `f_i` is the fraction of routing choices that went to expert i and `p_i` the mean router probability of i,
    both over all valid tokens of the group (Fedus et al. 2021, arXiv 2101.03961, eq. 4-6, with the top-k
    choices of a token counted alike). 1 when balanced. The product of the two is not a mean over tokens, so
    it must not be computed per rank; with global `f_i` the shares of the ranks add up to the loss that one
    process would compute, and so do the gradients, whatever the number of ranks. Multiply by your coefficient
    and add to `token_mean_loss`.

    Args:
        router_probs: `[T, E]` probabilities of this rank's tokens, float, carrying the gradient.
        chosen: `[T, K]` int64 experts chosen for each token.
        group: dp x cp ranks.
        token_mask: `[T]` bool, False for pads. None: every token counts.

    Raises:
        ValueError: shapes that do not fit.
    """
    tokens, experts = router_probs.shape
    mask = torch.ones(tokens, dtype=torch.bool, device=chosen.device) if token_mask is None else token_mask
    if chosen.ndim != 2 or chosen.shape[0] != tokens or mask.shape != (tokens,):
        raise ValueError(
            f"router_probs {list(router_probs.shape)} is [T, E], so chosen must be [{tokens}, K] and "
            f"token_mask [{tokens}]; got {list(chosen.shape)} and {list(mask.shape)}"
        )
    counts = torch.bincount(chosen[mask].reshape(-1), minlength=experts)  # [E]
    tally = torch.cat([counts, mask.sum()[None]])  # [E + 1]
    if _size(group) > 1:
        dist.all_reduce(tally, group=group)
    total = tally[experts].clamp(min=1)
    fraction = tally[:experts].to(_sum_dtype(router_probs)) / (total * chosen.shape[1])  # [E]
    summed = torch.where(mask[:, None], router_probs, 0).to(fraction.dtype).sum(0)  # [E], this rank's tokens
    return experts * (fraction * summed).sum() / total


def _size(group: dist.ProcessGroup | None) -> int:
    return dist.get_world_size(group) if group is not None or dist.is_initialized() else 1


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _ranks(group: dist.ProcessGroup | None) -> ContextParallel:
    world = group or dist.group.WORLD
    return ContextParallel.none() if world is None else ContextParallel(world, check="always")


def _misfit(loss_sum: Tensor, n_valid: object) -> str | None:
    if loss_sum.ndim != 0:
        return f"loss_sum must be a 0-d sum, got shape {list(loss_sum.shape)}; use reduction='sum'"
    if isinstance(n_valid, Tensor):
        if n_valid.ndim != 0 or n_valid.is_floating_point() or n_valid.is_complex():
            return f"n_valid must be one integer, got {n_valid.dtype} of shape {list(n_valid.shape)}"
    elif not isinstance(n_valid, Integral):  # NumPy's too
        return f"n_valid must be one integer, got {n_valid!r}"
    return None


def _trainable(parameters: nn.Module | Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """The distinct parameters that require grad, in order."""
    given = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
    return list(dict.fromkeys(parameter for parameter in given if parameter.requires_grad))


def _agree_on_presence(trainable: list[nn.Parameter], group: dist.ProcessGroup | None) -> list[bool]:
    """Which parameters have a gradient on any rank, once all ranks are known to hold the same parameters."""
    shapes = repr([(tuple(parameter.shape), _sum_dtype(parameter)) for parameter in trainable])
    signature = {
        "number of trainable parameters": len(trainable),
        "checksum of their shapes and dtypes": zlib.crc32(shapes.encode()),
    }
    agree(_ranks(group), signature, _local_error(trainable))
    present = torch.tensor([parameter.grad is not None for parameter in trainable], dtype=torch.int32)
    present = present.to(trainable[0].device)
    dist.all_reduce(present, group=group)
    return [holders > 0 for holders in present.tolist()]


def _local_error(trainable: list[nn.Parameter]) -> str | None:
    if not trainable:
        return _NOTHING_TRAINABLE
    for number, parameter in enumerate(trainable):
        where = f"trainable parameter {number} of shape {list(parameter.shape)}"
        if isinstance(parameter, DTensor):
            return f"{where} is a DTensor, whose gradient FSDP2 reduces; leave reduce_gradients out"
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            return f"{where} has a gradient of layout {parameter.grad.layout}; make it dense (sparse=False)"
        if not parameter.is_floating_point():
            return f"{where} has dtype {parameter.dtype}; only real floating point gradients can be reduced"
    return None


def _buckets(parameters: list[nn.Parameter], bucket_bytes: int) -> Iterator[list[nn.Parameter]]:
    """Consecutive parameters of one device and summation dtype, as many as fit in a bucket, at least one."""
    bucket: list[nn.Parameter] = []
    filled = 0
    for parameter in parameters:
        n_bytes = parameter.numel() * _sum_dtype(parameter).itemsize
        fits = bucket and filled + n_bytes <= bucket_bytes
        if bucket and not (fits and _kind(parameter) == _kind(bucket[0])):
            yield bucket
            bucket, filled = [], 0
        bucket.append(parameter)
        filled += n_bytes
    if bucket:
        yield bucket


def _kind(parameter: nn.Parameter) -> tuple[torch.device, torch.dtype]:
    return parameter.device, _sum_dtype(parameter)


def _reduce_bucket(bucket: list[nn.Parameter], group: dist.ProcessGroup | None, size: int) -> None:
    ends = list(accumulate(parameter.numel() for parameter in bucket))
    share = -(-ends[-1] // size)  # elements that each rank sums
    flat = torch.zeros(share * size, dtype=_sum_dtype(bucket[0]), device=bucket[0].device)
    places = [
        flat[end - parameter.numel() : end].view(parameter.shape) for parameter, end in zip(bucket, ends, strict=True)
    ]
    for parameter, place in zip(bucket, places, strict=True):
        if parameter.grad is not None:
            place.copy_(parameter.grad)
    # A ring all-reduce moves as many bytes, but rounds in an order that depends on the backend and the rank.
    received = torch.empty_like(flat)
    dist.all_to_all_single(received, flat, group=group)
    contributions = received.view(size, share)
    total = contributions[0]
    for contribution in contributions[1:]:
        total += contribution
    dist.all_gather(list(flat.view(size, share)), total, group=group)
    for parameter, place in zip(bucket, places, strict=True):
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        parameter.grad.copy_(place)
