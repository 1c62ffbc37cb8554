"""Inference: prefill with LAGA, decode absorbed, the latent cache spread over context-parallel ranks."""

from __future__ import annotations

from laga_attn.inference.attention import attend, crossover
from laga_attn.inference.cache import CacheMemory, LatentCache
from laga_attn.inference.files import export_cache, import_cache
from laga_attn.inference.step import Segment, Step

__all__ = [
    "CacheMemory",
    "LatentCache",
    "Segment",
    "Step",
    "attend",
    "crossover",
    "export_cache",
    "import_cache",
]
