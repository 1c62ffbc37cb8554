"""LAGA: gather the latent, rebuild each head group's K and V, attend in head space (arXiv 2607.17644).

Only one head group's K and V exist at a time, in forward and again in backward. Communication hides behind that work:
queries, outputs and their gradients travel group by group, and where the rank's own keys form a segment of their own
(`ulysses_degree` 1) they are attended to while the others' latents arrive, or while the others' gradients leave.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from laga_attn.attention_plan import AttentionPlan
from laga_attn.grid import ContextParallel
from laga_attn.kernels import merge_partials
from laga_attn.movement import acc_dtype, cut_key_grads, return_key_grads
from laga_attn.schemes.interface import Grads, Kept, Latents, Needs
from laga_attn.schemes.latent import (
    expand_kv,
    fold_kv_grads,
    split_latent_grad,
    start_latents,
    sum_contributions,
    weight_rows,
)
from laga_attn.schemes.queries import OutputReturn, QueryGradReturn, send_output_grads, send_queries

__all__ = ["backward", "forward"]


class Work(NamedTuple):
    """One head group against one key segment: the unit in which K and V are rebuilt."""

    segment: int
    group: int


def forward(
    q: Tensor,
    c_kv: Tensor,
    k_rope: Tensor,
    weight: Tensor,
    plan: AttentionPlan,
    cp: ContextParallel,
    prefetched: Latents | None = None,
) -> tuple[Tensor, Tensor | None, Kept]:
    """Shapes as in `latent_attention`; what is kept for backward depends on `plan.save`."""
    groups, own_weight = plan.own_head_groups(), weight[weight_rows(plan.heads, plan.dims)]
    latents = prefetched or start_latents(c_kv, k_rope, plan.routing, cp, "forward")
    arriving = send_queries(q, groups, plan, cp)
    returning = OutputReturn(q, plan, cp)

    queries: list[Tensor] = []
    partial: list[tuple[Tensor, Tensor]] = []
    kept_kv = []
    last = len(plan.routing.segments) - 1
    for segment, group in _forward_order(plan):
        if segment == 0:
            queries.append(arriving[group]())
        kv = _rebuild(latents[segment](), own_weight, groups[group], plan)
        k, v = _split_kv(kv, plan)
        out, lse = plan.kernel.forward(queries[group], k, v, plan.routing.segments[segment].spans, plan.softmax_scale)
        if segment == 0:
            partial.append((out, lse))
        else:
            partial[group] = merge_partials(*partial[group], out, lse)
        if segment == last:
            returning.start(groups[group], *partial[group])
        if plan.save == "kv":
            kept_kv.append(kv)
        del kv, k, v, out
    lses = [lse for _, lse in partial]
    del partial
    local_out, local_lse = returning.finish()
    gathered = None if plan.save == "latent" else latents[last]()
    return local_out, local_lse, (c_kv, local_out, k_rope, weight, gathered, *queries, *lses, *kept_kv)


def backward(
    dout: Tensor, dlse: Tensor | None, kept: Kept, needs: Needs, plan: AttentionPlan, cp: ContextParallel
) -> Grads:
    """Gather the latent again unless it was kept, rebuild group by group, fold dK and dV at once."""
    dims, groups, segments = plan.dims, plan.own_head_groups(), plan.routing.segments
    c_kv, out, k_rope, weight, gathered, *by_group = kept
    queries, lses = by_group[: len(groups)], by_group[len(groups) : 2 * len(groups)]
    kept_kv = dict(zip(_forward_order(plan), by_group[2 * len(groups) :], strict=bool(by_group[2 * len(groups) :])))
    latents = start_latents(c_kv, k_rope, plan.routing, cp, "backward", gathered)
    arriving = send_output_grads(dout, dlse, out, groups, plan, cp)

    acc = acc_dtype(c_kv.dtype)
    own_weight = weight[weight_rows(plan.heads, dims)]
    # Two segments add to one weight gradient, so it is summed in the accumulation dtype.
    d_weight = torch.zeros_like(weight, dtype=acc if len(segments) > 1 else None)
    own_d_weight = d_weight[weight_rows(plan.heads, dims)]
    d_latents = {
        number: c_kv.new_zeros(segment.num_keys, c_kv.shape[0], dims.latent_dim, dtype=acc)
        for number, segment in enumerate(segments)
    }
    returning = QueryGradReturn(dout, plan, cp) if needs.query else None
    own_grads: dict[int, tuple[Tensor, Tensor]] = {}
    dq_parts: dict[int, Tensor] = {}
    order = _backward_order(plan, gathered is not None)
    finish_d_latent = None
    for place, work in enumerate(order):
        segment, group = work
        rows = weight_rows(groups[group], dims)
        latent = latents[segment]()
        kv = kept_kv[work] if kept_kv else _rebuild(latent, own_weight, groups[group], plan)
        k, v = _split_kv(kv, plan)
        if group not in own_grads:
            own_grads[group] = arriving[group]()
        own_dout, delta = own_grads[group]
        dq, dk, dv = plan.kernel.backward(
            own_dout, delta, queries[group], k, v, lses[group], segments[segment].spans, plan.softmax_scale
        )
        del kv, k, v, own_dout
        dq = dq_parts.pop(group).add_(dq) if group in dq_parts else dq
        if any(later.group == group for later in order[place + 1 :]):
            dq_parts[group] = dq
        else:
            del own_grads[group]
            if returning:
                returning.start(groups[group], dq)
        if needs.latent or needs.weight:
            own_d_weight[rows] += fold_kv_grads(
                dk.transpose(0, 1), dv.transpose(0, 1), latent, own_weight[rows], dims, d_latents[segment]
            )
        del dq, dk, dv
        routes = segments[segment].routes
        finished = all(later.segment != segment for later in order[place + 1 :])
        if needs.latent and routes and finished:
            pieces = cut_key_grads(d_latents.pop(segment), routes, c_kv.dtype)
            del latent
            latents[segment] = _used_up
            finish_d_latent = return_key_grads(pieces, routes, cp, "latent_grad", "backward")
            del pieces

    d_c_kv, d_k_rope = None, None
    if finish_d_latent is not None:
        d_own = (
            d_latents[0]
            if len(segments) > 1
            else c_kv.new_zeros(plan.routing.real_len, c_kv.shape[0], dims.latent_dim, dtype=acc)
        )
        d_own = sum_contributions(finish_d_latent(), segments[-1].routes[0], d_own)
        d_c_kv, d_k_rope = split_latent_grad(d_own, plan, c_kv.dtype)
    d_query = returning.finish() if returning else None
    return Grads(d_query, d_c_kv, d_k_rope, d_weight.to(weight.dtype) if needs.weight else None)


def _forward_order(plan: AttentionPlan) -> list[Work]:
    """Own keys first: the others' latents are on their way."""
    groups = range(len(plan.own_head_groups()))
    return [Work(segment, group) for segment in range(len(plan.routing.segments)) for group in groups]


def _backward_order(plan: AttentionPlan, gathered: bool) -> list[Work]:
    """Own keys around the others': work for the time in which latents arrive, and in which gradients leave.

    With the gathered latent at hand there is nothing to wait for, and all of it can hide what leaves.
    """
    groups = list(range(len(plan.own_head_groups())))
    if len(plan.routing.segments) == 1:
        return [Work(0, group) for group in groups]
    before = 0 if gathered else len(groups) // 2
    own = [Work(0, group) for group in groups]
    return own[:before] + [Work(1, group) for group in groups] + own[before:]


def _used_up() -> Tensor:
    raise AssertionError("a segment's latent is needed after its gradient has left")


def _rebuild(latent: Tensor, own_weight: Tensor, group: slice, plan: AttentionPlan) -> Tensor:
    """K and V of a head group, `[keys, B, hg, Dqk + Dv]`."""
    return expand_kv(latent, own_weight[weight_rows(group, plan.dims)], plan.dims)


def _split_kv(kv: Tensor, plan: AttentionPlan) -> tuple[Tensor, Tensor]:
    """Views `[B, keys, hg, Dqk]` and `[B, keys, hg, Dv]`."""
    by_batch = kv.transpose(0, 1)
    return by_batch[..., : plan.dims.qk_head_dim], by_batch[..., plan.dims.qk_head_dim :]
