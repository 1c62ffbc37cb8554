"""Blockwise attention for any device: tiles of scores, never the whole matrix.

Plain 2-D matrix products, one head at a time, into scratch that is allocated once per call: on CPU they reach
the speed of the matrix library, where batched ones do not. What a tile does is in ``full`` (any dtype and
device) and ``half`` (bfloat16 on CPUs that multiply it in hardware).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from laga_attn.kernels.full import LN2, FullBackward, FullForward, Scores
from laga_attn.kernels.half import HalfBackward, HalfForward, has_fast_bfloat16
from laga_attn.kernels.operators import define_operators
from laga_attn.kernels.problem import acc_dtype, empty_gradients, empty_rows
from laga_attn.kernels.tiles import Tile, live, row_blocks, tiles
from laga_attn.spans import Span

__all__ = ["backward", "forward", "split"]

_FORWARD_TILE = (256, 8192)  # query rows, key rows
_BACKWARD_TILE = (4096, 256)
_FEW_KEYS = 512


def split(spans: Sequence[Span], half: bool) -> tuple[list[Span], list[Span]]:
    """Divide spans among ``full`` and, where ``half`` is allowed, the queries that see more than 512 keys.

    Rounding errors average out over the keys that a query sees, and its output shrinks with their number: the
    largest errors relative to the largest outputs are those of queries that see few. Few keys also mean
    little work.
    """
    full, many = [], []
    for s in live(spans):
        if not half or min(s.k_len, s.window or s.k_len) <= _FEW_KEYS:
            full.append(s)
        elif not s.causal:
            many.append(s)
        else:
            offset = s.k_len - s.q_len
            n = min(max(_FEW_KEYS - offset, 0), s.q_len)  # query i sees i + 1 + offset keys, or the window
            if n:
                full.append(Span(s.q_start, n, s.k_start, n + offset, True, s.window))
            many.append(Span(s.q_start + n, s.q_len - n, s.k_start, s.k_len, True, s.window).trimmed())
    return full, [s for s in many if s.q_len]


def forward(q: Tensor, k: Tensor, v: Tensor, spans: Sequence[Span], scale: float) -> tuple[Tensor, Tensor]:
    """Softmax attention over spans: out [B, Sq, h, Dv] and lse [B, h, Sq]."""
    batch, rows, heads, _ = q.shape
    out = empty_rows(q, heads, v.shape[3], q.dtype).zero_()
    lse = q.new_full((batch, heads, rows), -torch.inf, dtype=acc_dtype(q.dtype))
    full_spans, half_spans = split(spans, q.dtype == torch.bfloat16 and has_fast_bfloat16(q.device))
    tile = _fit(_FORWARD_TILE, q, k)
    scores = Scores(q, k, scale)
    full = FullForward(scores, v, tile)
    half = HalfForward(scores, v, tile) if half_spans else None
    for b in range(batch):
        for h in range(heads):
            g = h % k.shape[2]
            scores.load(q[b, :, h], k[b, :, g])
            full.load(v[b, :, g])
            for span in full_spans:
                for block in row_blocks(span, *tile):
                    _attend_block(full, block, out[b, :, h], lse[b, h])
            if half is not None:
                half.load(q[b, :, h], k[b, :, g], v[b, :, g])
                for span in half_spans:
                    for block in row_blocks(span, *tile):
                        _attend_block(half, block, out[b, :, h], lse[b, h])
    return out, lse


def _attend_block(engine: FullForward | HalfForward, block: list[Tile], out: Tensor, lse: Tensor) -> None:
    """Merge the tiles of one block of queries into rows of out [Sq, Dv] and lse [Sq]."""
    if len(block) == 1:
        part, part_lse = engine.attend(block[0])
        out[block[0].rows] = part
        lse[block[0].rows] = part_lse.squeeze(1).mul_(LN2)
        return
    rows = slice(min(t.q0 for t in block), max(t.q1 for t in block))
    acc = lse.new_zeros((rows.stop - rows.start, out.shape[1]))
    total = lse.new_full((rows.stop - rows.start, 1), -torch.inf)  # base-2 LSE so far
    for tile in block:
        part, part_lse = engine.attend(tile)
        seen = slice(tile.q0 - rows.start, tile.q1 - rows.start)
        before, total[seen] = total[seen].clone(), torch.logaddexp2(total[seen], part_lse)
        acc[seen] = acc[seen] * (before - total[seen]).exp2_() + part * (part_lse - total[seen]).exp2_()
    out[rows] = acc
    lse[rows] = total.squeeze(1).mul_(LN2)


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
    batch, _, heads, _ = q.shape
    groups = k.shape[2]
    dq, dk, dv = empty_gradients(q, k, v)
    full_spans, half_spans = split(spans, q.dtype == torch.bfloat16 and has_fast_bfloat16(q.device))
    tile = _fit(_BACKWARD_TILE, q, k)
    scores = Scores(q, k, scale)
    full = FullBackward(scores, v, tile, scale)
    half = HalfBackward(scores, v, tile, scale) if half_spans else None
    head_dq, head_dk, head_dv = torch.empty_like(scores.q), torch.empty_like(scores.k), torch.empty_like(full.v)
    for b in range(batch):
        for h in range(heads):
            g = h % groups
            head_dq.zero_()
            if h == g:
                head_dk.zero_()
                head_dv.zero_()
            scores.load(q[b, :, h], k[b, :, g])
            statistics = (dout[b, :, h], delta[b, h], lse[b, h])
            full.load(v[b, :, g], *statistics)
            for span in full_spans:
                for t in tiles(span, *tile):
                    full.add_gradients(t, head_dq, head_dk, head_dv)
            if half is not None:
                half.load(q[b, :, h], k[b, :, g], v[b, :, g], *statistics)
                for span in half_spans:
                    half.expect(slice(span.q_start, span.q_start + span.q_len), _seen(span, lse))
                    for t in tiles(span, *tile):
                        half.add_gradients(t, head_dq, head_dk, head_dv)
            dq[b, :, h] = head_dq
            if h + groups >= heads:
                dk[b, :, g], dv[b, :, g] = head_dk, head_dv
    return dq, dk, dv


def _seen(span: Span, like: Tensor) -> Tensor:
    """How many keys each query of the span sees [q_len], in the dtype and on the device of ``like``."""
    last = torch.arange(1 - span.q_len, 1, device=like.device, dtype=like.dtype) + span.k_len
    return last.clamp_(max=span.window or span.k_len) if span.causal else torch.full_like(last, span.k_len)


def _fit(tile: tuple[int, int], q: Tensor, k: Tensor) -> tuple[int, int]:
    return min(tile[0], q.shape[1]), min(tile[1], k.shape[1])


define_operators("blockwise", forward, backward)
