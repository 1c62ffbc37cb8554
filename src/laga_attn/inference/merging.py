"""Merging what the ranks found in their parts of the cache: attention over all of it, for every head.

Each rank comes with a partial output in latent space for all heads and its log-sum-exp. With R = kv_lora_rank,
`w` the bytes of an output element, `a` of a log-sum-exp, T query tokens, H heads and h of them this rank's share:

    all_gather      everyone gets all partials              T * H * (R w + a) * (P-1)
    reduce_scatter  log-sum-exps to everyone, weighted      T * (H-h) * R w + T * H * a * (P-1)   then W_UV of the
                    outputs to the head's rank, summed                                            share and, where all
    all_to_all      outputs with their log-sum-exps to      T * (H-h) * (R w + a)                 want all heads,
                    the head's rank, merged                                                       T * h * v w * (P-1)

bytes sent per rank. Where log-sum-exps travel in the same message as outputs, they are reinterpreted, not rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from laga_attn.attention_plan import LatentDims
from laga_attn.collectives import all_gather_rows, exchange_rows
from laga_attn.grid import ContextParallel
from laga_attn.movement import acc_dtype

__all__ = ["MERGES", "Heads", "Merge", "Partial", "cheapest", "gather_heads", "head_share", "merge", "sent_bytes"]

Merge: TypeAlias = Literal["all_gather", "reduce_scatter", "all_to_all"]
Heads: TypeAlias = Literal["all", "own"]
MERGES: tuple[Merge, ...] = get_args(Merge)


@dataclass(frozen=True, slots=True)
class Partial:
    """Attention over one part of the keys: `out [T, h, D]`, and `lse [T, h]` in the accumulation dtype."""

    out: Tensor
    lse: Tensor


def head_share(num_heads: int, cp_size: int, rank: int) -> slice:
    """The heads whose outputs a rank merges: shares differ by at most one, and are empty where P > H."""
    return slice(num_heads * rank // cp_size, num_heads * (rank + 1) // cp_size)


def sent_bytes(how: Merge, dims: LatentDims, tokens: int, cp_size: int, rank: int, itemsize: int, heads: Heads) -> int:
    """Bytes that a rank sends to merge the outputs of one layer: the table above.

    Args:
        tokens: query tokens, T.
        itemsize: bytes of an output element.
        heads: whether every rank wants all heads afterwards, or its share alone.
    """
    share = head_share(dims.num_heads, cp_size, rank)
    own: int = share.stop - share.start
    others = dims.num_heads - own
    out, lse = dims.kv_lora_rank * itemsize, max(4, itemsize)
    if how == "all_gather":
        return tokens * dims.num_heads * (out + lse) * (cp_size - 1)
    back = tokens * own * dims.v_head_dim * itemsize * (cp_size - 1) if heads == "all" else 0
    if how == "all_to_all":
        return tokens * others * (out + lse) + back
    return tokens * others * out + tokens * dims.num_heads * lse * (cp_size - 1) + back


def cheapest(dims: LatentDims, tokens: int, cp_size: int, itemsize: int, heads: Heads) -> Merge:
    """The way with the fewest bytes on the busiest rank; of equals, the one with fewer messages."""

    def cost(how: Merge) -> tuple[int, int]:
        ranks = range(cp_size)
        busiest = max(sent_bytes(how, dims, tokens, cp_size, rank, itemsize, heads) for rank in ranks)
        return busiest, ("all_gather", "all_to_all", "reduce_scatter").index(how)

    return min(MERGES, key=cost)


def merge(partial: Partial, how: Merge, cp: ContextParallel) -> Tensor:
    """The merged outputs `[T, h, D]`: of all heads after `all_gather`, else of this rank's share."""
    if how == "all_gather":
        return _merge_everything(partial, cp)
    return _merge_share(partial, cp) if how == "all_to_all" else _sum_share(partial, cp)


def gather_heads(x: Tensor, num_heads: int, cp: ContextParallel, kind: str) -> Tensor:
    """Every rank's share of heads, `[h, T, D]`, to all of them, `[H, T, D]`."""
    counts = [share.stop - share.start for share in (head_share(num_heads, cp.size, p) for p in range(cp.size))]
    if len(set(counts)) == 1:
        return all_gather_rows(x, cp, kind=kind, phase="forward").wait()
    return exchange_rows([x] * cp.size, counts, cp, kind=kind, phase="forward").wait()


def _merge_everything(partial: Partial, cp: ContextParallel) -> Tensor:
    packed = all_gather_rows(_pack(partial), cp, kind="output", phase="forward").wait()
    return _combine(_unpack(packed.unflatten(0, (cp.size, -1)), partial)).to(partial.out.dtype)


def _merge_share(partial: Partial, cp: ContextParallel) -> Tensor:
    arrived = _to_share(_pack(partial), cp, "output")  # [P, h, T, D + lse]
    return _combine(_unpack(arrived.transpose(1, 2), partial)).to(partial.out.dtype)


def _sum_share(partial: Partial, cp: ContextParallel) -> Tensor:
    gathered = all_gather_rows(partial.lse, cp, kind="lse", phase="forward").wait()
    weights = _weights(gathered.unflatten(0, (cp.size, -1)))  # [P, T, H]
    weighted = _scaled(weights[cp.rank], partial.out).to(partial.out.dtype)
    contributions = _to_share(weighted, cp, "output").to(partial.lse.dtype)  # [P, h, T, D]
    return contributions.sum(0).transpose(0, 1).to(partial.out.dtype)


def _to_share(x: Tensor, cp: ContextParallel, kind: str) -> Tensor:
    """`[T, H, D]` of every rank to this rank's heads of all of them, `[P, h, T, D]`."""
    by_head = x.transpose(0, 1)  # [H, T, D]
    shares = [head_share(x.shape[1], cp.size, peer) for peer in range(cp.size)]
    own = shares[cp.rank].stop - shares[cp.rank].start
    pieces = [by_head[share] for share in shares]
    arrived = exchange_rows(pieces, [own] * cp.size, cp, kind=kind, phase="forward").wait()
    return arrived.view(cp.size, own, *by_head.shape[1:])


def _pack(partial: Partial) -> Tensor:
    """Output and log-sum-exp in one row, bit for bit."""
    return torch.cat([partial.out, partial.lse.unsqueeze(-1).view(partial.out.dtype)], dim=-1)


def _unpack(packed: Tensor, like: Partial) -> Partial:
    width = like.out.shape[-1]
    lse = packed[..., width:].contiguous().view(like.lse.dtype).squeeze(-1)
    return Partial(packed[..., :width], lse)


def _combine(parts: Partial) -> Tensor:
    """Partials of P ranks, `[P, T, h, D]`, to one, added in rank order."""
    return _scaled(_weights(parts.lse), parts.out.to(acc_dtype(parts.out.dtype))).sum(0)


def _weights(lse: Tensor) -> Tensor:
    """The share of each of P parts in the softmax, `[P, ...]`: 0 for a part that saw no key."""
    top = lse.amax(0)
    top = torch.where(top == -torch.inf, torch.zeros_like(top), top)  # nobody saw a key: all weights are exp(-inf)
    weights = torch.exp(lse - top)
    return weights / weights.sum(0).clamp_min(torch.finfo(lse.dtype).tiny)


def _scaled(weights: Tensor, out: Tensor) -> Tensor:
    """`weights * out`, and 0 where the weight is 0, whatever `out` is there."""
    weights = weights.unsqueeze(-1)
    return torch.where(weights == 0, torch.zeros_like(weights), weights * out)
