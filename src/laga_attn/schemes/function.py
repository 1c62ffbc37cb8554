"""The one autograd function: it keeps what a scheme asks to keep and knows nothing else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from laga_attn.attention_plan import AttentionPlan
from laga_attn.grid import ContextParallel
from laga_attn.schemes import SCHEME_TABLE
from laga_attn.schemes.interface import Latents, Needs

__all__ = ["LatentAttentionFunction"]


class LatentAttentionFunction(torch.autograd.Function):
    """`apply(q, c_kv, k_rope, kv_b_weight, plan, cp, prefetched)` gives `(out, lse)`, lse None unless the plan asks."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        c_kv: Tensor,
        k_rope: Tensor,
        weight: Tensor,
        plan: AttentionPlan,
        cp: ContextParallel,
        prefetched: Latents | None,
    ) -> tuple[Tensor, Tensor | None]:
        out, lse, kept = SCHEME_TABLE[plan.scheme].forward(q, c_kv, k_rope, weight, plan, cp, prefetched)
        ctx.save_for_backward(*kept)
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.cp = plan, cp
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        kept = ctx.saved_tensors  # read once: under saved_tensors_hooks every read unpacks again
        needs_q, needs_c_kv, needs_k_rope, needs_weight = ctx.needs_input_grad[:4]
        if dout is None:
            dout = torch.zeros_like(kept[1])  # only the LSE was used; every scheme keeps `out` second
        grads = SCHEME_TABLE[ctx.plan.scheme].backward(
            dout, dlse, kept, Needs(needs_q, needs_c_kv or needs_k_rope, needs_weight), ctx.plan, ctx.cp
        )
        return *grads, None, None, None
