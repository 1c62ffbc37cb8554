"""Reference attention: every formula written out with full score matrices. For tests and small problems."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from laga_attn.kernels.operators import define_operators
from laga_attn.kernels.problem import acc_dtype, empty_gradients, empty_rows
from laga_attn.spans import Span

__all__ = ["backward", "forward", "visible"]


def visible(span: Span, device: torch.device) -> Tensor:
    """The span's mask, bool [q_len, k_len]: True where the query sees the key."""
    i = torch.arange(span.q_len, device=device).unsqueeze(1)
    j = torch.arange(span.k_len, device=device).unsqueeze(0)
    distance = (i + span.k_len - span.q_len) - j
    mask = torch.ones_like(distance, dtype=torch.bool)
    if span.causal:
        mask = distance >= 0
    if span.window is not None:
        mask = mask & (distance < span.window)
    return mask


def forward(q: Tensor, k: Tensor, v: Tensor, spans: Sequence[Span], scale: float) -> tuple[Tensor, Tensor]:
    """Softmax attention over spans: out [B, Sq, h, Dv] and lse [B, h, Sq]."""
    acc = acc_dtype(q.dtype)
    batch, rows, heads, _ = q.shape
    out = empty_rows(q, heads, v.shape[3], q.dtype).zero_()
    lse = q.new_full((batch, heads, rows), -torch.inf, dtype=acc)
    for full_span in spans:
        s = full_span.trimmed()
        if not s.area():
            continue
        queries = slice(s.q_start, s.q_start + s.q_len)
        scores = _scores(q, k, s, scale)
        lse[:, :, queries] = torch.logsumexp(scores, dim=-1)
        p = torch.softmax(scores, dim=-1)
        out[:, queries] = torch.einsum("bhij,bjhd->bihd", p, _keys(v, s, heads)).to(q.dtype)
    return out, lse


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
    heads = q.shape[2]
    dq, dk, dv = (torch.zeros_like(x, dtype=acc) for x in (q, k, v))
    for full_span in spans:
        s = full_span.trimmed()
        if not s.area():
            continue
        queries, keys = slice(s.q_start, s.q_start + s.q_len), slice(s.k_start, s.k_start + s.k_len)
        q_part, dout_part = q[:, queries].to(acc), dout[:, queries].to(acc)
        p = torch.exp(_scores(q, k, s, scale) - lse[:, :, queries].unsqueeze(-1))  # [B, h, q_len, k_len]
        dp = torch.einsum("bihd,bjhd->bhij", dout_part, _keys(v, s, heads))
        ds = p * (dp - delta[:, :, queries].unsqueeze(-1)) * scale
        dq[:, queries] += torch.einsum("bhij,bjhd->bihd", ds, _keys(k, s, heads))
        dk[:, keys] += _sum_heads(torch.einsum("bhij,bihd->bjhd", ds, q_part), k.shape[2])
        dv[:, keys] += _sum_heads(torch.einsum("bhij,bihd->bjhd", p, dout_part), v.shape[2])
    results = empty_gradients(q, k, v)
    for result, total in zip(results, (dq, dk, dv), strict=True):
        result.copy_(total)
    return results


def _scores(q: Tensor, k: Tensor, span: Span, scale: float) -> Tensor:
    q_part = q[:, span.q_start : span.q_start + span.q_len].to(acc_dtype(q.dtype))
    scores = torch.einsum("bihd,bjhd->bhij", q_part, _keys(k, span, q.shape[2])) * scale
    return scores.masked_fill(~visible(span, q.device), -torch.inf)


def _keys(x: Tensor, span: Span, heads: int) -> Tensor:
    part = x[:, span.k_start : span.k_start + span.k_len].to(acc_dtype(x.dtype))
    return part.expand(-1, -1, heads, -1)


def _sum_heads(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[2] == heads else x.sum(dim=2, keepdim=True)


define_operators("reference", forward, backward)
