"""Blockwise attention of one head by bfloat16 matrix products, for CPUs that have them in hardware.

PyTorch's bfloat16 product on CPU accumulates in float32 but rounds its result to bfloat16, whose 8 bits are
too few for a score: an error e in a base-2 score is a relative error e * ln 2 in the weight. What is rounded
is therefore made small:

- Scores leave the product *centred*. A column of ones in the keys meets minus a per-query centre in the
  queries, so that a score near the centre, where the weight is, is rounded near zero. Forward, the centre is
  the largest score with a tile's first and last keys; backward, the LSE tells where weights are average. A
  tile in which a key of large weight still scored far from the centre is scored again in float32.
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
_COARSE = 1.0  # a key of weight w may score up to _COARSE / w from the centre: an error of 0.2 % of its share
_FAR = 8.0  # and none may score further above it than this
_PATIENCE = 2  # tiles in a row that prove too coarse before the rest of the head is scored in float32
_DELTA_COLUMNS = 3  # bfloat16 columns that carry the 24 bits of a float32


def has_fast_bfloat16(device: torch.device) -> bool:
    """Whether ``device`` is a CPU that multiplies bfloat16 in hardware.

    Elsewhere half-precision inputs are widened to float32: more exact, and on such machines no slower.
    """
    return device.type == "cpu" and torch.cpu._is_avx512_bf16_supported()


class _CentredScores:
    """Base-2 scores minus a per-query centre, rounded to bfloat16."""

    def __init__(self, exact: Scores) -> None:
        self.factor = exact.factor
        self.width = exact.q.shape[1]
        columns = self.width + 2  # the centre's, and one that is 0 to keep rows aligned to 4 bytes
        self.queries = exact.q.new_zeros((exact.q.shape[0], columns), dtype=torch.bfloat16)
        self.keys = exact.k.new_ones((exact.k.shape[0], columns), dtype=torch.bfloat16)
        self.zero = self.queries.new_zeros(())

    @property
    def q(self) -> Tensor:
        """The head's queries [Sq, Dqk]."""
        return self.queries[:, : self.width]

    @property
    def k(self) -> Tensor:
        """The head's keys [Sk, Dqk]."""
        return self.keys[:, : self.width]

    def load(self, q: Tensor, k: Tensor) -> None:
        """Take one head: q [Sq, Dqk], k [Sk, Dqk]."""
        self.q.copy_(q)
        self.k.copy_(k)

    def uncentre(self, rows: slice) -> None:
        """Let scores of ``rows`` leave as they are."""
        self.queries[rows, self.width] = 0

    def centre(self, rows: slice, centre: Tensor) -> Tensor:
        """Centre scores of ``rows`` near ``centre`` [rows, 1]; returns where exactly."""
        column = self.queries[rows, self.width : self.width + 1]
        column.copy_(centre * (-1 / self.factor))
        return column.to(centre.dtype).mul_(-self.factor)

    def compute(self, rows: slice, keys: slice, out: Tensor) -> Tensor:
        """Centred scores of query rows by key rows, into ``out``."""
        queries = self.queries[rows]
        return torch.addmm(self.zero, queries, self.keys[keys].t(), beta=0, alpha=self.factor, out=out)


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
        self.failures = 0  # in a row

    def load(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Take one head: q [Sq, Dqk], k [Sk, Dqk], v [Sk, Dv]; ``exact`` is loaded by its owner."""
        self.centred.load(q, k)
        self.v.copy_(v)
        self.failures = 0

    def attend(self, tile: Tile) -> tuple[Tensor, Tensor]:
        """Output [rows, Dv], valid until the next call, and base-2 LSE [rows, 1] of a tile's queries."""
        rows, keys = tile.shape
        weights = self.weights[: rows * keys].view(rows, keys)
        lse = self._centred_weights(tile) if self.failures < _PATIENCE else None
        if lse is None:
            self.failures += 1
            self.exact.compute(tile.rows, tile.keys, weights)
            self.triangles.hide(weights, tile)
            total, lse = softmax_(weights)
            weights.mul_(total.reciprocal_())
        elif self.failures:
            self.failures = 0
        rounded = self.rounded[: rows * keys].view(rows, keys).copy_(weights)
        return torch.mm(rounded, self.v[tile.keys], out=self.out[:rows]), lse

    def _centred_weights(self, tile: Tile) -> Tensor | None:
        """Normalised weights into ``weights``; returns their base-2 LSE, or None if scores are too coarse."""
        ends = _ends(tile)
        if ends is None:
            return None
        self.centred.uncentre(tile.rows)
        first, last = (self._scores(end).amax(dim=1, keepdim=True) for end in ends)
        centre = self.centred.centre(tile.rows, torch.maximum(first, last))
        weights = self._scores(tile)
        top = weights.amax(dim=1, keepdim=True)  # measured from the centre
        total = weights.exp2_().sum(dim=1, keepdim=True)
        coarse = top.exp2().div_(total).mul_(top.abs()).mul_(1 / _COARSE)
        if torch.maximum(coarse, top.mul_(1 / _FAR)).amax() > 1:
            return None
        weights.mul_(total.reciprocal())
        return total.log2_().add_(centre)

    def _scores(self, tile: Tile) -> Tensor:
        """Centred scores of a tile [rows, keys], in the front of ``weights``."""
        rows, keys = tile.shape
        rounded = self.rounded[: rows * keys].view(rows, keys)
        scores = self.weights[: rows * keys].view(rows, keys)
        scores.copy_(self.centred.compute(tile.rows, tile.keys, rounded))
        self.triangles.hide(scores, tile)
        return scores


def _ends(tile: Tile) -> tuple[Tile, Tile] | None:
    """The parts of a tile with its first and its last keys, which hold all masks; None if they overlap."""
    rows, keys = tile.shape
    first = _PROBES if tile.edge is None else rows
    last = _PROBES if tile.diagonal is None else rows
    if keys < first + last:
        return None
    diagonal = None if tile.diagonal is None else tile.diagonal - (keys - last)
    return (
        Tile(tile.q0, tile.q1, tile.k0, tile.k0 + first, None, tile.edge),
        Tile(tile.q0, tile.q1, tile.k1 - last, tile.k1, diagonal, None),
    )


class HalfBackward:
    """Gradients of one head's tiles."""

    def __init__(self, exact: Scores, v: Tensor, tile: tuple[int, int], scale: float) -> None:
        """Make room for heads of ``v`` [B, Sk, hk, Dv] and for tiles of up to ``tile`` rows by keys."""
        self.exact, self.scale = exact, scale
        self.centred = _CentredScores(exact)
        (q_rows, qk_width), (k_rows, self.width) = exact.q.shape, v.shape[1::2]
        self.dout_delta = v.new_empty((q_rows, self.width + _DELTA_COLUMNS))  # [dout, -delta]
        self.v_ones = v.new_ones((k_rows, self.width + _DELTA_COLUMNS))  # [v, 1]
        self.lse = exact.q.new_empty((q_rows, 1))  # base 2
        self.offset = torch.empty_like(self.lse)  # centre - lse
        self.weights = exact.q.new_empty(tile[0] * tile[1])
        self.rounded, self.dscores = v.new_empty(tile[0] * tile[1]), v.new_empty(tile[0] * tile[1])
        self.dq = v.new_empty((tile[0], qk_width))
        self.dk, self.dv = v.new_empty((tile[1], qk_width)), v.new_empty((tile[1], self.width))
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
        self.v_ones[:, : self.width] = v
        self.dout_delta[:, : self.width] = dout
        rest = -delta
        for column in self.dout_delta[:, self.width :].unbind(1):
            rest = rest - column.copy_(rest)
        self.lse.copy_(lse.unsqueeze(1)).mul_(LOG2E)

    def expect(self, rows: slice, seen: Tensor) -> None:
        """Centre scores of ``rows`` where weights are about average, given how many keys [rows] each sees."""
        lse = self.lse[rows]
        self.offset[rows] = self.centred.centre(rows, lse + 1 - seen.unsqueeze(1).log2()) - lse

    def add_gradients(self, tile: Tile, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        """Add the tile's share to dq [Sq, Dqk], dk [Sk, Dqk] and dv [Sk, Dv], all float32."""
        rows, keys = tile.shape
        weights, rounded, dscores = (
            x[: rows * keys].view(rows, keys) for x in (self.weights, self.rounded, self.dscores)
        )
        if not self._centred_weights(tile, weights, rounded):
            self.exact.compute(tile.rows, tile.keys, weights)
            self.triangles.hide(weights, tile)
            weights.sub_(self.lse[tile.rows]).exp2_()
        rounded.copy_(weights)
        dv[tile.keys] += torch.mm(rounded.t(), self.dout_delta[tile.rows, : self.width], out=self.dv[:keys])
        torch.mm(self.dout_delta[tile.rows], self.v_ones[tile.keys].t(), out=dscores)
        dscores.mul_(rounded)
        dk[tile.keys] += self._scaled(dscores.t(), self.centred.q[tile.rows], self.dk[:keys])
        dq[tile.rows] += self._scaled(dscores, self.centred.k[tile.keys], self.dq[:rows])

    def _centred_weights(self, tile: Tile, weights: Tensor, rounded: Tensor) -> bool:
        """Weights into ``weights``; False if centred scores are too coarse."""
        offset = self.offset[tile.rows]
        weights.copy_(self.centred.compute(tile.rows, tile.keys, rounded))
        self.triangles.hide(weights, tile)
        weights.add_(offset).exp2_()
        top = weights.amax(dim=1, keepdim=True)
        # Its score was log2(top) - offset from the centre; xlogy makes 0 of 0 * log2(0).
        coarse = torch.special.xlogy(top, top).mul_(LOG2E).sub_(top.mul_(offset))
        return bool(coarse.abs_().amax() <= _COARSE)

    def _scaled(self, a: Tensor, b: Tensor, out: Tensor) -> Tensor:
        return torch.addmm(self.centred.zero, a, b, beta=0, alpha=self.scale, out=out)
