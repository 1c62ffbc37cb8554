"""Closed forms of what one attention call moves and computes on one rank.

`scheme="auto"` decides by them, and a trace of the code must give the same integers. With s real tokens per rank,
P ranks, U = `ulysses_degree`, L = `latent_dim` and every key visible to every rank, the port moves in forward, in
elements,

    queries and outputs     s H (D_qk + D_v) (U - 1) / U
    K and V, explicit       s (H / U) (D_qk + D_v) (P - 1)
    latents, others         s L (P - 1)

and the same again in gradients; `save="latent"` gathers once more, and with the output's gradient goes one number more
per head and token. A causal zigzag layout shows less: at U = 1, rank r receives the latents of s (P - 1 - r/2) tokens.
So the forms here take the number of rows from the layout; the full form is what the busiest rank moves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import numpy as np

from laga_attn.attention_plan import LatentDims, Save, Scheme
from laga_attn.layout import Index, SequenceLayout
from laga_attn.routing import members_of
from laga_attn.spans import Span

__all__ = [
    "FlopCount",
    "PortBytes",
    "View",
    "busier_way",
    "busy_ranks",
    "flop_count",
    "port_bytes",
    "port_elements",
    "sent_rows",
    "view_of",
]

_CACHED: Final = 256


@dataclass(frozen=True, slots=True)
class View:
    """What one rank sees of a layout, in tokens.

    Attributes:
        tokens: real tokens that it holds.
        queries: real tokens of its Ulysses group.
        keys: tokens that some query of the group sees.
        received: those of `keys` that other ranks hold.
        pairs: visible (query, key) pairs of the group.
    """

    tokens: int
    queries: int
    keys: int
    received: int
    pairs: int


@dataclass(frozen=True, slots=True)
class PortBytes:
    """Bytes that a rank receives from others, by phase."""

    forward: int
    backward: int

    @property
    def total(self) -> int:
        return self.forward + self.backward


@dataclass(frozen=True, slots=True)
class FlopCount:
    """FLOPs of attention and of products with `kv_b_proj.weight`, by phase; a multiply-add is two."""

    attention_forward: int
    attention_backward: int
    expansion_forward: int
    expansion_backward: int

    @property
    def total(self) -> int:
        return self.attention_forward + self.attention_backward + self.expansion_forward + self.expansion_backward


def view_of(layout: SequenceLayout, rank: int, ulysses_degree: int, *, causal: bool, window: int | None = None) -> View:
    """What a rank sees, from the ends of the chunks alone: no work per token."""
    members = members_of(rank, ulysses_degree)
    starts, stops, low, high = _reach(layout, members, causal, window)
    runs = zip((stops - starts).tolist(), (high - low).tolist(), strict=True)
    pairs = sum(Span(0, queries, 0, keys, causal, window).area() for queries, keys in runs)
    visible = _disjoint(low, high)
    own = _chunks(layout, (rank,))
    keys = int(visible[1].sum())
    return View(
        tokens=int((own[1] - own[0]).sum()),
        queries=int((stops - starts).sum()),
        keys=keys,
        received=keys - _overlap(visible, own),
        pairs=pairs,
    )


@lru_cache(maxsize=_CACHED)
def busy_ranks(
    layout: SequenceLayout, ulysses_degree: int, causal: bool, window: int | None
) -> tuple[tuple[View, int], ...]:
    """What those ranks see and send (`sent_rows`) of which one has most to do: at the ends and in the middle.

    With a causal zigzag layout the first group sees most and the last one is seen by most.
    """
    size = layout.cp_size
    groups = {0, size // ulysses_degree // 2 * ulysses_degree, size - ulysses_degree}
    ranks = sorted({rank for first in groups for rank in (first, first + ulysses_degree - 1)})
    return tuple(
        (
            view_of(layout, rank, ulysses_degree, causal=causal, window=window),
            sent_rows(layout, rank, ulysses_degree, causal=causal, window=window),
        )
        for rank in ranks
    )


def sent_rows(
    layout: SequenceLayout, rank: int, ulysses_degree: int, *, causal: bool, window: int | None = None
) -> int:
    """Tokens that a rank sends to others so that they can attend, each counted once per rank that gets it."""
    own = _chunks(layout, (rank,))
    firsts = range(0, layout.cp_size, ulysses_degree)
    if window is None:
        seen = _seen_from_the_start(layout, ulysses_degree, causal, own)
    else:
        reaches = (_reach(layout, range(first, first + ulysses_degree), causal, window) for first in firsts)
        seen = [_overlap(_disjoint(low, high), own) for _, _, low, high in reaches]
    mine = members_of(rank, ulysses_degree).start
    return sum((ulysses_degree - (first == mine)) * tokens for first, tokens in zip(firsts, seen, strict=True))


def _seen_from_the_start(
    layout: SequenceLayout, ulysses_degree: int, causal: bool, own: tuple[Index, Index, Index]
) -> list[int]:
    """For each Ulysses group: tokens of the chunks `own` that it sees, where documents are seen from their start.

    All groups at once, for there may be a thousand.
    """
    groups = [
        _places(layout, range(first, first + ulysses_degree)) for first in range(0, layout.cp_size, ulysses_degree)
    ]
    starts, stops = _chunk_ends(layout, np.asarray(groups)[..., None])  # [groups, chunks, documents]
    ends = stops if causal else np.broadcast_to(np.asarray(layout.lengths, dtype=np.int64), stops.shape)
    reach = np.where(stops > starts, ends, 0).max(axis=1)  # [groups, documents], within the document
    own_starts, own_stops, documents = own
    low = own_starts - np.asarray(layout.cu_seqlens, dtype=np.int64)[documents]
    return np.clip(reach[:, documents] - low, 0, own_stops - own_starts).sum(axis=1).tolist()  # type: ignore[no-any-return]


def port_elements(scheme: Scheme, dims: LatentDims, tokens: int, cp_size: int, ulysses_degree: int) -> float:
    """Elements that one rank sends, and receives, in a forward pass when every key is visible to every rank.

    Args:
        tokens: real tokens that the rank holds, times the batch size.
    """
    width = dims.qk_head_dim + dims.v_head_dim
    exchanged = tokens * dims.num_heads * width * (ulysses_degree - 1) / ulysses_degree
    return exchanged + tokens * _row_width(scheme, dims, ulysses_degree) * (cp_size - 1)


def port_bytes(
    scheme: Scheme,
    save: Save,
    dims: LatentDims,
    view: View,
    ulysses_degree: int,
    *,
    batch: int,
    itemsize: int,
    returned: int,
) -> PortBytes:
    """Bytes that one rank receives from others.

    Args:
        view: what the rank sees.
        itemsize: of the tensors' dtype.
        returned: rows whose gradients come home: those that the rank sent out (`sent_rows`).
    """
    heads = dims.num_heads // ulysses_degree
    arriving = batch * (view.queries - view.tokens) * heads * itemsize  # queries and gradients of outputs, per element
    returning = batch * (ulysses_degree - 1) * view.tokens * heads * itemsize  # outputs and gradients of queries
    delta = max(1, 4 // itemsize)  # one number per head and token, fp32 or fp64, goes with the output's gradient
    row = batch * itemsize * _row_width(scheme, dims, ulysses_degree)
    gathered = row * view.received
    gradient = row * returned
    return PortBytes(
        forward=arriving * dims.qk_head_dim + returning * dims.v_head_dim + gathered,
        backward=arriving * (dims.v_head_dim + delta)
        + returning * dims.qk_head_dim
        + gradient
        + (gathered if save == "latent" else 0),
    )


def busier_way(
    scheme: Scheme,
    save: Save,
    dims: LatentDims,
    view: View,
    sent: int,
    ulysses_degree: int,
    *,
    batch: int,
    itemsize: int,
) -> int:
    """Bytes that a rank sends or receives, whichever is more in each phase: a port does both at once.

    Args:
        sent: see `sent_rows`.
    """
    received = port_bytes(scheme, save, dims, view, ulysses_degree, batch=batch, itemsize=itemsize, returned=sent)
    # Seen from the other end: rows that go out instead of those that come in.
    turned = replace(view, received=sent)
    gone = port_bytes(
        scheme, save, dims, turned, ulysses_degree, batch=batch, itemsize=itemsize, returned=view.received
    )
    return max(received.forward, gone.forward) + max(received.backward, gone.backward)


def flop_count(
    scheme: Scheme, save: Save, dims: LatentDims, view: View, ulysses_degree: int, *, batch: int
) -> FlopCount:
    """FLOPs of one rank: attention over visible pairs, and products with its heads' part of `kv_b_proj.weight`."""
    heads = dims.num_heads // ulysses_degree
    absorbed = scheme == "absorbed"
    qk, v = (dims.latent_dim, dims.kv_lora_rank) if absorbed else (dims.qk_head_dim, dims.v_head_dim)
    pairs = 2 * batch * view.pairs * heads
    rank, nope, up = dims.kv_lora_rank, dims.qk_nope_head_dim, dims.up_head_dim
    if absorbed:  # forward folds W_UK into q and applies W_UV; backward does the former again and has 4 gradients
        rows = 2 * batch * view.queries * heads * rank
        forward, backward = rows * up, rows * (3 * nope + 2 * dims.v_head_dim)
    else:  # one expansion, its two gradients, and another expansion where K and V are not kept
        rows = view.tokens * dims.num_heads if scheme == "explicit" else view.keys * heads
        forward = 2 * batch * rows * rank * up
        backward = (2 if save == "kv" else 3) * forward
    return FlopCount(pairs * (qk + v), pairs * (3 * qk + 2 * v), forward, backward)


def _row_width(scheme: Scheme, dims: LatentDims, ulysses_degree: int) -> int:
    """Elements that represent one token's K and V for one rank."""
    return dims.num_heads // ulysses_degree * dims.kv_head_dim if scheme == "explicit" else dims.latent_dim


Intervals = tuple[Index, Index]
"""Starts and lengths (or stops, where it says so) of intervals."""


def _chunks(layout: SequenceLayout, ranks: Iterable[int]) -> tuple[Index, Index, Index]:
    """Starts, stops and documents of the runs of real tokens that some ranks hold."""
    starts, stops = _chunk_ends(layout, np.asarray(_places(layout, ranks))[:, None])  # [chunks, documents]
    offsets = np.asarray(layout.cu_seqlens[:-1], dtype=np.int64)
    documents = np.broadcast_to(np.arange(len(offsets)), starts.shape)
    real = stops > starts
    return (starts + offsets)[real], (stops + offsets)[real], documents[real]


def _pieces(layout: SequenceLayout) -> int:
    """Chunks that every document is cut into."""
    return 2 * layout.cp_size if layout.kind == "zigzag" and layout.cp_size > 1 else layout.cp_size


def _places(layout: SequenceLayout, ranks: Iterable[int]) -> list[int]:
    """Which chunks of every document some ranks hold."""
    pieces = _pieces(layout)
    return [c for rank in ranks for c in ((rank, pieces - 1 - rank) if pieces > layout.cp_size else (rank,))]


def _chunk_ends(layout: SequenceLayout, places: Index) -> Intervals:
    """Start and stop, within its document, of what is real of the chunks at `places [..., 1]`: `[..., documents]`."""
    lengths = np.asarray(layout.lengths, dtype=np.int64)
    chunk = np.asarray(layout.padded_lengths, dtype=np.int64) // _pieces(layout)
    return np.minimum(places * chunk, lengths), np.minimum((places + 1) * chunk, lengths)


def _reach(
    layout: SequenceLayout, ranks: Iterable[int], causal: bool, window: int | None
) -> tuple[Index, Index, Index, Index]:
    """For each run of queries: its start and stop, and the first and one past the last key that it sees."""
    starts, stops, documents = _chunks(layout, ranks)
    offsets = np.asarray(layout.cu_seqlens, dtype=np.int64)
    low = offsets[documents]
    if window is not None:
        low = np.maximum(low, starts - window + 1)
    return starts, stops, low, stops if causal else offsets[documents + 1]


def _disjoint(low: Index, high: Index) -> Intervals:
    """The union of intervals, from starts and stops to starts and lengths."""
    order = np.argsort(low, kind="stable")
    low, reach = low[order], np.maximum.accumulate(high[order])
    low = np.maximum(low, np.concatenate([low[:1], reach[:-1]]))
    return low, np.maximum(reach - low, 0)


def _overlap(intervals: Intervals, chunks: tuple[Index, Index, Index]) -> int:
    """Tokens that lie both in the intervals and in the chunks."""
    low, lengths = intervals
    if not len(low):
        return 0
    before = np.concatenate([[0], np.cumsum(lengths)])

    def covered(points: Index) -> Index:
        """Tokens of the intervals below each point."""
        place = np.searchsorted(low, points, side="right") - 1
        inside = np.minimum(points - low[np.maximum(place, 0)], lengths[np.maximum(place, 0)])
        return np.where(place < 0, 0, before[np.maximum(place, 0)] + inside)

    return int((covered(chunks[1]) - covered(chunks[0])).sum())
