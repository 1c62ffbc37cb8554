"""Turning a pair of kernel functions into PyTorch operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op
from torch.utils.flop_counter import register_flop_formula

from laga_attn.kernels.problem import (
    acc_dtype,
    backward_flops,
    backward_from_latent_flops,
    empty_gradients,
    empty_rows,
    forward_flops,
    forward_from_latent_flops,
)
from laga_attn.spans import Span, unpack_spans

__all__ = [
    "BackwardFn",
    "ForwardFn",
    "LatentBackwardFn",
    "LatentForwardFn",
    "define_latent_operators",
    "define_operators",
]

ForwardFn = Callable[[Tensor, Tensor, Tensor, Sequence[Span], float], tuple[Tensor, Tensor]]
LatentForwardFn = Callable[[Tensor, Tensor, Tensor, Sequence[Span], float, int], tuple[Tensor, Tensor]]
BackwardFn = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Sequence[Span], float], tuple[Tensor, Tensor, Tensor]
]
LatentBackwardFn = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Sequence[Span], float, Tensor | None, Tensor | None], Tensor
]

_FORWARD = "(Tensor q, Tensor k, Tensor v, int[] spans, float scale) -> (Tensor, Tensor)"
_BACKWARD = (
    "(Tensor dout, Tensor delta, Tensor q, Tensor k, Tensor v, Tensor lse, int[] spans, float scale)"
    " -> (Tensor, Tensor, Tensor)"
)
_LATENT_FORWARD = (
    "(Tensor q, Tensor latent, Tensor weight, int[] spans, float scale, int v_head_dim) -> (Tensor, Tensor)"
)
_LATENT_BACKWARD = (
    "(Tensor dout, Tensor delta, Tensor q, Tensor latent, Tensor weight, Tensor lse, int[] spans, float scale,"
    " Tensor(a!)? d_latent, Tensor(b!)? d_weight) -> Tensor"
)


def define_operators(name: str, forward: ForwardFn, backward: BackwardFn) -> None:
    """Register ``laga_attn::{name}_forward`` and ``laga_attn::{name}_backward``.

    As operators, the kernels run under ``FakeTensorMode`` without touching data, are one node for
    ``torch.compile``, and count the FLOPs of the visible pairs, not those of the tiles that they happen to
    compute. They have no autograd formula: the schemes call forward and backward themselves.
    """

    def forward_fake(q: Tensor, k: Tensor, v: Tensor, spans: Sequence[int], scale: float) -> tuple[Tensor, Tensor]:
        return _empty_output(q, v.shape[3])

    def backward_fake(
        dout: Tensor, delta: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, spans: Sequence[int], scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        return empty_gradients(q, k, v)

    _register(f"{name}_forward", _FORWARD, forward, forward_fake, forward_flops)
    _register(f"{name}_backward", _BACKWARD, backward, backward_fake, backward_flops)


def define_latent_operators(name: str, forward: LatentForwardFn, backward: LatentBackwardFn) -> None:
    """Register ``laga_attn::{name}_forward_from_latent`` and ``laga_attn::{name}_backward_from_latent``.

    Latents and weight stand where keys and values do in the others; FLOPs include those of rebuilding these, and of
    folding their gradients.
    """

    def forward_fake(
        q: Tensor, latent: Tensor, weight: Tensor, spans: Sequence[int], scale: float, v_head_dim: int
    ) -> tuple[Tensor, Tensor]:
        return _empty_output(q, v_head_dim)

    def backward_fake(dout: Tensor, delta: Tensor, q: Tensor, latent: Tensor, weight: Tensor, *rest: object) -> Tensor:
        return empty_rows(q, q.shape[2], q.shape[3], q.dtype)

    _register(f"{name}_forward_from_latent", _LATENT_FORWARD, forward, forward_fake, forward_from_latent_flops)
    _register(
        f"{name}_backward_from_latent",
        _LATENT_BACKWARD,
        backward,
        backward_fake,
        backward_from_latent_flops,
        changed=("d_latent", "d_weight"),
    )


def _empty_output(q: Tensor, v_head_dim: int) -> tuple[Tensor, Tensor]:
    batch, rows, heads, _ = q.shape
    lse = q.new_empty((batch, heads, rows), dtype=acc_dtype(q.dtype))
    return empty_rows(q, heads, v_head_dim, q.dtype), lse


def _register(
    name: str,
    schema: str,
    kernel: Callable[..., object],
    fake: Callable[..., object],
    flops: Callable[..., int],
    changed: tuple[str, ...] = (),
) -> None:
    """Make an operator of ``kernel``, which takes spans where the schema has their integers.

    Arguments that it changes in place are named in ``changed``.
    """
    place = schema[: schema.index("int[] spans")].count(",")

    def op(*args: Any) -> object:
        return kernel(*args[:place], unpack_spans(args[place]), *args[place + 1 :])

    custom_op(f"laga_attn::{name}", op, mutates_args=changed, schema=schema).register_fake(fake)
    register_flop_formula(getattr(torch.ops.laga_attn, name))(flops)
