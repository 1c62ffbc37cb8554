"""Real training processes, started the three ways that users start them."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from laga_attn.train.metrics import read_metrics
from laga_attn.train.options import TrainOptions

__all__ = [
    "Started",
    "children_of",
    "command_line",
    "launcher",
    "outcome",
    "ranks_by_hand",
    "torchrun",
    "wait_for_step",
]

Started = subprocess.Popen[str]

_REPOSITORY = Path(__file__).parents[2]
_CLI = [sys.executable, "-m", "tests.train.held", "train"]
# Below those that Linux and others hand out: one that was free stays free until rank 0 listens there, seconds later.
_PORTS = range(20000, 32768)


def command_line(options: TrainOptions) -> list[str]:
    """The arguments of `laga-attn train` that give `options`."""
    words: list[str] = []
    for name, value in asdict(options).items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif isinstance(value, tuple):
            words += [word for item in value for word in (flag, item)]
        elif value is not None and value is not False:
            words += [flag, str(value)]
    return words


@contextmanager
def launcher(words: Sequence[str]) -> Iterator[Started]:
    """`laga-attn train` with these arguments."""
    with _running([*_CLI, *words]) as process:
        yield process


@contextmanager
def torchrun(words: Sequence[str], nproc: int, max_restarts: int) -> Iterator[Started]:
    """The same under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    with _running([*command, "--max-restarts", str(max_restarts), "-m", *_CLI[2:], *words]) as process:
        yield process


@contextmanager
def ranks_by_hand(words: Sequence[str], size: int) -> Iterator[list[Started]]:
    """One process per rank, with no launcher to watch over them."""
    common = {"WORLD_SIZE": str(size), "MASTER_ADDR": "localhost", "MASTER_PORT": str(_free_port())}
    with ExitStack() as stack:
        yield [
            stack.enter_context(_running([*_CLI, *words], RANK=str(rank), LOCAL_RANK=str(rank), **common))
            for rank in range(size)
        ]


def outcome(process: Started, timeout: float = 300.0) -> tuple[int, str, str]:
    """Wait for the end: exit status, stdout, stderr."""
    stdout, stderr = process.communicate(timeout=timeout)
    return process.returncode, stdout, stderr


def wait_for_step(out: Path, step: int, process: Started, timeout: float = 300.0) -> None:
    """Return once `step` steps are on record; fail if the process ends before."""
    path = out / "metrics.jsonl"
    deadline = time.monotonic() + timeout
    while not (path.exists() and len(read_metrics(path)) >= step):
        assert process.poll() is None, f"ended early:\n{process.communicate()}"
        assert time.monotonic() < deadline, f"step {step} was not reached in {timeout} s"
        time.sleep(0.01)


def children_of(pid: int) -> list[int]:
    """Process ids of the training processes below `pid`, in the order in which they were started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if "resource_tracker" not in _command(child)]


def _command(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except FileNotFoundError:  # it ended after it was listed
        return "resource_tracker"


def _free_port() -> int:
    for port in random.sample(_PORTS, 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("localhost", port))
            return port
    raise RuntimeError(f"100 ports of {_PORTS} are taken")


@contextmanager
def _running(words: Sequence[str], **environment: str) -> Iterator[Started]:
    """A process in a process group of its own, all of which is killed at the end of the block."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    process = subprocess.Popen(
        words,
        cwd=_REPOSITORY,  # where `tests` is found
        env={**inherited, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
