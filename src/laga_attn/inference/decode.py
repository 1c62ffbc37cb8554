"""Absorbed attention of replicated tokens: every rank over the part of the cache that it holds.

    q_abs = [W_UK^T q_nope ; q_rope],  score = q_abs . [c_kv ; k_rope],  out = W_UV (sum_j p_j c_kv_j)

(arXiv 2405.04434, section 2.1.2.) All heads share one key, so heads are folded into the rows of the kernel's queries:
one matrix product per block of keys, and each key is read once for all heads. Partial outputs are merged over the
ranks before W_UV, which is applied once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from laga_attn.inference.call import StepCall
from laga_attn.inference.merging import Partial, cheapest, gather_heads, head_share, merge
from laga_attn.inference.running import RunningAttention
from laga_attn.inference.workspace import pages_within
from laga_attn.layout import Index
from laga_attn.spans import Span

__all__ = ["attend_replicated"]


@dataclass(frozen=True, slots=True)
class _Part:
    """Pages of one sequence, and which of its query tokens see which of their rows: (token, tokens, row, rows)."""

    pages: Index
    seen: tuple[tuple[int, int, int, int], ...]


def attend_replicated(q: Tensor, latent: Tensor, up: Tensor, call: StepCall) -> Tensor:
    """Store what this rank owns of the new latents, and attend to all of the cache.

    Args:
        q: `[T, h, nope + rope]` of the replicated tokens, rotated: all heads, or this rank's share (`call.heads`).
        latent: `[T, kv_lora_rank + qk_rope_head_dim]`.
        up: `[h, nope + v, kv_lora_rank]`, `kv_b_proj.weight` of the same heads.

    Returns:
        `[T, h, v]`.
    """
    _store(latent, call)
    cp, dims = call.cp, call.dims
    w_uk, w_uv = up.split([dims.qk_nope_head_dim, dims.v_head_dim], dim=1)  # [h, nope, r], [h, v, r]
    partial = _attend_own_part(_absorb(q, w_uk, call), call)
    if cp.size == 1:
        return _per_head(partial.out, w_uv.mT).transpose(0, 1)
    how = call.merge or cheapest(dims, q.shape[0], cp.size, q.element_size(), call.heads)
    merged = merge(partial, how, cp)  # [T, H or h, r]
    if how == "all_gather" or call.heads == "own":
        return _per_head(merged, w_uv.mT).transpose(0, 1)
    share = _per_head(merged, w_uv[head_share(dims.num_heads, cp.size, cp.rank)].mT)  # [h, T, v]
    return gather_heads(share, dims.num_heads, cp, "output").transpose(0, 1)


def _store(latent: Tensor, call: StepCall) -> None:
    writes, cache = call.step.writes, call.cache
    if len(writes.kept):
        kept = latent.index_select(0, torch.tensor(writes.kept, device=latent.device))
        where = torch.tensor(writes.kept_rows, device=latent.device)
        cache.store.write(call.layer, where, cache.codec.encode(kept))


def _absorb(q: Tensor, w_uk: Tensor, call: StepCall) -> Tensor:
    """`[T, h, nope + rope]` to `[T, H, r + rope]`, all heads of all ranks."""
    q_nope, q_rope = q.split([call.dims.qk_nope_head_dim, call.dims.qk_rope_head_dim], dim=-1)
    absorbed = torch.cat([_per_head(q_nope, w_uk).transpose(0, 1), q_rope], dim=-1)
    if call.heads == "all" or call.cp.size == 1:
        return absorbed
    return gather_heads(absorbed.transpose(0, 1), call.dims.num_heads, call.cp, "query").transpose(0, 1).contiguous()


def _per_head(x: Tensor, weight: Tensor) -> Tensor:
    """`[T, h, a]` times `[h, a, b]`, head by head: `[h, T, b]`."""
    return torch.bmm(x.transpose(0, 1), weight)


def _attend_own_part(absorbed: Tensor, call: StepCall) -> Partial:
    """All query tokens over the rows of this rank: out `[T, H, r]` and lse `[T, H]`, 0 and -inf where it has none."""
    tokens, heads, _ = absorbed.shape
    rank, cache = call.dims.kv_lora_rank, call.cache
    queries = absorbed.view(1, tokens * heads, 1, -1)
    running = None
    limit = pages_within(call.workspace, call.dims, absorbed.element_size(), cache.page_size, absorbed.device)
    for parts in (*_common_parts(call, limit), *_causal_parts(call)):
        first = min(part.seen[0][0] for part in parts)
        last = max(part.seen[-1][0] + part.seen[-1][1] for part in parts)
        rows = slice(first * heads, last * heads)
        pages = np.concatenate([part.pages for part in parts])
        keys = cache.codec.decode(cache.store.read(call.layer, pages), absorbed.dtype)[None, :, None]
        spans = _spans(parts, first, heads, cache.page_size)
        out, lse = call.latent_kernel.forward(queries[:, rows], keys, keys[..., :rank], spans, call.softmax_scale)
        if running is None and last - first == tokens:
            running = RunningAttention(out, lse)
            continue
        running = running or RunningAttention.nothing(1, tokens * heads, 1, rank, absorbed)
        running.add(rows, slice(0, 1), out, lse)
    running = running or RunningAttention.nothing(1, tokens * heads, 1, rank, absorbed)
    return Partial(running.out.to(absorbed.dtype).view(tokens, heads, rank), running.lse.view(tokens, heads))


def _common_parts(call: StepCall, limit: int) -> Iterator[list[_Part]]:
    """What all new tokens of a sequence see: its context and the first new token. At most `limit` pages at a time."""
    book, size = call.step.book, call.step.book.page_size
    parts: list[_Part] = []
    room, token = limit, 0
    for segment in call.step.replicated:
        count = book.local_count(segment.sequence, call.cp.rank, segment.context + 1)
        pages = book.local_pages(segment.sequence, call.cp.rank)[: -(-count // size)]
        while len(pages):
            taken, pages = pages[:room], pages[room:]
            rows = min(count, len(taken) * size)
            parts.append(_Part(taken, ((token, segment.new, 0, rows),)))
            count, room = count - rows, room - len(taken)
            if not room:
                yield parts
                parts, room = [], limit
        token += segment.new
    if parts:
        yield parts


def _causal_parts(call: StepCall) -> Iterator[list[_Part]]:
    """The further new tokens: each new token sees those up to itself."""
    book, rank, size = call.step.book, call.cp.rank, call.step.book.page_size
    parts: list[_Part] = []
    token = 0
    for segment in call.step.replicated:
        counts = [book.local_count(segment.sequence, rank, segment.context + 1 + i) for i in range(segment.new)]
        first = counts[0]
        if counts[-1] > first:
            pages = book.local_pages(segment.sequence, rank)[first // size : -(-counts[-1] // size)]
            seen = [(token + i, 1, first % size, n - first) for i, n in enumerate(counts) if n > first]
            parts.append(_Part(pages, tuple(seen)))
        token += segment.new
    if parts:
        yield parts


def _spans(parts: Sequence[_Part], first: int, heads: int, page_size: int) -> list[Span]:
    spans, row = [], 0
    for part in parts:
        for token, tokens, start, rows in part.seen:
            spans.append(Span((token - first) * heads, tokens * heads, row + start, rows, causal=False))
        row += len(part.pages) * page_size
    return spans
