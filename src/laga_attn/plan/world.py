"""A cluster of any size in one process: torch's fake process group, whose collectives move nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch.utils._python_dispatch import TorchDispatchMode

from laga_attn.grid import ContextParallel

__all__ = ["EmptyMessages", "empty_message", "fake_ranks"]


@contextmanager
def fake_ranks(
    size: int, rank: int, ulysses_degree: int | None = None, *, two_level: bool = False
) -> Iterator[ContextParallel]:
    """Be rank `rank` of `size` context-parallel ranks that exist in name only.

    Collectives return at once and leave their results as they were allocated: sizes are right, values are not. As with
    NCCL, the pieces of an all-to-all are sent from where they lie. PyTorch has one thread meanwhile.

    Raises:
        ValueError: a rank outside the group, or a process group that this process has joined already.
    """
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} is not one of {size} ranks; choose 0 to {size - 1}")
    if size > 1 and dist.is_initialized():
        raise ValueError("this process has joined a process group; plan in a process of its own")
    with _one_thread():
        if size == 1:
            yield ContextParallel.none()
            return
        from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

        dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
        try:
            world = dist.group.WORLD
            assert world is not None
            yield ContextParallel(world, ulysses_degree, two_level=two_level)
        finally:
            dist.destroy_process_group()


@contextmanager
def _one_thread() -> Iterator[None]:
    """The heads that a rank takes at a time on a CPU follow its threads; those of this machine mean nothing there."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def empty_message(args: Sequence[Any]) -> Any:
    """What `c10d::alltoall_` returns once it is done, nothing having moved."""
    return args[0], FakeWork().boxed()


class EmptyMessages(TorchDispatchMode):
    """Lets tensors with data run on fake ranks: what an all-to-all would bring is zero.

    Left alone, the fake process group copies what is sent into what is received, which needs pieces of equal sizes.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d.alltoall_.default:
            for received in args[0]:
                received.zero_()
            return empty_message(args)
        return func(*args, **(kwargs or {}))
