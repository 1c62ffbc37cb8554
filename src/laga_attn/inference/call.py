"""The arguments of one `attend` call, resolved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from laga_attn.attention_plan import LatentDims
from laga_attn.grid import ContextParallel
from laga_attn.inference.merging import Heads, Merge
from laga_attn.inference.step import Step
from laga_attn.inference.workspace import Blocks, blocks_within
from laga_attn.kernels import Kernel

if TYPE_CHECKING:
    from laga_attn.inference.cache import LatentCache

__all__ = ["StepCall"]


@dataclass(frozen=True, slots=True, eq=False)
class StepCall:
    """What both ways of attending need besides tensors."""

    cache: LatentCache
    step: Step
    layer: int
    dims: LatentDims  # of all heads of all ranks
    heads: Heads
    merge: Merge | None  # None: by bytes
    head_kernel: Kernel  # for head space, nope + rope / v
    latent_kernel: Kernel  # for latent space, kv_lora_rank + rope / kv_lora_rank
    softmax_scale: float
    workspace: int  # bytes

    @property
    def cp(self) -> ContextParallel:
        return self.cache.cp

    @property
    def streams(self) -> bool:
        """Whether the kernel rebuilds K and V by itself, a few rows at a time."""
        return self.head_kernel.rebuilds(self.dims.kv_lora_rank)

    def blocks(self, itemsize: int) -> Blocks:
        """How prefill works off the context, for queries whose elements take `itemsize` bytes."""
        heads = self.dims.num_heads // (self.cp.ulysses_degree or 1)
        row_bytes, page_size = self.cache.codec.row_bytes, self.cache.page_size
        return blocks_within(
            self.workspace, self.dims, heads, self.cp.size, itemsize, row_bytes, page_size, self.streams
        )
