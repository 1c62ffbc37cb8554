"""`attend`: attention of one layer in an inference step, over the cache and the new tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, get_args

import torch
from torch import Tensor

from laga_attn.agreement import agree
from laga_attn.attention_plan import LatentDims
from laga_attn.inference.cache import LatentCache
from laga_attn.inference.call import StepCall
from laga_attn.inference.decode import attend_replicated
from laga_attn.inference.merging import MERGES, Heads
from laga_attn.inference.prefill import attend_split
from laga_attn.inference.step import Step
from laga_attn.inference.workspace import WORKSPACE, longest_chunk
from laga_attn.kernels import KernelName, kernels_here, select

__all__ = ["REBUILD_COST", "attend", "crossover"]

REBUILD_COST: Final = 1.0
"""Time of a FLOP of rebuilding over one of attention: 0.8 to 1.2 by `benchmarks/inference.py crossover` on CPU."""


def crossover(dims: LatentDims) -> int:
    """The number of new tokens of a sequence from which rebuilding K and V beats absorbed attention.

    Per key and head, absorbed attention does `2 (2 r + dr)` FLOPs for each query token, and attention in head space
    `2 (nope + dr + v)` after `2 r (nope + v)` once to rebuild: the two meet at a number of query tokens that does not
    depend on the context. `REBUILD_COST` corrects it by what a machine makes of such FLOPs.

    The number is that of one rank. Over P ranks each head is rebuilt on P/U of them while absorbed attention is shared
    by all, so attention alone breaks even at up to P/U times as many tokens; but absorbed tokens are computed on every
    rank, projections and experts included. The second outweighs the first unless the context is long, so it is not
    scaled by P.

    Returns:
        At least 2 (one token is always absorbed); a number beyond any sequence where absorbed attention costs less
        per token, as with latents narrower than heads.
    """
    rebuild = dims.kv_lora_rank * dims.up_head_dim
    saved = dims.latent_dim + dims.kv_lora_rank - dims.kv_head_dim
    return max(2, round(REBUILD_COST * rebuild / saved)) if saved > 0 else 2**31


@torch.no_grad()
def attend(
    q: Tensor,
    c_kv: Tensor,
    k_rope: Tensor,
    kv_b_weight: Tensor,
    *,
    cache: LatentCache,
    step: Step,
    layer: int,
    qk_nope_head_dim: int,
    v_head_dim: int,
    softmax_scale: float | None = None,
    heads: Heads = "all",
    merge: str = "auto",
    kernel: KernelName = "auto",
    workspace: int = WORKSPACE,
) -> Tensor:
    """Store the latents of a step's new tokens in one layer, and attend with their queries.

    Each rank passes its local tokens (`step.rows`, `step.shard`) and gets their outputs. Split tokens attend as in
    `latent_attention` with `scheme="laga"` and the Ulysses degree of the cache's `cp`, and to their context in rebuilt
    blocks; replicated tokens are absorbed and attend on every rank to what it holds.

    Args:
        q: `[1, s, h, nope + rope]`, rope part rotated by `step.positions()`. s is `step.local_len`.
        c_kv: `[1, s, kv_lora_rank]`, the latent after `kv_a_layernorm`.
        k_rope: `[1, s, rope]`, the shared key part after rotation.
        kv_b_weight: `[h * (nope + v), kv_lora_rank]`: `kv_b_proj.weight` of the heads of `q`. If it has another dtype
            than `q` it is cast once, and again when it has changed.
        cache: where the latents are, of these and of earlier tokens.
        step: from `cache.plan`, not committed yet.
        layer: 0 to `cache.num_layers - 1`.
        qk_nope_head_dim, v_head_dim: widths of a head's un-rotated part and of its value.
        softmax_scale: factor on scores; None: `1 / sqrt(nope + rope)`. YaRN models need `MLAConfig.softmax_scale`.
        heads: `"all"`: every rank has all heads of the replicated tokens, and gets all. `"own"`: rank r has heads
            `r*H/P ..`, of queries and weight alike (tensor parallelism over the same ranks), and gets those; only for
            steps without split tokens.
        merge: how the ranks' partial outputs are merged, see `laga_attn.inference.merging`; `"auto"`: by bytes.
        kernel: `"auto"`, or a name from `laga_attn.kernels.support_table`.
        workspace: bytes of buffers for gathered and rebuilt context.

    Returns:
        `[1, s, h, v]` in the dtype of `q`, without gradient; 0 at pads.

    Raises:
        ValueError: arguments that do not fit, or that differ between ranks: on every rank, before data moves.
    """
    device = q.device.type
    if torch.is_autocast_enabled(device):
        q, c_kv, k_rope = (t.to(torch.get_autocast_dtype(device)) for t in (q, c_kv, k_rope))
    tensors = {"q": q, "c_kv": c_kv, "k_rope": k_rope, "kv_b_weight": kv_b_weight}
    error = next(_faults(tensors, cache, step, layer, qk_nope_head_dim, v_head_dim, heads, merge, workspace), None)
    call = None
    if error is None:
        dims = LatentDims(
            num_heads=q.shape[2] * (cache.cp.size if heads == "own" else 1),
            qk_nope_head_dim=qk_nope_head_dim,
            qk_rope_head_dim=k_rope.shape[2],
            v_head_dim=v_head_dim,
            kv_lora_rank=c_kv.shape[2],
        )
        scale = dims.qk_head_dim**-0.5 if softmax_scale is None else softmax_scale
        try:
            call = _resolve(q, dims, cache, step, layer, heads, merge, kernel, scale, workspace)
        except ValueError as failure:
            error = str(failure)
    agree(
        cache.cp,
        {
            "shapes": {name: tuple(tensor.shape) for name, tensor in tensors.items()},
            "dtypes": tuple(str(tensor.dtype) for tensor in tensors.values()),
            "layer": layer,
            "local tokens (split, replicated)": (step.split_len, step.local_len - step.split_len),
            # Of which "auto" takes the first; what is gathered at a time depends on it.
            "kernels": kernels_here(q.device, q.dtype) if kernel == "auto" else kernel,
            "options": (qk_nope_head_dim, v_head_dim, softmax_scale, heads, merge, workspace),
            "ulysses_degree": cache.cp.ulysses_degree,
        },
        error,
    )
    assert call is not None
    if kv_b_weight.dtype != q.dtype:
        kv_b_weight = cache.weights[layer].get((kv_b_weight,), q.dtype, lambda: kv_b_weight.detach().to(q.dtype))
    return _dispatch(q, c_kv, k_rope, kv_b_weight, call)


def _dispatch(q: Tensor, c_kv: Tensor, k_rope: Tensor, weight: Tensor, call: StepCall) -> Tensor:
    split = slice(0, call.step.split_len)
    rest = slice(call.step.split_len, None)
    outs = []
    if call.step.split:
        outs.append(attend_split(q[:, split], c_kv[:, split], k_rope[:, split], weight, call))
    if call.step.replicated:
        latent = torch.cat([c_kv[0, rest], k_rope[0, rest]], dim=-1)
        up = weight.unflatten(0, (-1, call.dims.up_head_dim))
        outs.append(attend_replicated(q[0, rest], latent, up, call)[None])
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)


def _resolve(
    q: Tensor,
    dims: LatentDims,
    cache: LatentCache,
    step: Step,
    layer: int,
    heads: Heads,
    merge: str,
    kernel: KernelName,
    softmax_scale: float,
    workspace: int,
) -> StepCall:
    """The call with its kernels, which must exist and have room to work.

    Raises:
        ValueError: no kernel for this case, or too small a workspace.
    """
    head_kernel = select(
        kernel, device=q.device, dtype=q.dtype, qk_head_dim=dims.qk_head_dim, v_head_dim=dims.v_head_dim
    )
    # The heads are folded into query rows, so it is not "one key/value head shared by several" to the kernel.
    latent_kernel = select(
        kernel, device=q.device, dtype=q.dtype, qk_head_dim=dims.latent_dim, v_head_dim=dims.kv_lora_rank
    )
    how = next((known for known in MERGES if known == merge), None)
    call = StepCall(cache, step, layer, dims, heads, how, head_kernel, latent_kernel, softmax_scale, workspace)
    if step.layout is not None:
        call.blocks(q.element_size())
        longest = longest_chunk(workspace, dims, q.element_size())
        if step.layout.seq_len > longest and not call.streams:
            raise ValueError(
                f"{step.layout.seq_len} split tokens in one step need more than the workspace of {workspace} bytes for "
                f"the K and V of one head; prefill in chunks of at most {longest} tokens, or give a larger workspace"
            )
        if dims.num_heads % (cache.cp.ulysses_degree or 1):
            raise ValueError(f"{dims.num_heads} heads cannot be divided over ulysses_degree={cache.cp.ulysses_degree}")
    return call


def _faults(
    tensors: dict[str, Tensor],
    cache: LatentCache,
    step: Step,
    layer: int,
    nope: int,
    v: int,
    heads: str,
    merge: str,
    workspace: int,
) -> Iterator[str]:
    """What is wrong with this rank's arguments."""
    if step.base is not cache.book:
        yield "this step was planned on another cache, or the cache has changed since (was the step committed?)"
    if not 0 <= layer < cache.num_layers:
        yield f"layer {layer} is outside the {cache.num_layers} layers of the cache (0..{cache.num_layers - 1})"
    if heads not in get_args(Heads):
        yield f"heads must be one of {', '.join(get_args(Heads))}, got {heads!r}"
    if merge not in ("auto", *MERGES):
        yield f"merge must be one of auto, {', '.join(MERGES)}, got {merge!r}"
    if heads == "own" and (step.split or merge == "all_gather"):
        yield (
            "heads='own' is for steps whose tokens are all replicated, merged by reduce_scatter or all_to_all; this "
            f"one has {len(step.split)} split sequences and merge={merge!r}"
        )
    if workspace < 1:
        yield f"workspace must be a positive number of bytes, got {workspace}"
    yield from _shape_faults(tensors, cache, step, nope, v)


def _shape_faults(tensors: dict[str, Tensor], cache: LatentCache, step: Step, nope: int, v: int) -> Iterator[str]:
    q, c_kv, k_rope, weight = tensors.values()
    rank, rope = cache.codec.kv_lora_rank, cache.codec.qk_rope_head_dim
    if q.ndim != 4 or q.shape[:2] != (1, step.local_len) or q.shape[3] != nope + rope:
        yield (
            f"q has shape {list(q.shape)}, but this step has {step.local_len} local tokens and heads are {nope} + "
            f"{rope} wide: it must be [1, {step.local_len}, heads, {nope + rope}]"
        )
    for name, tensor, width in (("c_kv", c_kv, rank), ("k_rope", k_rope, rope)):
        if tuple(tensor.shape) != (1, step.local_len, width):
            yield (
                f"{name} has shape {list(tensor.shape)}, but the step and the cache need [1, {step.local_len}, {width}]"
            )
    if tuple(weight.shape) != (q.shape[2] * (nope + v), rank):
        yield (
            f"kv_b_weight has shape {list(weight.shape)}, but {q.shape[2]} heads of {nope} + {v} rows over latents of "
            f"width {rank} need [{q.shape[2] * (nope + v)}, {rank}]"
        )
    if len({tensor.dtype for tensor in (q, c_kv, k_rope)}) > 1 or not q.is_floating_point():
        yield f"q, c_kv and k_rope need one floating dtype, got {q.dtype}, {c_kv.dtype} and {k_rope.dtype}"
    if len({tensor.device for tensor in tensors.values()}) > 1:
        found = ", ".join(f"{name} on {tensor.device}" for name, tensor in tensors.items())
        yield f"all tensors must be on one device, got {found}"
