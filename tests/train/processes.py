"""Real training processes, started the three ways that users start them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from laga_attn.train.metrics import read_metrics
from laga_attn.train.options import TrainOptions

__all__ = ["Started", "children_of", "command_line", "ranks_by_hand", "start", "torchrun", "wait_for_step"]

Started = subprocess.Popen[str]

_CLI = [sys.executable, "-m", "laga_attn.cli", "train"]


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


def start(words: Sequence[str], **environment: str) -> Started:
    """`laga-attn train` with these arguments; stdout and stderr can be read from it."""
    return _popen([*_CLI, *words], environment)


def torchrun(words: Sequence[str], nproc: int, max_restarts: int = 0) -> Started:
    """The same under torchrun."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(nproc), "--standalone"]
    return _popen([*launcher, "--max-restarts", str(max_restarts), "-m", *_CLI[2:], *words], {})


@contextmanager
def ranks_by_hand(words: Sequence[str], size: int) -> Iterator[list[Started]]:
    """One process per rank that no launcher watches over; those still alive at the end are killed."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    common = {"WORLD_SIZE": str(size), "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    processes = [start(words, RANK=str(rank), LOCAL_RANK=str(rank), **common) for rank in range(size)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def wait_for_step(out: Path, step: int, process: Started, timeout: float = 90.0) -> None:
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
    return [int(child) for child in children if "resource_tracker" not in Path(f"/proc/{child}/cmdline").read_text()]


def _popen(words: Sequence[str], environment: dict[str, str]) -> Started:
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.Popen(
        words,
        env={**inherited, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A test's Ctrl-C goes to the process that it names, not to pytest's whole process group.
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
    )
