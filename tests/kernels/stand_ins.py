"""Stand-ins for kernels that need a GPU: the signatures and conditions of the real ones, and plain math on the CPU.

Signatures as of the repositories that ``laga_attn.kernels.flash`` and ``laga_attn.kernels.cudnn`` name. Conditions are
what those check or take for granted; the math rounds to half precision where tensor cores do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

__all__ = ["CUDNN", "attend", "differentiate", "flash3_library", "flash4_module"]

_FLASH3_FORWARD = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(a!)? k_new=None, Tensor(b!)? v_new=None, Tensor? q_v=None,"
    " Tensor(c!)? out=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None,"
    " Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None,"
    " Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, Tensor? rotary_cos=None,"
    " Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, Tensor? q_descale=None, Tensor? k_descale=None,"
    " Tensor? v_descale=None, float? softmax_scale=None, bool is_causal=False, int window_size_left=-1,"
    " int window_size_right=-1, int attention_chunk=0, float softcap=0.0, bool is_rotary_interleaved=False,"
    " Tensor? scheduler_metadata=None, int num_splits=0, bool? pack_gqa=None, int sm_margin=0)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)
_FLASH3_BACKWARD = (
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(a!)? dq=None,"
    " Tensor(b!)? dk=None, Tensor(c!)? dv=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None,"
    " Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None,"
    " float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, int window_size_right=-1,"
    " float softcap=0.0, bool deterministic=False, int sm_margin=0) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Out and lse for [B, S, h, D] and a mask [Sq, Sk] in which every query sees a key."""
    scores = torch.einsum("bihd,bjhd->bhij", q.float(), k.float()) * scale
    lse = scores.masked_fill(~visible, -torch.inf).logsumexp(-1)
    p = torch.where(visible, (scores - lse.unsqueeze(-1)).exp(), 0.0)
    return torch.einsum("bhij,bjhd->bihd", p.to(v.dtype).float(), v.float()).to(q.dtype), lse


def differentiate(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, visible: Tensor,
    dlse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv, with delta from ``out`` and ``dout`` in float32."""
    half = q.dtype
    q, k, v, dout = (x.float() for x in (q, k, v, dout))
    delta = (dout * out.float()).sum(-1).transpose(1, 2)
    delta = delta if dlse is None else delta - dlse
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    p = torch.where(visible, (scores - lse.unsqueeze(-1)).exp(), 0.0)
    dp = torch.einsum("bihd,bjhd->bhij", dout, v)
    ds = (p * (dp - delta.unsqueeze(-1))).to(half).float()
    dq, dk = torch.einsum("bhij,bjhd->bihd", ds, k) * scale, torch.einsum("bhij,bihd->bjhd", ds, q) * scale
    return dq.to(half), dk.to(half), torch.einsum("bhij,bihd->bjhd", p.to(half).float(), dout).to(half)


def bottom_right(q: Tensor, k: Tensor, causal: bool, left: int | None, right: int | None) -> Tensor:
    """FlashAttention's mask: i + Sk - Sq - left <= j <= i + Sk - Sq + right, where None is no bound."""
    rows, keys = q.shape[1], k.shape[1]
    at = torch.arange(rows).unsqueeze(1) + keys - rows
    j = torch.arange(keys)
    right = 0 if causal else right
    visible = (j <= at + (math.inf if right is None else right)) & (j >= at - (math.inf if left is None else left))
    assert visible.any(1).all(), "backward is not tested with queries that see nothing"
    return visible


def check_inputs(q: Tensor, k: Tensor, v: Tensor, *like_out: Tensor) -> None:
    """Half precision, contiguous heads, 16-byte alignment, shapes that fit."""
    (batch, rows, heads, width), keys, v_width = q.shape, k.shape[1], v.shape[3]
    assert k.shape == (batch, keys, heads, width)
    assert v.shape == (batch, keys, heads, v_width)
    for x in (q, k, v, *like_out):
        assert x.dtype in (torch.bfloat16, torch.float16)
        assert x.dtype == q.dtype
        assert x.stride(-1) == 1
        assert all(n > 0 and n % 8 == 0 for n in x.stride()[:-1])
        assert x.storage_offset() % 8 == 0
    for x in like_out:
        assert x.shape == (batch, rows, heads, v_width)


def check_statistics(x: Tensor, q: Tensor) -> None:
    """[B, h, S] in float32, read without strides."""
    assert x.shape == (q.shape[0], q.shape[2], q.shape[1])
    assert x.dtype == torch.float32
    assert x.is_contiguous()


@contextmanager
def flash3_library(calls: list[dict[str, Any]]) -> Iterator[None]:
    """``torch.ops.flash_attn_3``, which the dispatcher holds to its schema; keywords of every call go to ``calls``."""

    def mask(q: Tensor, k: Tensor, kwargs: dict[str, Any]) -> Tensor:
        left, right = (kwargs[f"window_size_{side}"] for side in ("left", "right"))
        return bottom_right(q, k, kwargs["is_causal"], *(None if n < 0 else n for n in (left, right)))

    def fwd(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        assert not args
        calls.append(kwargs)
        check_inputs(q, k, v)
        assert kwargs["num_splits"] == 1
        out, lse = attend(q, k, v, kwargs["softmax_scale"], mask(q, k, kwargs))
        return out, lse, q.new_empty(0), q.new_empty(0)

    def bwd(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, ...]:
        assert not args
        calls.append(kwargs)
        check_inputs(q, k, v, dout, out)
        check_statistics(softmax_lse, q)
        grads = differentiate(dout, q, k, v, out, softmax_lse, kwargs["softmax_scale"], mask(q, k, kwargs))
        for name, like, grad in zip(("dq", "dk", "dv"), (q, k, v), grads, strict=True):
            assert (kwargs[name].shape, kwargs[name].dtype) == (like.shape, like.dtype)
            kwargs[name].copy_(grad)
        return tuple(q.new_empty(0) for _ in range(5))

    with torch.library._scoped_library("flash_attn_3", "DEF") as library:
        library.define(_FLASH3_FORWARD)
        library.define(_FLASH3_BACKWARD)
        library.impl("fwd", with_defaults(fwd, "fwd"), "CPU")
        library.impl("bwd", with_defaults(bwd, "bwd"), "CPU")
        yield


def with_defaults(function: Any, name: str) -> Any:
    """The kernel of an operator gets arguments by position, up to the last that is given: name them."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        arguments = getattr(torch.ops.flash_attn_3, name).default._schema.arguments
        required = [a.name for a in arguments if not a.has_default_value()]
        given = dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
        rest = {a.name: given.get(a.name, a.default_value) for a in arguments if a.has_default_value()}
        return function(*(given[n] for n in required), **rest)

    return kernel


def flash4_module(calls: list[dict[str, Any]]) -> ModuleType:
    """``flash_attn.cute.interface``."""

    def _flash_attn_fwd(
        q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None,
        max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None, causal=False, softcap=None,
        window_size_left=None, window_size_right=None, learnable_sink=None, tile_mn=None, mma_pv_is_rs=None,
        intra_wg_overlap=None, num_threads=384, num_splits=1, pack_gqa=None, _arch=None, score_mod=None, mask_mod=None,
        block_sparse_tensors=None, return_lse=False, out=None, lse=None, aux_tensors=None, aux_scalars=None,
        q_descale=None, k_descale=None, v_descale=None, gather_kv_indices=None, scheduler_metadata=None,
        seqlen_k_per_split=None, disable_scheduler_metadata=False,
    ):  # fmt: skip
        calls.append({"return_lse": return_lse})
        check_inputs(q, k, v)
        out, lse = attend(q, k, v, softmax_scale, bottom_right(q, k, causal, window_size_left, window_size_right))
        return out, lse if return_lse else None, None, None

    def _flash_attn_bwd(
        q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
        window_size_right=None, m_block_size=64, n_block_size=128, num_threads=256, pack_gqa=False, num_stages_Q=2,
        num_stages_dO=2, SdP_swapAB=False, dKV_swapAB=False, dQ_swapAB=False, AtomLayoutMSdP=2, AtomLayoutNdKV=2,
        AtomLayoutMdQ=2, V_in_regs=False, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
        max_seqlen_q=None, max_seqlen_k=None, deterministic=False, dq=None, dk=None, dv=None, score_mod=None,
        score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None, block_sparse_tensors=None, dlse=None,
        learnable_sink=None,
    ):  # fmt: skip
        calls.append({"deterministic": deterministic})
        check_inputs(q, k, v, dout, out)
        check_statistics(lse, q)
        check_statistics(dlse, q)
        visible = bottom_right(q, k, causal, window_size_left, window_size_right)
        return differentiate(dout, q, k, v, out, lse, softmax_scale, visible, dlse)

    module = ModuleType("flash_attn.cute.interface")
    module._flash_attn_fwd, module._flash_attn_bwd = _flash_attn_fwd, _flash_attn_bwd
    return module


def _on_meta(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Let PyTorch check a call against the real operator's schema."""
    op(*(x.to("meta") if isinstance(x, Tensor) else x for x in args), **kwargs)


def _rows(x: Tensor) -> Tensor:
    """[B, h, S, D], which must be dense rows [B, S, h, D], as such."""
    rows = x.transpose(1, 2)
    assert rows.stride() == torch.empty(rows.shape).stride()
    return rows


def _top_left(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    assert k.shape[1] > 1
    visible = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
    return visible.tril() if causal else visible


def _cudnn_forward(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    _on_meta(torch.ops.aten._scaled_dot_product_cudnn_attention, args, kwargs)
    q, k, v = map(_rows, args[:3])
    bias, with_lse, dropout, causal, debug = args[3:]
    assert (bias, with_lse, dropout, debug) == (None, True, 0.0, False)
    check_inputs(q, k, v)
    out, lse = attend(q, k, v, kwargs["scale"], _top_left(q, k, causal))
    return out.transpose(1, 2), lse.unsqueeze(-1), None, None, q.shape[1], k.shape[1], q.new_empty(()), None, None


def _cudnn_backward(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    _on_meta(torch.ops.aten._scaled_dot_product_cudnn_attention_backward, args, kwargs)
    dout, q, k, v, out = map(_rows, args[:5])
    lse, seed, offset, bias, from_q, from_k, max_q, max_k, dropout, causal = args[5:]
    assert (bias, from_q, from_k, dropout) == (None, None, None, 0.0)
    assert (max_q, max_k) == (q.shape[1], k.shape[1])
    assert seed.dtype == offset.dtype == torch.int64
    assert lse.stride() == torch.empty(lse.shape).stride()
    check_inputs(q, k, v, dout, out)
    check_statistics(lse.squeeze(-1), q)
    grads = differentiate(dout, q, k, v, out, lse.squeeze(-1), kwargs["scale"], _top_left(q, k, causal))
    return tuple(x.transpose(1, 2) for x in grads)


CUDNN = SimpleNamespace(
    _scaled_dot_product_cudnn_attention=_cudnn_forward,
    _scaled_dot_product_cudnn_attention_backward=_cudnn_backward,
)
"""In place of ``torch.ops.aten``."""
