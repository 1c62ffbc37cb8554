"""What every kernel agrees on: shapes, checks, result storage and FLOP counts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from laga_attn.spans import Span, unpack_spans

__all__ = [
    "acc_dtype",
    "backward_flops",
    "backward_from_latent_flops",
    "check_backward",
    "check_backward_from_latent",
    "check_forward",
    "check_forward_from_latent",
    "empty_gradients",
    "empty_rows",
    "forward_flops",
    "forward_from_latent_flops",
]


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of LSE, delta and sums: float64 for float64 inputs, float32 otherwise."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_rows(like: Tensor, heads: int, width: int, dtype: torch.dtype) -> Tensor:
    """Uninitialised [B, S, heads, width] for the rows of ``like`` [B, S, ...], stored sequence-first.

    Collectives exchange whole rows, so results are laid out [S, B, heads, width] and leave without a packing
    copy.
    """
    batch, rows = like.shape[:2]
    return like.new_empty((rows, batch, heads, width), dtype=dtype).transpose(0, 1)


def empty_gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialised dq, dk, dv; those of a shared key/value head are sums over heads, in the acc dtype."""
    dtype = acc_dtype(q.dtype) if k.shape[2] < q.shape[2] else q.dtype
    return (
        empty_rows(q, q.shape[2], q.shape[3], q.dtype),
        empty_rows(k, k.shape[2], k.shape[3], dtype),
        empty_rows(v, v.shape[2], v.shape[3], dtype),
    )


def check_forward(q: Tensor, k: Tensor, v: Tensor, spans: Sequence[Span]) -> None:
    """Refuse tensors and spans that do not fit together.

    Raises:
        ValueError: naming the shapes, the rule and the fix.
    """
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(f"{shapes}: each must be [batch, sequence, heads, head dim]")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q is {q.dtype}, k {k.dtype}, v {v.dtype}: cast them to one dtype")
    if not q.device == k.device == v.device:
        raise ValueError(f"q is on {q.device}, k on {k.device}, v on {v.device}: move them to one device")
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ValueError(f"{shapes}: the batch sizes must be equal")
    if k.shape[1:3] != v.shape[1:3]:
        raise ValueError(f"{shapes}: k and v must have the same rows and heads")
    if k.shape[2] not in (1, q.shape[2]):
        raise ValueError(f"{shapes}: k and v need {q.shape[2]} heads like q, or 1 head shared by all")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"{shapes}: q and k must have the same head dim")
    if not q.stride(3) == k.stride(3) == v.stride(3) == 1:
        raise ValueError(f"{shapes}: the last dim must be contiguous; call .contiguous() on the one that is not")
    _check_spans(spans, q.shape[1], k.shape[1])


def check_backward(
    dout: Tensor, delta: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, spans: Sequence[Span]
) -> None:
    """Refuse a backward call whose gradients or statistics do not fit its inputs.

    Raises:
        ValueError: naming the shapes, the rule and the fix.
    """
    check_forward(q, k, v, spans)
    _check_output_gradient(dout, delta, q, lse, v.shape[3])


def check_forward_from_latent(
    q: Tensor, latent: Tensor, weight: Tensor, spans: Sequence[Span], v_head_dim: int
) -> None:
    """Refuse latents and a weight that do not make keys and values for ``q``.

    Raises:
        ValueError: naming the shapes, the rule and the fix.
    """
    tensors = {"q": q, "latent": latent, "weight": weight}
    shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in tensors.items())
    if (q.dim(), latent.dim(), weight.dim()) != (4, 3, 2):
        raise ValueError(
            f"{shapes}: they must be [batch, queries, heads, head dim], [batch, keys, rank + rope] and "
            "[heads * (nope + v), rank]"
        )
    for name, values in (
        ("dtype", [x.dtype for x in tensors.values()]),
        ("device", [x.device for x in tensors.values()]),
    ):
        if len(set(values)) > 1:
            raise ValueError(f"q, latent and weight have {name} {', '.join(map(str, values))}: they need the same")
    heads, width = q.shape[2:]
    nope = weight.shape[0] // heads - v_head_dim
    rope = latent.shape[2] - weight.shape[1]
    if latent.shape[0] != q.shape[0] or weight.shape[0] % heads or nope < 0 or rope < 0 or nope + rope != width:
        raise ValueError(
            f"{shapes}: for {heads} heads of {width} and values of {v_head_dim}, weight needs {heads} * (nope + "
            f"{v_head_dim}) rows and latent rank + {width} - nope columns, rank being those of weight"
        )
    for name, x in tensors.items():
        if x.stride(-1) != 1:
            raise ValueError(f"the last dim of {name} must be contiguous; call .contiguous() on it")
    _check_spans(spans, q.shape[1], latent.shape[1])


def check_backward_from_latent(
    dout: Tensor,
    delta: Tensor,
    q: Tensor,
    latent: Tensor,
    weight: Tensor,
    lse: Tensor,
    spans: Sequence[Span],
    d_latent: Tensor | None,
    d_weight: Tensor | None,
) -> None:
    """Refuse a backward call from latents whose gradients, statistics or sums do not fit its inputs.

    Raises:
        ValueError: naming the shapes, the rule and the fix.
    """
    check_forward_from_latent(q, latent, weight, spans, dout.shape[-1])
    _check_output_gradient(dout, delta, q, lse, dout.shape[-1])
    for name, total, like in (("d_latent", d_latent, latent), ("d_weight", d_weight, weight)):
        if total is None:
            continue
        if total.shape != like.shape or total.dtype != acc_dtype(q.dtype) or total.device != like.device:
            raise ValueError(
                f"{name} is {tuple(total.shape)} {total.dtype} on {total.device}: it must be {tuple(like.shape)} "
                f"{acc_dtype(q.dtype)} on {like.device}"
            )
        if total.stride(-1) != 1:
            raise ValueError(f"the last dim of {name} must be contiguous")


def _check_output_gradient(dout: Tensor, delta: Tensor, q: Tensor, lse: Tensor, v_head_dim: int) -> None:
    batch, rows, heads, _ = q.shape
    if dout.shape != (batch, rows, heads, v_head_dim) or dout.dtype != q.dtype:
        raise ValueError(
            f"dout is {tuple(dout.shape)} {dout.dtype}: it must be like the output, "
            f"{(batch, rows, heads, v_head_dim)} {q.dtype}"
        )
    if dout.stride(3) != 1:
        raise ValueError("the last dim of dout must be contiguous; call .contiguous() on it")
    for name, x in (("delta", delta), ("lse", lse)):
        if x.shape != (batch, heads, rows) or x.dtype != acc_dtype(q.dtype):
            raise ValueError(
                f"{name} is {tuple(x.shape)} {x.dtype}: it must be [batch, heads, queries] = "
                f"{(batch, heads, rows)} {acc_dtype(q.dtype)}"
            )


def _check_spans(spans: Sequence[Span], q_rows: int, k_rows: int) -> None:
    for s in spans:
        if s.q_start + s.q_len > q_rows or s.k_start + s.k_len > k_rows:
            raise ValueError(f"{s} reaches outside the {q_rows} query rows and {k_rows} key rows of the call")
    taken = sorted((s.q_start, s.q_start + s.q_len) for s in spans if s.q_len)
    for (_, end), (start, _) in pairwise(taken):
        if start < end:
            raise ValueError(f"two spans hold query row {start}: each query row may be in one span only")


def forward_flops(
    q: Sequence[int], k: Sequence[int], v: Sequence[int], spans: Sequence[int], *args: object, **kwargs: object
) -> int:
    """FLOPs of the forward pass over the visible pairs alone: scores and output, from input shapes."""
    return 2 * q[0] * q[2] * _area(spans) * (q[3] + v[3])


def backward_flops(
    dout: Sequence[int],
    delta: Sequence[int],
    q: Sequence[int],
    k: Sequence[int],
    v: Sequence[int],
    lse: Sequence[int],
    spans: Sequence[int],
    *args: object,
    **kwargs: object,
) -> int:
    """FLOPs of the backward pass: scores again, dP, dV, dQ and dK, over the visible pairs alone."""
    return 2 * q[0] * q[2] * _area(spans) * (3 * q[3] + 2 * v[3])


def forward_from_latent_flops(
    q: Sequence[int],
    latent: Sequence[int],
    weight: Sequence[int],
    spans: Sequence[int],
    scale: float,
    v_head_dim: int,
    *args: object,
    **kwargs: object,
) -> int:
    """FLOPs of rebuilding every key and value once, and of the visible pairs."""
    return _rebuild_flops(latent, weight) + forward_flops(q, q, (*q[:3], v_head_dim), spans)


def backward_from_latent_flops(
    dout: Sequence[int],
    delta: Sequence[int],
    q: Sequence[int],
    latent: Sequence[int],
    weight: Sequence[int],
    lse: Sequence[int],
    spans: Sequence[int],
    scale: float,
    d_latent: Sequence[int] | None,
    d_weight: Sequence[int] | None,
    *args: object,
    **kwargs: object,
) -> int:
    """FLOPs of rebuilding every key and value once, of their gradients over the visible pairs, and of folding these."""
    products = 1 + sum(folded is not None for folded in (d_latent, d_weight))
    return products * _rebuild_flops(latent, weight) + backward_flops(dout, delta, q, q, dout, lse, spans)


def _rebuild_flops(latent: Sequence[int], weight: Sequence[int]) -> int:
    return 2 * latent[0] * latent[1] * weight[0] * weight[1]


def _area(spans: Sequence[int]) -> int:
    return sum(s.area() for s in unpack_spans(spans))
