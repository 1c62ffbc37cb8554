"""The yardstick of speed: the fastest matrix product that this machine does in a dtype, all ranks at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Gemm", "fastest_gemm"]

_SIZE: Final = 2048
_REPEAT: Final = 3


@dataclass(frozen=True, slots=True)
class Gemm:
    """A square product to be timed like any other contestant.

    Attributes:
        how: the operator that does it.
        flops: of one call, on one rank.
    """

    how: str
    flops: int
    step: Callable[[], object]


def fastest_gemm(dtype: torch.dtype, size: int = _SIZE) -> Gemm:
    """Time every operator that multiplies two `[size, size]` matrices, and keep the one that is fastest on all ranks.

    Collective over the default process group: threads of all ranks compete for the machine as they do in attention.
    """
    a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
    steps = _operators(a, b)
    seconds = torch.tensor([_best_seconds(step) for step in steps.values()], dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    how = list(steps)[int(seconds.argmin())]
    return Gemm(how, 2 * size**3, steps[how])


def _operators(a: Tensor, b: Tensor) -> dict[str, Callable[[], object]]:
    steps: dict[str, Callable[[], object]] = {"torch.mm": partial(torch.mm, a, b, out=torch.empty_like(a))}
    # On some CPUs the default library reaches only half of what oneDNN does in fp32; the peak is the peak.
    if a.dtype == torch.float32 and torch.backends.mkldnn.is_available():
        steps["oneDNN linear"] = partial(torch.ops.mkldnn._linear_pointwise, a, b, None, "none", [], "")
    return steps


def _best_seconds(step: Callable[[], object]) -> float:
    step()
    best = float("inf")
    for _ in range(_REPEAT):
        dist.barrier()
        started = time.perf_counter()
        step()
        best = min(best, time.perf_counter() - started)
    return best
