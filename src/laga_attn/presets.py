"""Configurations of published MLA models, as the dicts that their ``config.json`` holds.

The values are those of the named Hugging Face repositories, without the keys that only serve loading
(``auto_map``, ``torch_dtype``, ``transformers_version``, ``quantization_config``). Each dict is enough to
build the whole model with Transformers: ``AutoConfig.for_model(**hf_config(name))``.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

__all__ = ["hf_config", "preset_names"]

# What every DeepSeek-style model of this list has in common.
_COMMON: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "use_cache": True,
    }
)

# Routing of the DeepSeek-V3 line: sigmoid scores, no auxiliary loss, a bias corrects the load.
_SIGMOID_ROUTING: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "aux_loss_alpha": 0.001,
        "moe_layer_freq": 1,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "topk_method": "noaux_tc",
    }
)

# Routing of the DeepSeek-V2 line.
_SOFTMAX_ROUTING: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "aux_loss_alpha": 0.001,
        "moe_layer_freq": 1,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "seq_aux": True,
    }
)


def _yarn(factor: float, *, mscale: float, beta_fast: float = 32, original: int = 4096) -> dict[str, Any]:
    return {
        "beta_fast": beta_fast,
        "beta_slow": 1,
        "factor": factor,
        "mscale": mscale,
        "mscale_all_dim": mscale,
        "original_max_position_embeddings": original,
        "type": "yarn",
    }


_PRESETS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        # deepseek-ai/DeepSeek-V2 (236B, 21B active)
        "deepseek-v2": {
            **_COMMON,
            **_SOFTMAX_ROUTING,
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "bos_token_id": 100000,
            "eos_token_id": 100001,
            "first_k_dense_replace": 1,
            "hidden_size": 5120,
            "intermediate_size": 12288,
            "kv_lora_rank": 512,
            "max_position_embeddings": 163840,
            "moe_intermediate_size": 1536,
            "n_group": 8,
            "n_routed_experts": 160,
            "n_shared_experts": 2,
            "num_attention_heads": 128,
            "num_experts_per_tok": 6,
            "num_hidden_layers": 60,
            "num_key_value_heads": 128,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "rope_scaling": _yarn(40, mscale=0.707),
            "rope_theta": 10000,
            "routed_scaling_factor": 16.0,
            "topk_group": 3,
            "topk_method": "group_limited_greedy",
            "v_head_dim": 128,
            "vocab_size": 102400,
        },
        # deepseek-ai/DeepSeek-V2-Lite (16B, 2.4B active)
        "deepseek-v2-lite": {
            **_COMMON,
            **_SOFTMAX_ROUTING,
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "bos_token_id": 100000,
            "eos_token_id": 100001,
            "first_k_dense_replace": 1,
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "kv_lora_rank": 512,
            "max_position_embeddings": 163840,
            "moe_intermediate_size": 1408,
            "n_group": 1,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_attention_heads": 16,
            "num_experts_per_tok": 6,
            "num_hidden_layers": 27,
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "rope_scaling": _yarn(40, mscale=0.707),
            "rope_theta": 10000,
            "routed_scaling_factor": 1.0,
            "topk_group": 1,
            "topk_method": "greedy",
            "v_head_dim": 128,
            "vocab_size": 102400,
        },
        # deepseek-ai/DeepSeek-V3 (671B, 37B active); DeepSeek-R1 and DeepSeek-V3-0324 are the same
        "deepseek-v3": {
            **_COMMON,
            **_SIGMOID_ROUTING,
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "bos_token_id": 0,
            "eos_token_id": 1,
            "first_k_dense_replace": 3,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "kv_lora_rank": 512,
            "max_position_embeddings": 163840,
            "moe_intermediate_size": 2048,
            "n_group": 8,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_attention_heads": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 61,
            "num_key_value_heads": 128,
            "num_nextn_predict_layers": 1,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "rope_scaling": _yarn(40, mscale=1.0),
            "rope_theta": 10000,
            "routed_scaling_factor": 2.5,
            "topk_group": 4,
            "v_head_dim": 128,
            "vocab_size": 129280,
        },
        # moonshotai/Kimi-K2-Instruct (1T, 32B active). Its model_type is "kimi_k2", remote code around a
        # DeepseekV3ForCausalLM; Moonshot's deployment guide names "deepseek_v3" as the drop-in replacement.
        "kimi-k2": {
            **_COMMON,
            **_SIGMOID_ROUTING,
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "bos_token_id": 163584,
            "eos_token_id": 163585,
            "first_k_dense_replace": 1,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "kv_lora_rank": 512,
            "max_position_embeddings": 131072,
            "moe_intermediate_size": 2048,
            "n_group": 1,
            "n_routed_experts": 384,
            "n_shared_experts": 1,
            "num_attention_heads": 64,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 61,
            "num_key_value_heads": 64,
            "num_nextn_predict_layers": 0,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "rope_scaling": _yarn(32.0, mscale=1.0, beta_fast=1.0),
            "rope_theta": 50000.0,
            "routed_scaling_factor": 2.827,
            "topk_group": 1,
            "v_head_dim": 128,
            "vocab_size": 163840,
        },
        # moonshotai/Moonlight-16B-A3B
        "moonlight-16b": {
            **_COMMON,
            **_SIGMOID_ROUTING,
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "bos_token_id": 163584,
            "eos_token_id": 163585,
            "first_k_dense_replace": 1,
            "hidden_size": 2048,
            "intermediate_size": 11264,
            "kv_lora_rank": 512,
            "max_position_embeddings": 8192,
            "moe_intermediate_size": 1408,
            "n_group": 1,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_attention_heads": 16,
            "num_experts_per_tok": 6,
            "num_hidden_layers": 27,
            "num_key_value_heads": 16,
            "num_nextn_predict_layers": 0,
            "q_lora_rank": None,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "rms_norm_eps": 1e-5,
            "rope_scaling": None,
            "rope_theta": 50000.0,
            "routed_scaling_factor": 2.446,
            "topk_group": 1,
            "v_head_dim": 128,
            "vocab_size": 163840,
        },
        # zai-org/GLM-4.7-Flash (30B, 3B active)
        "glm-4.7-flash": {
            **_COMMON,
            "architectures": ["Glm4MoeLiteForCausalLM"],
            "model_type": "glm4_moe_lite",
            "eos_token_id": [154820, 154827, 154829],
            "first_k_dense_replace": 1,
            "hidden_size": 2048,
            "intermediate_size": 10240,
            "kv_lora_rank": 512,
            "max_position_embeddings": 202752,
            "moe_intermediate_size": 1536,
            "n_group": 1,
            "n_routed_experts": 64,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_attention_heads": 20,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 47,
            "num_key_value_heads": 20,
            "num_nextn_predict_layers": 1,
            "pad_token_id": 154820,
            "partial_rotary_factor": 1.0,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "rms_norm_eps": 1e-5,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "routed_scaling_factor": 1.8,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "v_head_dim": 256,
            "vocab_size": 154880,
        },
        # Not published by anyone: small enough to train on a CPU (forward and backward of 4096 tokens take
        # 2 s on one core with a fused attention core). Query heads (48) and value heads (32) differ, so
        # neither can stand in for the other. The vocabulary is 256 byte values and 4 special tokens.
        "tiny": {
            **_COMMON,
            **_SIGMOID_ROUTING,
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "bos_token_id": 256,
            "eos_token_id": 257,
            "pad_token_id": 258,
            "first_k_dense_replace": 1,
            "hidden_size": 256,
            "intermediate_size": 512,
            "kv_lora_rank": 64,
            "max_position_embeddings": 65536,
            "moe_intermediate_size": 128,
            "n_group": 1,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_attention_heads": 8,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 2,
            "num_key_value_heads": 8,
            "num_nextn_predict_layers": 0,
            "q_lora_rank": 96,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "rope_scaling": _yarn(16, mscale=1.0),
            "rope_theta": 10000,
            "routed_scaling_factor": 2.5,
            "topk_group": 1,
            "v_head_dim": 32,
            "vocab_size": 260,
        },
    }
)


def preset_names() -> tuple[str, ...]:
    """The names that :func:`hf_config` and ``MLAConfig.preset`` know."""
    return tuple(_PRESETS)


def hf_config(name: str) -> dict[str, Any]:
    """The Hugging Face configuration of a preset, as a dict of its own that the caller may change.

    Raises:
        ValueError: unknown name.
    """
    if name not in _PRESETS:
        raise ValueError(f"unknown preset {name!r}; choose one of {', '.join(_PRESETS)}")
    return copy.deepcopy(dict(_PRESETS[name]))
