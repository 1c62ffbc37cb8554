"""One inference step: which sequences get new tokens, which ranks compute them, and where their latents are stored.

A step may prefill some sequences and decode others. New tokens are either

* *split*: a sequence with many is cut over the ranks like a training sequence; K and V are rebuilt (LAGA);
* *replicated*: a sequence with few is computed on every rank, and attention is absorbed, each rank over the part of
  the cache that it holds.

The new tokens of all sequences, in the order of the sequences, are the *packed* tokens. A rank holds some of them,
its *local* tokens: first the split ones, by a packed `SequenceLayout` (pads included), then the replicated ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from laga_attn.inference.pages import PageBook
from laga_attn.layout import Index, LayoutKind, SequenceLayout, ranges

__all__ = ["Segment", "Step", "WriteRoute", "plan_step"]


@dataclass(frozen=True, slots=True)
class Segment:
    """The new tokens of one sequence: packed tokens `start..start + new`, after `context` tokens in the cache."""

    sequence: int
    start: int
    context: int
    new: int


@dataclass(frozen=True, slots=True, eq=False)
class WriteRoute:
    """How new latents reach the ranks that store them, seen from one rank.

    `send[p]` are the local split tokens that rank p stores and `received[p]` the number that comes from it, which go
    to `arrived` in order of arrival. Of the replicated tokens, this rank stores `kept` at `kept_rows`.
    """

    send: tuple[Index, ...]
    received: tuple[int, ...]
    arrived: Index
    kept: Index
    kept_rows: Index


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A planned step: nothing of it is in the cache's books until `LatentCache.commit`.

    `base` is the book it was planned on, `book` what it becomes.
    """

    base: PageBook
    book: PageBook
    rank: int
    split: tuple[Segment, ...]
    replicated: tuple[Segment, ...]
    layout: SequenceLayout | None  # of the split segments, in order
    writes: WriteRoute

    @property
    def segments(self) -> tuple[Segment, ...]:
        """All segments in packed order."""
        return tuple(sorted((*self.split, *self.replicated), key=lambda segment: segment.start))

    @property
    def num_tokens(self) -> int:
        """Packed tokens: all new tokens of all sequences."""
        return sum(segment.new for segment in (*self.split, *self.replicated))

    @property
    def split_len(self) -> int:
        """Local split tokens, pads included: the same on every rank."""
        return 0 if self.layout is None else self.layout.local_len

    @property
    def local_len(self) -> int:
        """Local tokens, pads included: the same on every rank."""
        return self.split_len + sum(segment.new for segment in self.replicated)

    def rows(self, rank: int | None = None) -> Index:
        """`[local_len]`: the packed token in each local place, -1 for a pad. `rank` is this rank by default."""
        rank = self.rank if rank is None else rank
        replicated = _packed(self.replicated)
        if self.layout is None:
            return replicated
        return np.concatenate([_split_rows(self.layout, self.split, rank), replicated])

    def positions(self, device: torch.device | str | None = None) -> Tensor:
        """`[local_len]` int64 position of each local token in its sequence (0 for pads): what RoPE needs."""
        position = np.zeros(self.num_tokens + 1, dtype=np.int64)  # the last entry is what pads read
        for segment in self.segments:
            position[segment.start : segment.start + segment.new] = segment.context + np.arange(segment.new)
        return torch.tensor(position[self.rows()], device=device)

    def shard(self, packed: Tensor, dim: int = 1, pad_value: float = 0) -> Tensor:
        """This rank's part of a tensor with all packed tokens along `dim`.

        Raises:
            ValueError: another length along `dim`.
        """
        if packed.shape[dim] != self.num_tokens:
            raise ValueError(
                f"tensor of shape {tuple(packed.shape)} has {packed.shape[dim]} tokens along dim {dim}, but the step "
                f"has {self.num_tokens} new ones; concatenate those of all its sequences, in their order"
            )
        rows = self.rows()
        local = packed.index_select(dim, torch.tensor(np.maximum(rows, 0), device=packed.device))
        shape = [1] * packed.ndim
        shape[dim] = len(rows)
        return local.masked_fill(torch.tensor(rows < 0, device=packed.device).view(shape), pad_value)


def plan_step(
    base: PageBook, book: PageBook, counts: Mapping[int, int], rank: int, rebuild_from: int, kind: LayoutKind
) -> Step:
    """Segments, layout and storage of a step. Pure in its arguments.

    Args:
        base: the cache's book.
        book: the same with room for the new tokens, `base.append(counts)`.
        counts: new tokens of each sequence, in packed order.
        rank: this rank.
        rebuild_from: sequences with so many new tokens are split.
        kind: how they are split.
    """
    starts = np.cumsum([0, *counts.values()]).tolist()
    segments = [
        Segment(sequence, start, base.table(sequence).length, new)
        for start, (sequence, new) in zip(starts, counts.items(), strict=False)
        if new
    ]
    split = tuple(segment for segment in segments if segment.new >= rebuild_from)
    replicated = tuple(segment for segment in segments if segment.new < rebuild_from)
    layout = None
    if split:
        offsets = np.cumsum([0, *(segment.new for segment in split)]).tolist()
        layout = SequenceLayout.packed(offsets, base.cp_size, kind)
    writes = _route_writes(book, split, replicated, layout, rank)
    return Step(base, book, rank, split, replicated, layout, writes)


def _route_writes(
    book: PageBook,
    split: tuple[Segment, ...],
    replicated: tuple[Segment, ...],
    layout: SequenceLayout | None,
    rank: int,
) -> WriteRoute:
    owner, row = _locate(book, replicated)
    kept = np.flatnonzero(owner == rank)
    none = np.empty(0, dtype=np.int64)
    if layout is None:
        return WriteRoute((none,) * book.cp_size, (0,) * book.cp_size, none, kept, row[kept])
    split_owner, split_row = _locate(book, split)
    held = layout.rows_by_rank()
    mine = np.where(held[rank] >= 0, split_owner[held[rank]], -1)  # pads are nobody's
    arriving = [rows[rows >= 0] for rows in held]
    arriving = [rows[split_owner[rows] == rank] for rows in arriving]
    return WriteRoute(
        send=tuple(np.flatnonzero(mine == peer) for peer in range(book.cp_size)),
        received=tuple(len(rows) for rows in arriving),
        arrived=split_row[np.concatenate(arriving)],
        kept=kept,
        kept_rows=row[kept],
    )


def _locate(book: PageBook, segments: tuple[Segment, ...]) -> tuple[Index, Index]:
    """Rank and row of all new tokens of these segments, one after another."""
    if not segments:
        none = np.empty(0, dtype=np.int64)
        return none, none
    places = [book.locate(s.sequence, s.context, s.context + s.new) for s in segments]
    return np.concatenate([owner for owner, _ in places]), np.concatenate([row for _, row in places])


def _packed(segments: tuple[Segment, ...]) -> Index:
    """The packed tokens of these segments, one after another."""
    starts = np.asarray([segment.start for segment in segments], dtype=np.int64)
    return ranges(starts, np.asarray([segment.new for segment in segments], dtype=np.int64))


def _split_rows(layout: SequenceLayout, split: tuple[Segment, ...], rank: int) -> Index:
    rows = layout.rows(rank)
    return np.where(rows >= 0, _packed(split)[rows], -1)
