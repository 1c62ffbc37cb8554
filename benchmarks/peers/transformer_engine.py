"""NVIDIA Transformer Engine's `DotProductAttention` under context parallelism, on GPUs."""

from __future__ import annotations

import torch
import torch.distributed as dist
from benchmarks.peers.ulysses import expand
from torch import Tensor

from laga_attn.bench.grid import Cell
from laga_attn.bench.measure import Attend

__all__ = ["ulysses"]


def ulysses(cell: Cell, group: dist.ProcessGroup) -> Attend:
    """`cp_comm_type="a2a"`, for ranks that each hold a GPU; it expects the zigzag split (chunks r and 2P - 1 - r)."""
    if not torch.cuda.is_available():
        raise RuntimeError("Transformer Engine computes on CUDA devices, and there is none")
    from transformer_engine.pytorch import DotProductAttention

    dims = cell.dims
    attention = DotProductAttention(
        dims.num_heads,
        (dims.qk_head_dim, dims.v_head_dim),
        qkv_format="bshd",
        attn_mask_type="causal",
        attention_dropout=0.0,
        cp_group=group,
        cp_global_ranks=list(range(dist.get_world_size(group))),
        cp_stream=torch.cuda.Stream(),
        cp_comm_type="a2a",
    )

    def attend(q: Tensor, c_kv: Tensor, k_rope: Tensor, weight: Tensor) -> Tensor:
        k, v = expand(c_kv, k_rope, weight, dims)
        out: Tensor = attention(q, k, v)  # [1, s, H * 128]
        return out.unflatten(-1, (dims.num_heads, dims.v_head_dim))

    return attend
