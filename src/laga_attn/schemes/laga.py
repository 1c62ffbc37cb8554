"""LAGA: gather the latent, rebuild each head group's K and V, attend in head space (arXiv 2607.17644).

Only one head group's K and V exist at a time, in forward and again in backward. Queries, outputs and their gradients
travel group by group behind that work.
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
from laga_attn.schemes.queries import OutputReturn, QueryGradReturn, send_output_grads, send_queries

__all__ = ["backward", "forward"]


def forward(
    q: Tensor, c_kv: Tensor, k_rope: Tensor, weight: Tensor, plan: AttentionPlan, cp: ContextParallel
) -> tuple[Tensor, Tensor | None, Kept]:
    """Shapes as in `latent_attention`; what is kept for backward depends on `plan.save`."""
    dims, groups = plan.dims, plan.own_head_groups()
    own_weight = weight[weight_rows(plan.heads, dims)]
    finish_latent = gather_keys(join_latent(c_kv, k_rope, plan.routing), plan.routing, cp, "latent", "forward")
    arriving = send_queries(q, groups, plan, cp)
    latent, returning = finish_latent(), OutputReturn(q, plan, cp)

    queries, lses, kept_kv = [], [], []
    for group, arrive in zip(groups, arriving, strict=True):
        query = arrive()
        kv = expand_kv(latent, own_weight[weight_rows(group, dims)], dims)  # [keys, B, hg, Dqk + Dv]
        k, v = kv.transpose(0, 1).split([dims.qk_head_dim, dims.v_head_dim], dim=-1)
        out, lse = plan.kernel.forward(query, k, v, plan.routing.spans, plan.softmax_scale)
        returning.start(group, out, lse)
        queries.append(query)
        lses.append(lse)
        if plan.save == "kv":
            kept_kv.append(kv)
        del kv, k, v, out
    local_out, local_lse = returning.finish()
    kept_latent = None if plan.save == "latent" else latent
    return local_out, local_lse, (c_kv, local_out, k_rope, weight, kept_latent, *queries, *lses, *kept_kv)


def backward(
    dout: Tensor, dlse: Tensor | None, kept: Kept, needs: Needs, plan: AttentionPlan, cp: ContextParallel
) -> Grads:
    """Gather the latent again unless it was kept, rebuild group by group, fold dK and dV at once."""
    dims, routing, groups = plan.dims, plan.routing, plan.own_head_groups()
    c_kv, out, k_rope, weight, latent, *by_group = kept
    queries, lses, kept_kv = (by_group[i * len(groups) : (i + 1) * len(groups)] for i in range(3))
    if latent is None:
        finish_latent = gather_keys(join_latent(c_kv, k_rope, routing), routing, cp, "latent", "backward")
    arriving = send_output_grads(dout, dlse, out, groups, plan, cp)
    if latent is None:
        latent = finish_latent()

    own_weight = weight[weight_rows(plan.heads, dims)]
    d_weight = torch.zeros_like(weight) if plan.ulysses_degree > 1 else torch.empty_like(weight)
    own_d_weight = d_weight[weight_rows(plan.heads, dims)]
    d_latent = latent.new_zeros(latent.shape, dtype=acc_dtype(latent.dtype))
    returning = QueryGradReturn(dout, plan, cp) if needs.query else None
    for number, group in enumerate(groups):
        rows = weight_rows(group, dims)
        kv = kept_kv[number] if kept_kv else expand_kv(latent, own_weight[rows], dims)
        k, v = kv.transpose(0, 1).split([dims.qk_head_dim, dims.v_head_dim], dim=-1)
        own_dout, delta = arriving[number]()
        dq, dk, dv = plan.kernel.backward(
            own_dout, delta, queries[number], k, v, lses[number], routing.spans, plan.softmax_scale
        )
        del kv, k, v, own_dout
        if returning:
            returning.start(group, dq)
        if needs.latent or needs.weight:
            own_d_weight[rows] = fold_kv_grads(
                dk.transpose(0, 1), dv.transpose(0, 1), latent, own_weight[rows], dims, d_latent
            )
        del dq, dk, dv

    d_c_kv, d_k_rope = None, None
    if needs.latent:
        finish_d_latent = return_key_grads(d_latent, routing, cp, c_kv.dtype, "latent_grad", "backward")
        d_c_kv, d_k_rope = split_latent_grad(sum_contributions(finish_d_latent(), plan), plan, c_kv.dtype)
    d_query = returning.finish() if returning else None
    return Grads(d_query, d_c_kv, d_k_rope, d_weight if needs.weight else None)
