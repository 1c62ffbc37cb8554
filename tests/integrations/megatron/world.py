"""Megatron's parallel groups on the workers of the pool."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tests.megatron_cpu import megatron_on_cpu

__all__ = ["Parallel", "megatron_ranks"]


@dataclass(frozen=True)
class Parallel:
    """How the four workers are used; what is left over is data parallel."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    sequence_parallel: bool = False


@contextmanager
def megatron_ranks(parallel: Parallel) -> Iterator[None]:
    """Megatron on the CPU with its global state set to a layout of all ranks of the world."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    before = _state(parallel_state)
    with megatron_on_cpu():
        try:
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=parallel.tp,
                context_parallel_size=parallel.cp,
                pipeline_model_parallel_size=parallel.pp,
            )
            model_parallel_cuda_manual_seed(1)
            torch.manual_seed(0)
            yield
        finally:
            vars(parallel_state).update(before)
            dist.barrier()


def _state(module: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name.startswith("_") and name.isupper()}
