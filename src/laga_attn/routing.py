"""Which rows travel where, and which spans are attended to, worked out from a layout: integers only.

Three index spaces matter on one rank:

- *local rows*: what the rank holds, in layout order, pads included;
- *queries*: the real tokens of its Ulysses group in sequence order, for the heads this rank owns;
- *keys*: every real token that some query of the group can see, in sequence order. Tokens that no query of the
  group sees are not in it, so they are neither rebuilt nor received. They come in one segment, or in two: those the
  rank holds itself, which can be attended to at once, and those that still have to arrive.

Real rows of every rank ascend in the sequence, so "real rows of rank 0, of rank 1, ..." concatenated and sorted is
the order of arrival made sequence order.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from laga_attn.layout import Index, SequenceLayout
from laga_attn.spans import Span

__all__ = ["KeySegment", "Routing", "Rows", "TokenRoute", "heads_of", "members_of", "route_tokens"]

Rows = slice | Index  # a slice where the rows are consecutive, so that picking them is a view

_CACHED_ROUTINGS: Final = 32


@dataclass(frozen=True, slots=True, eq=False)
class TokenRoute:
    """An exchange of rows over the context-parallel group, seen from one rank.

    `send[p]` are rows of this rank's real rows for rank p, `received[p]` how many come from rank p, and
    `order[i]` is the place of final row i in the concatenation of what was received, None where it is i itself.
    """

    send: tuple[Rows, ...]
    sent: tuple[int, ...]
    received: tuple[int, ...]
    order: Index | None
    inverse: Index | None
    everyone_gets_everything: bool


@dataclass(frozen=True, slots=True, eq=False)
class KeySegment:
    """A set of keys, in sequence order, with the spans of the queries over it.

    `routes` are taken one after the other: none for own keys, one across the whole group, or two where latents travel
    between Ulysses groups first and inside them second.
    """

    routes: tuple[TokenRoute, ...]
    num_keys: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """All movement and all spans of one attention call on one rank."""

    real: Rows  # local rows that hold a token
    real_len: int
    local_len: int
    queries: TokenRoute
    num_queries: int
    segments: tuple[KeySegment, ...]

    @property
    def keys(self) -> KeySegment:
        """All keys as one segment, for those who attend to them at once."""
        (segment,) = self.segments
        return segment

    @property
    def has_pads(self) -> bool:
        return self.real_len != self.local_len


def heads_of(rank: int, ulysses_degree: int, num_heads: int) -> slice:
    """The heads that `rank` attends with: the slice of its place inside its Ulysses group."""
    each = num_heads // ulysses_degree
    member = rank % ulysses_degree
    return slice(member * each, (member + 1) * each)


def members_of(rank: int, ulysses_degree: int) -> range:
    """The ranks of `rank`'s Ulysses group."""
    first = rank // ulysses_degree * ulysses_degree
    return range(first, first + ulysses_degree)


@lru_cache(maxsize=_CACHED_ROUTINGS)
def route_tokens(
    layout: SequenceLayout,
    rank: int,
    ulysses_degree: int,
    causal: bool,
    window: int | None,
    own_keys_apart: bool = False,
    two_level: bool = False,
) -> Routing:
    """Plan the movement of one attention call: pure in its arguments, hence cached.

    `own_keys_apart` makes two segments of the keys. It needs `ulysses_degree` 1, so that queries and own keys are the
    same tokens, and no window, whose edge does not survive taking tokens out of the sequence. `two_level` sends keys
    between ranks of the same place in each Ulysses group, then inside the group.
    """
    if own_keys_apart and (ulysses_degree != 1 or window is not None):
        raise ValueError(
            f"own keys stay apart only at ulysses_degree=1 without a window, got {ulysses_degree}, {window}"
        )
    size = layout.cp_size
    held = layout.rows_by_rank()
    tokens = [rows[rows >= 0] for rows in held]  # real tokens of each rank, ascending
    groups = size // ulysses_degree
    members = [range(g * ulysses_degree, (g + 1) * ulysses_degree) for g in range(groups)]
    queries = [np.sort(np.concatenate([tokens[p] for p in ranks])) for ranks in members]
    mine = rank // ulysses_degree

    visible = [_visible(layout, queries[g], causal, window) for g in range(groups)]
    seen_by = [_within(tokens[rank], visible[g]) for g in range(groups)]
    visible_of = [tokens[p][_within(tokens[p], visible[mine])] for p in range(size)]
    seen_whole = all(int((stops - starts).sum()) == layout.seq_len for starts, stops in visible)

    nothing = np.empty(0, dtype=np.int64)

    def direct(peers: Collection[int]) -> TokenRoute:
        return _route(
            send=[np.flatnonzero(seen_by[p // ulysses_degree]) if p in peers else nothing for p in range(size)],
            arriving=[visible_of[p] if p in peers else nothing for p in range(size)],
            everyone_gets_everything=seen_whole and len(peers) == size and len({len(part) for part in tokens}) == 1,
        )

    def inside_group() -> TokenRoute:
        """After `direct` between the ranks of each place: what the members of my group hold, to all members."""
        columns = [np.concatenate(visible_of[place::ulysses_degree]) for place in range(ulysses_degree)]
        held_now = columns[rank % ulysses_degree]
        return _route(
            send=[_all_rows(len(held_now)) if p in members[mine] else nothing for p in range(size)],
            arriving=[columns[p % ulysses_degree] if p in members[mine] else nothing for p in range(size)],
        )

    def segment(peers: Collection[int], *, causal: bool) -> KeySegment:
        keys = np.sort(np.concatenate([nothing, *(visible_of[p] for p in peers)]))
        routes: tuple[TokenRoute, ...] = (direct(peers),)
        if two_level and 1 < ulysses_degree < size:
            between = direct(range(rank % ulysses_degree, size, ulysses_degree))
            routes = (replace(between, order=None, inverse=None), inside_group())  # order is made at the end
        return KeySegment(routes, len(keys), _spans(bounds, queries[mine], keys, causal, window))

    bounds = _key_bounds(layout, queries[mine], causal, window)
    if own_keys_apart:
        own = KeySegment((), len(tokens[rank]), _spans(bounds, queries[mine], tokens[rank], causal, window))
        # Keys of other ranks lie before a run of queries or after it, never inside: no diagonal crosses them.
        segments: tuple[KeySegment, ...] = (own, segment([p for p in range(size) if p != rank], causal=False))
    else:
        segments = (segment(range(size), causal=causal),)

    inside = members[mine]
    return Routing(
        real=_compact(np.flatnonzero(held[rank] >= 0)),
        real_len=len(tokens[rank]),
        local_len=layout.local_len,
        queries=_route(
            send=[_all_rows(len(tokens[rank])) if p in inside else nothing for p in range(size)],
            arriving=[tokens[p] if p in inside else nothing for p in range(size)],
        ),
        num_queries=len(queries[mine]),
        segments=segments,
    )


def _route(send: list[Index], arriving: list[Index], *, everyone_gets_everything: bool = False) -> TokenRoute:
    arrival = np.concatenate(arriving)
    order = np.argsort(arrival, kind="stable")
    in_order = bool(np.array_equal(order, np.arange(len(order))))
    return TokenRoute(
        send=tuple(_compact(rows) for rows in send),
        sent=tuple(len(rows) for rows in send),
        received=tuple(len(part) for part in arriving),
        order=None if in_order else order,
        inverse=None if in_order else np.argsort(order, kind="stable"),
        everyone_gets_everything=everyone_gets_everything,
    )


def _runs(layout: SequenceLayout, tokens: Index) -> tuple[Index, Index, Index]:
    """Cut ascending tokens into runs of consecutive tokens of one document: start, stop and document of each."""
    if not len(tokens):
        empty = np.empty(0, dtype=np.int64)
        return empty, empty, empty
    document = np.searchsorted(np.asarray(layout.cu_seqlens), tokens, side="right") - 1
    cut = np.flatnonzero((np.diff(tokens) != 1) | (np.diff(document) != 0)) + 1
    first = np.concatenate([[0], cut])
    last = np.concatenate([cut, [len(tokens)]]) - 1
    return tokens[first], tokens[last] + 1, document[first]


def _key_bounds(
    layout: SequenceLayout, tokens: Index, causal: bool, window: int | None
) -> tuple[Index, Index, Index, Index]:
    """For each run of queries: its start and stop, and the first and one past the last key that it sees."""
    start, stop, document = _runs(layout, tokens)
    offsets = np.asarray(layout.cu_seqlens, dtype=np.int64)
    low = offsets[document]
    if window is not None:
        low = np.maximum(low, start - window + 1)
    return start, stop, low, stop if causal else offsets[document + 1]


def _visible(layout: SequenceLayout, tokens: Index, causal: bool, window: int | None) -> tuple[Index, Index]:
    """Disjoint ascending intervals of the tokens that these queries see."""
    _, _, low, high = _key_bounds(layout, tokens, causal, window)
    if not len(low):
        return low, high
    reach = np.maximum.accumulate(high)  # runs ascend, so do their bounds: merge what touches
    fresh = np.concatenate([[True], low[1:] > reach[:-1]])
    last = np.concatenate([np.flatnonzero(fresh)[1:] - 1, [len(low) - 1]])
    return low[fresh], reach[last]


def _within(tokens: Index, intervals: tuple[Index, Index]) -> NDArray[np.bool_]:
    """Boolean mask of the tokens that lie in one of the intervals."""
    starts, stops = intervals
    if not len(starts):
        return np.zeros(len(tokens), dtype=bool)
    place = np.searchsorted(starts, tokens, side="right") - 1
    return (place >= 0) & (tokens < stops[np.maximum(place, 0)])


def _spans(
    bounds: tuple[Index, Index, Index, Index], queries: Index, keys: Index, causal: bool, window: int | None
) -> tuple[Span, ...]:
    """The spans of the query runs over a set of keys, empty ones left out."""
    start, stop, low, high = bounds
    q_start = np.searchsorted(queries, start).tolist()
    k_start, k_stop = np.searchsorted(keys, low).tolist(), np.searchsorted(keys, high).tolist()
    rows = zip(q_start, (stop - start).tolist(), k_start, k_stop, strict=True)
    return tuple(Span(q, q_len, first, last - first, causal, window) for q, q_len, first, last in rows if last > first)


def _all_rows(count: int) -> Index:
    return np.arange(count, dtype=np.int64)


def _compact(rows: Index) -> Rows:
    """A slice where the rows are consecutive."""
    if not len(rows):
        return slice(0, 0)
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first + 1 == len(rows) else rows
