"""`kv_b_proj` as one matrix, with the LoRA adapters that PEFT may have put on it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["check_projection", "latent_and_weight"]


def latent_and_weight(projection: Any, latent: Tensor) -> tuple[Tensor, Tensor]:
    """What `projection(latent)` multiplies: `[B, s, r]` and `[H * (nope + v), r]`.

    Each active LoRA adapter widens r by its rank: W c + B A c = [W B] [c; A c], so the low-rank part rides
    with the latent. Adding B A to W would lose small updates of a bf16 W, and has no place for LoRA dropout.
    """
    check_projection(projection)
    weight: Tensor = getattr(projection, "base_layer", projection).weight
    latents, weights = [latent], [weight]
    for name in _active_adapters(projection):
        down, up = projection.lora_A[name], projection.lora_B[name].weight
        low_rank = down(projection.lora_dropout[name](latent.to(down.weight.dtype)))  # [B, s, adapter rank]
        latents.append(low_rank.to(latent.dtype))
        weights.append((up * projection.scaling[name]).to(weight.dtype))
    if len(weights) == 1:
        return latent, weight
    return torch.cat(latents, dim=-1), torch.cat(weights, dim=1)


def check_projection(projection: Any) -> None:
    """Return if the projection is a plain linear map, or plain LoRA on one.

    Wrappers are recognised by their attributes, so PEFT need not be installed.

    Raises:
        ValueError: a bias, quantized weights, another kind of adapter or a variant of LoRA.
    """
    base = getattr(projection, "base_layer", projection)
    if not isinstance(base, nn.Linear) or base.bias is not None or not base.weight.is_floating_point():
        raise ValueError(
            f"kv_b_proj must be an nn.Linear without bias in floating point, or LoRA on one, got {base}; "
            "leave kv_b_proj out of quantization and of modules_to_save"
        )
    plain_lora = hasattr(projection, "lora_A") and not hasattr(projection, "lora_E")
    if base is not projection and not plain_lora:
        raise ValueError(
            f"kv_b_proj carries a {type(projection).__module__}.{type(projection).__name__}, but only plain "
            "LoRA works there; leave kv_b_proj out of the target_modules of other adapters"
        )
    for name in _active_adapters(projection):
        if name in projection.lora_variant:
            raise ValueError(
                f"adapter {name!r} on kv_b_proj is a {type(projection.lora_variant[name]).__name__}, but "
                "only plain LoRA works there; leave kv_b_proj out of its target_modules"
            )


def _active_adapters(projection: Any) -> list[str]:
    """The LoRA adapters that the projection's own forward would apply now."""
    if not hasattr(projection, "lora_A"):
        return []
    if projection.disable_adapters and projection.merged:
        projection.unmerge()
    if projection.disable_adapters or projection.merged:
        return []
    return [name for name in projection.active_adapters if name in projection.lora_A]
