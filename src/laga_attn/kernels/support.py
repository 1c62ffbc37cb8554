"""Rows of the support table: what a kernel computes, and why it refuses a case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = [
    "ANY_DIMS",
    "CUDNN_DIMS",
    "EQUAL_DIMS",
    "EVEN_DIMS",
    "FLASH3_DIMS",
    "FLASH4_DIMS",
    "MULTIPLES_OF_8",
    "Case",
    "HeadDims",
    "Support",
]


@dataclass(frozen=True, slots=True)
class HeadDims:
    """A rule on (qk_head_dim, v_head_dim), and the same rule in words."""

    accepts: Callable[[int, int], bool]
    words: str


ANY_DIMS = HeadDims(lambda qk, v: True, "any")
EQUAL_DIMS = HeadDims(lambda qk, v: qk == v, "qk_head_dim == v_head_dim")
EVEN_DIMS = HeadDims(lambda qk, v: qk % 2 == v % 2 == 0, "both even")
MULTIPLES_OF_8 = HeadDims(lambda qk, v: qk % 8 == 0 and v % 8 == 0, "both multiples of 8")
# Those for which the packages promise or test backward.
FLASH3_DIMS = HeadDims(
    lambda qk, v: qk % 8 == v % 8 == 0 and (qk == v <= 256 or (128 < qk <= 192 and 96 < v <= 128)),
    "multiples of 8: equal up to 256, or above 128 up to 192 / above 96 up to 128",
)
FLASH4_DIMS = HeadDims(
    lambda qk, v: (qk % 8 == 0 and qk == v <= 128) or (qk, v) == (192, 128),
    "multiples of 8: equal up to 128, or 192/128",
)
CUDNN_DIMS = HeadDims(
    lambda qk, v: (qk % 8 == v % 8 == 0 and max(qk, v) <= 128) or (qk, v) == (192, 128),
    "multiples of 8: up to 128, or 192/128",
)


@dataclass(frozen=True, slots=True)
class Case:
    """What a caller wants computed."""

    device: str
    dtype: torch.dtype
    qk_head_dim: int
    v_head_dim: int
    window: bool
    shared_kv: bool
    lse_gradient: bool = False


@dataclass(frozen=True, slots=True)
class Support:
    """One row of the table: what a kernel computes on a kind of device."""

    name: str
    devices: tuple[str, ...]  # torch device types; empty: any
    dtypes: tuple[torch.dtype, ...]
    head_dims: HeadDims
    window: bool  # sliding-window spans
    shared_kv: bool  # one key/value head for all query heads
    how: str
    missing: Callable[[torch.dtype], str | None] = lambda dtype: None  # what this machine lacks to compute in a dtype
    lse_gradient: bool = True  # gradients of the LSE

    def misfit(self, device: str, dtype: torch.dtype) -> str | None:
        """Why this row is not for a device type and dtype, on whatever machine; None if it is."""
        if self.devices and device not in self.devices:
            return f"device {device}: it runs on {', '.join(self.devices)}"
        if dtype not in self.dtypes:
            return f"{dtype}: it takes {', '.join(str(d).removeprefix('torch.') for d in self.dtypes)}"
        return None

    def refusal(self, case: Case) -> str | None:
        """Why this row cannot compute ``case``; None if it can."""
        misfit = self.misfit(case.device, case.dtype)
        if misfit is not None:
            return misfit
        if not self.head_dims.accepts(case.qk_head_dim, case.v_head_dim):
            return f"head dims {case.qk_head_dim}/{case.v_head_dim}: it needs {self.head_dims.words}"
        if case.window and not self.window:
            return "window: it has no sliding window"
        if case.shared_kv and not self.shared_kv:
            return "shared key/value head: it would hold key and value gradients of every head"
        if case.lse_gradient and not self.lse_gradient:
            return "gradient of the LSE: it has that of the output alone"
        return self.missing(case.dtype)
