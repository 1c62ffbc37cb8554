"""Tensor movement along routes: rows of real tokens from rank to rank and back.

Everything here is linear and comes in transposed pairs: `send_heads` / `return_heads` inside a Ulysses group, and
`gather_keys` / `return_key_grads` over the whole context-parallel group. Inside the schemes the sequence is the
first dimension of storage (`[S, B, ...]`), so a row is contiguous and what travels is a run of rows.

Each function starts its collective and returns a closure that waits for it and finishes: start early, finish late.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from laga_attn.collectives import all_gather_rows, exchange_rows, split_rows
from laga_attn.grid import ContextParallel
from laga_attn.layout import Index
from laga_attn.routing import Routing, Rows, TokenRoute, heads_of, members_of
from laga_attn.traffic import Phase

__all__ = [
    "Finish",
    "acc_dtype",
    "add_rows",
    "cut_key_grads",
    "empty_local",
    "gather_keys",
    "put",
    "return_heads",
    "return_key_grads",
    "row_numbers",
    "send_heads",
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
    return x.index_select(0, row_numbers(rows, x))


def add_rows(total: Tensor, rows: Rows, part: Tensor) -> None:
    """`total[rows] += part`, in the dtype of `total`; rows are distinct, so the order of additions is fixed."""
    if isinstance(rows, slice):
        total[rows].add_(part)  # not `+=`, which would assign the view to itself afterwards
    else:
        total.index_add_(0, row_numbers(rows, total), part.to(total.dtype))


def send_heads(
    x: Tensor, group: slice, routing: Routing, cp: ContextParallel, ulysses_degree: int, kind: str, phase: Phase
) -> Finish:
    """From the rank's own tokens, all heads, to a group of the rank's heads over its Ulysses group's tokens.

    Args:
        x: `[B, s, H, D]`, pads included.
        group: which of the rank's heads, counted from its first; every rank asks for the same places.

    Returns:
        A closure that gives `[B, queries, heads of the group, D]`, sequence-first in storage.
    """
    if x.stride(-1) != 1:  # an expanded or permuted gradient, say; kernels read rows
        x = x.contiguous()
    rows = take(x.transpose(0, 1), routing.real)  # [n, B, H, D]
    if ulysses_degree == 1:
        return lambda: rows[:, :, group].transpose(0, 1)
    pieces = [rows[:0, :, group]] * cp.size  # one empty view for all strangers: there may be hundreds
    for peer in members_of(cp.rank, ulysses_degree):
        heads = _heads(peer, group, ulysses_degree, x.shape[2])
        pieces[peer] = take(rows[:, :, heads], routing.queries.send[peer])
    pending = exchange_rows(pieces, routing.queries.received, cp, kind=kind, phase=phase)
    return lambda: take(pending.wait(), routing.queries.order).transpose(0, 1)


def return_heads(
    x: Tensor,
    local: Tensor,
    group: slice,
    routing: Routing,
    cp: ContextParallel,
    ulysses_degree: int,
    kind: str,
    phase: Phase,
) -> Callable[[], None]:
    """The transpose of `send_heads`: `[B, queries, heads of the group, D]` into its places in `local`.

    Args:
        local: `[B, s, H, D]`, written at the real tokens; start from `empty_local`, which is zero at pads.

    Returns:
        A closure that waits and writes.
    """
    rows, target = x.transpose(0, 1), local.transpose(0, 1)  # [queries, B, hg, D], [s, B, H, D]
    if ulysses_degree == 1:
        put(target[:, :, group], routing.real, rows)
        return lambda: None
    route = routing.queries
    pending = exchange_rows(_in_arrival_order(rows, route), route.sent, cp, kind=kind, phase=phase)

    def finish() -> None:
        pieces = pending.wait().unflatten(0, (ulysses_degree, routing.real_len))  # [U, n, B, hg, D]
        for member, piece in enumerate(pieces):
            put(target[:, :, _heads(member, group, ulysses_degree, local.shape[2])], routing.real, piece)

    return finish


def empty_local(like: Tensor, routing: Routing, heads: int, width: int, dtype: torch.dtype | None = None) -> Tensor:
    """`[B, s, heads, width]` for `return_heads`, sequence-first in storage: exact zeros wherever pads are."""
    shape = (routing.local_len, like.shape[0], heads, width)
    new = like.new_zeros if routing.has_pads else like.new_empty
    return new(shape, dtype=dtype or like.dtype).transpose(0, 1)


def _heads(rank: int, group: slice, ulysses_degree: int, num_heads: int) -> slice:
    first = heads_of(rank, ulysses_degree, num_heads).start
    return slice(first + group.start, first + group.stop)


def gather_keys(
    pieces: Sequence[Tensor] | Tensor, routes: Sequence[TokenRoute], cp: ContextParallel, kind: str, phase: Phase
) -> Finish:
    """What represents K and V, from every rank that holds a visible token, in sequence order.

    Args:
        pieces: `[n, B, ...]` over this rank's real rows, the same for every peer; or one such tensor per peer, where
            peers want different heads.
        routes: the routes of a key segment; what arrives along one leaves along the next.

    Returns:
        A closure that gives `[keys, B, ...]`.
    """
    first, *further = routes
    finish = _gather(pieces, first, cp, kind, phase)
    for route in further:
        arrived = finish()
        finish = _gather(arrived, route, cp, kind, phase)
    return finish


def _gather(
    pieces: Sequence[Tensor] | Tensor, route: TokenRoute, cp: ContextParallel, kind: str, phase: Phase
) -> Finish:
    if isinstance(pieces, Tensor) and route.everyone_gets_everything:
        gathered = all_gather_rows(pieces, cp, kind=kind, phase=phase)
        return lambda: take(gathered.wait(), route.order)
    by_peer = [pieces] * cp.size if isinstance(pieces, Tensor) else pieces
    sent = [take(piece, rows) for piece, rows in zip(by_peer, route.send, strict=True)]
    pending = exchange_rows(sent, route.received, cp, kind=kind, phase=phase)
    return lambda: take(pending.wait(), route.order)


def cut_key_grads(grad: Tensor, routes: Sequence[TokenRoute], dtype: torch.dtype) -> list[Tensor]:
    """Cut the gradient of gathered rows by the rank that each row came from, in `dtype`.

    A step of its own, so that the wide gradient can be dropped before room is made for what comes back.

    Args:
        grad: `[keys, B, ...]`.
        routes: those of `gather_keys`.
        dtype: what travels.
    """
    route = routes[-1]
    if route.inverse is None:
        return [piece.to(dtype) for piece in split_rows(grad, route.received)]
    places = split_rows(row_numbers(route.inverse, grad), route.received)
    return [grad.index_select(0, rows).to(dtype) for rows in places]


def return_key_grads(
    pieces: list[Tensor], routes: Sequence[TokenRoute], cp: ContextParallel, kind: str, phase: Phase
) -> Callable[[], list[Tensor]]:
    """Send each rank the gradient of the rows that it contributed: a reduce-scatter up to its sum.

    All-to-all of the contributions moves what a ring reduce-scatter moves, and leaves the sum to the receiver,
    who adds in rank order with one rounding: bitwise repeatable on every backend.

    Args:
        pieces: what `cut_key_grads` made.
        routes: those of `gather_keys`, taken backwards.

    Returns:
        A closure that gives one contribution `[rows sent to p, B, ...]` per peer p, in rank order.
    """
    if cp.size == 1:
        return lambda: pieces
    for place in range(len(routes) - 1, 0, -1):
        route, dtype = routes[place], pieces[0].dtype
        arrived = pieces[0].new_zeros(route.sent[cp.rank], *pieces[0].shape[1:], dtype=acc_dtype(dtype))
        for rows, part in zip(route.send, _return(pieces, route, cp, kind, phase)(), strict=True):
            if part.shape[0]:
                add_rows(arrived, rows, part)
        pieces = cut_key_grads(arrived, routes[:place], dtype)
    return _return(pieces, routes[0], cp, kind, phase)


def _return(
    pieces: list[Tensor], route: TokenRoute, cp: ContextParallel, kind: str, phase: Phase
) -> Callable[[], list[Tensor]]:
    pending = exchange_rows(pieces, route.sent, cp, kind=kind, phase=phase)
    return lambda: split_rows(pending.wait(), route.sent)


def _in_arrival_order(rows: Tensor, route: TokenRoute) -> list[Tensor]:
    """Final rows put back in order of arrival and cut by the rank that they came from."""
    return split_rows(take(rows, route.inverse), route.received)


def put(local: Tensor, rows: Rows, part: Tensor) -> None:
    """`local[rows] = part` along dim 0."""
    if isinstance(rows, slice):
        local[rows] = part
    else:
        local.index_copy_(0, row_numbers(rows, local), part)


def row_numbers(rows: Index, like: Tensor) -> Tensor:
    """Rows as a tensor on the device of `like`.

    A GPU takes them from pinned memory while the host goes on: a copy from any other would hold the host up until the
    GPU had done all that it was given before.
    """
    if not like.is_cuda or isinstance(like, FakeTensor):
        return torch.tensor(rows, device=like.device)
    return torch.from_numpy(rows).pin_memory().to(like.device, non_blocking=True)
