"""The yardstick of speed: the fastest matrix product that this machine does in a dtype, all ranks at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Gemm", "fastest_gemm"]

Product: TypeAlias = Callable[[Tensor, Tensor], Any]

_SIZES: Final = {"cpu": (2048, 1024, 512), "cuda": (8192, 4096)}  # 512: fits in the caches of a core
_REPEAT: Final = 2


@dataclass(frozen=True, slots=True)
class Gemm:
    """Square products, to be timed like any other contestant.

    Attributes:
        how: size and operator.
        flops: of one step, on one rank.
    """

    how: str
    flops: int
    step: Callable[[], object]


def fastest_gemm(dtype: torch.dtype, device: torch.device, finish: Callable[[], object]) -> Gemm:
    """Time products of several sizes by every operator that does them; keep what is fastest on all ranks.

    Collective over the default process group: threads of all ranks compete for the machine as they do in attention.

    Args:
        dtype: of the matrices.
        device: of the matrices.
        finish: waits for what was left to the device.
    """
    candidates = []
    sizes = _SIZES[device.type]
    for size in sizes:
        calls = (max(sizes) // size) ** 3  # the same FLOPs in every candidate
        a, b = (torch.randn(size, size).to(device, dtype) for _ in range(2))
        for name, operator in _operators(dtype, device).items():
            how = f"{name} of {size} x {size} matrices"
            candidates.append(Gemm(how, 2 * calls * size**3, _repeated(operator, a, b, calls)))
    seconds = torch.tensor([_best_seconds(candidate.step, finish) for candidate in candidates], dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return candidates[int(seconds.argmin())]


def _operators(dtype: torch.dtype, device: torch.device) -> dict[str, Product]:
    operators: dict[str, Product] = {"torch.mm": torch.mm}
    # On some CPUs the default library reaches only half of what oneDNN does in fp32; the peak is the peak.
    if device.type == "cpu" and dtype == torch.float32 and torch.backends.mkldnn.is_available():
        operators["oneDNN"] = lambda a, b: torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")
    return operators


def _repeated(operator: Product, a: Tensor, b: Tensor, calls: int) -> Callable[[], None]:
    def step() -> None:
        for _ in range(calls):
            operator(a, b)

    return step


def _best_seconds(step: Callable[[], object], finish: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(_REPEAT):
        dist.barrier()
        started = time.perf_counter()
        step()
        finish()
        best = min(best, time.perf_counter() - started)
    return best
