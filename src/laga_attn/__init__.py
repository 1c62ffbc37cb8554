"""laga-attn: Latent All-Gather Attention. Context parallelism for Multi-head Latent Attention in PyTorch."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from laga_attn.attention import latent_attention
from laga_attn.config import MLAConfig
from laga_attn.gradients import reduce_gradients, token_mean_loss
from laga_attn.grid import ContextParallel
from laga_attn.layout import LMShard, SequenceLayout, Span
from laga_attn.module import MultiheadLatentAttention
from laga_attn.prefetch import prefetch_latent
from laga_attn.traffic import traffic

if TYPE_CHECKING:
    from laga_attn.integrations import megatron, transformers

__all__ = [
    "ContextParallel",
    "LMShard",
    "MLAConfig",
    "MultiheadLatentAttention",
    "SequenceLayout",
    "Span",
    "latent_attention",
    "megatron",
    "prefetch_latent",
    "reduce_gradients",
    "token_mean_loss",
    "traffic",
    "transformers",
]


def __getattr__(name: str) -> ModuleType:
    # Adapters import the framework that they adapt, which is optional: only when asked for.
    if name in ("megatron", "transformers"):
        return importlib.import_module(f"laga_attn.integrations.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
