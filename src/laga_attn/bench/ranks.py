"""Run a function as several context-parallel ranks on this machine."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

__all__ = ["run_on_ranks"]


def run_on_ranks(function: Callable[..., Any], size: int, *args: object) -> list[Any]:
    """`function(*args)` in `size` new processes that form the default process group over gloo, one thread each.

    Args:
        function: a function at the top of its module.
        size: number of processes.
        args: its arguments; like the results they must be picklable.

    Returns:
        The results in rank order.

    Raises:
        Exception: a process could not be started or failed; its traceback is in the message.
    """
    with tempfile.TemporaryDirectory(prefix="laga-attn-") as folder:
        spawn(_run_rank, args=(size, Path(folder), function, args), nprocs=size)
        return [torch.load(Path(folder, f"result-{rank}"), weights_only=False) for rank in range(size)]


def _run_rank(rank: int, size: int, folder: Path, function: Callable[..., Any], args: tuple[object, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    torch.save(function(*args), folder / f"result-{rank}")
    dist.barrier()
    dist.destroy_process_group()
