"""Blockwise attention of one head by bfloat16 matrix products, for CPUs that have them in hardware.

PyTorch's bfloat16 product on CPU accumulates in float32 but rounds its result to bfloat16, whose 8 bits are too few for a
score: an error e in a base-2 score is a relative error e * ln 2 in the weight. What is rounded is therefore made small:

- Scores leave the product *centred*. A column of ones in the keys meets minus a per-query centre in the queries, so that a
  score near the centre, where the weight is, is rounded near zero. Forward, a few keys are scored exactly and the largest
  of their scores is the centre; backward, the LSE tells where weights are average. A tile in which a key of large weight
  still scored far from the centre is scored again in float32.
- The product of dout and the values leaves as dP - delta, in the same way.
- Weights are normalised before they meet the values, so that the output is rounded once.

Queries that see few keys, whose errors do not average out, are not for this module: see ``blockwise.split``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from laga_attn.kernels.full import LOG2E, Scores, softmax_
from laga_attn.kernels.tiles import Tile, Triangles

__all__ = ["HalfBackward", "HalfForward", "has_fast_bfloat16"]

_PROBES = 64  # first and last keys of a tile that are scored twice, first to find the centre
_COARSE = 1.0  # a key with weight w may score up to _COARSE / w from the centre: an error of about 0.2 % of its share
_FAR = 8.0  # and no key may score further above it than this
_DELTA_COLUMNS = 3  # bfloat16 columns that carry the 24 bits of a float32


def has_fast_bfloat16(device: torch.device) -> bool:
    """Whether ``device`` is a CPU that multiplies bfloat16 in hardware.

    Elsewhere half-precision inputs are widened to float32, which is as exact and on such machines faster.
    """
    return device.type == "cpu" and torch.cpu._is_avx512_bf16_supported()


class _CentredScores:
    """Scores minus a per-query centre, rounded to bfloat16."""

    def __init__(self, exact: Scores) -> None:
        self.width = exact.q.shape[1]
        self.factor = exact.factor
        self.q = exact.q.new_zeros((exact.q.shape[0], self.width + 2), dtype=torch.bfloat16)
        self.k = exact.k.new_ones((exact.k.shape[0], self.width + 2), dtype=torch.bfloat16)
        self.zero = self.q.new_zeros(())

    def load(self, q: Tensor, k: Tensor) -> None:
        self.q[:, : self.width] = q
        self.k[:, : self.width] = k

    def reset(self, rows: slice) -> None:
        """Let the scores of ``rows`` leave as they are, uncentred."""
        self.q[rows, self.width] = 0

    def centre(self, rows: slice, centre: Tensor) -> Tensor:
        """Centre the scores of ``rows`` near ``centre`` [rows, 1]; where exactly, is returned."""
        column = self.q[rows, self.width : self.width + 1]
        column.copy_(centre * (-1 / self.factor))
        return column.to(centre.dtype).mul_(-self.factor)

    def compute(self, rows: slice, keys: slice, out: Tensor) -> Tensor:
        return torch.addmm(self.zero, self.q[rows], self.k[keys].t(), beta=0, alpha=self.factor, out=out)


class HalfForward:
    """Attention of one head's tiles."""

    def __init__(self, exact: Scores, v: Tensor, tile: tuple[int, int]) -> None:
        """Make room for heads of ``v`` [B, Sk, hk, Dv] and for tiles of up to ``tile`` rows by keys."""
        self.exact = exact
        self.centred = _CentredScores(exact)
        self.v = v.new_empty((v.shape[1], v.shape[3]))
        self.weights = exact.q.new_empty(tile[0] * tile[1])
        self.rounded = v.new_empty(tile[0] * tile[1])
        self.out = v.new_empty((tile[0], v.shape[3]))
        self.triangles = Triangles.build(min(tile), exact.q)

    def load(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Take one head: q [Sq, Dqk], k [Sk, Dqk], v [Sk, Dv]; ``exact`` is loaded by its owner."""
        self.centred.load(q, k)
        self.v.copy_(v)

    def attend(self, tile: Tile) -> tuple[Tensor, Tensor]:
        """Output [rows, Dv], valid until the next call, and base-2 LSE [rows, 1] of the tile's queries over its keys."""
        rows, keys = tile.shape
        weights = self.weights[: rows * keys].view(rows, keys)
        rounded = self.rounded[: rows * keys].view(rows, keys)
        lse = self._centred_weights(tile, weights, rounded)
        if lse is None:
            self.exact.compute(tile.rows, tile.keys, weights)
            self.triangles.hide(weights, tile)
            total, lse = softmax_(weights)
            weights.mul_(total.reciprocal_())
        return torch.mm(rounded.copy_(weights), self.v[tile.keys], out=self.out[: tile.shape[0]]), lse

    def _centred_weights(self, tile: Tile, weights: Tensor, rounded: Tensor) -> Tensor | None:
        """Normalised weights into ``weights``, and their base-2 LSE; None if centred scores are too coarse."""
        centre = self.centred.centre(tile.rows, self._probe(tile))
        weights.copy_(self.centred.compute(tile.rows, tile.keys, rounded))
        self.triangles.hide(weights, tile)
        top = weights.amax(dim=1, keepdim=True)
        total = weights.exp2_().sum(dim=1, keepdim=True)
        coarse = top.exp2().div_(total).mul_(top.abs()).mul_(1 / _COARSE)
        if torch.maximum(coarse, top.mul_(1 / _FAR)).amax().item() > 1:
            return None
        weights.mul_(total.reciprocal())
        return total.log2_().add_(centre)

    def _probe(self, tile: Tile) -> Tensor:
        """The largest score [rows, 1] of each query with the tile's first and last keys, roughly."""
        rows, keys = tile.shape
        first = min(keys, _PROBES if tile.edge is None else rows)
        last = min(keys, _PROBES if tile.diagonal is None else rows)
        self.centred.reset(tile.rows)
        tops = []
        for part in (tile.first_keys(first), tile.last_keys(last)):
            size = part.shape[0] * part.shape[1]
            rounded = self.rounded[:size].view(part.shape)
            scores = self.weights[:size].view(part.shape)
            scores.copy_(self.centred.compute(part.rows, part.keys, rounded))
            self.triangles.hide(scores, part)
            tops.append(scores.amax(dim=1, keepdim=True))
        return torch.maximum(*tops)


class HalfBackward:
    """Gradients of one head's tiles."""

    def __init__(self, exact: Scores, v: Tensor, tile: tuple[int, int], scale: float) -> None:
        """Make room for heads of ``v`` [B, Sk, hk, Dv] and for tiles of up to ``tile`` rows by keys."""
        self.exact, self.scale = exact, scale
        self.centred = _CentredScores(exact)
        q_rows, k_rows, width = exact.q.shape[0], exact.k.shape[0], v.shape[3]
        self.q = v.new_empty((q_rows, exact.q.shape[1]))
        self.k = v.new_empty((k_rows, exact.k.shape[1]))
        self.dout = v.new_empty((q_rows, width))
        self.dout_delta = v.new_empty((q_rows, width + _DELTA_COLUMNS))  # [dout, -delta]
        self.v_ones = v.new_ones((k_rows, width + _DELTA_COLUMNS))  # [v, 1]
        self.lse = exact.q.new_empty((q_rows, 1))  # base 2
        self.offset = torch.empty_like(self.lse)  # centre - lse
        size = tile[0] * tile[1]
        self.weights = exact.q.new_empty(size)
        self.rounded, self.dscores = v.new_empty(size), v.new_empty(size)
        self.dq, self.dk = self.q.new_empty((tile[0], self.q.shape[1])), self.k.new_empty((tile[1], self.k.shape[1]))
        self.dv = v.new_empty((tile[1], width))
        self.triangles = Triangles.build(min(tile), exact.q)

    def load(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, delta: Tensor, lse: Tensor) -> None:
        """Take one head; ``exact`` is loaded by its owner.

        Args:
            q: [Sq, Dqk].
            k: [Sk, Dqk].
            v: [Sk, Dv].
            dout: [Sq, Dv].
            delta: [Sq], float32.
            lse: [Sq], float32, natural log.
        """
        self.centred.load(q, k)
        self.q.copy_(q)
        self.k.copy_(k)
        self.dout.copy_(dout)
        width = v.shape[1]
        self.v_ones[:, :width] = v
        self.dout_delta[:, :width] = dout
        rest = -delta
        for column in self.dout_delta[:, width:].unbind(1):
            rest = rest - column.copy_(rest)
        self.lse.copy_(lse.unsqueeze(1)).mul_(LOG2E)

    def expect(self, rows: slice, seen: Tensor) -> None:
        """Centre the scores of ``rows`` where weights are about average, given how many keys [rows] each sees."""
        lse = self.lse[rows]
        self.offset[rows] = self.centred.centre(rows, lse + 1 - seen.unsqueeze(1).log2()) - lse

    def add_gradients(self, tile: Tile, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        """Add the tile's share to dq [Sq, Dqk], dk [Sk, Dqk] and dv [Sk, Dv], all float32."""
        rows, keys = tile.shape
        weights = self.weights[: rows * keys].view(rows, keys)
        rounded = self.rounded[: rows * keys].view(rows, keys)
        if not self._centred_weights(tile, weights, rounded):
            self.exact.compute(tile.rows, tile.keys, weights)
            self.triangles.hide(weights, tile)
            weights.sub_(self.lse[tile.rows]).exp2_()
        rounded.copy_(weights)
        dv[tile.keys] += torch.mm(rounded.t(), self.dout[tile.rows], out=self.dv[:keys])
        dscores = self.dscores[: rows * keys].view(rows, keys)
        torch.mm(self.dout_delta[tile.rows], self.v_ones[tile.keys].t(), out=dscores)
        dscores.mul_(rounded)
        zero = self.centred.zero
        dk[tile.keys] += torch.addmm(
            zero, dscores.t(), self.q[tile.rows], beta=0, alpha=self.scale, out=self.dk[:keys]
        )
        dq[tile.rows] += torch.addmm(
            zero, dscores, self.k[tile.keys], beta=0, alpha=self.scale, out=self.dq[:rows]
        )

    def _centred_weights(self, tile: Tile, weights: Tensor, rounded: Tensor) -> bool:
        """Weights into ``weights``; False if centred scores are too coarse."""
        offset = self.offset[tile.rows]
        weights.copy_(self.centred.compute(tile.rows, tile.keys, rounded))
        self.triangles.hide(weights, tile)
        weights.add_(offset).exp2_()
        top = weights.amax(dim=1, keepdim=True)
        # Its score was log2(top) - offset from the centre; xlogy keeps 0 * log2(0) at 0.
        coarse = torch.special.xlogy(top, top).mul_(LOG2E).sub_(top.mul_(offset))
        return bool(coarse.abs_().amax() <= _COARSE)
