"""Small MLA models with random weights, and what `generate()` and plain calls give with a latent cache on ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import laga_attn as laga
from laga_attn.integrations.transformers import generation_cache, parallelize
from tests.pool import RankContext

__all__ = ["MODELS", "Call", "call_in_chunks", "generate", "parallel", "tiny_model"]

_YARN = {
    "type": "yarn", "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16, "beta_fast": 32,
    "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 10000.0,
}  # fmt: skip
_SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 6, "head_dim": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1, "max_position_embeddings": 256,
    "vocab_size": 61, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"rope_parameters": _YARN},
    "deepseek_v2": {"topk_method": "greedy", "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
}


def tiny_model(model_type: str = "deepseek_v3", dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """A model with random weights of some size, so that tokens are not all alike. The same on every rank."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **{**_SIZES, **MODELS[model_type], **changes})
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", experts_implementation="eager").to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)
    return model


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
    return out, [cache.latents.length(sequence) for sequence in cache.sequences]
