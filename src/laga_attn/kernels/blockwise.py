"""Blockwise attention for any device: tiles of scores, never the whole matrix.

Plain 2-D matrix products, one head at a time, into scratch that is allocated once per call: on CPU they reach
the speed of the matrix library, where batched ones do not. What a tile does is in ``engine``; half-precision
inputs are widened to float32, since products that round scores to bfloat16 are not exact enough.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from laga_attn.kernels.engine import LN2, BackwardEngine, ForwardEngine, Scores
from laga_attn.kernels.operators import define_operators
from laga_attn.kernels.problem import acc_dtype, empty_gradients, empty_rows
from laga_attn.kernels.tiles import Tile, live, row_blocks, tiles
from laga_attn.spans import Span

__all__ = ["backward", "forward"]

_FORWARD_TILE = (256, 8192)  # query rows, key rows
_BACKWARD_TILE = (4096, 256)


def forward(q: Tensor, k: Tensor, v: Tensor, spans: Sequence[Span], scale: float) -> tuple[Tensor, Tensor]:
    """Softmax attention over spans: out [B, Sq, h, Dv] and lse [B, h, Sq]."""
    batch, rows, heads, _ = q.shape
    out = empty_rows(q, heads, v.shape[3], q.dtype).zero_()
    lse = q.new_full((batch, heads, rows), -torch.inf, dtype=acc_dtype(q.dtype))
    seen = live(spans)
    tile = _fit(_FORWARD_TILE, q, k)
    scores = Scores(q, k, scale)
    engine = ForwardEngine(scores, v, tile)
    for b in range(batch):
        for h in range(heads):
            g = h % k.shape[2]
            scores.load(q[b, :, h], k[b, :, g])
            engine.load(v[b, :, g])
            for span in seen:
                for block in row_blocks(span, *tile):
                    _attend_block(engine, block, out[b, :, h], lse[b, h])
    return out, lse


def _attend_block(engine: ForwardEngine, block: list[Tile], out: Tensor, lse: Tensor) -> None:
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
    seen = live(spans)
    tile = _fit(_BACKWARD_TILE, q, k)
    scores = Scores(q, k, scale)
    engine = BackwardEngine(scores, v, tile, scale)
    head_dq, head_dk, head_dv = torch.empty_like(scores.q), torch.empty_like(scores.k), torch.empty_like(engine.v)
    for b in range(batch):
        for h in range(heads):
            g = h % groups
            head_dq.zero_()
            if h == g:
                head_dk.zero_()
                head_dv.zero_()
            scores.load(q[b, :, h], k[b, :, g])
            engine.load(v[b, :, g], dout[b, :, h], delta[b, h], lse[b, h])
            for span in seen:
                for t in tiles(span, *tile):
                    engine.add_gradients(t, head_dq, head_dk, head_dv)
            dq[b, :, h] = head_dq
            if h + groups >= heads:
                dk[b, :, g], dv[b, :, g] = head_dk, head_dv
    return dq, dk, dv


def _fit(tile: tuple[int, int], q: Tensor, k: Tensor) -> tuple[int, int]:
    return min(tile[0], q.shape[1]), min(tile[1], k.shape[1])


define_operators("blockwise", forward, backward)
