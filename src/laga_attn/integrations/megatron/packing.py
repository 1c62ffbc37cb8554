"""Which token a rank holds, in Megatron's terms: zigzag over the ranks, inside every document of a packed sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from laga_attn.layout import SequenceLayout

__all__ = ["check_packed", "layout_of"]

_MEMO = "_laga_attn_layout"


def check_packed(packed: Any) -> None:
    """Raise ValueError for forms of `PackedSeqParams` that MLA cannot compute."""
    if packed is None:
        return
    if packed.qkv_format != "thd":
        raise ValueError(f"packed_seq_params.qkv_format is {packed.qkv_format!r}; packed sequences must be 'thd'")
    if getattr(packed, "local_cp_size", None) is not None:
        raise ValueError(
            f"packed_seq_params.local_cp_size={packed.local_cp_size}: the number of context-parallel ranks must be the "
            "same for all sequences; turn hybrid context parallelism off"
        )


def layout_of(packed: Any, local_tokens: int, cp_size: int) -> SequenceLayout:
    """The layout of `local_tokens` rows per rank, or of the documents of a packed sequence.

    Reading the offsets of documents waits for the device, so the layout is remembered in `packed`, which all
    layers of a micro-batch share.

    Args:
        packed: `PackedSeqParams` in the form `thd`, or None for one sequence per batch row. Real lengths come from
            `cu_seqlens_q`, the slots that documents occupy from `cu_seqlens_q_padded` if given.

    Raises:
        ValueError: different offsets for queries and keys, or slots that do not divide over the ranks.
    """
    if packed is None:
        return SequenceLayout.zigzag(local_tokens * cp_size, cp_size)
    names = ("cu_seqlens_q", "cu_seqlens_q_padded", "cu_seqlens_kv", "cu_seqlens_kv_padded")
    offsets = [getattr(packed, name) for name in names]
    key = (cp_size, *((id(t), t._version) if t is not None else None for t in offsets))
    known = vars(packed).get(_MEMO)
    if known is None or known[0] != key:
        # The tensors stay in the memo: while they live, no other tensor has their identity.
        known = (key, offsets, _read([None if t is None else t.tolist() for t in offsets], cp_size))
        vars(packed)[_MEMO] = known
    layout: SequenceLayout = known[2]
    return layout


def _read(offsets: Sequence[list[int] | None], cp_size: int) -> SequenceLayout:
    q, q_padded, kv, kv_padded = offsets
    if q is None:
        raise ValueError("packed_seq_params has no cu_seqlens_q, so the documents are unknown")
    for name, of_q, of_kv in (("cu_seqlens", q, kv), ("cu_seqlens_padded", q_padded, kv_padded)):
        if of_kv is not None and of_kv != of_q:
            raise ValueError(
                f"packed_seq_params has {name}_q={of_q} and {name}_kv={of_kv}: in self-attention queries and keys are "
                "the same tokens, so the two must be equal"
            )
    return SequenceLayout.packed(q, cp_size, cu_seqlens_padded=q if q_padded is None else q_padded)
