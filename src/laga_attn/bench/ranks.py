"""Run a function as several context-parallel ranks on this machine."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

__all__ = ["Device", "Place", "run_on_ranks"]

Device = Literal["cpu", "cuda"]

_CLONE_NEWNET: Final = 0x40000000


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the network a rank lives.

    Attributes:
        interface: the device by which other ranks reach it.
        namespace: the network namespace that the device is in, as a file; None: the one of this process.
    """

    interface: str
    namespace: str | None = None


def run_on_ranks(
    function: Callable[..., Any],
    size: int,
    *args: object,
    threads: int = 1,
    device: Device = "cpu",
    places: Sequence[Place] | None = None,
) -> list[Any]:
    """`function(*args)` in `size` new processes that form the default process group.

    Args:
        function: a function at the top of its module.
        size: number of processes.
        args: its arguments; like the results they must be picklable.
        threads: that each process computes with.
        device: CPU tensors travel by gloo. With `"cuda"` each process gets a GPU, and tensors there travel by NCCL;
            where there are fewer GPUs than processes, these share them and use gloo, for NCCL refuses.
        places: of the ranks; None: all on the loopback device of this machine, on Linux, else as the host name says.

    Returns:
        The results in rank order.

    Raises:
        Exception: a process could not be started or failed; its traceback is in the message.
    """
    with tempfile.TemporaryDirectory(prefix="laga-attn-") as folder:
        arguments = (size, Path(folder), threads, device, places, function, args)
        context = spawn(_run_rank, args=arguments, nprocs=size, join=False)
        assert context is not None
        try:
            while not context.join():
                pass
        finally:  # Ctrl-C, too: nobody is left behind
            for process in context.processes:
                process.kill()
                process.join()
        return [torch.load(Path(folder, f"result-{rank}"), weights_only=False) for rank in range(size)]


def _run_rank(
    rank: int,
    size: int,
    folder: Path,
    threads: int,
    device: Device,
    places: Sequence[Place] | None,
    function: Callable[..., Any],
    args: tuple[object, ...],
) -> None:
    Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    _move_to(places[rank] if places else None)
    backend = "gloo"
    if device == "cuda":
        gpus = torch.cuda.device_count()
        torch.cuda.set_device(rank % gpus)
        backend = f"cpu:gloo,cuda:{'nccl' if gpus >= size else 'gloo'}"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=size)
    torch.save(function(*args), folder / f"result-{rank}")
    dist.barrier()
    dist.destroy_process_group()


def _end_with_parent() -> None:
    """A parent that is killed tells nobody, and the interrupt that PyTorch then sends is ignored under nohup."""
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)


def _move_to(place: Place | None) -> None:
    """Before the process group exists, whose sockets stay where they were opened."""
    if place is None:
        if sys.platform == "linux":
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # not whatever the host name resolves to
        return
    os.environ["GLOO_SOCKET_IFNAME"] = place.interface
    if place.namespace is not None:
        with open(place.namespace, "rb") as namespace:
            libc = ctypes.CDLL(None, use_errno=True)  # os.setns came with Python 3.12
            if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                error = ctypes.get_errno()
                raise OSError(error, os.strerror(error), place.namespace)
