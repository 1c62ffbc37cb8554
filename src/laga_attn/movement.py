"""Tensor movement along routes: rows of real tokens from rank to rank and back.

Everything here is linear and comes in transposed pairs: `send_heads` / `return_heads` inside a Ulysses group, and
`gather_keys` / `return_key_grads` over the whole context-parallel group. Inside the schemes the sequence is the
first dimension of storage (`[S, B, ...]`), so a row is contiguous and what travels is a run of rows.

Each function starts its collective and returns a closure that waits for it and finishes: start early, finish late.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from laga_attn.collectives import all_gather_rows, exchange_rows
from laga_attn.grid import ContextParallel
from laga_attn.routing import Routing, Rows, TokenRoute, heads_of
from laga_attn.traffic import Phase

__all__ = [
    "Finish",
    "acc_dtype",
    "add_rows",
    "gather_keys",
    "return_heads",
    "return_key_grads",
    "send_heads",
    "spread",
    "take",
]

Finish = Callable[[], Tensor]


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums are kept in: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def take(x: Tensor, rows: Rows | None) -> Tensor:
    """Rows of `x` along dim 0: a view where they are consecutive, else a copy; None means all of them."""
    if rows is None:
        return x
    if isinstance(rows, slice):
        return x if rows == slice(0, x.shape[0]) else x[rows]
    return x.index_select(0, _tensor(rows, x.device))


def add_rows(total: Tensor, rows: Rows, part: Tensor) -> None:
    """`total[rows] += part`, in the dtype of `total`; rows are distinct, so the order of additions is fixed."""
    if isinstance(rows, slice):
        total[rows] += part
    else:
        total.index_add_(0, _tensor(rows, total.device), part.to(total.dtype))


def send_heads(
    x: Tensor, routing: Routing, cp: ContextParallel, ulysses_degree: int, kind: str, phase: Phase
) -> Finish:
    """From all heads of the rank's own tokens to the rank's heads of its Ulysses group's tokens.

    Args:
        x: `[B, s, H, D]`, pads included.

    Returns:
        A closure that gives `[B, queries, H / U, D]`, sequence-first in storage.
    """
    rows = take(x.transpose(0, 1), routing.real)  # [n, B, H, D]
    if ulysses_degree == 1:
        return lambda: rows.transpose(0, 1)
    heads = x.shape[2]
    pieces = [
        take(rows[:, :, heads_of(peer, ulysses_degree, heads)], routing.queries.send[peer]) for peer in range(cp.size)
    ]
    pending = exchange_rows(pieces, routing.queries.received, cp, kind=kind, phase=phase)
    return lambda: take(pending.wait(), routing.queries.order).transpose(0, 1)


def return_heads(
    x: Tensor, routing: Routing, cp: ContextParallel, ulysses_degree: int, kind: str, phase: Phase
) -> Finish:
    """The transpose of `send_heads`: `[B, queries, H / U, D]` back to `[B, s, H, D]`, exact zeros at pads."""
    rows = x.transpose(0, 1)  # [queries, B, h, D]
    if ulysses_degree == 1:
        return lambda: spread(rows, routing).transpose(0, 1)
    route = routing.queries
    pending = exchange_rows(_in_arrival_order(rows, route), route.sent, cp, kind=kind, phase=phase)

    def finish() -> Tensor:
        pieces = pending.wait().unflatten(0, (ulysses_degree, routing.real_len))  # [U, n, B, h, D]
        joined = pieces.permute(1, 2, 0, 3, 4).flatten(2, 3)  # [n, B, H, D]
        return spread(joined, routing).transpose(0, 1)

    return finish


def gather_keys(
    pieces: Sequence[Tensor] | Tensor, routing: Routing, cp: ContextParallel, kind: str, phase: Phase
) -> Finish:
    """What represents K and V, from every rank that holds a visible token, in sequence order.

    Args:
        pieces: `[n, B, ...]` over this rank's real rows, the same for every peer; or one such tensor per peer, where
            peers want different heads.

    Returns:
        A closure that gives `[keys, B, ...]`.
    """
    route = routing.keys
    if isinstance(pieces, Tensor) and route.everyone_gets_everything:
        gathered = all_gather_rows(pieces, cp, kind=kind, phase=phase)
        return lambda: take(gathered.wait(), route.order)
    by_peer = [pieces] * cp.size if isinstance(pieces, Tensor) else pieces
    sent = [take(piece, rows) for piece, rows in zip(by_peer, route.send, strict=True)]
    pending = exchange_rows(sent, route.received, cp, kind=kind, phase=phase)
    return lambda: take(pending.wait(), route.order)


def return_key_grads(
    grad: Tensor, routing: Routing, cp: ContextParallel, dtype: torch.dtype, kind: str, phase: Phase
) -> Callable[[], list[Tensor]]:
    """Send each rank the gradient of the rows that it contributed, in `dtype`: a reduce-scatter up to its sum.

    All-to-all of the contributions moves what a ring reduce-scatter moves, and leaves the sum to the receiver,
    who adds in rank order with one rounding: bitwise repeatable on every backend.

    Args:
        grad: `[keys, B, ...]`.

    Returns:
        A closure that gives one contribution `[rows sent to p, B, ...]` per peer p, in rank order.
    """
    route = routing.keys
    if cp.size == 1:
        return lambda: [grad]  # nothing travels, so nothing is rounded to the wire's dtype either
    pieces = _in_arrival_order(grad, route, dtype)
    pending = exchange_rows(pieces, route.sent, cp, kind=kind, phase=phase)
    return lambda: list(pending.wait().split(list(route.sent)))


def _in_arrival_order(rows: Tensor, route: TokenRoute, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Final rows put back in order of arrival and cut by the rank that they came from."""
    arrived = take(rows if dtype is None else rows.to(dtype), route.inverse)
    return list(arrived.split(list(route.received)))


def spread(rows: Tensor, routing: Routing) -> Tensor:
    """Real rows `[n, ...]` to local rows `[s, ...]`, zero at pads."""
    if not routing.has_pads:
        return rows
    local = rows.new_zeros(routing.local_len, *rows.shape[1:])
    if isinstance(routing.real, slice):
        local[routing.real] = rows
    else:
        local.index_copy_(0, _tensor(routing.real, rows.device), rows)
    return local


def _tensor(rows: np.ndarray, device: torch.device) -> Tensor:
    return torch.tensor(rows, device=device)
