"""MLA configurations from Megatron's and to it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from laga_attn.config import MLAConfig, RopeScaling, yarn_mscale

__all__ = ["config_from_megatron", "config_to_megatron"]

_SIZES = {
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_head_dim": "qk_nope_head_dim",  # Megatron's name for the part without rotation
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}


def config_from_megatron(config: Any) -> MLAConfig:
    """Sizes, norms and RoPE of the attention of an `MLATransformerConfig`.

    Raises:
        ValueError: not an MLA configuration, or attention that `MLAConfig` cannot express.
    """
    if not getattr(config, "multi_latent_attention", False):
        raise ValueError(f"{type(config).__name__} does not describe MLA: multi_latent_attention is not set")
    yarn = config.rope_type == "yarn"
    _check(
        add_bias_linear=(config.add_bias_linear, False),  # Megatron gives a bias to the output projection alone
        qk_layernorm=(config.qk_layernorm, True),
        rotary_percent=(1.0 if yarn else config.rotary_percent, 1.0),
        mscale_all_dim=(0 if yarn else config.mscale_all_dim, 0),  # Megatron scales the softmax of plain RoPE by it
    )
    scaling = _yarn(config) if yarn else RopeScaling()
    arguments: dict[str, Any] = {ours: getattr(config, theirs) for theirs, ours in _SIZES.items()}
    if yarn:
        arguments["max_position_embeddings"] = int(scaling.factor * config.original_max_position_embeddings)
    return MLAConfig(
        **arguments,
        rms_norm_eps=config.layernorm_epsilon,
        latent_norm_eps=config.layernorm_epsilon,
        rope_theta=float(config.rotary_base),
        rope_interleave=True,  # Megatron pairs neighbouring dimensions
        rope_scaling=scaling,
    )


def config_to_megatron(config: MLAConfig) -> dict[str, Any]:
    """The arguments of `MLATransformerConfig` that make the same attention.

    Raises:
        ValueError: attention that Megatron has no arguments for.
    """
    scaling = config.rope_scaling
    _check(
        attention_bias=(config.attention_bias, False),
        latent_norm_eps=(config.latent_norm_eps, config.rms_norm_eps),
        rope_interleave=(config.rope_interleave, True),
        truncate=(scaling.truncate, True),
        rope_type=(scaling.rope_type, "yarn" if scaling.rope_type == "yarn" else "default"),
    )
    arguments = {
        **{theirs: getattr(config, ours) for theirs, ours in _SIZES.items()},
        "multi_latent_attention": True,
        "add_bias_linear": False,
        "qk_layernorm": True,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "rotary_base": config.rope_theta,
    }
    if scaling.rope_type != "yarn":
        return {**arguments, "rope_type": "rope", "mscale_all_dim": 0.0}
    return {
        **arguments,
        "rope_type": "yarn",
        "rotary_scaling_factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_max_position_embeddings,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
        "mscale": _mscale(scaling),
        "mscale_all_dim": scaling.mscale_all_dim or 0.0,
    }


def _check(**options: tuple[object, object]) -> None:
    for name, (value, only) in options.items():
        if value != only:
            raise ValueError(f"{name}={value!r} has no counterpart on the other side; it must be {only!r}")


def _yarn(config: Any) -> RopeScaling:
    scaling = RopeScaling(
        rope_type="yarn",
        factor=float(config.rotary_scaling_factor),
        original_max_position_embeddings=config.original_max_position_embeddings,
        beta_fast=float(config.beta_fast),
        beta_slow=float(config.beta_slow),
        mscale=config.mscale,
        mscale_all_dim=config.mscale_all_dim,
    )
    # Here a weight of 0 is a weight; elsewhere it means that there is none.
    factor = yarn_mscale(scaling.factor, config.mscale) / yarn_mscale(scaling.factor, config.mscale_all_dim)
    return scaling if factor == scaling.cos_sin_factor else replace(scaling, attention_factor=factor)


def _mscale(scaling: RopeScaling) -> float:
    """What Megatron needs as `mscale` to multiply cos and sin with the same factor."""
    if scaling.attention_factor is None and scaling.mscale and scaling.mscale_all_dim:
        return scaling.mscale
    target = scaling.cos_sin_factor * yarn_mscale(scaling.factor, scaling.mscale_all_dim or 0.0)
    if scaling.factor > 1:
        return (target - 1.0) / (0.1 * math.log(scaling.factor))
    _check(attention_factor=(target, 1.0))
    return 1.0
