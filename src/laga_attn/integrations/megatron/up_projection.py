"""The stock up-projection `linear_kv_up_proj`, which LAGA asks for its weight instead of running it.

The module stays where it is, with its parameters and its place in checkpoints. Calling it still goes through
`nn.Module.__call__`, so that forward hooks fire: Megatron's distributed optimizer waits in one for the weight to
arrive (`overlap_param_gather`).
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["give_back", "take_over", "up_weight"]


def take_over(linear: nn.Module) -> None:
    """From now on, calling `linear` gives the latent as it has to travel, and the weight is an ordinary parameter.

    The gradient of the weight comes out of attention, at once and whole. So nothing is left for `backward_dw`, and
    DDP must collect the gradient in backward even where other linears delay theirs (`delay_wgrad_compute`).
    """
    vars(linear)["forward"] = MethodType(_travelling_latent, linear)
    vars(linear)["backward_dw"] = MethodType(_nothing_delayed, linear)
    weight = getattr(linear, "weight", None)
    if getattr(weight, "skip_backward_post_hook", False):
        weight.skip_backward_post_hook = False  # type: ignore[union-attr]


def give_back(linear: nn.Module) -> None:
    """Make `linear` the stock module again."""
    del vars(linear)["forward"], vars(linear)["backward_dw"]


def up_weight(layer: Any) -> Tensor:
    """The shard `[H / TP * (nope + v), kv_lora_rank]` of the layer's up-projection weight.

    Raises:
        ValueError: the module has been wrapped or replaced since the layer was built.
    """
    linear = layer.linear_kv_up_proj
    weight = getattr(linear, "weight", None)
    if not isinstance(weight, Tensor) or "forward" not in vars(linear):
        raise ValueError(
            f"linear_kv_up_proj was replaced by {type(linear).__name__} after the layer was built, but attention needs "
            "its weight itself, so a wrapper (LoRA, quantisation) would be bypassed; leave this module out of the "
            "wrapped ones, or merge the adapter into the weight first"
        )
    return weight


def _travelling_latent(linear: Any, c_kv: Tensor) -> Tensor:
    """`c_kv [..., kv_lora_rank]`, after the norm that Transformer Engine's spec fuses into the up-projection."""
    weight = getattr(linear, "layer_norm_weight", None)
    if weight is None:
        return c_kv
    if linear.zero_centered_gamma:
        weight = 1 + weight
    if linear.normalization == "RMSNorm":
        return torch.nn.functional.rms_norm(c_kv, weight.shape, weight, linear.eps)
    return torch.nn.functional.layer_norm(c_kv, weight.shape, weight, linear.layer_norm_bias, linear.eps)


def _nothing_delayed(_: Any) -> None:
    """`backward_dw` of a module whose weight gradient is never delayed."""
