"""Which keys a query sees, in Megatron's terms."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer import utils
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

__all__ = ["is_causal", "window_of"]

_CAUSAL = ("causal", "padding_causal", "causal_bottom_right")
_FULL = ("no_mask", "padding")
_READ_A_MASK = ("padding", "padding_causal")


def is_causal(mask_type: AttnMaskType, mask: Tensor | None) -> bool:
    """Whether a token sees only itself and what is before it.

    A mask tensor beside a causal type is not read, as in Transformer Engine.

    Raises:
        ValueError: a type that needs its mask tensor read, and has one.
    """
    name = mask_type.name
    if name not in (*_CAUSAL, *_FULL) or (mask is not None and name in _READ_A_MASK):
        raise ValueError(
            f"attn_mask_type={name} with a mask tensor cannot be computed here; describe documents and pads "
            "by packed_seq_params (THD), and use the mask type 'causal' or 'no_mask'"
        )
    return name in _CAUSAL


def window_of(config: Any, layer_number: int) -> int | None:
    """Tokens that a query of this layer sees, itself included; None for all.

    Raises:
        ValueError: a window that reaches to the right.
    """
    if not config.window_size:
        return None
    skip = getattr(config, "window_attn_skip_freq", None)
    if skip is not None and not utils.is_layer_window_attention(config.window_size, skip, layer_number):
        return None
    left, right = config.window_size
    if right > 0:
        raise ValueError(f"window_size={config.window_size} reaches {right} tokens ahead; use (left, 0)")
    return left + 1 if left >= 0 else None
