"""LAGA attention of split tokens: among themselves as in training, and to what the cache holds of their sequences.

The context of a sequence is spread over the ranks page by page. It is gathered block by block, in the dtype of
storage; each block's K and V are rebuilt for one group of heads at a time, attended to by all queries, and merged
into the result by log-sum-exp. The next block travels meanwhile. What exists at once is bounded by a byte budget.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from laga_attn.collectives import Pending, all_gather_rows, exchange_rows
from laga_attn.inference.call import StepCall
from laga_attn.inference.running import RunningAttention
from laga_attn.inference.step import Segment
from laga_attn.inference.workspace import longest_chunk
from laga_attn.movement import acc_dtype, empty_local, gather_keys, return_heads, send_heads
from laga_attn.routing import Routing, heads_of, route_tokens
from laga_attn.schemes.latent import attend_to_latents, expand_kv, join_latent, rows_of_heads, weight_rows
from laga_attn.spans import Span

__all__ = ["attend_split"]


def attend_split(q: Tensor, c_kv: Tensor, k_rope: Tensor, weight: Tensor, call: StepCall) -> Tensor:
    """Attend to the context and to the new tokens, and send the new latents to the ranks that store them.

    Args:
        q: `[1, s, H, nope + rope]` of the local split tokens, rotated.
        c_kv, k_rope: `[1, s, kv_lora_rank]` and `[1, s, rope]`.
        weight: `[H * (nope + v), kv_lora_rank]`.

    Returns:
        `[1, s, H, v]`, 0 at pads.
    """
    step, cp, dims = call.step, call.cp, call.dims
    assert step.layout is not None
    degree = cp.ulysses_degree or 1
    routing = route_tokens(step.layout, cp.rank, degree, True, None)
    finish_latent = gather_keys(join_latent(c_kv, k_rope, routing), routing.keys.routes, cp, "latent", "forward")
    every = slice(0, dims.num_heads // degree)
    finish_query = send_heads(q, every, routing, cp, degree, "query", "forward")
    storing = _send_to_storage(torch.cat([c_kv, k_rope], dim=-1)[0], call)

    own_weight = rows_of_heads(weight, heads_of(cp.rank, degree, dims.num_heads), dims)
    latent, query = finish_latent(), finish_query()
    running = _attend_new(query, latent, own_weight, routing, call)
    blocks = call.blocks(q.element_size())
    for block, rows in _context(degree, blocks.tokens, call, q.dtype):
        everything = (Span(0, rows.stop - rows.start, 0, len(block), causal=False),)
        for group in _groups(query.shape[2], blocks.head_group, call) if rows.stop > rows.start else ():
            part = _attend(query[:, rows, group], block, own_weight[weight_rows(group, dims)], everything, call)
            running.add(rows, group, *part)

    call.cache.store.write(call.layer, torch.tensor(step.writes.arrived, device=q.device), storing.wait())
    local = empty_local(q, routing, dims.num_heads, dims.v_head_dim)
    return_heads(running.out.to(q.dtype), local, every, routing, cp, degree, "output", "forward")()
    return local


def _attend_new(query: Tensor, latent: Tensor, weight: Tensor, routing: Routing, call: StepCall) -> RunningAttention:
    """New tokens among themselves: `query [1, queries, h, Dqk]` over `latent [keys, 1, r + dr]`."""
    dims, (_, queries, heads, _) = call.dims, query.shape
    out = query.new_empty(queries, 1, heads, dims.v_head_dim).transpose(0, 1)
    lse = query.new_empty(1, heads, queries, dtype=acc_dtype(query.dtype))
    fitting = longest_chunk(call.workspace, dims, query.element_size()) // max(1, len(latent))
    for group in _groups(heads, max(1, min(heads // 8, fitting)), call):
        part = _attend(query[:, :, group], latent, weight[weight_rows(group, dims)], routing.keys.spans, call)
        out[:, :, group], lse[:, group] = part
    return RunningAttention(out, lse)


def _attend(
    query: Tensor, latent: Tensor, weight: Tensor, spans: tuple[Span, ...], call: StepCall
) -> tuple[Tensor, Tensor]:
    """A head group's queries over the K and V that are rebuilt for it."""
    kv = None if call.streams else expand_kv(latent, weight, call.dims)
    return attend_to_latents(call.head_kernel, query, latent, weight, kv, spans, call.softmax_scale, call.dims)


def _groups(heads: int, each: int, call: StepCall) -> list[slice]:
    """Heads that are attended with at a time: `each`, and one for each thread where their K and V need no room."""
    each = max(each, torch.get_num_threads()) if call.streams else each
    return [slice(start, min(start + each, heads)) for start in range(0, heads, each)]


def _send_to_storage(latent: Tensor, call: StepCall) -> Pending[Tensor]:
    """New latents `[s, r + dr]` to the ranks that own their pages, as stored rows."""
    writes = call.step.writes
    rows = call.cache.codec.encode(latent)
    pieces = [rows.index_select(0, torch.tensor(send, device=rows.device)) for send in writes.send]
    return exchange_rows(pieces, writes.received, call.cp, kind="cache", phase="forward")


def _context(degree: int, block: int, call: StepCall, dtype: torch.dtype) -> Iterator[tuple[Tensor, slice]]:
    """Blocks of cached latents `[keys, 1, r + dr]`, each with the rows of the queries that see it.

    They see all of it, so the order of the keys inside a block (by rank) does not matter.
    """
    pieces = [
        (piece, rows)
        for segment, rows in zip(call.step.split, _query_rows(degree, call), strict=True)
        for piece in _cut(segment, block, call)
    ]
    arriving = [_gather(piece, call) for piece, _ in pieces[:1]]
    for number, (_, rows) in enumerate(pieces):
        arrived = arriving.pop().wait()
        arriving.extend(_gather(piece, call) for piece, _ in pieces[number + 1 : number + 2])
        yield call.cache.codec.decode(arrived, dtype)[:, None], rows


def _query_rows(degree: int, call: StepCall) -> list[slice]:
    """Where the queries of each split segment lie among those that this rank attends with."""
    layout, first = call.step.layout, call.cp.rank // degree * degree
    assert layout is not None
    held = np.concatenate([layout.rows(rank) for rank in range(first, first + degree)])
    edges = np.searchsorted(np.sort(held[held >= 0]), layout.cu_seqlens).tolist()
    return [slice(start, stop) for start, stop in pairwise(edges)]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows `start..start + counts[p]` of what rank p holds of a sequence."""

    sequence: int
    start: int
    counts: tuple[int, ...]


def _cut(segment: Segment, block: int, call: StepCall) -> Iterator[_Piece]:
    """The context of a segment in pieces of at most `block` tokens of all ranks."""
    book, each = call.step.book, block // call.cp.size
    held = [book.local_count(segment.sequence, rank, segment.context) for rank in range(call.cp.size)]
    for start in range(0, max(held), each):
        yield _Piece(segment.sequence, start, tuple(min(max(n - start, 0), each) for n in held))


def _gather(piece: _Piece, call: StepCall) -> Pending[Tensor]:
    """The stored rows of a piece, from all ranks."""
    cp, cache, size = call.cp, call.cache, call.cache.page_size
    stop = piece.start + piece.counts[cp.rank]
    pages = call.step.book.local_pages(piece.sequence, cp.rank)[piece.start // size : -(-stop // size)]
    skipped = piece.start // size * size
    rows = cache.store.read(call.layer, pages)[piece.start - skipped : stop - skipped]
    if len(set(piece.counts)) == 1:
        return all_gather_rows(rows, cp, kind="latent", phase="forward")
    return exchange_rows([rows] * cp.size, piece.counts, cp, kind="latent", phase="forward")
