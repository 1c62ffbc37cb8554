"""What this installation of Megatron-Core offers: asked feature by feature, never by version number."""

from __future__ import annotations

import inspect
from typing import Any, Final

try:
    import megatron.core
    from megatron.core.models.common.embeddings import apply_rotary_pos_emb
    from megatron.core.transformer import multi_latent_attention as mla
except ImportError as error:
    raise ImportError(
        "laga_attn.integrations.megatron needs megatron-core 0.14 or newer, which could not be imported "
        f"({error}): pip install 'laga-attn[megatron]'"
    ) from error

__all__ = [
    "FUSED_ATTENTION",
    "FUSED_ROTARY",
    "RETURNS_COMPRESSED",
    "process_groups",
    "process_groups_argument",
    "rotary_arguments",
]


def _accepts(function: Any, argument: str) -> bool:
    return argument in inspect.signature(function).parameters


def _groups_attribute() -> str:
    """How a layer calls its process groups: `model_comm_pgs` in 0.14, `pg_collection` since."""
    for name in ("pg_collection", "model_comm_pgs"):
        if _accepts(mla.MLASelfAttention.__init__, name):
            return name
    raise ImportError(
        f"megatron-core {megatron.core.__version__}: MLASelfAttention takes neither pg_collection nor "
        "model_comm_pgs, so its context-parallel group is unknown; use megatron-core 0.14 or newer"
    )


_GROUPS: Final = _groups_attribute()
_NAMES_MLA_PAIRING: Final = _accepts(apply_rotary_pos_emb, "mla_rotary_interleaved")
_TAKES_MAX_SEQLEN: Final = _accepts(apply_rotary_pos_emb, "max_seqlen")

RETURNS_COMPRESSED: Final = "kv_compressed" in inspect.unwrap(mla.MultiLatentAttention.forward).__code__.co_varnames
"""Whether the stock `forward` unpacks the compressed query and latent beside query, key and value (from 0.16)."""

FUSED_ATTENTION: Final = getattr(mla, "FusedMLASelfAttention", None)
"""The layer with one down-projection for query and latent, where there is one (from 0.17)."""

FUSED_ROTARY: Final = mla.fused_apply_mla_rope_for_q
"""The kernel behind `apply_rope_fusion`, None where it could not be imported."""


def process_groups(layer: Any) -> Any:
    """The process groups of an attention layer: `.tp`, `.cp` and others."""
    return getattr(layer, _GROUPS)


def process_groups_argument(layer: Any) -> dict[str, Any]:
    """The process groups of an attention layer, as a keyword argument for its parts."""
    return {_GROUPS: process_groups(layer)}


def rotary_arguments(packed: Any) -> dict[str, Any]:
    """What `apply_rotary_pos_emb` wants to be told beyond what all releases take.

    Older releases learn from the configuration that MLA pairs neighbouring dimensions, and from the device how long
    the longest document is.
    """
    arguments: dict[str, Any] = {"mla_rotary_interleaved": True} if _NAMES_MLA_PAIRING else {}
    if _TAKES_MAX_SEQLEN and packed is not None and None not in (packed.max_seqlen_q, packed.max_seqlen_kv):
        arguments["max_seqlen"] = max(packed.max_seqlen_q, packed.max_seqlen_kv)
    return arguments
