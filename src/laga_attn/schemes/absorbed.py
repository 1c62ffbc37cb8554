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
from laga_attn.movement import acc_dtype, gather_keys, return_key_grads
from laga_attn.schemes.interface import Grads, Kept, Needs
from laga_attn.schemes.latent import join_latent, split_latent_grad, sum_contributions, weight_rows
from laga_attn.schemes.queries import return_output, return_query_grad, send_output_grad, send_query

__all__ = ["backward", "forward"]


def forward(
    q: Tensor, c_kv: Tensor, k_rope: Tensor, weight: Tensor, plan: AttentionPlan, cp: ContextParallel
) -> tuple[Tensor, Tensor | None, Kept]:
    """Shapes as in `latent_attention`; `save="gathered"` keeps the gathered latent."""
    dims = plan.dims
    own_weight = weight[weight_rows(plan.heads, dims)]
    finish_latent = gather_keys(join_latent(c_kv, k_rope, plan.routing), plan.routing, cp, "latent", "forward")
    query = send_query(q, plan, cp)()
    latent = finish_latent()
    k, v = _shared_kv(latent, dims)

    batch, tokens, heads = query.shape[:3]
    latent_out = query.new_empty(tokens, batch, heads, dims.kv_lora_rank).transpose(0, 1)
    out = query.new_empty(tokens, batch, heads, dims.v_head_dim).transpose(0, 1)
    lse = query.new_empty(batch, heads, tokens, dtype=acc_dtype(q.dtype))
    for group in plan.own_head_groups():
        w_uk, w_uv = _up_weights(own_weight[weight_rows(group, dims)], dims)
        absorbed = _absorb(query[:, :, group], w_uk, dims)
        latent_out[:, :, group], lse[:, group] = plan.kernel.forward(
            absorbed, k, v, plan.routing.spans, plan.softmax_scale
        )
        out[:, :, group] = _per_head(latent_out[:, :, group], w_uv.mT)
    local_out, local_lse = return_output(out, lse, plan, cp)
    kept_latent = latent if plan.save == "gathered" else None
    return local_out, local_lse, (query, local_out, lse, latent_out, c_kv, k_rope, weight, kept_latent)


def backward(
    dout: Tensor, dlse: Tensor | None, kept: Kept, needs: Needs, plan: AttentionPlan, cp: ContextParallel
) -> Grads:
    """Absorb again, attend backward in latent space, and unfold the gradients of both up-projections."""
    dims, routing = plan.dims, plan.routing
    query, out, lse, latent_out, c_kv, k_rope, weight, latent = kept
    if latent is None:
        latent = gather_keys(join_latent(c_kv, k_rope, routing), routing, cp, "latent", "backward")()
    own_dout, delta = send_output_grad(dout, dlse, out, plan, cp)()
    k, v = _shared_kv(latent, dims)

    own_weight = weight[weight_rows(plan.heads, dims)]
    d_weight = torch.zeros_like(weight) if plan.ulysses_degree > 1 else torch.empty_like(weight)
    own_d_weight = d_weight[weight_rows(plan.heads, dims)]
    d_latent = latent.new_zeros(latent.shape, dtype=acc_dtype(latent.dtype))
    dq = query.new_empty(query.shape[1], query.shape[0], *query.shape[2:]).transpose(0, 1)
    nope, rank = dims.qk_nope_head_dim, dims.kv_lora_rank
    for group in plan.own_head_groups():
        rows = weight_rows(group, dims)
        w_uk, w_uv = _up_weights(own_weight[rows], dims)
        dw_uk, dw_uv = _up_weights(own_d_weight[rows], dims)
        absorbed = _absorb(query[:, :, group], w_uk, dims)
        d_latent_out = _per_head(own_dout[:, :, group], w_uv)
        # The sum over heads of dK and dV comes out of the kernel in the accumulation dtype.
        d_absorbed, dk, dv = plan.kernel.backward(
            d_latent_out, delta[:, group], absorbed, k, v, lse[:, group], routing.spans, plan.softmax_scale
        )
        d_latent += dk.transpose(0, 1).squeeze(2)
        d_latent[..., :rank] += dv.transpose(0, 1).squeeze(2)
        dq[:, :, group, :nope] = _per_head(d_absorbed[..., :rank], w_uk.mT)
        dq[:, :, group, nope:] = d_absorbed[..., rank:]
        dw_uk.copy_(_outer_per_head(query[:, :, group, :nope], d_absorbed[..., :rank]))
        dw_uv.copy_(_outer_per_head(own_dout[:, :, group], latent_out[:, :, group]))

    d_c_kv, d_k_rope = None, None
    if needs.latent:
        contributions = return_key_grads(d_latent, routing, cp, c_kv.dtype, "latent_grad", "backward")()
        d_c_kv, d_k_rope = split_latent_grad(sum_contributions(contributions, plan), plan, c_kv.dtype)
    d_query = return_query_grad(dq, plan, cp)() if needs.query else None
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
