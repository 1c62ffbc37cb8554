"""Ulysses as one writes it today: expand K and V of the rank's own tokens, and swap sequence for heads.

Sequences are split contiguously here, rank r holding the r-th block: inside, every rank sees the whole sequence for its
heads, so causal work is balanced without a zigzag.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laga_attn.attention_plan import LatentDims
from laga_attn.bench.measure import Attend
from laga_attn.traffic import Record, record

__all__ = ["LocalAttention", "expand", "note", "ulysses"]

LocalAttention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q `[1, S, h, 192]`, k `[1, S, h, 192]`, v `[1, S, h, 128]` to `[1, S, h, 128]`, causal, scale 1 / sqrt(192)."""


def expand(c_kv: Tensor, k_rope: Tensor, weight: Tensor, dims: LatentDims) -> tuple[Tensor, Tensor]:
    """K `[1, s, H, 192]` and V `[1, s, H, 128]`, as `DeepseekV3Attention` expands them."""
    up = torch.nn.functional.linear(c_kv, weight).unflatten(-1, (dims.num_heads, dims.up_head_dim))
    k_nope, v = up.split([dims.qk_nope_head_dim, dims.v_head_dim], dim=-1)
    shared = k_rope.unsqueeze(2).expand(-1, -1, dims.num_heads, -1)
    return torch.cat([k_nope, shared], dim=-1), v


def ulysses(local: LocalAttention, dims: LatentDims, group: dist.ProcessGroup) -> Attend:
    """Attention over the group's sequence: one all-to-all for q, k and v side by side, and one for the output."""

    def attend(q: Tensor, c_kv: Tensor, k_rope: Tensor, weight: Tensor) -> Tensor:
        k, v = expand(c_kv, k_rope, weight, dims)
        qkv = _sequence_for_heads(torch.cat([q, k, v], dim=-1), group)  # [1, S, h, 512]
        own = qkv.split([dims.qk_head_dim, dims.qk_head_dim, dims.v_head_dim], dim=-1)
        return _heads_for_sequence(local(*own), group)

    return attend


def note(x: Tensor, group: dist.ProcessGroup) -> None:
    """Write an all-to-all of `x` in equal parts into the ledgers, and the one that its gradient will take back."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    each = tuple(0 if peer == rank else x.nbytes // size for peer in range(size))
    record(Record("activation", "all_to_all", "forward", each, each))
    record(Record("gradient", "all_to_all", "backward", each, each))


class _AllToAll(torch.autograd.Function):
    """Equal parts of dim 0 from every rank to every rank; the gradient goes back the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        sent_back = torch.empty_like(grad, memory_format=torch.contiguous_format)
        dist.all_to_all_single(sent_back, grad.contiguous(), group=ctx.group)
        return sent_back, None


def _exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    note(x, group)
    received: Tensor = _AllToAll.apply(x, group)  # type: ignore[no-untyped-call]
    return received


def _sequence_for_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`[1, s, H, D]` to `[1, S, H / P, D]`."""
    by_rank = x[0].unflatten(1, (dist.get_world_size(group), -1)).transpose(0, 1).contiguous()  # [P, s, h, D]
    return _exchange(by_rank, group).flatten(0, 1).unsqueeze(0)


def _heads_for_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`[1, S, h, D]` to `[1, S / P, h * P, D]`."""
    by_rank = x[0].unflatten(0, (dist.get_world_size(group), -1)).contiguous()  # [P, s, h, D]
    return _exchange(by_rank, group).transpose(0, 1).flatten(1, 2).unsqueeze(0)
