"""Blockwise attention for any device: online softmax over tiles, scores never stored.

One head at a time, plain 2-D matrix products into scratch that is allocated once per call. Exponents are base 2 with the
softmax scale folded in: exp(scale * s - lse) = exp2(scale * log2(e) * s - log2(e) * lse).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from laga_attn.kernels.operators import define_operators
from laga_attn.kernels.problem import acc_dtype, empty_gradients, empty_rows
from laga_attn.kernels.tiles import Triangles, live, visible_tile
from laga_attn.spans import Span

__all__ = ["backward", "forward"]

_LOG2E = math.log2(math.e)
_BLOCK = 256  # rows of the short side of a tile
_CHUNK = 2048  # rows of the long side
_LOWEST = -1e30  # running maximum before the first key: finite, so that exp2(_LOWEST - _LOWEST) is not NaN


def forward(q: Tensor, k: Tensor, v: Tensor, spans: Sequence[Span], scale: float) -> tuple[Tensor, Tensor]:
    """Softmax attention over spans: out [B, Sq, h, Dv] and lse [B, h, Sq]."""
    acc = acc_dtype(q.dtype)
    batch, rows, heads, _ = q.shape
    out = empty_rows(q, heads, v.shape[3], q.dtype).zero_()
    lse = q.new_full((batch, heads, rows), -torch.inf, dtype=acc)
    triangles = Triangles.build(_BLOCK, q, acc)
    for b in range(batch):
        for h in range(heads):
            kv_head = h if k.shape[2] > 1 else 0
            for span in live(spans):
                queries, keys = slice(span.q_start, span.q_start + span.q_len), slice(span.k_start, span.k_start + span.k_len)
                part = Span(0, span.q_len, 0, span.k_len, span.causal, span.window)
                o, l = _forward_span(
                    q[b, queries, h].to(acc), k[b, keys, kv_head].to(acc), v[b, keys, kv_head].to(acc), part, scale, triangles
                )
                out[b, queries, h] = o.to(q.dtype)
                lse[b, h, queries] = l
    return out, lse


def _forward_span(q: Tensor, k: Tensor, v: Tensor, span: Span, scale: float, triangles: Triangles) -> tuple[Tensor, Tensor]:
    top = q.new_full((span.q_len, 1), _LOWEST)
    total = q.new_zeros((span.q_len, 1))
    out = q.new_zeros((span.q_len, v.shape[1]))
    for k0 in range(0, span.k_len, _CHUNK):
        for q0 in range(0, span.q_len, _BLOCK):
            tile = visible_tile(span, q0, min(q0 + _BLOCK, span.q_len), k0, min(k0 + _CHUNK, span.k_len))
            if tile is None:
                continue
            r = slice(tile.q0, tile.q1)
            s = torch.mm(q[r], k[tile.k0 : tile.k1].t()).mul_(scale * _LOG2E)
            triangles.hide(s, tile)
            new_top = torch.maximum(top[r], s.amax(dim=1, keepdim=True))
            p = s.sub_(new_top).exp2_()
            fade = top[r].sub(new_top).exp2_()
            total[r] = total[r] * fade + p.sum(dim=1, keepdim=True)
            out[r] = torch.addmm(out[r] * fade, p, v[tile.k0 : tile.k1])
            top[r] = new_top
    return out / total, (top / _LOG2E + total.log()).squeeze(1)


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
    acc = acc_dtype(q.dtype)
    triangles = Triangles.build(_BLOCK, q, acc)
    dq, dk, dv = (torch.zeros_like(x, dtype=acc) for x in (q, k, v))
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            kv_head = h if k.shape[2] > 1 else 0
            for span in live(spans):
                queries, keys = slice(span.q_start, span.q_start + span.q_len), slice(span.k_start, span.k_start + span.k_len)
                part = Span(0, span.q_len, 0, span.k_len, span.causal, span.window)
                inputs = (
                    dout[b, queries, h].to(acc),
                    delta[b, h, queries].unsqueeze(1),
                    q[b, queries, h].to(acc),
                    k[b, keys, kv_head].to(acc),
                    v[b, keys, kv_head].to(acc),
                    lse[b, h, queries].unsqueeze(1) * _LOG2E,
                )
                a, c, d = _backward_span(*inputs, part, scale, triangles)
                dq[b, queries, h] += a
                dk[b, keys, kv_head] += c
                dv[b, keys, kv_head] += d
    results = empty_gradients(q, k, v)
    for result, total in zip(results, (dq, dk, dv), strict=True):
        result.copy_(total)
    return results


def _backward_span(
    dout: Tensor, delta: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, span: Span, scale: float, triangles: Triangles
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for k0 in range(0, span.k_len, _BLOCK):
        for q0 in range(0, span.q_len, _CHUNK):
            tile = visible_tile(span, q0, min(q0 + _CHUNK, span.q_len), k0, min(k0 + _BLOCK, span.k_len))
            if tile is None:
                continue
            r, c = slice(tile.q0, tile.q1), slice(tile.k0, tile.k1)
            s = torch.mm(q[r], k[c].t()).mul_(scale * _LOG2E)
            triangles.hide(s, tile)
            p = s.sub_(lse[r]).exp2_()
            dv[c] += p.t() @ dout[r]
            ds = torch.mm(dout[r], v[c].t()).sub_(delta[r]).mul_(p).mul_(scale)
            dk[c] += ds.t() @ q[r]
            dq[r] += ds @ k[c]
    return dq, dk, dv


define_operators("blockwise", forward, backward)
