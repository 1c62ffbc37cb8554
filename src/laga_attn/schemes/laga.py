"""LAGA: gather the latent, rebuild each head group's K and V, attend in head space (arXiv 2607.17644).

Only one head group's K and V exist at a time, in forward and again in backward. Communication hides behind that work:
queries, outputs and their gradients travel group by group, and where the rank's own keys form a segment of their own
(`ulysses_degree` 1) they are attended to while the others' latents arrive, or while the others' gradients leave.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from laga_attn.attention_plan import AttentionPlan
from laga_attn.grid import ContextParallel
from laga_attn.kernels import merge_partials
from laga_attn.movement import acc_dtype, cut_key_grads, return_key_grads
from laga_attn.schemes.interface import Grads, Kept, Latents, Needs
from laga_attn.schemes.latent import (
    attend_to_latents,
    expand_kv,
    fold_kv_grads,
    rows_of_heads,
    split_kv,
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
    groups, own_weight = plan.own_head_groups(), rows_of_heads(weight, plan.heads, plan.dims)
    latents = prefetched or start_latents(c_kv, k_rope, plan.routing, cp, "forward")
    arriving = send_queries(q, groups, plan, cp)
    returning = OutputReturn(q, plan, cp)

    queries: dict[int, Tensor] = {}
    partial: dict[int, tuple[Tensor, Tensor]] = {}
    kept_kv = []
    last = len(plan.routing.segments) - 1
    for segment, group in _forward_order(plan):
        if segment == 0:
            queries[group] = arriving[group]()
        keys = latents[segment](), own_weight[weight_rows(groups[group], plan.dims)]
        kv = None if plan.streams else expand_kv(*keys, plan.dims)
        spans = plan.routing.segments[segment].spans
        out, lse = attend_to_latents(plan.kernel, queries[group], *keys, kv, spans, plan.softmax_scale, plan.dims)
        partial[group] = (out, lse) if segment == 0 else merge_partials(*partial[group], out, lse)
        if segment == last:
            returning.start(groups[group], *partial[group])
            if not plan.keeps:
                del queries[group], partial[group]
        if plan.keeps and plan.save == "kv":
            kept_kv.append(kv)
        del keys, kv, out
    lses = [lse for _, lse in partial.values()]
    partial.clear()
    local_out, local_lse = returning.finish()
    if not plan.keeps:
        return local_out, local_lse, ()
    gathered = None if plan.save == "latent" else latents[last]()
    return local_out, local_lse, (c_kv, local_out, k_rope, weight, gathered, *queries.values(), *lses, *kept_kv)


def backward(
    dout: Tensor, dlse: Tensor | None, kept: Kept, needs: Needs, plan: AttentionPlan, cp: ContextParallel
) -> Grads:
    """Gather the latent again unless it was kept, rebuild group by group, fold dK and dV at once."""
    groups = plan.own_head_groups()
    c_kv, out, k_rope, weight, gathered, *by_group = kept
    queries, lses = by_group[: len(groups)], by_group[len(groups) : 2 * len(groups)]
    kept_kv = dict(zip(_forward_order(plan), by_group[2 * len(groups) :], strict=False))
    latents = start_latents(c_kv, k_rope, plan.routing, cp, "backward", gathered)
    arriving: list[Callable[[], tuple[Tensor, Tensor]]] = [
        cache(arrive) for arrive in send_output_grads(dout, dlse, out, groups, plan, cp)
    ]

    key_grads = _KeyGrads(latents, weight, needs, plan, cp)
    query_grads = QueryGradReturn(dout, plan, cp) if needs.query else None
    order = _backward_order(plan, gathered is not None)
    last_of_group = {work.group: place for place, work in enumerate(order)}
    last_of_segment = {work.segment: place for place, work in enumerate(order)}
    for place, work in enumerate(order):
        segment, group = work
        dq, kv_grads = key_grads.differentiate(
            segment, groups[group], arriving[group](), queries[group], lses[group], kept_kv.get(work)
        )
        finished = last_of_group[group] == place
        if query_grads:
            query_grads.add(groups[group], dq, finished)  # on its way while the others are folded
        if finished:
            arriving[group] = _used_up
        if kv_grads is not None:
            key_grads.fold(segment, groups[group], *kv_grads)
        del dq, kv_grads
        if needs.latent and last_of_segment[segment] == place:
            key_grads.send(segment)
    d_c_kv, d_k_rope = key_grads.finish() if needs.latent else (None, None)
    d_query = query_grads.finish() if query_grads else None
    return Grads(d_query, d_c_kv, d_k_rope, key_grads.weight_grad() if needs.weight else None)


class _KeyGrads:
    """Sums the gradients of all keys' latents and of the rank's rows of the weight, and sends the former home."""

    def __init__(
        self, latents: Latents, weight: Tensor, needs: Needs, plan: AttentionPlan, cp: ContextParallel
    ) -> None:
        self._latents, self._weight, self._needs, self._plan, self._cp = latents, weight, needs, plan, cp
        self._own_weight = rows_of_heads(weight, plan.heads, plan.dims)
        self._d_own_weight = torch.zeros_like(self._own_weight, dtype=acc_dtype(weight.dtype))
        self._d_latents: dict[int, Tensor] = {}
        self._contributions: Callable[[], list[Tensor]] | None = None

    def differentiate(
        self,
        segment: int,
        group: slice,
        dout_delta: tuple[Tensor, Tensor],
        q: Tensor,
        lse: Tensor,
        kv: Tensor | None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Gradients of a head group's `q`, and of its K and V in a segment unless the kernel has folded these itself.

        Args:
            kv: the group's K and V where they were kept; else they are rebuilt.
        """
        plan, latent, rows = self._plan, self._latents[segment](), weight_rows(group, self._plan.dims)
        spans, weight, scale = plan.routing.segments[segment].spans, self._own_weight[rows], plan.softmax_scale
        if plan.streams:
            d_latent = self._d_latent(segment).transpose(0, 1) if self._needs.latent else None
            d_weight = self._d_own_weight[rows] if self._needs.weight else None
            keys = latent.transpose(0, 1), weight
            return plan.kernel.backward_from_latent(*dout_delta, q, *keys, lse, spans, scale, d_latent, d_weight), None
        if kv is None:
            kv = expand_kv(latent, weight, plan.dims)
        dq, dk, dv = plan.kernel.backward(*dout_delta, q, *split_kv(kv, plan.dims), lse, spans, scale)
        return dq, (dk, dv) if self._needs.latent or self._needs.weight else None

    def fold(self, segment: int, group: slice, dk: Tensor, dv: Tensor) -> None:
        """Fold in a head group's `[B, keys, hg, Dqk]` and `[B, keys, hg, Dv]`."""
        rows, grads = weight_rows(group, self._plan.dims), (dk.transpose(0, 1), dv.transpose(0, 1))
        self._d_own_weight[rows] += fold_kv_grads(
            *grads, self._latents[segment](), self._own_weight[rows], self._plan.dims, self._d_latent(segment)
        )

    def _d_latent(self, segment: int) -> Tensor:
        if segment not in self._d_latents:
            latent = self._latents[segment]()
            self._d_latents[segment] = torch.zeros_like(latent, dtype=acc_dtype(latent.dtype))
        return self._d_latents[segment]

    def send(self, segment: int) -> None:
        """Start sending a segment's gradient to the ranks that hold its latents; its latent is dropped."""
        routes = self._plan.routing.segments[segment].routes
        if routes:
            pieces = cut_key_grads(self._d_latents.pop(segment), routes, self._weight.dtype)
            self._latents[segment] = _used_up
            self._contributions = return_key_grads(pieces, routes, self._cp, "latent_grad", "backward")

    def finish(self) -> tuple[Tensor, Tensor]:
        """Gradients of `c_kv` and `k_rope`, `[B, s, ...]`: own keys' and what came home."""
        assert self._contributions is not None
        contributions = self._contributions()
        own = self._d_latents.pop(0, None)
        if own is None:
            shape = (self._plan.routing.real_len, *contributions[0].shape[1:])
            own = contributions[0].new_zeros(shape, dtype=acc_dtype(contributions[0].dtype))
        own = sum_contributions(contributions, self._plan.routing.segments[-1].routes[0], own)
        return split_latent_grad(own, self._plan, self._weight.dtype)

    def weight_grad(self) -> Tensor:
        """The gradient of `kv_b_weight`, zero in the rows of other ranks' heads."""
        if self._plan.ulysses_degree == 1:
            return self._d_own_weight.to(self._weight.dtype)
        grad = torch.zeros_like(self._weight)
        grad[weight_rows(self._plan.heads, self._plan.dims)] = self._d_own_weight
        return grad


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


def _used_up() -> Any:
    raise AssertionError("needed again after its last use was thought over")
