"""Comparisons that cannot pass by accident: NaN, Inf, and differing shapes or dtypes always fail."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["assert_bitwise", "assert_close", "relative_error"]


def relative_error(actual: Tensor, expected: Tensor, *, name: str = "", same_infinities: bool = False) -> float:
    """``max|actual - expected| / max|expected|`` in float64; dtypes may differ (bf16 result, fp64 oracle).

    With ``same_infinities`` (for log-sum-exp of rows that see nothing) infinite elements must be the same
    ones with the same sign, and the rest is compared. If ``expected`` is all zero the result is 0 or
    infinite.

    Raises:
        AssertionError: shapes differ, nothing to compare, NaN, or Inf.
    """
    prefix = f"{name}: " if name else ""
    assert actual.shape == expected.shape, f"{prefix}shape {tuple(actual.shape)} != {tuple(expected.shape)}"
    assert actual.numel() > 0, f"{prefix}shape {tuple(actual.shape)} has nothing to compare"
    a, e = (t.detach().to("cpu", torch.float64) for t in (actual, expected))
    if same_infinities:
        infinite = e.isinf()
        mismatch = (a != e) & (infinite | a.isinf())
        assert not mismatch.any(), f"{prefix}infinite elements differ at {_first(mismatch)}"
        a, e = a[~infinite], e[~infinite]
        if a.numel() == 0:
            return 0.0
    for which, tensor in (("actual", a), ("expected", e)):
        bad = ~tensor.isfinite()
        assert not bad.any(), f"{prefix}{which} has {int(bad.sum())} NaN or Inf, first at {_first(bad)}"
    difference, scale = float((a - e).abs().max()), float(e.abs().max())
    if scale == 0.0:
        return 0.0 if difference == 0.0 else float("inf")
    return difference / scale


def assert_close(
    actual: Tensor, expected: Tensor, *, rel: float, name: str = "", same_infinities: bool = False
) -> None:
    """Fail unless shapes and dtypes are equal and :func:`relative_error` is at most ``rel``."""
    prefix = f"{name}: " if name else ""
    assert actual.dtype == expected.dtype, f"{prefix}dtype {actual.dtype} != {expected.dtype}"
    error = relative_error(actual, expected, name=name, same_infinities=same_infinities)
    assert error <= rel, f"{prefix}relative error {error:.3e} > {rel:.3e} for shape {tuple(actual.shape)}"


def assert_bitwise(actual: Tensor, expected: Tensor, *, name: str = "", allow_nonfinite: bool = False) -> None:
    """Fail unless shapes, dtypes and all bits are equal (0 and -0 differ) and all values finite."""
    prefix = f"{name}: " if name else ""
    assert actual.dtype == expected.dtype, f"{prefix}dtype {actual.dtype} != {expected.dtype}"
    assert actual.shape == expected.shape, f"{prefix}shape {tuple(actual.shape)} != {tuple(expected.shape)}"
    a, e = actual.detach().cpu().contiguous(), expected.detach().cpu().contiguous()
    if not allow_nonfinite:
        bad = ~e.isfinite()
        assert not bad.any(), f"{prefix}expected has {int(bad.sum())} NaN or Inf, first at {_first(bad)}"
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    different = a.view(width) != e.view(width)
    first = _first(different) if different.any() else ()
    assert not different.any(), f"{prefix}{int(different.sum())} of {a.numel()} elements differ, first at {first}"


def _first(mask: Tensor) -> tuple[int, ...]:
    return tuple(mask.nonzero()[0].tolist())
