"""MLA configurations from Megatron's and to it."""

from __future__ import annotations

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
    """Sizes, RoPE and norms of an `MLATransformerConfig`.

    Raises:
        ValueError: not an MLA configuration, a bias that only the output projection has, a partial rotation.
    """
    if not getattr(config, "multi_latent_attention", False):
        raise ValueError(f"{type(config).__name__} does not describe MLA (multi_latent_attention is not set)")
    if config.add_bias_linear:
        raise ValueError(
            "add_bias_linear=True gives a bias to the output projection alone, which MLAConfig cannot express; set "
            "add_bias_linear=False"
        )
    if config.rope_type == "rope" and config.rotary_percent != 1.0:
        raise ValueError(f"rotary_percent={config.rotary_percent} must be 1.0: MLA rotates its rotary part whole")
    return MLAConfig(
        **{ours: getattr(config, theirs) for theirs, ours in _SIZES.items()},
        rms_norm_eps=config.layernorm_epsilon,
        latent_norm_eps=config.layernorm_epsilon,
        rope_theta=float(config.rotary_base),
        rope_scaling=_yarn(config) if config.rope_type == "yarn" else RopeScaling(),
    )


def config_to_megatron(config: MLAConfig) -> dict[str, Any]:
    """The MLA arguments of `MLATransformerConfig`; `config_from_megatron` of the result gives `config` again.

    Raises:
        ValueError: something that Megatron has no argument for: a bias, another epsilon for the latent norms, a kind of
            RoPE scaling other than YaRN.
    """
    scaling = config.rope_scaling
    for name, value, only in (
        ("attention_bias", config.attention_bias, False),
        ("latent_norm_eps", config.latent_norm_eps, config.rms_norm_eps),
        ("rope_type", scaling.rope_type, "yarn" if scaling.rope_type == "yarn" else "default"),
        ("truncate", scaling.truncate, True),
    ):
        if value != only:
            raise ValueError(f"{name}={value!r} has no counterpart in Megatron-Core; it must be {only!r}")
    arguments = {theirs: getattr(config, ours) for theirs, ours in _SIZES.items()}
    arguments |= {
        "multi_latent_attention": True,
        "add_bias_linear": False,
        "layernorm_epsilon": config.rms_norm_eps,
        "rotary_base": config.rope_theta,
        "rope_type": "yarn" if scaling.rope_type == "yarn" else "rope",
    }
    if scaling.rope_type == "yarn":
        arguments |= {
            "rotary_scaling_factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
        }
    return arguments
