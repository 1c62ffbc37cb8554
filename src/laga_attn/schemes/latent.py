"""From latents to K and V, and from their gradients back: the algebra that all schemes share.

Per head h, with `W_h` the head's rows of `kv_b_proj.weight` (first the nope rows, then the v rows):

    k = [W_UK c_kv ; k_rope],  v = W_UV c_kv        (arXiv 2405.04434, section 2.1)

Latents are `[S, B, kv_lora_rank + qk_rope_head_dim]`, sequence-first, so that a row is what travels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from laga_attn.attention_plan import AttentionPlan, LatentDims
from laga_attn.grid import ContextParallel
from laga_attn.kernels import Kernel
from laga_attn.movement import Finish, add_rows, gather_keys, put, take
from laga_attn.routing import Routing, TokenRoute
from laga_attn.spans import Span
from laga_attn.traffic import Phase

__all__ = [
    "attend_to_latents",
    "expand_kv",
    "fold_kv_grads",
    "join_latent",
    "rows_of_heads",
    "split_kv",
    "split_latent_grad",
    "start_latents",
    "sum_contributions",
    "weight_rows",
]

_FOLD_ROWS, _FOLD_CHUNKS = 4096, 16  # keys in a chunk: full-speed GEMMs, and few enough to trace a long sequence


def weight_rows(heads: slice, dims: LatentDims) -> slice:
    """The rows of `kv_b_proj.weight` that belong to these heads."""
    return slice(heads.start * dims.up_head_dim, heads.stop * dims.up_head_dim)


def rows_of_heads(weight: Tensor, heads: slice, dims: LatentDims) -> Tensor:
    """These rows; kernels want each in one piece, whatever the caller's strides."""
    return weight[weight_rows(heads, dims)].contiguous()


def join_latent(c_kv: Tensor, k_rope: Tensor, routing: Routing) -> Tensor:
    """The real tokens' latents as rows: `[B, s, r]` and `[B, s, dr]` to `[n, B, r + dr]`."""
    return take(torch.cat([c_kv.transpose(0, 1), k_rope.transpose(0, 1)], dim=-1), routing.real)


def start_latents(
    c_kv: Tensor,
    k_rope: Tensor,
    routing: Routing,
    cp: ContextParallel,
    phase: Phase,
    gathered: Tensor | None = None,
) -> list[Finish]:
    """Start gathering every key segment's latent; closures give `[keys, B, r + dr]` and wait only the first time.

    `gathered` is the last segment's latent where it was kept.
    """
    rows = join_latent(c_kv, k_rope, routing)

    def start(routes: tuple[TokenRoute, ...]) -> Finish:
        if not routes:
            return lambda: rows
        if gathered is not None:
            return lambda: gathered
        return cache(gather_keys(rows, routes, cp, "latent", phase))

    return [start(segment.routes) for segment in routing.segments]


def expand_kv(latent: Tensor, weight: Tensor, dims: LatentDims) -> Tensor:
    """K and V, side by side, of the heads whose rows `weight` holds.

    One GEMM per head, whatever the number of heads: the result does not depend on how heads are grouped, which is
    what makes schemes agree to the bit.

    Args:
        latent: `[S, B, r + dr]`.
        weight: `[h * (nope + v), r]`.

    Returns:
        `[S, B, h, nope + rope + v]`.
    """
    nope, rank = dims.qk_nope_head_dim, dims.kv_lora_rank
    heads = weight.shape[0] // dims.up_head_dim
    kv = latent.new_empty(*latent.shape[:2], heads, dims.kv_head_dim)
    c_kv = latent[..., :rank].flatten(0, 1)  # [S*B, r]
    rows = kv.flatten(0, 1)  # [S*B, h, nope + rope + v]
    for head, w in enumerate(weight.unflatten(0, (heads, dims.up_head_dim))):  # w [nope + v, r]
        torch.mm(c_kv, w[:nope].t(), out=rows[:, head, :nope])
        torch.mm(c_kv, w[nope:].t(), out=rows[:, head, dims.qk_head_dim :])
    kv[..., nope : dims.qk_head_dim] = latent[..., None, rank:]
    return kv


def split_kv(kv: Tensor, dims: LatentDims) -> tuple[Tensor, Tensor]:
    """Views `[B, S, h, nope + rope]` and `[B, S, h, v]` of what `expand_kv` made."""
    by_batch = kv.transpose(0, 1)
    return by_batch[..., : dims.qk_head_dim], by_batch[..., dims.qk_head_dim :]


def attend_to_latents(
    kernel: Kernel,
    q: Tensor,
    latent: Tensor,
    weight: Tensor,
    kv: Tensor | None,
    spans: Sequence[Span],
    softmax_scale: float,
    dims: LatentDims,
) -> tuple[Tensor, Tensor]:
    """A head group's output and log-sum-exp over the K and V that its rows of the weight make of latents.

    Args:
        q: `[B, queries, h, nope + rope]`.
        latent, weight: as in `expand_kv`.
        kv: what `expand_kv` made of them, None with a kernel that rebuilds K and V by itself.
    """
    if kv is not None:
        return kernel.forward(q, *split_kv(kv, dims), spans, softmax_scale)
    return kernel.forward_from_latent(q, latent.transpose(0, 1), weight, spans, softmax_scale, dims.v_head_dim)


def fold_kv_grads(dk: Tensor, dv: Tensor, latent: Tensor, weight: Tensor, dims: LatentDims, d_latent: Tensor) -> Tensor:
    """Fold the gradients of a head group's K and V into the latents' and return the weight's.

    Works through the keys in chunks, so that what it needs beside its arguments stays small.

    Args:
        dk, dv: `[S, B, h, nope + rope]` and `[S, B, h, v]`.
        latent: `[S, B, r + dr]`.
        weight: `[h * (nope + v), r]`.
        d_latent: `[S, B, r + dr]` in the accumulation dtype, added to.

    Returns:
        The gradient of `weight`, in the accumulation dtype.
    """
    nope, rank = dims.qk_nope_head_dim, dims.kv_lora_rank
    d_weight = weight.new_zeros(weight.shape, dtype=d_latent.dtype)
    dk, dv, latent = (x.flatten(0, 1) for x in (dk, dv, latent))  # [S*B, ...], views of sequence-first storage
    d_latent = d_latent.view(latent.shape)
    dk_nope, dk_rope = dk.split([nope, dims.qk_rope_head_dim], dim=-1)
    d_c_kv, d_k_rope = d_latent.split([rank, dims.qk_rope_head_dim], dim=-1)
    # Views of all chunks are cut at once, and sums added in place: a chunk is no more operators than it has to be.
    chunk = max(_FOLD_ROWS, -(-latent.shape[0] // _FOLD_CHUNKS))
    chunks = zip(*(x.split(chunk) for x in (dk_nope, dk_rope, dv, latent[:, :rank], d_c_kv, d_k_rope)), strict=True)
    for nope_grad, rope_grad, v_grad, c_kv, to_c_kv, to_k_rope in chunks:
        d_up = torch.cat([nope_grad, v_grad], dim=-1).flatten(1)  # [rows, h*(nope+v)]
        to_c_kv.add_(d_up @ weight)
        to_k_rope.add_(rope_grad.sum(dim=1, dtype=d_latent.dtype))
        d_weight.add_(d_up.t() @ c_kv)
    return d_weight


def sum_contributions(contributions: list[Tensor], route: TokenRoute, total: Tensor) -> Tensor:
    """Add what other ranks contributed to this rank's latents, in rank order.

    Args:
        contributions: from each rank p, `[rows sent to p, B, r + dr]`.
        route: along which the latents had travelled.
        total: `[n, B, r + dr]` over this rank's real rows in the accumulation dtype, added to and returned.
    """
    for rows, part in zip(route.send, contributions, strict=True):
        add_rows(total, rows, part)
    return total


def split_latent_grad(d_latent: Tensor, plan: AttentionPlan, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`[n, B, r + dr]` to the gradients of `c_kv` and `k_rope`, `[B, s, ...]`, zero at pads."""
    local = d_latent.new_zeros(plan.routing.local_len, *d_latent.shape[1:], dtype=dtype)
    put(local, plan.routing.real, d_latent.to(dtype))
    rank = plan.dims.kv_lora_rank
    return local[..., :rank].transpose(0, 1), local[..., rank:].transpose(0, 1)
