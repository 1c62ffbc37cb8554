"""A pool of worker processes that run test functions as context-parallel ranks over gloo.

Four processes start with the first test that needs them and stay until the session ends, so a test on several
ranks costs milliseconds. Tests use them through the ``ranks`` fixture::

    def gathers(ctx, rows):                     # a plain function of the test module; runs in every rank
        return all_gather_rows(torch.full((rows, 2), ctx.rank), ContextParallel(ctx.group), ...).wait()

    def test_gather(ranks):
        for out in ranks(3).run(gathers, 5): ...                            # results of rank 0, 1, 2

    def test_bad_rows(ranks):
        ranks(2).run_raises(gathers, -1, match="rows")                      # the same ValueError on all ranks

Arguments and results are pickled; tensors come back detached. Every task starts with seed 0 and with
uninitialised memory that reads as NaN.
"""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import pickle
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

__all__ = ["RankContext", "RankGroup", "RankHung", "RankPool", "poisoned_memory"]

WORLD = 4
_GRACE = 5.0  # seconds that the other ranks get to finish after one has failed

# One server imports what takes long; the workers, also those of a restarted pool, are forked from it.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["tests.pool", "laga_attn", "pytest", "hypothesis"])


@dataclass(frozen=True)
class RankContext:
    """What a test function learns about the rank that it runs as."""

    rank: int
    size: int
    group: dist.ProcessGroup  # gloo, ranks 0 .. size-1 of a world of 4


class RankHung(TimeoutError):
    """A rank did not finish in time, or not soon after another rank had failed."""


@dataclass(frozen=True)
class _Outcome:
    value: Any = None
    error: BaseException | None = None
    text: str = ""  # traceback


@dataclass(frozen=True)
class RankGroup:
    """The first ``size`` ranks of a pool."""

    pool: RankPool
    size: int

    def run(self, fn: Callable[..., Any], *args: object, timeout: float = 60.0) -> list[Any]:
        """``fn(ctx, *args)`` on every rank; results in rank order.

        The exception of the lowest rank that failed is raised here, with all ranks' tracebacks as notes. A
        rank that hung counts last: it waited for one that failed.
        """
        outcomes = self.pool.outcomes(self.size, fn, args, timeout)
        errors = [o.error for o in outcomes if o.error is not None]
        if errors:
            error = min(errors, key=lambda e: isinstance(e, RankHung))
            for rank, outcome in enumerate(outcomes):
                error.add_note(f"--- rank {rank} of {self.size}: {outcome.text or 'finished'}")
            raise error
        return [outcome.value for outcome in outcomes]

    def run_raises(
        self,
        fn: Callable[..., Any],
        *args: object,
        error: type[BaseException] = ValueError,
        match: str = "",
        same: bool = True,
        timeout: float = 60.0,
    ) -> list[str]:
        """Assert that ``fn(ctx, *args)`` raises ``error`` on all ranks, with a text that ``match`` fits.

        With ``same`` the text must be the same on all ranks. Returns the texts in rank order.
        """
        outcomes = self.pool.outcomes(self.size, fn, args, timeout)
        report = "\n".join(f"--- rank {r}: {o.text or f'returned {o.value!r}'}" for r, o in enumerate(outcomes))
        assert all(type(o.error) is error for o in outcomes), f"expected {error.__name__} on all ranks\n{report}"
        texts = [str(o.error) for o in outcomes]
        for text in texts:
            assert re.search(match, text), f"{match!r} not found in an error\n{report}"
        assert not same or len(set(texts)) == 1, f"the ranks' errors differ\n{report}"
        return texts


class RankPool:
    """Four workers; started by the first run, replaced after one that may have left them out of step."""

    def __init__(self) -> None:
        self._workers: list[tuple[multiprocessing.process.BaseProcess, connection.Connection]] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def outcomes(self, size: int, fn: Callable[..., Any], args: object, timeout: float) -> list[_Outcome]:
        """What happens when the first ``size`` ranks run ``fn(ctx, *args)``."""
        if not 1 <= size <= WORLD:
            raise ValueError(f"the pool runs 1 to {WORLD} ranks, not {size}")
        if fn.__qualname__ != fn.__name__:
            raise ValueError(f"{fn.__qualname__} must be a plain function at the top of its module")
        task = pickle.dumps((size, fn.__module__, fn.__name__, args))
        try:
            if not self._workers:
                self._start()
            for _, pipe in self._workers[:size]:
                pipe.send_bytes(task)
            outcomes = self._collect(size, timeout)
        except BaseException:  # a test timeout or Ctrl-C while ranks are running
            self.close()
            raise
        # A failure on some ranks only, or at different places, leaves collectives half done.
        if len({(type(o.error), str(o.error)) for o in outcomes}) > 1:
            self.close()
        return outcomes

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="laga-ranks-")
        for rank in range(WORLD):
            ours, theirs = _processes.Pipe()
            worker = _processes.Process(target=_serve, args=(rank, theirs, self._folder.name), daemon=True)
            worker.start()
            theirs.close()
            self._workers.append((worker, ours))

    def _collect(self, size: int, timeout: float) -> list[_Outcome]:
        deadline = time.monotonic() + timeout
        outcomes: dict[int, _Outcome] = {}
        while len(outcomes) < size:
            waiting = {self._workers[r][1]: r for r in range(size) if r not in outcomes}
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                for rank in waiting.values():
                    hung = RankHung(f"rank {rank} of {size} did not finish; its pool was stopped")
                    outcomes[rank] = _Outcome(error=hung, text=f"hung here:\n{self._stack(rank)}")
            for pipe in ready:
                assert isinstance(pipe, connection.Connection)
                rank = waiting[pipe]
                try:
                    outcomes[rank] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    died = ChildProcessError(f"rank {rank} of {size} died")
                    outcomes[rank] = _Outcome(error=died, text=f"died: {self._workers[rank][0]}")
                if outcomes[rank].error is not None:
                    deadline = min(deadline, time.monotonic() + _GRACE)
        return [outcomes[rank] for rank in range(size)]

    def _stack(self, rank: int) -> str:
        """Where a worker is right now."""
        worker = self._workers[rank][0]
        assert worker.pid is not None
        assert self._folder is not None
        os.kill(worker.pid, signal.SIGUSR1)
        time.sleep(0.3)
        return _stack_file(self._folder.name, rank).read_text()

    def close(self) -> None:
        """Stop the workers at once, whatever they do."""
        for worker, pipe in self._workers:
            worker.kill()
            worker.join()
            pipe.close()
        self._workers.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Let ``torch.empty`` and its kin return NaN (integers: the largest), so that nothing relies on zeros.

    This is a part of torch's deterministic mode, here with warnings for what the rest of that mode forbids.
    """
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _serve(rank: int, pipe: connection.Connection, folder: str) -> None:
    """Life of a worker: join the groups, then run tasks until the other end of the pipe closes."""
    with _stack_file(folder, rank).open("w") as stack_file:
        faulthandler.register(signal.SIGUSR1, stack_file, all_threads=True)
        torch.set_num_threads(1)
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # not whatever the host name resolves to
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD)
        groups = {size: dist.new_group(list(range(size))) for size in range(1, WORLD + 1)}
        while True:
            try:
                task = pipe.recv_bytes()
            except EOFError:
                return
            pipe.send_bytes(_attempt(task, rank, groups))


def _attempt(task: bytes, rank: int, groups: Mapping[int, dist.ProcessGroup]) -> bytes:
    try:
        size, module, name, args = pickle.loads(task)
        ctx = RankContext(rank, size, groups[size])
        torch.manual_seed(0)
        with poisoned_memory():
            value = getattr(importlib.import_module(module), name)(ctx, *args)
        # A clone leaves the rest of a shared storage behind. Plain pickle, unlike the pipe's, copies bytes.
        value = tree_map_only(torch.Tensor, lambda t: t.detach().clone(), value)
        return pickle.dumps(_Outcome(value))
    except BaseException as error:
        text = traceback.format_exc()
        try:
            packed = pickle.dumps(_Outcome(error=error, text=text))
            pickle.loads(packed)  # some exceptions only fail here
        except Exception:
            packed = pickle.dumps(_Outcome(error=RuntimeError(f"{type(error).__name__}: {error}"), text=text))
        return packed


def _stack_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"stack-{rank}"
