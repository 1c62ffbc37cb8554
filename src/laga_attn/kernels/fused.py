"""Spans computed by somebody else's fused kernel, piece by piece.

What such kernels have in common: tensors [B, S, h, D] with as many key/value heads as query heads, a causal flag,
natural-log LSE, and a backward pass for one contiguous range of queries and one of keys. How a span is cut into what
one call can do, and the calls themselves, are a kernel's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from laga_attn.kernels.merge import merge_partials
from laga_attn.kernels.problem import acc_dtype, empty_gradients, empty_rows
from laga_attn.kernels.tiles import live
from laga_attn.spans import Span

__all__ = ["Fused", "Piece", "cut_at_diagonal", "out_for_delta", "whole"]


@dataclass(frozen=True, slots=True)
class Piece:
    """What one call computes: these query rows of the problem by these key rows."""

    queries: slice
    keys: slice
    causal: bool
    window: int | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Number of query rows and of key rows."""
        return self.queries.stop - self.queries.start, self.keys.stop - self.keys.start


def whole(span: Span) -> list[Piece]:
    """For kernels whose masks are aligned like those of spans, to the last query and the last key."""
    queries, keys = slice(span.q_start, span.q_start + span.q_len), slice(span.k_start, span.k_start + span.k_len)
    return [Piece(queries, keys, span.causal, span.window)]


def cut_at_diagonal(span: Span) -> list[Piece]:
    """For kernels whose causal mask is aligned top-left: a full rectangle, and a square with the diagonal."""
    if span.window is not None:
        raise ValueError(f"{span}: this kernel has no sliding window; select one with window=True")
    (piece,) = whole(span)
    if not span.causal:
        return [piece]
    cut = piece.keys.stop - span.q_len
    square = Piece(piece.queries, slice(cut, piece.keys.stop), causal=True)
    return [Piece(piece.queries, slice(span.k_start, cut), causal=False)] * (cut > span.k_start) + [square]


Attend = Callable[[Tensor, Tensor, Tensor, Piece, float], tuple[Tensor, Tensor]]
"""``(q, k, v, piece, scale)``, of the piece's rows, gives out [B, n, h, Dv] and lse [B, h, n]."""

Differentiate = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Piece, float], tuple[Tensor, Tensor, Tensor]]
"""``(dout, delta, q, k, v, lse, piece, scale)``, of the piece's rows, gives the piece's share of dq, dk and dv."""


@dataclass(frozen=True, slots=True)
class Fused:
    """Forward and backward over spans by way of a fused kernel."""

    cut: Callable[[Span], list[Piece]]  # of a span whose queries and keys are all in visible pairs
    attend: Attend
    differentiate: Differentiate

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spans: Sequence[Span], scale: float) -> tuple[Tensor, Tensor]:
        """Softmax attention over spans: out [B, Sq, h, Dv] and lse [B, h, Sq]."""
        batch, rows, heads, _ = q.shape
        out = empty_rows(q, heads, v.shape[3], q.dtype).zero_()
        lse = q.new_full((batch, heads, rows), -torch.inf, dtype=acc_dtype(q.dtype))
        for span in live(spans):
            first, *rest = (self.attend(q[:, p.queries], k[:, p.keys], v[:, p.keys], p, scale) for p in self.cut(span))
            for part in rest:
                first = merge_partials(*first, *part)
            queries = slice(span.q_start, span.q_start + span.q_len)
            out[:, queries], lse[:, :, queries] = first
        return out, lse

    def backward(
        self,
        dout: Tensor,
        delta: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        spans: Sequence[Span],
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients dq, dk, dv from dS = P * (dout V^T - delta), with P recomputed from ``lse``."""
        pieces = [piece for span in live(spans) for piece in self.cut(span)]
        results = empty_gradients(q, k, v)
        queries, keys = [p.queries for p in pieces], [p.keys for p in pieces]
        totals = [_total(x, rows) for x, rows in zip(results, (queries, keys, keys), strict=True)]
        for p in pieces:
            grads = self.differentiate(
                dout[:, p.queries], delta[:, :, p.queries], q[:, p.queries], k[:, p.keys], v[:, p.keys],
                lse[:, :, p.queries], p, scale,
            )  # fmt: skip
            for total, rows, grad in zip(totals, (p.queries, p.keys, p.keys), grads, strict=True):
                total[:, rows] += grad
        for result, total in zip(results, totals, strict=True):
            if total is not result:
                result.copy_(total)
        return results


def _total(result: Tensor, taken: Sequence[slice]) -> Tensor:
    """Zeros to add to: ``result`` itself where no two slices of its rows meet, else in the acc dtype."""
    in_order = sorted(taken, key=lambda rows: rows.start)
    if all(a.stop <= b.start for a, b in pairwise(in_order)):
        return result.zero_()
    return torch.zeros_like(result, dtype=acc_dtype(result.dtype))


def out_for_delta(dout: Tensor, delta: Tensor) -> Tensor:
    """An ``out`` from which a kernel that computes sum(dout * out) by itself gets ``delta``.

    Backward is given delta and not the output, whereas most kernels take the output and derive delta from it. What
    they get is dout * delta / |dout|^2, which is the shortest vector that has the right product with dout. Where dout
    is zero no vector has, and the result is zero: right as long as delta is sum(dout * out), so zero too, and wrong
    where a gradient of the LSE is in it; such kernels have ``lse_gradient`` off in the support table.

    Rounding: each element of the result is rounded to the dtype of dout, with relative errors e_i up to its unit
    roundoff u. What the kernel computes is off by delta * sum(w_i e_i) with weights w_i = dout_i^2 / |dout|^2, so by
    u |delta| at most, which is at most u |dout| |out|: the bound that holds for the rounding of the true ``out``,
    too, which a caller has put into delta by using the rounded output. So the bound at most doubles. Where both are
    small against the rounding of P and dS, as in bf16 at head dims 192/128, the errors of dq and dk stay within a few
    per cent of those with the true output (emulated on CPU in ``tests/kernels/test_fused.py``).

    Args:
        dout: [B, n, h, Dv].
        delta: [B, h, n] in the acc dtype.

    Returns:
        [B, n, h, Dv], contiguous, in the dtype of dout.
    """
    norm = torch.linalg.vector_norm(dout, dim=-1, keepdim=True, dtype=delta.dtype)  # [B, n, h, 1]
    # Divided twice, since the square of a small norm could vanish.
    factor = torch.where(norm > 0, delta.transpose(1, 2).unsqueeze(-1) / norm / norm, 0.0)
    return torch.mul(dout, factor, out=dout.new_empty(dout.shape))
