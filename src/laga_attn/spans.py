"""Spans: which queries of a kernel call see which keys.

A kernel knows masks only as a list of spans. One span is a rectangle of query rows and key rows in the call's
own coordinates, optionally cut by a causal diagonal and a sliding window; causal masks, zigzag shards, packed
documents and windows are all lists of spans.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["SPAN_FIELDS", "Span", "pack_spans", "unpack_spans"]

_NO_WINDOW = -1  # how "no window" travels through an operator schema, which holds integers only
SPAN_FIELDS = 6
"""Integers that a packed span takes."""


@dataclass(frozen=True, slots=True)
class Span:
    """One rectangle, or band, of visible (query, key) pairs.

    Row ``i`` of the span's ``q_len`` queries and row ``j`` of its ``k_len`` keys are
    ``d = (i + k_len - q_len) - j`` apart: the last query is aligned with the last key. The pair is visible if
    and only if ``d >= 0`` where ``causal``, and ``d < window`` where a window is given.

    Args:
        q_start: first query row.
        q_len: number of query rows.
        k_start: first key row.
        k_len: number of key rows.
        causal: whether keys after the query are hidden.
        window: number of keys that a query sees at most, its own included; needs ``causal``.

    Raises:
        ValueError: a negative start or length, a window below 1, or a window without ``causal``.
    """

    q_start: int
    q_len: int
    k_start: int
    k_len: int
    causal: bool
    window: int | None = None

    def __post_init__(self) -> None:
        if min(self.q_start, self.q_len, self.k_start, self.k_len) < 0:
            raise ValueError(f"{self} has a negative start or length: all four must be 0 or more")
        if self.window is not None and not self.causal:
            raise ValueError(
                f"{self} has a window without causal=True: a window is counted back from the query's own key"
            )
        if self.window is not None and self.window < 1:
            raise ValueError(f"{self} has window {self.window}: pass 1 or more, or None for no window")

    def area(self) -> int:
        """Exact number of visible (query, key) pairs, per batch row and head."""
        if not self.causal:
            return self.q_len * self.k_len
        first = self.k_len - self.q_len  # keys before the first query; the last query sees all k_len keys
        seen = _triangle(self.k_len) - _triangle(first)
        if self.window is None:
            return seen
        return seen - (_triangle(self.k_len - self.window) - _triangle(first - self.window))

    def trimmed(self) -> Span:
        """The same visible pairs, without leading queries that see nothing and leading keys nothing sees."""
        if not self.causal:
            return self
        blind = min(max(self.q_len - self.k_len, 0), self.q_len)  # their last visible key would lie before key 0
        q_len = self.q_len - blind
        unseen = 0 if self.window is None else min(max(self.k_len - q_len - self.window + 1, 0), self.k_len)
        return Span(self.q_start + blind, q_len, self.k_start + unseen, self.k_len - unseen, self.causal, self.window)


def pack_spans(spans: Iterable[Span]) -> list[int]:
    """Flatten spans to the integer list that an operator schema can carry (six integers a span)."""
    return [
        value
        for s in spans
        for value in (
            s.q_start,
            s.q_len,
            s.k_start,
            s.k_len,
            int(s.causal),
            _NO_WINDOW if s.window is None else s.window,
        )
    ]


def unpack_spans(flat: Sequence[int]) -> tuple[Span, ...]:
    """Invert :func:`pack_spans`.

    Raises:
        ValueError: the length is no multiple of six.
    """
    if len(flat) % SPAN_FIELDS:
        raise ValueError(
            f"a flat span list has {SPAN_FIELDS} integers a span, got {len(flat)}: build it with pack_spans"
        )
    rows = (flat[i : i + SPAN_FIELDS] for i in range(0, len(flat), SPAN_FIELDS))
    return tuple(
        Span(q_start, q_len, k_start, k_len, bool(causal), None if window == _NO_WINDOW else window)
        for q_start, q_len, k_start, k_len, causal, window in rows
    )


def _triangle(n: int) -> int:
    return n * (n + 1) // 2 if n > 0 else 0
