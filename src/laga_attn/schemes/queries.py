"""The query side, the same in every scheme: queries out, outputs back, and their gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from laga_attn.attention_plan import AttentionPlan
from laga_attn.grid import ContextParallel
from laga_attn.movement import Finish, acc_dtype, return_heads, send_heads

__all__ = ["return_output", "return_query_grad", "send_output_grad", "send_query"]


def send_query(q: Tensor, plan: AttentionPlan, cp: ContextParallel) -> Finish:
    """`[B, s, H, D]` to the rank's heads of its group's tokens, `[B, queries, h, D]`."""
    return send_heads(q, plan.routing, cp, plan.ulysses_degree, "query", "forward")


def return_output(
    out: Tensor, lse: Tensor, plan: AttentionPlan, cp: ContextParallel
) -> tuple[Tensor, Tensor | None]:
    """`[B, queries, h, Dv]` and `[B, h, queries]` to `[B, s, H, Dv]` and, if asked for, `[B, H, s]`."""
    finish = return_heads(out, plan.routing, cp, plan.ulysses_degree, "output", "forward")
    if not plan.return_lse:
        return finish(), None
    rows = lse.transpose(1, 2).unsqueeze(-1)  # [B, queries, h, 1]
    finish_lse = return_heads(rows, plan.routing, cp, plan.ulysses_degree, "lse", "forward")
    local_out, local_lse = finish(), finish_lse().squeeze(-1).transpose(1, 2)
    return local_out, _empty_rows_to_minus_inf(local_lse, plan)


def send_output_grad(
    dout: Tensor, dlse: Tensor | None, out: Tensor, plan: AttentionPlan, cp: ContextParallel
) -> Callable[[], tuple[Tensor, Tensor]]:
    """The output's gradient for the rank's heads of its group's tokens, with delta = sum(dout * out) - dlse.

    Delta is summed where `out` is at home, and travels as one number per head and token. So `out` is kept once, in
    the storage that the caller's output projection keeps anyway, and the gradient of the LSE costs nothing.

    Returns:
        A closure that gives `[B, queries, h, Dv]` and `[B, h, queries]` (accumulation dtype).
    """
    delta = _delta(dout, out, plan)  # [B, s, H]
    if dlse is not None:
        delta -= dlse.transpose(1, 2)
    if plan.ulysses_degree == 1:
        finish_dout = send_heads(dout, plan.routing, cp, 1, "output_grad", "backward")
        finish_delta = send_heads(delta.unsqueeze(-1), plan.routing, cp, 1, "output_grad", "backward")
        return lambda: (finish_dout(), finish_delta().squeeze(-1).transpose(1, 2))
    packed = torch.cat([dout, delta.unsqueeze(-1).view(dout.dtype)], dim=-1)
    finish = send_heads(packed, plan.routing, cp, plan.ulysses_degree, "output_grad", "backward")
    width = dout.shape[-1]

    def unpack() -> tuple[Tensor, Tensor]:
        arrived = finish()
        own_delta = arrived[..., width:].contiguous().view(delta.dtype).squeeze(-1)  # [B, queries, h]
        return arrived[..., :width], own_delta.transpose(1, 2)

    return unpack


def return_query_grad(dq: Tensor, plan: AttentionPlan, cp: ContextParallel) -> Finish:
    """`[B, queries, h, D]` back to `[B, s, H, D]`, zero at pads."""
    return return_heads(dq, plan.routing, cp, plan.ulysses_degree, "query_grad", "backward")


def _delta(dout: Tensor, out: Tensor, plan: AttentionPlan) -> Tensor:
    delta = dout.new_empty(dout.shape[:-1], dtype=acc_dtype(dout.dtype))
    for group in plan.all_head_groups():  # by groups, so that the wide product never exists for all heads
        product = dout[:, :, group].to(delta.dtype) * out[:, :, group]
        torch.sum(product, dim=-1, out=delta[:, :, group])
    return delta


def _empty_rows_to_minus_inf(lse: Tensor, plan: AttentionPlan) -> Tensor:
    """Pads came back as 0; no key is visible to a pad, so its LSE is -inf."""
    routing = plan.routing
    if not routing.has_pads:
        return lse
    pad = torch.ones(routing.local_len, dtype=torch.bool, device=lse.device)
    pad[routing.real if isinstance(routing.real, slice) else torch.tensor(routing.real, device=lse.device)] = False
    return lse.masked_fill(pad, float("-inf"))
