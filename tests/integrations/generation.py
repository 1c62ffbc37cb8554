"""Small MLA models with random weights, and what `generate()` and plain calls give with a latent cache on ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import laga_attn as laga
from laga_attn.integrations.transformers import generation_cache, parallelize
from tests.integrations.mla_models import build
from tests.pool import RankContext

__all__ = ["Call", "call_in_chunks", "generate", "parallel", "tiny_model"]


def tiny_model(name: str = "deepseek_v3", dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """A model of `mla_models` for longer texts; it ends a text with token 2."""
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "max_position_embeddings": 256}
    return build(name, dtype, **{**ids, **changes}).eval()


def parallel(ctx: RankContext, ulysses_degree: int = 1) -> laga.ContextParallel:
    return laga.ContextParallel.none() if ctx.size == 1 else laga.ContextParallel(ctx.group, ulysses_degree)


@dataclass(frozen=True)
class Call:
    """How a model is called, and with what cache."""

    model: str = "deepseek_v3"
    chunks: tuple[int, ...] = ()
    cache: dict[str, Any] = field(default_factory=dict)  # arguments of generation_cache
    arguments: dict[str, Any] = field(default_factory=dict)  # of generate
    dtype: torch.dtype = torch.float64


def call_in_chunks(ctx: RankContext, call: Call, tokens: Tensor, mask: Tensor | None) -> Tensor:
    """Logits of all inputs `[B, S, vocab]`, computed chunk by chunk."""
    model = tiny_model(call.model, call.dtype)
    cp = parallel(ctx)
    parallelize(model, cp=cp)
    cache = generation_cache(model, cp=cp, page_size=4, **call.cache)
    logits, start = [], 0
    for chunk in call.chunks:
        stop = start + chunk
        seen = None if mask is None else mask[:, :stop]
        with torch.no_grad():
            logits.append(model(tokens[:, start:stop], attention_mask=seen, cache=cache).logits)
        start = stop
    assert start == tokens.shape[1] == cache.get_seq_length()
    return torch.cat(logits, dim=1)


def generate(ctx: RankContext, call: Call, tokens: Tensor, mask: Tensor | None) -> tuple[Tensor, list[int]]:
    """The sequences that `generate` returns, and the lengths that the cache has afterwards."""
    model = tiny_model(call.model, call.dtype)
    cp = parallel(ctx)
    parallelize(model, cp=cp)
    cache = generation_cache(model, cp=cp, page_size=4, **call.cache)
    torch.manual_seed(11)
    out = model.generate(tokens, attention_mask=mask, past_key_values=cache, **call.arguments)
    assert sorted(cache.sequences) == list(cache.latents.sequences), "rows that beam search gave up are still there"
    return out, [cache.latents.length(sequence) for sequence in cache.sequences]
