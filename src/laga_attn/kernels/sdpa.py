"""Attention through PyTorch's fused kernels: flash attention on CPU, memory-efficient attention on CUDA.

Two of their habits are worked around here. Their causal mask is aligned top-left, so that a causal span is
cut into a full rectangle and a square with the diagonal, merged by LSE. And their backward derives delta from
``out``, while a caller who also differentiates the LSE has another delta: it rides along as extra columns of
``dout`` that meet ones in ``v``, with ``out`` set to zero, so that the kernel's own dP is dout V^T - delta.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from laga_attn.kernels.merge import merge_partials
from laga_attn.kernels.operators import define_operators
from laga_attn.kernels.problem import acc_dtype, empty_gradients, empty_rows
from laga_attn.kernels.tiles import live
from laga_attn.spans import Span

__all__ = ["backward", "forward"]

_EXTRA = 8  # columns added for delta: the CUDA kernel wants head dims in multiples of 8
_LSE_ALIGN = 32  # the CUDA kernel reads LSE rows in groups of this size

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a span that one call of a fused kernel can compute."""

    queries: slice
    keys: slice
    causal: bool  # top-left aligned; the piece is then square


def _pieces(spans: Sequence[Span]) -> Iterator[list[_Piece]]:
    for s in live(spans):
        if s.window is not None:
            raise ValueError(f"{s}: the sdpa kernel has no sliding window; select the kernel with window=True")
        queries = slice(s.q_start, s.q_start + s.q_len)
        cut = s.k_start + (s.k_len - s.q_len if s.causal else s.k_len)
        pieces = [_Piece(queries, slice(s.k_start, cut), causal=False)] if cut > s.k_start else []
        if s.causal:
            pieces.append(_Piece(queries, slice(cut, s.k_start + s.k_len), causal=True))
        yield pieces


def forward(q: Tensor, k: Tensor, v: Tensor, spans: Sequence[Span], scale: float) -> tuple[Tensor, Tensor]:
    """Softmax attention over spans: out [B, Sq, h, Dv] and lse [B, h, Sq]."""
    batch, rows, heads, _ = q.shape
    out = empty_rows(q, heads, v.shape[3], q.dtype).zero_()
    lse = q.new_full((batch, heads, rows), -torch.inf, dtype=acc_dtype(q.dtype))
    for first, *rest in _pieces(spans):
        part = _attend(q, k, v, first, scale)
        for piece in rest:
            part = merge_partials(*part, *_attend(q, k, v, piece, scale))
        out[:, first.queries], lse[:, :, first.queries] = part
    return out, lse


def _attend(q: Tensor, k: Tensor, v: Tensor, piece: _Piece, scale: float) -> tuple[Tensor, Tensor]:
    parts = (q[:, piece.queries], k[:, piece.keys], v[:, piece.keys])
    heads_first = [x.transpose(1, 2) for x in parts]  # [B, h, S, D]
    if q.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*heads_first, 0.0, piece.causal, scale=scale)
    else:
        out, lse, _, _ = aten._scaled_dot_product_efficient_attention(
            *heads_first, None, True, 0.0, piece.causal, scale=scale
        )
    return out.transpose(1, 2), lse[:, :, : out.shape[2]].to(acc_dtype(q.dtype))


def backward(
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
    dout_ext, v_ext = _with_delta(dout, delta, v)
    on_cpu = q.device.type == "cpu"  # there the kernel wants equal head dims, so that q and k grow by zeros
    q_ext, k_ext = (pad(q, (0, _EXTRA)), pad(k, (0, _EXTRA))) if on_cpu else (q, k)
    totals = tuple(torch.zeros_like(x, dtype=acc_dtype(q.dtype)) for x in (q, k, v))
    for piece in (piece for pieces in _pieces(spans) for piece in pieces):
        rows = (piece.queries, piece.keys, piece.keys)
        parts = [x[:, r].transpose(1, 2) for x, r in zip((q_ext, k_ext, v_ext), rows, strict=True)]
        dout_part = dout_ext[:, piece.queries].transpose(1, 2)  # [B, h, q_len, Dv + extra]
        statistics = lse[:, :, piece.queries]
        grads = (_cpu_gradients if on_cpu else _cuda_gradients)(dout_part, parts, statistics, piece.causal, scale)
        for total, r, grad in zip(totals, rows, grads, strict=True):
            total[:, r] += grad.transpose(1, 2)[..., : total.shape[3]]
    results = empty_gradients(q, k, v)
    for result, total in zip(results, totals, strict=True):
        result.copy_(total)
    return results


def _with_delta(dout: Tensor, delta: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """``dout`` extended by -delta and ``v`` by ones; in half precision, 24 bits of delta take 3 columns."""
    rest = -delta.transpose(1, 2)  # [B, Sq, h]
    columns = []
    for _ in range(1 if dout.dtype == delta.dtype else 3):
        columns.append(rest.to(dout.dtype))
        rest = rest - columns[-1].to(delta.dtype)
    dout_ext = torch.cat((dout, pad(torch.stack(columns, dim=-1), (0, _EXTRA - len(columns)))), dim=-1)
    ones = v.new_ones((*v.shape[:3], len(columns)))
    return dout_ext, torch.cat((v, pad(ones, (0, _EXTRA - len(columns)))), dim=-1)


def _cpu_gradients(
    dout: Tensor, parts: list[Tensor], lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, *parts, torch.zeros_like(dout), lse, 0.0, causal, scale=scale
    )
    return dq, dk, dv


def _cuda_gradients(
    dout: Tensor, parts: list[Tensor], lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    # Rows past the end count as LSE +inf, that is weight 0, as in the kernel's own forward.
    lse = pad(lse, (0, -lse.shape[2] % _LSE_ALIGN), value=torch.inf).contiguous()
    unused = lse.new_empty((), dtype=torch.int64)  # dropout state
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        dout,
        *parts,
        None,
        torch.zeros_like(dout),
        lse,
        unused,
        unused,
        0.0,
        [True, True, True, False],
        causal,
        scale=scale,
    )
    return dq, dk, dv


define_operators("sdpa", forward, backward)
