"""Bytes that ranks really put on the network, counted by the kernel.

The ranks run in a network namespace of their own, whose loopback device carries nothing but their messages.
Every byte passes the device once, whichever two ranks it travels between::

    if netns.available():
        wire = netns.run(exchanges, 2, 1_000_000)      # like ranks(2).run(exchanges, 1_000_000)
        wire.bytes, wire.results

Packet headers and acknowledgements count too: less than 0.5 % for messages of megabytes, since a loopback
packet holds 64 KiB, but most of a message of a few bytes.
"""

from __future__ import annotations

import functools
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.pool import RankGroup, RankPool

__all__ = ["Wire", "available", "run"]

_ENTER = ["unshare", "--net", "--", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]


@dataclass(frozen=True)
class Wire:
    """Bytes that all ranks together sent over the loopback device, and the results of the ranks."""

    bytes: int
    results: list[Any]


@functools.cache
def available() -> bool:
    """Whether this process may create a network namespace: needs root, iproute2 and util-linux."""
    if not (shutil.which("unshare") and shutil.which("ip")):
        return False
    return subprocess.run([*_ENTER, "true"], capture_output=True, check=False).returncode == 0


def run(fn: Callable[..., Any], size: int, *args: object, timeout: float = 60.0) -> Wire:
    """Run ``fn(ctx, *args)`` on ``size`` ranks in a private network and count what they send meanwhile.

    ``fn`` is a plain function of a test module, as for ``ranks(size).run``.
    """
    command = [*_ENTER, sys.executable, "-m", "tests.netns"]
    request = pickle.dumps((sys.path, fn.__module__, fn.__name__, size, args, timeout))
    root = Path(__file__).parent.parent
    done = subprocess.run(
        command, input=request, cwd=root, capture_output=True, timeout=timeout + 60, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    return Wire(*pickle.loads(done.stdout))


def _sent_over_loopback() -> int:
    # Not /sys/class/net, which shows the namespace in which it was mounted.
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[8])
    raise RuntimeError("this network namespace has no loopback device")


def _main() -> None:
    import importlib

    sys.path[:], module, name, size, args, timeout = pickle.load(sys.stdin.buffer)
    fn = getattr(importlib.import_module(module), name)
    pool = RankPool()
    try:
        ranks = RankGroup(pool, size)
        ranks.run(_join)
        before = _sent_over_loopback()
        results = ranks.run(fn, *args, timeout=timeout)
        after = _sent_over_loopback()
    finally:
        pool.close()
    sys.stdout.buffer.write(pickle.dumps((after - before, results)))


def _join(ctx: object) -> None:
    """Nothing: a first run starts the workers, whose rendezvous is not what is counted."""


if __name__ == "__main__":
    _main()
