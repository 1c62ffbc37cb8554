"""Attention compiled for CPUs with AVX-512, in float32 and bfloat16; see ``attention.cpp``.

It is compiled when the package is installed, by ``setup.py``, where there is a C++ compiler for such a CPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_float, c_int64, c_void_p
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from laga_attn.kernels.operators import define_latent_operators, define_operators
from laga_attn.kernels.problem import empty_gradients, empty_rows
from laga_attn.kernels.tiles import live
from laga_attn.spans import SPAN_FIELDS, Span, pack_spans

__all__ = ["backward", "backward_from_latent", "forward", "forward_from_latent", "missing"]

_ALIGNMENT = 64  # bytes


class _Rows(ctypes.Structure):
    """A tensor ``[batch, rows, heads, width]`` with strides in elements; that of the width is 1."""

    _fields_ = (("data", c_void_p), ("batch", c_int64), ("row", c_int64), ("head", c_int64))


class _Problem(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("batch", "q_rows", "k_rows", "heads", "kv_heads", "qk_width", "v_width")),
        *((name, c_int64) for name in ("rank", "nope_width", "span_count")),
        ("spans", ctypes.POINTER(c_int64)),
        ("scale", c_float),
        ("threads", c_int64),
        ("scratch", c_void_p),
    )


@cache
def _library() -> ctypes.CDLL | None:
    """The compiled code, None if it was not compiled."""
    found = (Path(__file__).parent / f"_attention{suffix}" for suffix in EXTENSION_SUFFIXES)
    path = next((p for p in found if p.exists()), None)
    if path is None:
        return None
    library = ctypes.CDLL(str(path))
    for name in ("laga_forward_scratch", "laga_backward_scratch"):
        getattr(library, name).restype = c_int64
    return library


def missing(dtype: torch.dtype) -> str | None:
    """What this machine lacks to compute in ``dtype``; None if nothing."""
    if _library() is None:
        return "it was not compiled when laga-attn was installed: reinstall it where there is a C++ compiler"
    fast = torch.backends.cpu.get_cpu_capability() == "AVX512"
    if dtype == torch.bfloat16:
        fast = fast and torch.cpu._is_avx512_bf16_supported()
    return None if fast else f"this CPU has no AVX-512 instructions for {str(dtype).removeprefix('torch.')}"


def forward(q: Tensor, k: Tensor, v: Tensor, spans: Sequence[Span], scale: float) -> tuple[Tensor, Tensor]:
    """Softmax attention over spans: out [B, Sq, h, Dv] and lse [B, h, Sq]."""
    return _forward(q, _Given(k, v), spans, scale)


def backward(
    dout: Tensor, delta: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, spans: Sequence[Span], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients dq, dk, dv from dS = P * (dout V^T - delta), with P recomputed from ``lse``."""
    grads = empty_gradients(q, k, v)
    results, wide = tuple(map(_rows, grads)), grads[1].dtype == torch.float32
    _differentiate("laga_backward", (wide,), dout, delta, q, _Given(k, v), lse, results, spans, scale)
    return grads


def forward_from_latent(
    q: Tensor, latent: Tensor, weight: Tensor, spans: Sequence[Span], scale: float, v_head_dim: int
) -> tuple[Tensor, Tensor]:
    """The same from latents [B, Sk, rank + rope] and weight [h * (nope + Dv), rank]."""
    return _forward(q, _Rebuilt(latent, weight, v_head_dim, q.shape[2]), spans, scale)


def backward_from_latent(
    dout: Tensor,
    delta: Tensor,
    q: Tensor,
    latent: Tensor,
    weight: Tensor,
    lse: Tensor,
    spans: Sequence[Span],
    scale: float,
    d_latent: Tensor | None,
    d_weight: Tensor | None,
) -> Tensor:
    """The gradient of q; adds to ``d_latent`` and ``d_weight``, float32 sums like latent and weight, unless None."""
    dq = empty_rows(q, q.shape[2], q.shape[3], q.dtype)
    results = _rows(dq), _latent_rows(d_latent), _weight_rows(d_weight, q.shape[2])
    keys = _Rebuilt(latent, weight, dout.shape[3], q.shape[2])
    _differentiate("laga_backward_from_latent", (), dout, delta, q, keys, lse, results, spans, scale)
    return dq


class _Given:
    """Keys [B, Sk, hk, Dqk] and values [B, Sk, hk, Dv]."""

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self.first, self.second = _rows(k), _rows(v)
        self.heads, self.v_width = v.shape[2:]
        self.k_rows, self.rank, self.nope_width = k.shape[1], 0, 0


class _Rebuilt:
    """Keys and values that are rebuilt from latents [B, Sk, rank + rope] and a weight [h * (nope + Dv), rank]."""

    def __init__(self, latent: Tensor, weight: Tensor, v_width: int, heads: int) -> None:
        self.first, self.second = _latent_rows(latent), _weight_rows(weight, heads)
        self.heads, self.v_width = heads, v_width
        self.k_rows, (rows, self.rank) = latent.shape[1], weight.shape
        self.nope_width = rows // heads - v_width


def _forward(q: Tensor, keys: _Given | _Rebuilt, spans: Sequence[Span], scale: float) -> tuple[Tensor, Tensor]:
    out = empty_rows(q, q.shape[2], keys.v_width, q.dtype)
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    problem, half = _problem(q, keys, spans, scale), q.dtype == torch.bfloat16
    library = _loaded()
    _scratch = _lend(problem, library.laga_forward_scratch(byref(problem), half))
    if not isinstance(q, FakeTensor):  # a trace of memory looks in here
        rows = (byref(x) for x in (_rows(q), keys.first, keys.second, _rows(out)))
        library.laga_forward(byref(problem), half, *rows, c_void_p(lse.data_ptr()))
    return out, lse


def _differentiate(
    name: str,
    flags: tuple[bool, ...],
    dout: Tensor,
    delta: Tensor,
    q: Tensor,
    keys: _Given | _Rebuilt,
    lse: Tensor,
    results: tuple[_Rows, ...],
    spans: Sequence[Span],
    scale: float,
) -> None:
    """Call the compiled function ``name``, which fills or adds to ``results``."""
    lse, delta = lse.contiguous(), delta.contiguous()
    problem, half = _problem(q, keys, spans, scale), q.dtype == torch.bfloat16
    library = _loaded()
    _scratch = _lend(problem, library.laga_backward_scratch(byref(problem), half))
    if isinstance(q, FakeTensor):
        return
    rows = (byref(x) for x in (_rows(q), keys.first, keys.second))
    getattr(library, name)(
        byref(problem),
        half,
        *flags,
        byref(_rows(dout)),
        c_void_p(delta.data_ptr()),
        *rows,
        c_void_p(lse.data_ptr()),
        *map(byref, results),
    )


def _rows(x: Tensor) -> _Rows:
    return _Rows(_address(x), x.stride(0), x.stride(1), x.stride(2))


def _latent_rows(x: Tensor | None) -> _Rows:
    """Of [batch, rows, width], the same for every head."""
    return _Rows() if x is None else _Rows(_address(x), x.stride(0), x.stride(1), 0)


def _weight_rows(x: Tensor | None, heads: int) -> _Rows:
    """Of [heads * rows, width], the same for every batch entry."""
    return _Rows() if x is None else _Rows(_address(x), 0, x.stride(0), x.shape[0] // heads * x.stride(0))


def _address(x: Tensor) -> int:
    return 0 if isinstance(x, FakeTensor) else x.data_ptr()


def _problem(q: Tensor, keys: _Given | _Rebuilt, spans: Sequence[Span], scale: float) -> _Problem:
    batch, q_rows, heads, qk_width = q.shape
    packed = pack_spans(live(spans))
    sizes = (batch, q_rows, keys.k_rows, heads, keys.heads, qk_width, keys.v_width, keys.rank, keys.nope_width)
    span_array = (c_int64 * len(packed))(*packed)
    return _Problem(*sizes, len(packed) // SPAN_FIELDS, span_array, scale, torch.get_num_threads())


def _lend(problem: _Problem, nbytes: int) -> Tensor:
    """Scratch for every thread: a tensor, so that who watches memory sees it; to be kept until the call is over."""
    scratch = torch.empty(nbytes * problem.threads + _ALIGNMENT, dtype=torch.uint8)
    problem.scratch = -(-_address(scratch) // _ALIGNMENT) * _ALIGNMENT
    return scratch


def _loaded() -> ctypes.CDLL:
    library = _library()
    if library is None:
        raise RuntimeError(f"the avx512 kernel cannot run here: {missing(torch.float32)}")
    return library


define_operators("avx512", forward, backward)
define_latent_operators("avx512", forward_from_latent, backward_from_latent)
