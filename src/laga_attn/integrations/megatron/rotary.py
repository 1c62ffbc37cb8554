"""RoPE and YaRN by Megatron's own tables and kernels, for queries and for the shared key part alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.models.common.embeddings import apply_rotary_pos_emb
from torch import Tensor

from laga_attn.integrations.megatron.features import FUSED_ROTARY, process_groups, rotary_arguments

__all__ = ["Rotate", "rotation"]

Rotate = Callable[[Tensor], Tensor]
"""`[s, b, h, n + rope]` or `[t, h, n + rope]` with its last `rope` dimensions rotated."""


def rotation(layer: Any, hidden_states: Tensor, packed: Any) -> Rotate:
    """The rotation of this rank's tokens.

    Args:
        layer: a stock MLA layer.
        hidden_states: `[s, b, hidden]`, or `[s / TP, b, hidden]` with sequence parallelism.
        packed: `PackedSeqParams` in the form `thd`, or None.
    """
    config, table, cp = layer.config, layer.rotary_pos_emb, process_groups(layer).cp
    length = table.get_rotary_seq_len(None, None, hidden_states, config, packed)
    is_packed = packed is not None
    slots = None  # offsets of the documents' slots: pads count, and every document starts at position 0
    if is_packed:
        slots = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
    if config.apply_rope_fusion:
        cos, sin = table.get_cached_cos_sin(length, dtype=hidden_states.dtype, packed_seq=is_packed)
        return _fused(cos, sin, config.qk_pos_emb_head_dim, slots, cp)
    angles, mscale = table(length, packed_seq=is_packed), 1.0
    if config.rope_type == "yarn":
        angles, mscale = angles

    def rotate(x: Tensor) -> Tensor:
        plain = x.shape[-1] - config.qk_pos_emb_head_dim
        rotated = apply_rotary_pos_emb(
            x[..., plain:],
            angles[: x.shape[0]] if slots is None else angles,
            config=config,
            cu_seqlens=slots,
            mscale=mscale,
            cp_group=cp,
            **rotary_arguments(packed),
        )
        return torch.cat([x[..., :plain], rotated], dim=-1)

    return rotate


def _fused(cos: Tensor, sin: Tensor, width: int, slots: Tensor | None, cp: Any) -> Rotate:
    if FUSED_ROTARY is None:
        raise ValueError(
            "apply_rope_fusion needs Megatron's fused MLA RoPE kernel (Triton), which could not be imported; set "
            "apply_rope_fusion=False"
        )

    def rotate(x: Tensor) -> Tensor:
        # The kernel rotates in place: what comes in as a view of something else is copied first.
        return FUSED_ROTARY(x.contiguous(), cos, sin, x.shape[-1] - width, width, slots, cp.rank(), cp.size())  # type: ignore[no-any-return]

    return rotate
