"""FlashAttention 3 and 4, which take head dims 192/128 as they are.

FlashAttention 3 (Dao-AILab/flash-attention, ``hopper/flash_api.cpp``) registers ``torch.ops.flash_attn_3.fwd`` and
``bwd``; FlashAttention 4 (the same repository, ``flash_attn/cute/interface.py``) has ``_flash_attn_fwd`` and
``_flash_attn_bwd``, which PyTorch calls for its own attention, too (``torch/nn/attention/_fa4.py``). Both take
[B, S, h, D] with any aligned strides, align causal masks and windows to the last query and the last key as spans do,
and return LSE [B, h, S] in float32, natural log; backward wants it contiguous. So a span is one call. Spans come
without queries that see nothing: a causal one never has more queries than keys, which the packages' own tests of
backward leave out.

FlashAttention 4 takes the gradient of the LSE and subtracts it from sum(dout * out) in float32: with ``out`` zero and
-delta as that gradient, its delta is exactly the one given. FlashAttention 3 has no such argument and gets an ``out``
made for delta, see ``out_for_delta``.
"""

from __future__ import annotations

import inspect
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from laga_attn.kernels.cuda import aligned, gpu_lacks, signature_lacks
from laga_attn.kernels.fused import Fused, Piece, out_for_delta, whole
from laga_attn.kernels.operators import define_operators

__all__ = ["missing_flash3", "missing_flash4"]

_HOPPER, _BLACKWELL = 9, (10, 11)
_MASK = ("softmax_scale", "window_size_left", "window_size_right")


def missing_flash3(dtype: torch.dtype) -> str | None:
    """What this machine lacks for FlashAttention 3; None if nothing."""
    return gpu_lacks((_HOPPER,)) or _package3_lacks()


def missing_flash4(dtype: torch.dtype) -> str | None:
    """What this machine lacks for FlashAttention 4; None if nothing."""
    return gpu_lacks((_HOPPER, *_BLACKWELL)) or _package4_lacks()


@cache
def _package3_lacks() -> str | None:
    try:
        import_module("flash_attn_3._C")
        forward, backward = (_arguments(op) for op in (torch.ops.flash_attn_3.fwd, torch.ops.flash_attn_3.bwd))
    except Exception as error:  # whatever a broken installation raises must not take other kernels along
        return (
            f"FlashAttention 3 is not installed ({error}): install the directory hopper of "
            "https://github.com/Dao-AILab/flash-attention"
        )
    wanted = (*_MASK, "is_causal")
    return signature_lacks("flash_attn_3.fwd", forward, (*wanted, "num_splits")) or signature_lacks(
        "flash_attn_3.bwd", backward, (*wanted, "dq", "dk", "dv", "deterministic")
    )


@cache
def _package4_lacks() -> str | None:
    try:
        package = _package4()
        forward, backward = (
            inspect.signature(f).parameters for f in (package._flash_attn_fwd, package._flash_attn_bwd)
        )
    except Exception as error:
        return f"FlashAttention 4 is not installed ({error}): pip install flash-attn-4"
    wanted = (*_MASK, "causal")
    return signature_lacks("_flash_attn_fwd of flash-attn-4", forward, (*wanted, "return_lse")) or signature_lacks(
        "_flash_attn_bwd of flash-attn-4", backward, (*wanted, "dlse", "deterministic")
    )


def _package4() -> Any:
    return import_module("flash_attn.cute.interface")


def _arguments(op: Any) -> list[str]:
    return [argument.name for argument in op.default._schema.arguments]


def _attend3(q: Tensor, k: Tensor, v: Tensor, piece: Piece, scale: float) -> tuple[Tensor, Tensor]:
    q, k, v = aligned(q), aligned(k), aligned(v)
    out, lse, *_ = torch.ops.flash_attn_3.fwd(q, k, v, num_splits=1, **_mask3(piece, scale))
    return out, lse


def _differentiate3(
    dout: Tensor, delta: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, piece: Piece, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    out = out_for_delta(dout, delta)
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    torch.ops.flash_attn_3.bwd(
        aligned(dout), aligned(q), aligned(k), aligned(v), out, lse.contiguous(),
        dq=dq, dk=dk, dv=dv, deterministic=torch.are_deterministic_algorithms_enabled(), **_mask3(piece, scale),
    )  # fmt: skip
    return dq, dk, dv


def _mask3(piece: Piece, scale: float) -> dict[str, Any]:
    return {
        "softmax_scale": scale,
        "is_causal": piece.causal,
        "window_size_left": -1 if piece.window is None else piece.window - 1,  # keys before the query's own
        "window_size_right": 0 if piece.causal else -1,
    }


def _attend4(q: Tensor, k: Tensor, v: Tensor, piece: Piece, scale: float) -> tuple[Tensor, Tensor]:
    q, k, v = aligned(q), aligned(k), aligned(v)
    out, lse, *_ = _package4()._flash_attn_fwd(q, k, v, return_lse=True, **_mask4(piece, scale))
    return out, lse


def _differentiate4(
    dout: Tensor, delta: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, piece: Piece, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    dout = aligned(dout)
    dq, dk, dv = _package4()._flash_attn_bwd(
        aligned(q), aligned(k), aligned(v), torch.zeros_like(dout), dout, lse.contiguous(),
        dlse=(-delta).contiguous(), deterministic=torch.are_deterministic_algorithms_enabled(), **_mask4(piece, scale),
    )  # fmt: skip
    return dq, dk, dv


def _mask4(piece: Piece, scale: float) -> dict[str, Any]:
    return {
        "softmax_scale": scale,
        "causal": piece.causal,
        "window_size_left": None if piece.window is None else piece.window - 1,
        "window_size_right": 0 if piece.causal else None,
    }


_flash3 = Fused(whole, _attend3, _differentiate3)
define_operators("flash3", _flash3.forward, _flash3.backward)
_flash4 = Fused(whole, _attend4, _differentiate4)
define_operators("flash4", _flash4.forward, _flash4.backward)
