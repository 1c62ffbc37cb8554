"""LAGA: gather the latent, rebuild each head group's K and V, attend in head space (arXiv 2607.17644).

Only one head group's K and V exist at a time, in forward and again in backward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from laga_attn.attention_plan import AttentionPlan
from laga_attn.grid import ContextParallel
from laga_attn.movement import acc_dtype, gather_keys, return_key_grads
from laga_attn.schemes.interface import Grads, Kept, Needs
from laga_attn.schemes.latent import (
    expand_kv,
    fold_kv_grads,
    join_latent,
    split_latent_grad,
    sum_contributions,
    weight_rows,
)
from laga_attn.schemes.queries import return_output, return_query_grad, send_output_grad, send_query

__all__ = ["backward", "forward"]


def forward(
    q: Tensor, c_kv: Tensor, k_rope: Tensor, weight: Tensor, plan: AttentionPlan, cp: ContextParallel
) -> tuple[Tensor, Tensor | None, Kept]:
    """Shapes as in `latent_attention`; what is kept for backward depends on `plan.save`."""
    dims = plan.dims
    own_weight = weight[weight_rows(plan.heads, dims)]
    finish_latent = gather_keys(join_latent(c_kv, k_rope, plan.routing), plan.routing, cp, "latent", "forward")
    finish_query = send_query(q, plan, cp)
    latent, query = finish_latent(), finish_query()

    out = query.new_empty(query.shape[1], query.shape[0], query.shape[2], dims.v_head_dim).transpose(0, 1)
    lse = query.new_empty(query.shape[0], query.shape[2], query.shape[1], dtype=acc_dtype(q.dtype))
    kept_kv = []
    for group in plan.own_head_groups():
        kv = expand_kv(latent, own_weight[weight_rows(group, dims)], dims)  # [keys, B, hg, Dqk + Dv]
        k, v = kv.transpose(0, 1).split([dims.qk_head_dim, dims.v_head_dim], dim=-1)
        out[:, :, group], lse[:, group] = plan.kernel.forward(
            query[:, :, group], k, v, plan.routing.spans, plan.softmax_scale
        )
        if plan.save == "kv":
            kept_kv.append(kv)
        del kv, k, v
    local_out, local_lse = return_output(out, lse, plan, cp)
    kept_latent = None if plan.save == "latent" else latent
    return local_out, local_lse, (query, local_out, lse, c_kv, k_rope, weight, kept_latent, *kept_kv)


def backward(
    dout: Tensor, dlse: Tensor | None, kept: Kept, needs: Needs, plan: AttentionPlan, cp: ContextParallel
) -> Grads:
    """Gather the latent again unless it was kept, rebuild group by group, fold dK and dV at once."""
    dims, routing = plan.dims, plan.routing
    query, out, lse, c_kv, k_rope, weight, latent, *kept_kv = kept
    if latent is None:
        finish_latent = gather_keys(join_latent(c_kv, k_rope, routing), routing, cp, "latent", "backward")
    finish_dout = send_output_grad(dout, dlse, out, plan, cp)
    if latent is None:
        latent = finish_latent()
    own_dout, delta = finish_dout()

    own_weight = weight[weight_rows(plan.heads, dims)]
    d_weight = torch.zeros_like(weight) if plan.ulysses_degree > 1 else torch.empty_like(weight)
    own_d_weight = d_weight[weight_rows(plan.heads, dims)]
    d_latent = latent.new_zeros(latent.shape, dtype=acc_dtype(latent.dtype))
    dq = query.new_empty(query.shape[1], query.shape[0], *query.shape[2:]).transpose(0, 1)
    for number, group in enumerate(plan.own_head_groups()):
        rows = weight_rows(group, dims)
        kv = kept_kv[number] if kept_kv else expand_kv(latent, own_weight[rows], dims)
        k, v = kv.transpose(0, 1).split([dims.qk_head_dim, dims.v_head_dim], dim=-1)
        dq[:, :, group], dk, dv = plan.kernel.backward(
            own_dout[:, :, group], delta[:, group], query[:, :, group], k, v, lse[:, group],
            routing.spans, plan.softmax_scale,
        )  # fmt: skip
        del kv, k, v
        if needs.latent or needs.weight:
            own_d_weight[rows] = fold_kv_grads(
                dk.transpose(0, 1), dv.transpose(0, 1), latent, own_weight[rows], dims, d_latent
            )
        del dk, dv
    del own_dout

    if needs.latent:
        finish_d_latent = return_key_grads(d_latent, routing, cp, c_kv.dtype, "latent_grad", "backward")
    finish_dq = return_query_grad(dq, plan, cp) if needs.query else None
    d_c_kv, d_k_rope = None, None
    if needs.latent:
        d_c_kv, d_k_rope = split_latent_grad(sum_contributions(finish_d_latent(), plan), plan, c_kv.dtype)
    return Grads(finish_dq() if finish_dq else None, d_c_kv, d_k_rope, d_weight if needs.weight else None)
