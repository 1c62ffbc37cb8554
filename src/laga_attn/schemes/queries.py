"""The query side, the same in every scheme: queries out, outputs back, and their gradients, by head groups.

A scheme starts the exchange of all its groups at once and waits for each where it needs it, so that what one group
moves is hidden behind what another computes. A `group` counts heads from the rank's first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from laga_attn.attention_plan import AttentionPlan
from laga_attn.grid import ContextParallel
from laga_attn.movement import Finish, acc_dtype, empty_local, return_heads, row_numbers, send_heads

__all__ = ["OutputReturn", "QueryGradReturn", "send_output_grads", "send_queries"]


def send_queries(q: Tensor, groups: list[slice], plan: AttentionPlan, cp: ContextParallel) -> list[Finish]:
    """`[B, s, H, D]` to each group of the rank's heads over its Ulysses group's tokens, `[B, queries, hg, D]`."""
    return [send_heads(q, group, plan.routing, cp, plan.ulysses_degree, "query", "forward") for group in groups]


class OutputReturn:
    """Collects `out [B, s, H, Dv]` and, where the plan asks for it, `lse [B, H, s]` from the groups' results."""

    def __init__(self, q: Tensor, plan: AttentionPlan, cp: ContextParallel) -> None:
        self._plan, self._cp = plan, cp
        self._out = empty_local(q, plan.routing, plan.dims.num_heads, plan.dims.v_head_dim)
        self._lse = (
            empty_local(q, plan.routing, plan.dims.num_heads, 1, acc_dtype(q.dtype)) if plan.return_lse else None
        )
        self._finish: list[Callable[[], None]] = []

    def start(self, group: slice, out: Tensor, lse: Tensor) -> None:
        """Send home one group's `[B, queries, hg, Dv]` and `[B, hg, queries]`."""
        self._send(out, self._out, group, "output")
        if self._lse is not None:
            self._send(lse.transpose(1, 2).unsqueeze(-1), self._lse, group, "lse")

    def finish(self) -> tuple[Tensor, Tensor | None]:
        for wait in self._finish:
            wait()
        if self._lse is None:
            return self._out, None
        return self._out, _minus_inf_at_pads(self._lse.squeeze(-1).transpose(1, 2), self._plan)

    def _send(self, x: Tensor, local: Tensor, group: slice, kind: str) -> None:
        plan = self._plan
        self._finish.append(return_heads(x, local, group, plan.routing, self._cp, plan.ulysses_degree, kind, "forward"))


def send_output_grads(
    dout: Tensor, dlse: Tensor | None, out: Tensor, groups: list[slice], plan: AttentionPlan, cp: ContextParallel
) -> list[Callable[[], tuple[Tensor, Tensor]]]:
    """Each group's part of the output's gradient, with delta = sum(dout * out) - dlse.

    Delta is summed where `out` is at home, and travels as one number per head and token. So `out` is kept once, in
    the storage that the caller's output projection keeps anyway, and the gradient of the LSE costs nothing.

    Returns:
        Closures that give `[B, queries, hg, Dv]` and `[B, hg, queries]` (accumulation dtype).
    """
    delta = _delta(dout, out, plan)  # [B, s, H]
    if dlse is not None:
        delta -= dlse.transpose(1, 2)
    routing, degree = plan.routing, plan.ulysses_degree
    width = dout.shape[-1]
    tensors: tuple[Tensor, ...]
    if degree == 1:
        tensors = (dout, delta.unsqueeze(-1))
    else:  # one message for both: delta's bytes ride along as elements of dout's dtype
        tensors = (torch.cat([dout, delta.unsqueeze(-1).view(dout.dtype)], dim=-1),)

    def start(group: slice) -> Callable[[], tuple[Tensor, Tensor]]:
        finish = [send_heads(x, group, routing, cp, degree, "output_grad", "backward") for x in tensors]

        def arrive() -> tuple[Tensor, Tensor]:
            if degree == 1:
                own_dout, own_delta = (part() for part in finish)
            else:
                packed = finish[0]()
                own_dout, own_delta = (
                    packed[..., :width],
                    packed[..., width:].clone(memory_format=torch.contiguous_format).view(delta.dtype),
                )
            return own_dout, own_delta.squeeze(-1).transpose(1, 2)

        return arrive

    return [start(group) for group in groups]


class QueryGradReturn:
    """Collects `dq [B, s, H, D]` from the groups' gradients."""

    def __init__(self, like: Tensor, plan: AttentionPlan, cp: ContextParallel) -> None:
        self._plan, self._cp = plan, cp
        self._dq = empty_local(like, plan.routing, plan.dims.num_heads, plan.dims.qk_head_dim)
        self._parts: dict[int, Tensor] = {}
        self._finish: list[Callable[[], None]] = []

    def add(self, group: slice, dq: Tensor, finished: bool = True) -> None:
        """Add one group's `[B, queries, hg, D]`; once all its parts are there, send it home."""
        part = self._parts.pop(group.start, None)
        total = dq if part is None else part.add_(dq)
        if not finished:
            self._parts[group.start] = total
            return
        plan = self._plan
        self._finish.append(
            return_heads(total, self._dq, group, plan.routing, self._cp, plan.ulysses_degree, "query_grad", "backward")
        )

    def finish(self) -> Tensor:
        for wait in self._finish:
            wait()
        return self._dq


def _delta(dout: Tensor, out: Tensor, plan: AttentionPlan) -> Tensor:
    delta = dout.new_empty(dout.shape[:-1], dtype=acc_dtype(dout.dtype))
    for group in plan.all_head_groups():  # by groups, so that the wide product never exists for all heads
        product = dout[:, :, group].to(delta.dtype) * out[:, :, group]
        torch.sum(product, dim=-1, out=delta[:, :, group])
    return delta


def _minus_inf_at_pads(lse: Tensor, plan: AttentionPlan) -> Tensor:
    """Pads are left at 0; no key is visible to a pad, so its LSE is -inf."""
    routing = plan.routing
    if not routing.has_pads:
        return lse
    pad = torch.ones(routing.local_len, dtype=torch.bool, device=lse.device)
    pad[routing.real if isinstance(routing.real, slice) else row_numbers(routing.real, lse)] = False
    return lse.masked_fill(pad, float("-inf"))
