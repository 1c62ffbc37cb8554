"""cuDNN attention through PyTorch's operator, which takes head dims 192/128 as they are.

``aten::_scaled_dot_product_cudnn_attention`` and its backward (pytorch/pytorch, ``aten/src/ATen/native/cudnn/MHA.cpp``)
align the causal mask top-left and have no window, so that spans are cut at the diagonal. LSE is natural log, [B, h, S,
1]. Extra columns for delta, as in ``sdpa``, would make head dims that the kernel does not have: it gets an ``out`` made
for delta, see ``out_for_delta``.

PyTorch keeps the graphs that it builds by shapes and strides of q, k and v alone, and expects the output, its gradient
and those of q, k and v in the strides that follow from these. Dense inputs in one order keep every call to that;
keys and values that are views of one buffer are copied for it.

PyTorch does not give single keys to cuDNN, nor single queries with some of its releases: both go to ``sdpa``.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from laga_attn.kernels import sdpa
from laga_attn.kernels.cuda import aligned, gpu_lacks, signature_lacks
from laga_attn.kernels.fused import Fused, Piece, cut_at_diagonal, out_for_delta
from laga_attn.kernels.operators import define_operators

__all__ = ["missing"]

_MAJORS = (9, 10)  # compute capabilities for which PyTorch prefers cuDNN, and for which cuDNN has 192/128
_OLDEST = 91501
"""cuDNN 9.15.1: before it, PyTorch distrusts sequence lengths that are no multiples of 128 (its issue 169849)."""
_FORWARD = ("query", "key", "value", "attn_bias", "compute_log_sumexp", "dropout_p", "is_causal", "return_debug_mask")
_BACKWARD = (
    "grad_out", "query", "key", "value", "out", "logsumexp", "philox_seed", "philox_offset", "attn_bias", "cum_seq_q",
    "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal",
)  # fmt: skip

aten = torch.ops.aten


def missing(dtype: torch.dtype) -> str | None:
    """What this machine lacks for cuDNN attention; None if nothing."""
    lacks = gpu_lacks(_MAJORS)
    if lacks is not None:
        return lacks
    version = torch.backends.cudnn.version()
    if version is None or version < _OLDEST:
        return f"PyTorch has cuDNN {version}: it needs {_OLDEST} or newer"
    if torch.are_deterministic_algorithms_enabled():
        return "deterministic algorithms are switched on, and cuDNN attention is none"
    return _operators_lack()


@cache
def _operators_lack() -> str | None:
    forward, backward = aten._scaled_dot_product_cudnn_attention, aten._scaled_dot_product_cudnn_attention_backward
    return _lacks(forward, _FORWARD) or _lacks(backward, _BACKWARD)


def _lacks(op: Any, wanted: tuple[str, ...]) -> str | None:
    there = [argument.name for argument in op.default._schema.arguments if not argument.kwarg_only]
    if tuple(there) == wanted:
        return None
    return signature_lacks(str(op), there, wanted) or f"{op} has other arguments than those in use here: {there}"


def _attend(q: Tensor, k: Tensor, v: Tensor, piece: Piece, scale: float) -> tuple[Tensor, Tensor]:
    if 1 in piece.shape:
        return sdpa.attend(q, k, v, piece, scale)
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
        _heads_first(q), _heads_first(k), _heads_first(v), None, True, 0.0, piece.causal, False, scale=scale
    )
    return out.transpose(1, 2), lse.reshape(out.shape[:3])


def _differentiate(
    dout: Tensor, delta: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, piece: Piece, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    if 1 in piece.shape:
        return sdpa.differentiate(dout, delta, q, k, v, lse, piece, scale)
    unused = lse.new_empty((), dtype=torch.int64)  # dropout state
    dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
        _heads_first(dout), _heads_first(q), _heads_first(k), _heads_first(v), _heads_first(out_for_delta(dout, delta)),
        _dense(lse).unsqueeze(-1), unused, unused, None, None, None, *piece.shape, 0.0, piece.causal, scale=scale,
    )  # fmt: skip
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _heads_first(x: Tensor) -> Tensor:
    """[B, S, h, D] as a view [B, h, S, D] of dense rows."""
    return _dense(aligned(x)).transpose(1, 2)


def _dense(x: Tensor) -> Tensor:
    """Contiguous, also in the strides of dims of size 1, which ``contiguous`` leaves as they are."""
    return x.contiguous().flatten().view(x.shape)


_cudnn = Fused(cut_at_diagonal, _attend, _differentiate)
define_operators("cudnn", _cudnn.forward, _cudnn.backward)
