"""PyTorch's experimental `context_parallel`: a ring under `scaled_dot_product_attention`, for sharded buffers."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from benchmarks.peers import torch_sdpa
from benchmarks.peers.ulysses import expand
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel

from laga_attn.bench.grid import Cell
from laga_attn.bench.measure import Attend

__all__ = ["padded", "plain"]


def padded(cell: Cell, group: dist.ProcessGroup) -> Attend:
    """With V padded to the width of K, so that a flash kernel may be chosen."""
    return _ring(torch_sdpa.padded, cell, group)


def plain(cell: Cell, group: dist.ProcessGroup) -> Attend:
    """With V as narrow as it is."""
    return _ring(torch_sdpa.plain, cell, group)


def _ring(local: Callable[[Tensor, Tensor, Tensor], Tensor], cell: Cell, group: dist.ProcessGroup) -> Attend:
    mesh = DeviceMesh.from_group(group, "cpu")

    def attend(q: Tensor, c_kv: Tensor, k_rope: Tensor, weight: Tensor) -> Tensor:
        k, v = expand(c_kv, k_rope, weight, cell.dims)
        # Its only buffer to shard is one that nobody uses: the tensors are shards already.
        unused = q.new_zeros(2 * dist.get_world_size(group))
        with context_parallel(mesh, buffers=[unused], buffer_seq_dims=[0]):
            return local(q, k, v)

    return attend
