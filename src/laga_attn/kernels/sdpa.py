"""Attention through PyTorch's fused kernels: flash attention on CPU, memory-efficient attention on CUDA.

Two of their habits are worked around here. Their causal mask is aligned top-left, so that a causal span is
cut into a full rectangle and a square with the diagonal, merged by LSE. And their backward derives delta from
``out``, while a caller who also differentiates the LSE has another delta: it rides along as extra columns of
``dout`` that meet ones in ``v``, with ``out`` set to zero, so that the kernel's own dP is dout V^T - delta.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from laga_attn.kernels.fused import Fused, Piece, cut_at_diagonal
from laga_attn.kernels.operators import define_operators
from laga_attn.kernels.problem import acc_dtype

__all__ = ["attend", "backward", "differentiate", "forward"]

_EXTRA = 8  # columns added for delta: the CUDA kernel wants head dims in multiples of 8
_LSE_ALIGN = 32  # the CUDA kernel reads LSE rows in groups of this size

aten = torch.ops.aten


def attend(q: Tensor, k: Tensor, v: Tensor, piece: Piece, scale: float) -> tuple[Tensor, Tensor]:
    """Out and lse of the rows of one piece."""
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]  # [B, h, S, D]
    if q.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*heads_first, 0.0, piece.causal, scale=scale)
    else:
        out, lse, _, _ = aten._scaled_dot_product_efficient_attention(
            *heads_first, None, True, 0.0, piece.causal, scale=scale
        )
    return out.transpose(1, 2), lse[:, :, : out.shape[2]].to(acc_dtype(q.dtype))


def differentiate(
    dout: Tensor, delta: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, piece: Piece, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The shares of dq, dk and dv of one piece."""
    widths = (q.shape[3], k.shape[3], v.shape[3])
    dout, v = _with_delta(dout, delta, v)
    on_cpu = q.device.type == "cpu"
    if on_cpu:  # there the kernel wants equal head dims, so that q and k grow by zeros
        q, k = pad(q, (0, _EXTRA)), pad(k, (0, _EXTRA))
    parts = [x.transpose(1, 2) for x in (q, k, v)]
    grads = (_cpu_gradients if on_cpu else _cuda_gradients)(dout.transpose(1, 2), parts, lse, piece.causal, scale)
    dq, dk, dv = (grad.transpose(1, 2)[..., :width] for grad, width in zip(grads, widths, strict=True))
    return dq, dk, dv


def _with_delta(dout: Tensor, delta: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """``dout`` extended by -delta and ``v`` by ones; in half precision, 24 bits of delta take 3 columns."""
    rest = -delta.transpose(1, 2)  # [B, Sq, h]
    columns = []
    for _ in range(1 if dout.dtype == delta.dtype else 3):
        columns.append(rest.to(dout.dtype))
        rest = rest - columns[-1].to(delta.dtype)
    dout_ext = torch.cat((dout, pad(torch.stack(columns, dim=-1), (0, _EXTRA - len(columns)))), dim=-1)
    ones = v.new_ones((*v.shape[:3], len(columns)))
    return dout_ext, torch.cat((v, pad(ones, (0, _EXTRA - len(columns)))), dim=-1)


def _cpu_gradients(
    dout: Tensor, parts: list[Tensor], lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, *parts, torch.zeros_like(dout), lse, 0.0, causal, scale=scale
    )
    return dq, dk, dv


def _cuda_gradients(
    dout: Tensor, parts: list[Tensor], lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    # Rows past the end count as LSE +inf, that is weight 0, as in the kernel's own forward.
    lse = pad(lse, (0, -lse.shape[2] % _LSE_ALIGN), value=torch.inf).contiguous()
    unused = lse.new_empty((), dtype=torch.int64)  # dropout state
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        dout,
        *parts,
        None,
        torch.zeros_like(dout),
        lse,
        unused,
        unused,
        0.0,
        [True, True, True, False],
        causal,
        scale=scale,
    )
    return dq, dk, dv


_fused = Fused(cut_at_diagonal, attend, differentiate)
forward, backward = _fused.forward, _fused.backward
define_operators("sdpa", forward, backward)
