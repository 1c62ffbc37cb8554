"""Cutting spans into tiles, and masking the tiles that a causal diagonal or a window edge crosses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laga_attn.spans import Span

__all__ = ["Tile", "Triangles", "live", "visible_tile"]


@dataclass(frozen=True, slots=True)
class Tile:
    """Query rows ``q0:q1`` against key rows ``k0:k1`` of the call, every one of which is in some visible pair.

    Row ``r`` of the tile sees its key column ``c`` if and only if ``c <= diagonal + r`` (causal edge; None: all) and
    ``c > edge + r`` (window edge; None: all).
    """

    q0: int
    q1: int
    k0: int
    k1: int
    diagonal: int | None
    edge: int | None


def live(spans: Sequence[Span]) -> list[Span]:
    """Spans that hold a visible pair, without queries that see nothing and keys that nothing sees."""
    return [s.trimmed() for s in spans if s.area()]


def visible_tile(span: Span, q0: int, q1: int, k0: int, k1: int) -> Tile | None:
    """The visible part of span rows ``q0:q1`` by span keys ``k0:k1``, or None where nothing is visible."""
    if not span.causal:
        return Tile(span.q_start + q0, span.q_start + q1, span.k_start + k0, span.k_start + k1, None, None)
    offset = span.k_len - span.q_len  # span row i sees span keys up to i + offset
    window = span.k_len + span.q_len if span.window is None else span.window
    # Rows that see something of k0:k1, then the keys that something of those rows sees.
    q0, q1 = max(q0, k0 - offset), min(q1, k1 - 1 - offset + window)
    k0, k1 = max(k0, q0 + offset - window + 1), min(k1, q1 + offset)
    if q0 >= q1 or k0 >= k1:
        return None
    diagonal, edge = q0 + offset - k0, q0 + offset - window - k0
    return Tile(
        span.q_start + q0,
        span.q_start + q1,
        span.k_start + k0,
        span.k_start + k1,
        diagonal if diagonal < k1 - k0 - 1 else None,
        edge if edge + (q1 - q0) > 0 else None,
    )


@dataclass(frozen=True, slots=True)
class Triangles:
    """Additive masks [size, size], -inf where hidden, for the corners of tiles whose shorter side is at most ``size``."""

    above: Tensor  # hidden where column >= row: beyond the causal diagonal
    below: Tensor  # hidden where column <= row: before the window

    @staticmethod
    def build(size: int, like: Tensor, dtype: torch.dtype) -> Triangles:
        """Prepare the masks on the device of ``like``."""
        hidden = like.new_full((size, size), -torch.inf, dtype=dtype)
        return Triangles(above=hidden.triu(), below=hidden.tril())

    def hide(self, scores: Tensor, tile: Tile) -> None:
        """Set the hidden scores [rows, columns] of ``tile`` to -inf, in place."""
        rows, columns = scores.shape
        if tile.diagonal is not None:
            n = columns - tile.diagonal - 1
            scores[:n, columns - n :] += self.above[:n, :n]
        if tile.edge is not None:
            n = rows + tile.edge
            scores[rows - n :, :n] += self.below[:n, :n]
