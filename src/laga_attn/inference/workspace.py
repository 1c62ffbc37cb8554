"""How much of the context is worked on at a time: from a byte budget.

What is counted: rows on their way, rows picked from pages, latents in the dtype of queries, rebuilt K and V, and the
copies of one head's keys and values that kernels make in the accumulation dtype. The last two are not there
with a kernel that rebuilds K and V by itself. A kernel's tile of scores, and the few hundred keys that it packs for it,
are not counted; their size does not depend on the context.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from laga_attn.attention_plan import LatentDims

__all__ = ["WORKSPACE", "Blocks", "blocks_within", "longest_chunk", "pages_within"]

WORKSPACE: Final = 2**28
"""Bytes of buffers by default: enough for full-speed matrix products, small beside a model."""

_ENOUGH = 1024
"""Tokens of a block beyond which longer ones are no faster: heads are grouped wider instead."""

_CACHED = 4096
"""Tokens that absorbed attention reads at a time on a CPU: more, and the copies that kernels make of them leave the
caches and are given back to the system after every call. Over 16K tokens of bf16 that took twice the time."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """How prefill works off the context: tokens gathered at a time (from all ranks), heads rebuilt at a time."""

    tokens: int
    head_group: int


def blocks_within(
    budget: int,
    dims: LatentDims,
    heads: int,
    cp_size: int,
    itemsize: int,
    row_bytes: int,
    page_size: int,
    streams: bool = False,
) -> Blocks:
    """The blocks whose buffers take at most `budget` bytes: an eighth of the heads, fewer if blocks get too short.

    Args:
        heads: what one rank attends with.
        itemsize: bytes of an element of queries.
        row_bytes: bytes of a stored row.
        streams: the kernel rebuilds K and V by itself.

    Raises:
        ValueError: a budget below one token of each rank and one head.
    """

    def per_token(head_group: int) -> int:
        # Two blocks of rows at a time, one in use and one arriving, each of them perhaps packed to be sent.
        rebuilt = 0 if streams else dims.kv_head_dim * (head_group * itemsize + _acc_bytes(itemsize))
        return 4 * row_bytes + dims.latent_dim * itemsize + rebuilt

    spare = 2 * page_size * row_bytes  # rows are picked by whole pages
    head_group = max(1, heads // 8)
    while head_group > 1 and (budget - spare) // per_token(head_group) < _ENOUGH:
        head_group //= 2
    tokens = max(0, budget - spare) // per_token(head_group) // cp_size * cp_size
    if not tokens:
        rebuilt = "" if streams else ", and the K and V of one head"
        raise ValueError(
            f"a workspace of {budget} bytes is too small for blocks of {cp_size} tokens, one of each rank{rebuilt}; "
            f"give at least {spare + cp_size * per_token(1)} bytes"
        )
    return Blocks(tokens, head_group)


def longest_chunk(budget: int, dims: LatentDims, itemsize: int) -> int:
    """The most split tokens in a step: those whose K and V of one head take `budget` bytes."""
    return budget // (dims.kv_head_dim * (itemsize + _acc_bytes(itemsize)))


def pages_within(budget: int, dims: LatentDims, itemsize: int, page_size: int, device: torch.device) -> int:
    """Pages that absorbed attention reads at a time; at least one."""
    copies = (dims.latent_dim + dims.kv_lora_rank) * _acc_bytes(itemsize)
    tokens = budget // (dims.latent_dim * itemsize + copies)
    return max(1, (min(tokens, _CACHED) if device.type == "cpu" else tokens) // page_size)


def _acc_bytes(itemsize: int) -> int:
    return max(4, itemsize)
