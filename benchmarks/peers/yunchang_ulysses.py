"""yunchang (USP, feifeibear/long-context-attention): its Ulysses exchange, with torch's flash kernel inside.

Its own local attentions need a GPU: `stock` runs the one that promises plain torch, to show what happens.
"""

from __future__ import annotations

import torch.distributed as dist
from benchmarks.peers import torch_sdpa
from benchmarks.peers.ulysses import expand, note
from torch import Tensor

from laga_attn.bench.grid import Cell
from laga_attn.bench.measure import Attend

__all__ = ["stock", "with_torch_flash"]


def with_torch_flash(cell: Cell, group: dist.ProcessGroup) -> Attend:
    """`SeqAllToAll4D`, yunchang's differentiable all-to-all, around SDPA on padded V."""
    from yunchang.comm.all_to_all import SeqAllToAll4D

    def exchange(x: Tensor, scatter: int, gather: int) -> Tensor:
        note(x, group)
        out: Tensor = SeqAllToAll4D.apply(group, x, scatter, gather)
        return out

    def attend(q: Tensor, c_kv: Tensor, k_rope: Tensor, weight: Tensor) -> Tensor:
        k, v = expand(c_kv, k_rope, weight, cell.dims)
        own = (exchange(x, 2, 1) for x in (q, k, v))
        return exchange(torch_sdpa.padded(*own), 1, 2)

    return attend


def stock(cell: Cell, group: dist.ProcessGroup) -> Attend:
    """`LongContextAttention` with all ranks in the Ulysses dimension and torch as its attention."""
    import yunchang
    from yunchang.kernels import AttnType

    size, rank = dist.get_world_size(group), dist.get_rank(group)
    yunchang.set_seq_parallel_pg(size, 1, rank, size)
    attention = yunchang.LongContextAttention(ring_impl_type="basic_pytorch", attn_type=AttnType.TORCH_MATH)

    def attend(q: Tensor, c_kv: Tensor, k_rope: Tensor, weight: Tensor) -> Tensor:
        k, v = expand(c_kv, k_rope, weight, cell.dims)
        out: Tensor = attention(q, k, v, causal=True)
        return out

    return attend
