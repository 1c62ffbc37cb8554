"""One process of a run: joins the others, trains, turns what went wrong into one line and an exit status."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.rendezvous import rendezvous

from laga_attn.train.errors import UsageError
from laga_attn.train.options import TrainOptions
from laga_attn.train.setup import examine
from laga_attn.train.stop import StopRequest
from laga_attn.train.together import everywhere

__all__ = ["run_worker"]

_OK, _FAILED, _USAGE = 0, 1, 2
# How the transports of torch word it when another process has gone or stays silent.
_SIGNS_OF_LOSS = ("gloo", "nccl", "connection", "timed out", "timeout", "broken pipe")


def run_worker(options: TrainOptions, stop_file: Path | None = None) -> int:
    """Train as the rank that the environment (`RANK`, `WORLD_SIZE`, ...) says, alone if it says nothing.

    Returns:
        The exit status: 0 done or stopped on request, 2 something that the user has to change, 1 another error.
    """
    from laga_attn.train.loop import train

    console, errors = _plain_console(stderr=False), _plain_console(stderr=True)
    rank = int(os.environ.get("RANK", "0"))
    restarted = _attempt() > 0
    with StopRequest(stop_file).listening() as stop:
        try:
            with _process_group(options) as device:
                run = everywhere(lambda: examine(options, dist.get_world_size(), restarted=restarted))
                train(run, device, stop, console)
        except UsageError as error:
            errors.print(f"Error: {error}")
            return _USAGE
        except (Exception, CheckpointException) as error:  # the latter is a BaseException
            lost = _loss_of_contact(error)
            if lost is None:
                traceback.print_exc()
                return _FAILED
            errors.print(
                f"Error: rank {rank} lost another rank, which has died or has not answered for "
                f"{options.timeout:g} s (--timeout); continue from the last checkpoint with --resume. [{lost}]"
            )
            return _FAILED
    return _OK


def _plain_console(*, stderr: bool) -> Console:
    """Prints text as it is: paths keep their brackets, lines their length."""
    return Console(stderr=stderr, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _process_group(options: TrainOptions) -> Iterator[torch.device]:
    """Join the default process group; yields the device of this rank.

    After an error other than `UsageError`, which all ranks raise together, the group is left as it is: leaving it
    properly would wait for ranks that are gone.
    """
    device = _device(options)
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=options.timeout)
    store, rank, world = _meeting_point(timeout)
    dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=world)
    try:
        yield device
        dist.barrier()
    except UsageError:
        dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def _meeting_point(timeout: timedelta) -> tuple[Store, int, int]:
    """`(store, rank, world size)`: where the ranks find each other."""
    if "RANK" not in os.environ:
        return HashStore(), 0, 1
    store, rank, world = next(rendezvous("env://", timeout=timeout))
    # torch's elastic launcher keeps one store for all attempts, full of addresses of ranks that are gone.
    return PrefixStore(f"attempt-{_attempt()}", store), rank, world


def _attempt() -> int:
    """How often the launcher has started the ranks again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _device(options: TrainOptions) -> torch.device:
    if options.device == "cpu" or (options.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    local_rank, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local_rank >= count:
        raise UsageError(
            f"this machine has {count} CUDA devices for at least {local_rank + 1} processes; start one process "
            "per device, or use --device cpu"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _loss_of_contact(error: BaseException) -> str | None:
    """The first line of a message that says that another rank is gone, None for any other error."""
    if isinstance(error, CheckpointException):
        causes = [cause for cause, _ in error.failures.values()]
        return next((text for text in map(_loss_of_contact, causes) if text is not None), None)
    text = (str(error).splitlines() or [""])[0]
    known = isinstance(error, dist.DistError) or any(sign in text.lower() for sign in _SIGNS_OF_LOSS)
    return text if isinstance(error, RuntimeError) and known else None
