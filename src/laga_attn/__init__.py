"""laga-attn: Latent All-Gather Attention. Context parallelism for Multi-head Latent Attention in PyTorch."""

from __future__ import annotations

from laga_attn.attention import latent_attention
from laga_attn.grid import ContextParallel
from laga_attn.layout import LMShard, SequenceLayout, Span
from laga_attn.traffic import traffic

__all__ = ["ContextParallel", "LMShard", "SequenceLayout", "Span", "latent_attention", "traffic"]
