"""Closed forms of what one attention call moves and computes on one rank, for `scheme="auto"` and for the tests of the
tracer: a trace of the code must give the same integers.

With s real tokens per rank, P ranks, U = `ulysses_degree`, L = `latent_dim` and every key visible to every rank, the port
moves in the forward pass, in elements,

    queries and outputs     s H (D_qk + D_v) (U - 1) / U
    K and V, explicit       s (H / U) (D_qk + D_v) (P - 1)
    latents, others         s L (P - 1)

and the same again in gradients; `save="latent"` gathers once more, and the output's gradient carries one number more per
head and token. A causal zigzag layout shows less: at U = 1, rank r receives the latents of s (P - 1 - r/2) tokens. So the
forms here take the number of rows from the layout, and the full form is what the busiest rank moves.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from laga_attn.attention_plan import SAVE_POLICIES, LatentDims, Save, Scheme
from laga_attn.layout import Index, SequenceLayout
from laga_attn.spans import Span

__all__ = ["FlopCount", "PortBytes", "View", "busiest_view", "flop_count", "port_bytes", "view_of"]

_CACHED: Final = 512


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


@lru_cache(maxsize=_CACHED)
def view_of(layout: SequenceLayout, rank: int, ulysses_degree: int, *, causal: bool, window: int | None) -> View:
    """What a rank sees, from the ends of the chunks alone: no work per token."""
    first = rank // ulysses_degree * ulysses_degree
    starts, stops, documents = _chunks(layout, range(first, first + ulysses_degree))
    offsets = np.asarray(layout.cu_seqlens, dtype=np.int64)
    low = offsets[documents]
    if window is not None:
        low = np.maximum(low, starts - window + 1)
    high = stops if causal else offsets[documents + 1]
    runs = zip((stops - starts).tolist(), (high - low).tolist(), strict=True)
    pairs = sum(Span(0, queries, 0, keys, causal, window).area() for queries, keys in runs)

    order = np.argsort(low, kind="stable")
    low, reach = low[order], np.maximum.accumulate(high[order])
    before = np.concatenate([[0], reach[:-1]])  # what earlier chunks see up to
    low = np.maximum(low, before)
    seen = np.maximum(reach - low, 0)  # disjoint intervals [low, low + seen)
    own_starts, own_stops, _ = _chunks(layout, (rank,))
    own_seen = int((_covered(low, seen, own_stops) - _covered(low, seen, own_starts)).sum())
    keys = int(seen.sum())
    return View(
        tokens=int((own_stops - own_starts).sum()),
        queries=int((stops - starts).sum()),
        keys=keys,
        received=keys - own_seen,
        pairs=pairs,
    )


def busiest_view(layout: SequenceLayout, ulysses_degree: int, *, causal: bool, window: int | None) -> View:
    """The most that any rank sees, number by number; looked up at the first, middle and last Ulysses group."""
    size = layout.cp_size
    groups = {0, size // ulysses_degree // 2 * ulysses_degree, size - ulysses_degree}
    ranks = {rank for first in groups for rank in (first, first + ulysses_degree - 1)}
    views = [view_of(layout, rank, ulysses_degree, causal=causal, window=window) for rank in sorted(ranks)]
    return View(
        tokens=max(view.tokens for view in views),
        queries=max(view.queries for view in views),
        keys=max(view.keys for view in views),
        received=max(view.received for view in views),
        pairs=max(view.pairs for view in views),
    )


def port_bytes(
    scheme: Scheme, save: Save, dims: LatentDims, view: View, ulysses_degree: int, *, batch: int, itemsize: int
) -> PortBytes:
    """Bytes that one rank receives from others; with every key visible it sends as many.

    Args:
        itemsize: of the tensors' dtype. Delta, one number per head and token, travels with the output's gradient in
            fp32 (fp64 for fp64) and rides inside the group only.
    """
    away = view.queries - view.tokens  # of the group's tokens, those that other ranks hold
    heads = dims.num_heads // ulysses_degree
    query = batch * away * heads * dims.qk_head_dim * itemsize
    output = batch * away * heads * dims.v_head_dim * itemsize
    delta = batch * away * heads * max(itemsize, 4)
    width = heads * dims.kv_head_dim if scheme == "explicit" else dims.latent_dim
    gathered = batch * view.received * width * itemsize
    returned = _returned_rows(view) * batch * width * itemsize
    again = gathered if save == "latent" and view.received else 0
    return PortBytes(
        forward=query + output + gathered,
        backward=query + output + delta + returned + again,
    )


def _returned_rows(view: View) -> int:
    """Gradients come home for the rows that were sent out: with every key visible, as many as were received."""
    return view.received
