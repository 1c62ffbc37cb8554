"""Tiny random models of every supported type, and their arithmetic in fp64 throughout."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from laga_attn.layout import SequenceLayout

__all__ = ["MODELS", "VOCAB", "build", "exact", "packed_tokens", "reference"]

VOCAB = 64
_DENSE = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "max_position_embeddings": 64,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_MOE = _DENSE | {
    "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
_MOE_BY_LAYER = _MOE | {"mlp_layer_types": ["dense", "sparse"]}
_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16,
    "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
_LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1], "long_factor": [2.0, 3.0],
    "original_max_position_embeddings": 16, "factor": 4.0,
}  # fmt: skip
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}

MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v3": _MOE | {"rope_parameters": _YARN},
    "deepseek_v3 without q latent": _MOE | {"rope_parameters": _YARN, "q_lora_rank": None},
    "deepseek_v3 with dynamic rope": _DENSE
    | {"rope_parameters": _DYNAMIC, "first_k_dense_replace": 2, "max_position_embeddings": 12},
    "deepseek_v2": _MOE | {"rope_parameters": _YARN, "topk_method": "group_limited_greedy"},
    "glm4_moe_lite": _MOE_BY_LAYER,
    "axk1": _MOE_BY_LAYER,
    "youtu": _DENSE,
    "sarvam_mla": _MOE | {"q_lora_rank": None},
    "minicpm3": _DENSE | {"rope_parameters": _LONGROPE},
    "mistral4": _MOE | {"rope_parameters": _YARN | {"llama_4_scaling_beta": 0.1}},
    "longcat_flash": _DENSE
    | {"num_layers": 2, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "moe_topk": 2, "zero_expert_num": 2}
    | {"n_routed_experts": 4, "head_dim": 4},
}


def build(name: str = "deepseek_v3", dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """The causal LM of `MODELS[name]`: the same weights in every process, large enough that attention matters."""
    from transformers import AutoConfig, AutoModelForCausalLM, Mistral4ForCausalLM

    config = AutoConfig.for_model(name.split()[0], **copy.deepcopy(MODELS[name] | changes))
    config._experts_implementation = "eager"  # the grouped one has no fp64
    torch.manual_seed(0)
    automatic = config.model_type != "mistral4"
    model = AutoModelForCausalLM.from_config(config) if automatic else Mistral4ForCausalLM(config)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        values = torch.randn(parameter.shape, generator=generator)
        parameter.data = 0.2 * values if parameter.ndim > 1 else 1 + 0.1 * values
    return model.to(dtype)


class _Fine:
    """Stands in for `torch` in a modeling file, whose norms, routers and softmax compute in `torch.float32`."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _fine_complex_rotation(q: Tensor, k: Tensor, freqs: Tensor) -> tuple[Tensor, Tensor]:
    """DeepSeek-V2's rotation of neighbouring pairs, `[B, H, S, d]` by complex `[B, S, d / 2]`, in fp64."""
    pairs = (torch.view_as_complex(x.double().unflatten(-1, (-1, 2))) for x in (q, k))
    rotated_q, rotated_k = (torch.view_as_real(x * freqs[:, None]).flatten(-2) for x in pairs)
    return rotated_q, rotated_k


@contextmanager
def exact(model: nn.Module) -> Iterator[None]:
    """fp64 also where the model's own code goes through fp32, so that errors far below 1e-7 show."""
    while not type(model).__module__.startswith("transformers.models"):
        model = next(model.children())
    modeling = sys.modules[type(model).__module__]
    replaced = {"torch": _Fine()}
    if hasattr(modeling, "apply_rotary_emb"):
        replaced["apply_rotary_emb"] = _fine_complex_rotation
    before = {name: getattr(modeling, name) for name in replaced}
    vars(modeling).update(replaced)
    try:
        yield
    finally:
        vars(modeling).update(before)


def packed_tokens(lengths: tuple[int, ...]) -> tuple[Tensor, SequenceLayout]:
    """Random documents `[1, sum(lengths)]`, and their layout on one rank."""
    offsets = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    tokens = torch.randint(VOCAB, (1, offsets[-1]), generator=torch.Generator().manual_seed(2))
    return tokens, SequenceLayout.packed(offsets, 1)


def reference(model: Any, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Logits `[1, S, vocab]`, mean loss and gradients of an untouched model; Transformers masks the documents."""
    tokens, layout = packed_tokens(lengths)
    batch = layout.shard_lm(tokens, 0)
    logits = model(tokens, position_ids=batch.position_ids, use_cache=False).logits
    loss = cross_entropy(logits[0], batch.labels[0])
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), loss.detach(), grads
