"""Absorbed: gather the latent and attend in latent space, with W_UK folded into the query and W_UV after.

    q_abs = [W_UK^T q_nope ; q_rope],  score = q_abs . [c_kv ; k_rope],  out = W_UV (sum_j p_j c_kv_j)

(arXiv 2405.04434, section 2.1.2.) Queries are exchanged before they are absorbed and outputs after W_UV, so that
what travels has head width. Latent-space outputs are kept for the gradient of W_UV: the cost that makes this form
heavy in training.
"""

from __future__ import annotations

import torch
from torch import Tensor

from laga_attn.attention_plan import AttentionPlan, LatentDims
from laga_attn.grid import ContextParallel
from laga_attn.movement import acc_dtype, cut_key_grads, return_key_grads
from laga_attn.schemes.interface import Grads, Kept, Latents, Needs
from laga_attn.schemes.latent import split_latent_grad, start_latents, sum_contributions, weight_rows
from laga_attn.schemes.queries import OutputReturn, QueryGradReturn, send_output_grads, send_queries

__all__ = ["backward", "forward"]


def forward(
    q: Tensor,
    c_kv: Tensor,
    k_rope: Tensor,
    weight: Tensor,
    plan: AttentionPlan,
    cp: ContextParallel,
    prefetched: Latents | None = None,
) -> tuple[Tensor, Tensor | None, Kept]:
    """Shapes as in `latent_attention`; `save="gathered"` keeps the gathered latent."""
    dims, groups = plan.dims, plan.own_head_groups()
    own_weight = weight[weight_rows(plan.heads, dims)]
    (finish_latent,) = prefetched or start_latents(c_kv, k_rope, plan.routing, cp, "forward")
    arriving = send_queries(q, groups, plan, cp)
    latent, returning = finish_latent(), OutputReturn(q, plan, cp)
    k, v = _shared_kv(latent, dims)

    queries, lses, latent_outs = [], [], []
    for group, arrive in zip(groups, arriving, strict=True):
        w_uk, w_uv = _up_weights(own_weight[weight_rows(group, dims)], dims)
        query = arrive()
        latent_out, lse = plan.kernel.forward(
            _absorb(query, w_uk, dims), k, v, plan.routing.keys.spans, plan.softmax_scale
        )
        returning.start(group, _per_head(latent_out, w_uv.mT), lse)
        queries.append(query)
        lses.append(lse)
        latent_outs.append(latent_out)
    local_out, local_lse = returning.finish()
    kept_latent = latent if plan.save == "gathered" else None
    return local_out, local_lse, (c_kv, local_out, k_rope, weight, kept_latent, *queries, *lses, *latent_outs)


def backward(
    dout: Tensor, dlse: Tensor | None, kept: Kept, needs: Needs, plan: AttentionPlan, cp: ContextParallel
) -> Grads:
    """Absorb again, attend backward in latent space, and unfold the gradients of both up-projections."""
    dims, groups = plan.dims, plan.own_head_groups()
    c_kv, out, k_rope, weight, latent, *by_group = kept
    queries, lses, latent_outs = (by_group[i * len(groups) : (i + 1) * len(groups)] for i in range(3))
    (finish_latent,) = start_latents(c_kv, k_rope, plan.routing, cp, "backward", latent)
    arriving = send_output_grads(dout, dlse, out, groups, plan, cp)
    latent = finish_latent()
    k, v = _shared_kv(latent, dims)

    own_weight = weight[weight_rows(plan.heads, dims)]
    d_weight = torch.zeros_like(weight) if plan.ulysses_degree > 1 else torch.empty_like(weight)
    own_d_weight = d_weight[weight_rows(plan.heads, dims)]
    d_latent = latent.new_zeros(latent.shape, dtype=acc_dtype(latent.dtype))
    returning = QueryGradReturn(dout, plan, cp) if needs.query else None
    nope, rank = dims.qk_nope_head_dim, dims.kv_lora_rank
    for number, group in enumerate(groups):
        rows, query = weight_rows(group, dims), queries[number]
        w_uk, w_uv = _up_weights(own_weight[rows], dims)
        dw_uk, dw_uv = _up_weights(own_d_weight[rows], dims)
        own_dout, delta = arriving[number]()
        # The sum over heads of dK and dV comes out of the kernel in the accumulation dtype.
        d_absorbed, dk, dv = plan.kernel.backward(
            _per_head(own_dout, w_uv), delta, _absorb(query, w_uk, dims), k, v, lses[number],
            plan.routing.keys.spans, plan.softmax_scale,
        )  # fmt: skip
        if returning:
            dq = torch.cat([_per_head(d_absorbed[..., :rank], w_uk.mT), d_absorbed[..., rank:]], dim=-1)
            returning.add(group, dq)
        d_latent += dk.transpose(0, 1).squeeze(2)
        d_latent[..., :rank].add_(dv.transpose(0, 1).squeeze(2))
        dw_uk.copy_(_outer_per_head(query[..., :nope], d_absorbed[..., :rank]))
        dw_uv.copy_(_outer_per_head(own_dout, latent_outs[number]))

    d_c_kv, d_k_rope = None, None
    if needs.latent:
        routes = plan.routing.keys.routes
        pieces = cut_key_grads(d_latent, routes, c_kv.dtype)
        d_own = d_latent.new_zeros(plan.routing.real_len, *d_latent.shape[1:])
        del d_latent, latent, k, v
        contributions = return_key_grads(pieces, routes, cp, "latent_grad", "backward")()
        d_own = sum_contributions(contributions, routes[0], d_own)
        d_c_kv, d_k_rope = split_latent_grad(d_own, plan, c_kv.dtype)
    d_query = returning.finish() if returning else None
    return Grads(d_query, d_c_kv, d_k_rope, d_weight if needs.weight else None)


def _shared_kv(latent: Tensor, dims: LatentDims) -> tuple[Tensor, Tensor]:
    """One key and one value that all heads share, as views of the latent: `[B, keys, 1, r + dr]`, `[B, keys, 1, r]`."""
    k = latent.transpose(0, 1).unsqueeze(2)
    return k, k[..., : dims.kv_lora_rank]


def _up_weights(weight: Tensor, dims: LatentDims) -> tuple[Tensor, Tensor]:
    """W_UK `[h, nope, r]` and W_UV `[h, v, r]`, views of the head group's rows of `kv_b_proj.weight`."""
    by_head = weight.unflatten(0, (-1, dims.up_head_dim))
    return by_head[:, : dims.qk_nope_head_dim], by_head[:, dims.qk_nope_head_dim :]


def _absorb(query: Tensor, w_uk: Tensor, dims: LatentDims) -> Tensor:
    """`[B, S, h, nope + rope]` to `[B, S, h, r + rope]`."""
    nope = dims.qk_nope_head_dim
    return torch.cat([_per_head(query[..., :nope], w_uk), query[..., nope:]], dim=-1)


def _per_head(x: Tensor, weight: Tensor) -> Tensor:
    """`[B, S, h, a]` times `[h, a, b]`, head by head: `[B, S, h, b]`."""
    return torch.stack([x[:, :, head] @ w for head, w in enumerate(weight)], dim=2)


def _outer_per_head(left: Tensor, right: Tensor) -> Tensor:
    """`[B, S, h, a]` and `[B, S, h, b]` summed over tokens: `[h, a, b]`."""
    pairs = zip(left.unbind(2), right.unbind(2), strict=True)
    return torch.stack([a.flatten(0, 1).t() @ b.flatten(0, 1) for a, b in pairs])
