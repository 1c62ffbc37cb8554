"""A slower network for real: ranks in two network namespaces, as in two nodes, joined by a cable with a set rate.

The cable is a veth pair whose two ends are shaped by the kernel's own queues (`tc`): tbf for a rate, netem where it is
to have a latency, too. Ranks of one node reach each other by that node's loopback device, unshaped. Nothing sleeps to
simulate anything, no packet leaves the two namespaces, and they vanish with the processes that live in them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist

from laga_attn.bench.ranks import Place
from laga_attn.train.errors import UsageError

__all__ = ["Link", "node_size", "parse_link", "received_rate", "set_link", "two_nodes"]

_NODES: Final = 2
_INTERFACE: Final = "laga0"
_ADDRESSES: Final = ("198.18.0.1/30", "198.18.0.2/30")  # the block that RFC 2544 sets aside for benchmarks
_COMMANDS: Final = ("ip", "tc", "unshare", "nsenter")

_BIT_UNITS: Final = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_TIME_UNITS: Final = {"us": 10**6, "ms": 10**3, "s": 1}  # in a second
_SYNTAX: Final = re.compile(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)(?:,(\d+(?:\.\d+)?)(us|ms|s))?")

_BURST_SECONDS: Final = 1e-3  # what may pass at once after a pause
_LEAST_BURST: Final = 2**13  # tbf lets no packet pass that is larger
# TCP hands down up to 64 KiB at once. With a smaller burst tbf cuts that up and sets a timer for every 1500 bytes: at
# 300 Mbit/s that took 70 % of a core from the rank computing there. Slow links set few, and would feel such a burst.
_UNCUT_BURST: Final = 80_000
_LONGEST_BURST_SECONDS: Final = 1e-2
_QUEUE_SECONDS: Final = 0.1
_LEAST_QUEUE: Final = 2**22  # room for what TCP has under way: the queue delays, it does not drop

_PACKET: Final = 1500

_PROBE_SECONDS: Final = 0.5
_PROBE_BYTES: Final = (2**16, 2**28)


@dataclass(frozen=True, slots=True)
class Link:
    """What each direction of the cable does: bits per second, and the seconds that a packet is under way."""

    rate: float
    latency: float = 0.0

    def __str__(self) -> str:
        unit = next(name for name, factor in reversed(_BIT_UNITS.items()) if self.rate >= factor or factor == 1000)
        text = f"{self.rate / _BIT_UNITS[unit]:g}{unit}"
        return f"{text},{self.latency * 1e3:g}ms" if self.latency else text


def parse_link(text: str) -> Link:
    """`RATE[,LATENCY]`, such as `"100mbit"` or `"2.5gbit,0.2ms"`.

    Raises:
        UsageError: another syntax, or a rate of 0.
    """
    match = _SYNTAX.fullmatch(text)
    if match is None or float(match[1]) == 0:
        raise UsageError(
            f"--link {text!r} is not RATE[,LATENCY]; write a number above 0 with one of {', '.join(_BIT_UNITS)} "
            f"(bits per second), then perhaps a comma and a number with one of {', '.join(_TIME_UNITS)}: 100mbit, "
            "2.5gbit,0.2ms"
        )
    latency = float(match[3]) / _TIME_UNITS[match[4]] if match[3] else 0.0
    return Link(float(match[1]) * _BIT_UNITS[match[2]], latency)


def node_size(ranks: int) -> int:
    """How many of the ranks live in one node.

    Raises:
        UsageError: they cannot be divided over two.
    """
    if ranks % _NODES:
        raise UsageError(f"--link needs an even number of ranks, to place them in two nodes; got {ranks}")
    return ranks // _NODES


@contextmanager
def two_nodes(links: Sequence[Link]) -> Iterator[tuple[Place, Place]]:
    """Two namespaces and the cable between them; every link was set once, so that none fails later.

    Raises:
        UsageError: not root, a command that is missing, or something that this kernel cannot do.
    """
    _check_machine()
    with ExitStack() as stack:
        nodes = [stack.enter_context(_namespace()) for _ in range(_NODES)]
        ends = [["name", _INTERFACE, "netns", str(pid)] for pid in nodes]
        _run(["ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1]])
        for pid, address in zip(nodes, _ADDRESSES, strict=True):
            _run_in(pid, ["ip", "address", "add", address, "dev", _INTERFACE])
            # No IPv6 address of its own making, which ranks would take for the way to each other.
            _run_in(pid, ["ip", "link", "set", _INTERFACE, "addrgenmode", "none"])
            _run_in(pid, ["ip", "link", "set", _INTERFACE, "up"])
            for link in links:
                _run_in(pid, _shape(link))
        yield tuple(Place(_INTERFACE, f"/proc/{pid}/ns/net") for pid in nodes)  # type: ignore[misc]


def set_link(link: Link | None) -> None:
    """On all ranks of two nodes together: let the cable be `link` from now on; None: as fast as it can."""
    dist.barrier()
    if dist.get_rank() % node_size(dist.get_world_size()) == 0:  # one of each node, for its direction
        subprocess.run(_shape(link), check=True, capture_output=True)
    dist.barrier()


def received_rate(link: Link) -> float | None:
    """Bits per second of payload that arrive in the second node: its first rank's measurement, None on all others."""
    least, most = _PROBE_BYTES
    payload = torch.zeros(int(min(max(link.rate * _PROBE_SECONDS / 8, least), most)), dtype=torch.uint8)
    receiver = node_size(dist.get_world_size())
    rate = None
    dist.barrier()
    started = time.perf_counter()
    if dist.get_rank() == 0:
        dist.send(payload, receiver)
    elif dist.get_rank() == receiver:
        dist.recv(payload, 0)
        rate = payload.nbytes * 8 / (time.perf_counter() - started)
    dist.barrier()
    return rate


def _shape(link: Link | None) -> list[str]:
    """The command that shapes what leaves by the interface."""
    command = ["tc", "qdisc", "replace", "dev", _INTERFACE, "root"]
    if link is None:
        return [*command, "pfifo", "limit", "10000"]
    queue = max(_LEAST_QUEUE, int(link.rate * _QUEUE_SECONDS / 8))  # bytes
    rate = f"{link.rate:.0f}bit"
    if link.latency:
        packets = int((link.latency * link.rate / 8 + queue) / _PACKET)
        return [*command, "netem", "rate", rate, "delay", f"{link.latency * 1e6:.0f}us", "limit", f"{packets}"]
    uncut = min(_UNCUT_BURST, link.rate * _LONGEST_BURST_SECONDS / 8)
    burst = int(max(_LEAST_BURST, uncut, link.rate * _BURST_SECONDS / 8))
    return [*command, "tbf", "rate", rate, "burst", f"{burst}b", "limit", f"{queue + burst}b"]


def _check_machine() -> None:
    missing = [name for name in _COMMANDS if shutil.which(name) is None]
    if missing:
        raise UsageError(f"--link needs Linux with iproute2 and util-linux; not found: {', '.join(missing)}")
    if os.geteuid() != 0:
        raise UsageError("--link makes network namespaces, which needs root; run it as root or leave --link out")


@contextmanager
def _namespace() -> Iterator[int]:
    """A network namespace with a loopback device, held by a process whose id this is.

    The process waits for its standard input to end, which the kernel sees to even when this process is killed. It is in
    a session of its own, out of reach of Ctrl-C.
    """
    command = ["unshare", "--net", "--", "sh", "-c", "ip link set lo up && echo ready && exec cat"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as holder:
        assert holder.stdin is not None and holder.stdout is not None and holder.stderr is not None  # noqa: PT018
        if holder.stdout.readline() != "ready\n":
            raise _failure(command, holder.stderr.read())
        try:
            yield holder.pid
        finally:
            holder.stdin.close()


def _run_in(pid: int, command: list[str]) -> None:
    _run(["nsenter", f"--net=/proc/{pid}/ns/net", "--", *command])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        if "netem" in command:
            raise UsageError(
                "--link with a latency needs the kernel's netem queue (module sch_netem), which is not there "
                f"({' '.join(done.stderr.split())}); leave the latency out"
            )
        raise _failure(command, done.stderr)


def _failure(command: Sequence[str], errors: str) -> UsageError:
    return UsageError(f"--link: this machine refused `{' '.join(command)}`: {' '.join(errors.split())}")
