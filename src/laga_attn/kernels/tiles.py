"""Cutting spans into tiles, and masking the tiles that a causal diagonal or a window edge crosses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laga_attn.spans import Span

__all__ = ["Tile", "Triangles", "live", "row_blocks", "tiles", "visible_tile"]


@dataclass(frozen=True, slots=True)
class Tile:
    """Query rows ``q0:q1`` by key rows ``k0:k1`` of a call, all of them in visible pairs of the tile.

    Row ``r`` of the tile sees its column ``c`` if and only if ``c <= diagonal + r`` (None: no such bound) and
    ``c > edge + r`` (None: no such bound).
    """

    q0: int
    q1: int
    k0: int
    k1: int
    diagonal: int | None
    edge: int | None

    @property
    def shape(self) -> tuple[int, int]:
        """Number of query rows and of key rows."""
        return self.q1 - self.q0, self.k1 - self.k0

    @property
    def rows(self) -> slice:
        """The query rows of the call."""
        return slice(self.q0, self.q1)

    @property
    def keys(self) -> slice:
        """The key rows of the call."""
        return slice(self.k0, self.k1)


@dataclass(frozen=True, slots=True)
class Triangles:
    """Additive masks [size, size], -inf where hidden, for tiles whose shorter side is at most ``size``."""

    above: Tensor  # hidden where column >= row: beyond the causal diagonal
    below: Tensor  # hidden where column <= row: before the window

    @staticmethod
    def build(size: int, like: Tensor) -> Triangles:
        """Masks in the dtype and on the device of ``like``."""
        hidden = like.new_full((size, size), -torch.inf)
        return Triangles(above=hidden.triu(), below=hidden.tril())

    def hide(self, scores: Tensor, tile: Tile) -> None:
        """Set the hidden ones of a tile's scores [rows, keys] to -inf, in place."""
        rows, keys = tile.shape
        if tile.diagonal is not None:
            n = keys - tile.diagonal - 1
            scores[:n, keys - n :] += self.above[:n, :n]
        if tile.edge is not None:
            n = rows + tile.edge
            scores[rows - n :, :n] += self.below[:n, :n]


def live(spans: Sequence[Span]) -> list[Span]:
    """The spans that hold a visible pair, without the queries and keys of theirs that are in none."""
    return [s.trimmed() for s in spans if s.area()]


def row_blocks(span: Span, rows: int, keys: int) -> Iterator[list[Tile]]:
    """The tiles of a span, at most ``rows`` by ``keys``: one list for each block of query rows."""
    for q0 in range(0, span.q_len, rows):
        blocks = (
            visible_tile(span, q0, min(q0 + rows, span.q_len), k0, min(k0 + keys, span.k_len))
            for k0 in range(0, span.k_len, keys)
        )
        yield [tile for tile in blocks if tile is not None]


def tiles(span: Span, rows: int, keys: int) -> Iterator[Tile]:
    """The tiles of a span, at most ``rows`` by ``keys``, by blocks of keys."""
    for k0 in range(0, span.k_len, keys):
        for q0 in range(0, span.q_len, rows):
            tile = visible_tile(span, q0, min(q0 + rows, span.q_len), k0, min(k0 + keys, span.k_len))
            if tile is not None:
                yield tile


def visible_tile(span: Span, q0: int, q1: int, k0: int, k1: int) -> Tile | None:
    """The visible part of a span's rows ``q0:q1`` by its keys ``k0:k1``, or None where nothing is visible."""
    diagonal = edge = None
    if span.causal:
        offset = span.k_len - span.q_len  # span row i sees span keys up to i + offset
        window = span.k_len + span.q_len if span.window is None else span.window
        q0, q1 = max(q0, k0 - offset), min(q1, k1 - 1 - offset + window)
        k0, k1 = max(k0, q0 + offset - window + 1), min(k1, q1 + offset)
        if q0 >= q1 or k0 >= k1:
            return None
        last, first = q0 + offset - k0, q0 + offset - window - k0  # last seen and last unseen column of row 0
        diagonal = last if last < k1 - k0 - 1 else None
        edge = first if first + q1 - q0 > 0 else None
    return Tile(span.q_start + q0, span.q_start + q1, span.k_start + k0, span.k_start + k1, diagonal, edge)
