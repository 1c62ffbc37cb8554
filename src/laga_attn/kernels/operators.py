"""Turning a pair of kernel functions into PyTorch operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from laga_attn.kernels.problem import acc_dtype, backward_flops, empty_gradients, empty_rows, forward_flops
from laga_attn.spans import Span, unpack_spans

__all__ = ["BackwardFn", "ForwardFn", "define_operators"]

ForwardFn = Callable[[Tensor, Tensor, Tensor, Sequence[Span], float], tuple[Tensor, Tensor]]
BackwardFn = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Sequence[Span], float], tuple[Tensor, Tensor, Tensor]
]


def define_operators(name: str, forward: ForwardFn, backward: BackwardFn) -> None:
    """Register ``laga_attn::{name}_forward`` and ``laga_attn::{name}_backward``.

    As operators, the kernels run under ``FakeTensorMode`` without touching data, are one node for
    ``torch.compile``, and count the FLOPs of the visible pairs, not those of the tiles that they happen to
    compute. They have no autograd formula: the schemes call forward and backward themselves.
    """

    def forward_op(q: Tensor, k: Tensor, v: Tensor, spans: Sequence[int], scale: float) -> tuple[Tensor, Tensor]:
        return forward(q, k, v, unpack_spans(spans), scale)

    def forward_fake(q: Tensor, k: Tensor, v: Tensor, spans: Sequence[int], scale: float) -> tuple[Tensor, Tensor]:
        batch, rows, heads, _ = q.shape
        lse = q.new_empty((batch, heads, rows), dtype=acc_dtype(q.dtype))
        return empty_rows(q, heads, v.shape[3], q.dtype), lse

    def backward_op(
        dout: Tensor, delta: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, spans: Sequence[int], scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        return backward(dout, delta, q, k, v, lse, unpack_spans(spans), scale)

    def backward_fake(
        dout: Tensor, delta: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, spans: Sequence[int], scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        return empty_gradients(q, k, v)

    schema_q = "(Tensor q, Tensor k, Tensor v, int[] spans, float scale) -> (Tensor, Tensor)"
    schema_b = (
        "(Tensor dout, Tensor delta, Tensor q, Tensor k, Tensor v, Tensor lse, int[] spans, float scale)"
        " -> (Tensor, Tensor, Tensor)"
    )
    for suffix, op, fake, schema, flops in (
        ("forward", forward_op, forward_fake, schema_q, forward_flops),
        ("backward", backward_op, backward_fake, schema_b, backward_flops),
    ):
        qualified = f"laga_attn::{name}_{suffix}"
        torch.library.custom_op(qualified, op, mutates_args=(), schema=schema).register_fake(fake)
        register_flop_formula(getattr(torch.ops.laga_attn, f"{name}_{suffix}"))(flops)
