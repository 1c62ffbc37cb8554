"""Bytes that ranks really put on the network, counted by the kernel.

The ranks run in a network namespace of their own, whose loopback device carries nothing but their messages.
Every byte passes the device once, whichever two ranks it travels between. Tests use it through a fixture,
which skips them where a namespace cannot be had (it takes root, iproute2 and unshare)::

    def test_bytes(private_network):
        wire = private_network.run(exchanges, 2, 1_000_000)     # like ranks(2).run(exchanges, 1_000_000)
        wire.bytes, wire.results

Packet headers and acknowledgements count too: less than 0.5 % for messages of megabytes, since a loopback
packet holds 64 KiB, but most of a message of a few bytes. What TCP sends a second time does not: on a busy machine
packets overtake each other, and the sender takes them for lost.
"""

from __future__ import annotations

import importlib
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.pool import RankContext, RankGroup, RankPool

__all__ = ["PrivateNetwork", "Wire", "available"]

_ENTER = ["unshare", "--net", "--", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]


@dataclass(frozen=True)
class Wire:
    """Bytes that all ranks together sent over the loopback device, each once, and the results in rank order."""

    bytes: int
    results: list[Any]


def available() -> bool:
    """Whether this process may create a network namespace with a working loopback device."""
    if not all(shutil.which(command) for command in ("unshare", "ip", "ss")):
        return False
    return subprocess.run([*_ENTER, "true"], capture_output=True, check=False).returncode == 0


class PrivateNetwork:
    """A pool of ranks on a network of their own; started by the first run."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None

    def run(self, fn: Callable[..., Any], size: int, *args: object, timeout: float = 60.0) -> Wire:
        """``fn(ctx, *args)`` on every rank, as with ``ranks(size).run``, and what went over the network."""
        try:
            if self._server is None:
                self._server = self._start()
            assert self._server.stdin is not None
            assert self._server.stdout is not None
            pickle.dump((fn.__module__, fn.__name__, size, args, timeout), self._server.stdin)
            self._server.stdin.flush()
            answer = pickle.load(self._server.stdout)
        except BaseException:  # also a test timeout: the answer would be taken for that of the next run
            self.close()
            raise
        if isinstance(answer, BaseException):
            raise answer
        assert isinstance(answer, Wire)
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        command = [*_ENTER, sys.executable, "-c", "from tests.netns import serve; serve()"]
        path = os.pathsep.join(entry for entry in sys.path if entry)
        return subprocess.Popen(
            command,
            cwd=Path(__file__).parent.parent,
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def close(self) -> None:
        """Leave the network, which disappears with its last process."""
        if self._server is not None:
            assert self._server.stdin is not None
            self._server.stdin.close()  # the server's sign to stop its ranks and end
            self._server.wait()
            self._server = None


def serve() -> None:
    """Inside the namespace: answer requests until they end."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what tests print must not end up among the answers
    pool = RankPool()
    try:
        while True:
            try:
                module, name, size, args, timeout = pickle.load(sys.stdin.buffer)
            except EOFError:
                return
            answer: Wire | Exception
            try:
                ranks = RankGroup(pool, size)
                ranks.run(_meet)
                repeats, before = _sent_again(), _sent_over_loopback()
                results = ranks.run(getattr(importlib.import_module(module), name), *args, timeout=timeout)
                sent = _sent_over_loopback() - before
                again = sum(count - repeats.get(socket, 0) for socket, count in _sent_again().items())
                answer = Wire(sent - again, results)
            except Exception as error:
                answer = error
            pickle.dump(answer, answers)
            answers.flush()
    finally:
        pool.close()


def _meet(ctx: RankContext) -> None:
    """Nothing: starts the workers if need be, so that their rendezvous is not counted."""


def _sent_over_loopback() -> int:
    # Not /sys/class/net, which shows the namespace in which it was mounted.
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[8])
    raise RuntimeError("this network namespace has no loopback device")


def _sent_again() -> dict[str, int]:
    """Bytes that each connected socket of this namespace has sent more than once, by its two addresses."""
    lines = subprocess.run(["ss", "-tiHOn"], capture_output=True, check=True, text=True).stdout.splitlines()
    counts = ((line.split()[3:5], re.search(r"bytes_retrans:(\d+)", line)) for line in lines)
    return {" ".join(ends): int(count[1]) for ends, count in counts if count}
