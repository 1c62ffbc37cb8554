"""Blockwise attention of one head in the accumulation dtype (float32 or float64).

Exponents are base 2 with the softmax scale folded into the queries:
exp(scale * s - lse) = exp2(score - log2(e) * lse) with score = scale * log2(e) * s.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from laga_attn.kernels.problem import acc_dtype
from laga_attn.kernels.tiles import Tile, Triangles

__all__ = ["LN2", "LOG2E", "BackwardEngine", "ForwardEngine", "Scores", "softmax_"]

LOG2E = math.log2(math.e)
LN2 = math.log(2)


class Scores:
    """Base-2 scores of one head, tile by tile, from its queries and keys in the acc dtype."""

    def __init__(self, q: Tensor, k: Tensor, scale: float) -> None:
        """Make room for heads of ``q`` [B, Sq, h, Dqk] and ``k`` [B, Sk, hk, Dqk]."""
        self.factor = scale * LOG2E
        self.q = q.new_empty((q.shape[1], q.shape[3]), dtype=acc_dtype(q.dtype))  # scaled by factor
        self.k = k.new_empty((k.shape[1], k.shape[3]), dtype=acc_dtype(k.dtype))

    def load(self, q: Tensor, k: Tensor) -> None:
        """Take one head: q [Sq, Dqk], k [Sk, Dqk], any strides."""
        self.q.copy_(q).mul_(self.factor)
        self.k.copy_(k)

    def compute(self, rows: slice, keys: slice, out: Tensor) -> Tensor:
        """Scores of query rows by key rows, into ``out``."""
        return torch.mm(self.q[rows], self.k[keys].t(), out=out)


def softmax_(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Turn base-2 scores [rows, keys] into weights, in place; returns their sums and base-2 LSE, [rows, 1].

    The largest weight of a row is 1. Every row holds a score above -inf.
    """
    top = scores.amax(dim=1, keepdim=True)
    total = scores.sub_(top).exp2_().sum(dim=1, keepdim=True)
    return total, total.log2().add_(top)


class ForwardEngine:
    """Attention of one head's tiles."""

    def __init__(self, scores: Scores, v: Tensor, tile: tuple[int, int]) -> None:
        """Make room for heads of ``v`` [B, Sk, hk, Dv] and for tiles of up to ``tile`` rows by keys."""
        self.scores = scores
        self.v = scores.k.new_empty((v.shape[1], v.shape[3]))
        self.weights = scores.q.new_empty(tile[0] * tile[1])
        self.out = scores.q.new_empty((tile[0], v.shape[3]))
        self.triangles = Triangles.build(min(tile), scores.q)

    def load(self, v: Tensor) -> None:
        """Take the values [Sk, Dv] of one head; ``scores`` is loaded by its owner."""
        self.v.copy_(v)

    def attend(self, tile: Tile) -> tuple[Tensor, Tensor]:
        """Output [rows, Dv], valid until the next call, and base-2 LSE [rows, 1] of a tile's queries."""
        rows, keys = tile.shape
        weights = self.weights[: rows * keys].view(rows, keys)
        self.scores.compute(tile.rows, tile.keys, weights)
        self.triangles.hide(weights, tile)
        total, lse = softmax_(weights)
        return torch.mm(weights, self.v[tile.keys], out=self.out[:rows]).div_(total), lse


class BackwardEngine:
    """Gradients of one head's tiles."""

    def __init__(self, scores: Scores, v: Tensor, tile: tuple[int, int], scale: float) -> None:
        """Make room for heads of ``v`` [B, Sk, hk, Dv] and for tiles of up to ``tile`` rows by keys."""
        self.scores, self.scale = scores, scale
        self.v = scores.k.new_empty((v.shape[1], v.shape[3]))
        self.dout = scores.q.new_empty((scores.q.shape[0], v.shape[3]))
        self.delta = scores.q.new_empty((scores.q.shape[0], 1))
        self.lse = torch.empty_like(self.delta)  # base 2
        self.weights = scores.q.new_empty(tile[0] * tile[1])
        self.dscores = torch.empty_like(self.weights)
        self.triangles = Triangles.build(min(tile), scores.q)

    def load(self, v: Tensor, dout: Tensor, delta: Tensor, lse: Tensor) -> None:
        """Take one head: v [Sk, Dv], dout [Sq, Dv], delta [Sq] and natural-log lse [Sq]."""
        self.v.copy_(v)
        self.dout.copy_(dout)
        self.delta.copy_(delta.unsqueeze(1))
        self.lse.copy_(lse.unsqueeze(1)).mul_(LOG2E)

    def add_gradients(self, tile: Tile, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        """Add the tile's share to dq [Sq, Dqk], dk [Sk, Dqk] and dv [Sk, Dv]."""
        rows, keys = tile.shape
        weights = self.weights[: rows * keys].view(rows, keys)
        self.scores.compute(tile.rows, tile.keys, weights)
        self.triangles.hide(weights, tile)
        weights.sub_(self.lse[tile.rows]).exp2_()
        dv[tile.keys].addmm_(weights.t(), self.dout[tile.rows])
        dscores = self.dscores[: rows * keys].view(rows, keys)
        torch.mm(self.dout[tile.rows], self.v[tile.keys].t(), out=dscores)
        dscores.sub_(self.delta[tile.rows]).mul_(weights)
        dq[tile.rows].addmm_(dscores, self.scores.k[tile.keys], alpha=self.scale)
        dk[tile.keys].addmm_(dscores.t(), self.scores.q[tile.rows], alpha=LN2)  # scores.q carries scale / ln 2
