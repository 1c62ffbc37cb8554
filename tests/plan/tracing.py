"""Trace one attention call on tensors without data, or on real ones: what tests of the planner share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import laga_attn as laga
from laga_attn.attention_plan import LatentDims
from laga_attn.plan.trace import Trace
from laga_attn.plan.world import EmptyMessages, fake_ranks

__all__ = ["SMALL", "V3", "Call", "trace_call"]

SMALL = LatentDims(num_heads=8, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, kv_lora_rank=64)
V3 = LatentDims(num_heads=128, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, kv_lora_rank=512)


@dataclass(frozen=True)
class Call:
    """One attention call on one rank."""

    layout: laga.SequenceLayout
    scheme: str = "laga"
    degree: int = 1
    rank: int = 0
    dims: LatentDims = SMALL
    save: str = "auto"
    causal: bool = True
    window: int | None = None
    batch: int = 1
    dtype: torch.dtype = torch.bfloat16
    two_level: bool = False

    def with_(self, **changes: Any) -> Call:
        return replace(self, **changes)


def trace_call(call: Call, *, real: bool = False, look_inside: bool = False) -> Trace:
    """Forward and backward of `latent_attention`; inputs and weight are known to the trace."""
    layout, dims = call.layout, call.dims
    with (
        fake_ranks(layout.cp_size, call.rank, call.degree, two_level=call.two_level) as cp,
        EmptyMessages() if real else FakeTensorMode(),
        Trace(look_inside=look_inside) as trace,
    ):

        def leaf(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=call.dtype).requires_grad_()

        tokens = layout.local_len
        weight = leaf(dims.num_heads * dims.up_head_dim, dims.kv_lora_rank)
        inputs = [
            leaf(call.batch, tokens, dims.num_heads, dims.qk_head_dim),
            leaf(call.batch, tokens, dims.kv_lora_rank),
            leaf(call.batch, tokens, dims.qk_rope_head_dim),
        ]
        trace.watch([weight], "parameter")
        trace.watch(inputs, "input")
        out = laga.latent_attention(
            *inputs, weight, layout=layout, cp=cp, scheme=call.scheme, save=call.save, causal=call.causal,
            window=call.window, qk_nope_head_dim=dims.qk_nope_head_dim, v_head_dim=dims.v_head_dim,
            kernel="blockwise",
        )  # fmt: skip
        trace.start_backward(out)
        out.backward(torch.zeros_like(out))
        trace.watch([leaf.grad for leaf in (*inputs, weight)], "gradient")
    return trace
