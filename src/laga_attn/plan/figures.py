"""What a trace comes to: the figures of one rank, plain numbers that travel between processes and into JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from laga_attn.plan.flops import Part
from laga_attn.plan.trace import Trace
from laga_attn.plan.wire import Transfer
from laga_attn.plan.workload import Workload
from laga_attn.traffic import Phase

__all__ = ["Message", "RankFigures", "figures_of", "worst"]

_RINGS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")


@dataclass(frozen=True, slots=True)
class Message:
    """One collective of one rank: what it sends and receives in all, inside its node, and through the network.

    An all-to-all goes straight from rank to rank. An all-gather and its kin go round a ring that passes through every
    node once: all of it over the links inside, while the ranks of a node share what crosses the network.
    """

    kind: str
    op: str
    phase: Phase
    sent: int
    received: int
    node_sent: int
    node_received: int
    nic_sent: int
    nic_received: int

    @property
    def node_bytes(self) -> int:
        return max(self.node_sent, self.node_received)

    @property
    def nic_bytes(self) -> int:
        return max(self.nic_sent, self.nic_received)


@dataclass(frozen=True, slots=True)
class RankFigures:
    """One rank, forward and backward of what was traced; bytes and FLOPs.

    `sent` and `received` are bytes through its port, `nic_sent` and `nic_received` those that cross to other nodes.
    `activation_bytes` is the most that lives at once without parameters and gradients, at another moment than the peak.
    `top` are the largest storages at the moment of the peak.
    """

    rank: int
    sent: dict[Phase, int]
    received: dict[Phase, int]
    nic_sent: dict[Phase, int]
    nic_received: dict[Phase, int]
    messages: tuple[Message, ...]
    saved_bytes: int
    peak_bytes: int
    activation_bytes: int
    peak_by_category: dict[str, int]
    top: tuple[tuple[str, int], ...]
    parameter_bytes: int
    flops: dict[tuple[Part, Phase], int]
    hbm_bytes: dict[tuple[Part | None, Phase], int]
    calls: dict[Phase, int]
    uncounted: tuple[str, ...]

    @property
    def port_bytes(self) -> int:
        """Forward and backward, the larger of sent and received."""
        return sum(max(self.sent[phase], self.received[phase]) for phase in self.sent)

    @property
    def nic_bytes(self) -> int:
        """Forward and backward through this rank's share of the network, the larger of sent and received."""
        return sum(max(self.nic_sent[phase], self.nic_received[phase]) for phase in self.nic_sent)

    @property
    def total_flops(self) -> int:
        return sum(self.flops.values())

    def part_flops(self, part: Part) -> int:
        """FLOPs of a part, forward and backward."""
        return sum(count for (name, _), count in self.flops.items() if name == part)


def figures_of(trace: Trace, workload: Workload, rank: int) -> RankFigures:
    """Condense the trace of one context-parallel rank."""
    peak = trace.memory.peak()
    phases: tuple[Phase, Phase] = ("forward", "backward")
    messages = [_message(transfer, workload) for transfer in trace.transfers]

    def total(name: str) -> dict[Phase, int]:
        return {p: sum(getattr(message, name) for message in messages if message.phase == p) for p in phases}

    return RankFigures(
        rank=rank,
        sent=total("sent"),
        received=total("received"),
        nic_sent=total("nic_sent"),
        nic_received=total("nic_received"),
        messages=tuple(messages),
        saved_bytes=trace.saved_bytes,
        peak_bytes=peak.nbytes,
        activation_bytes=trace.memory.peak(without=("parameter", "gradient")).nbytes,
        peak_by_category={str(name): size for name, size in peak.by_category.items()},
        top=tuple((f"{block.made_by} {list(block.shape)} {str(block.dtype)[6:]}", size) for block, size in peak.top),
        parameter_bytes=sum(block.nbytes for block in trace.memory.blocks if block.category == "parameter"),
        flops=dict(trace.flops),
        hbm_bytes=dict(trace.hbm_bytes),
        calls=dict(trace.calls),
        uncounted=tuple(sorted(trace.uncounted)),
    )


def worst(figures: Iterable[RankFigures]) -> RankFigures:
    """The rank whose peak is highest; of equals the one that moves most."""
    return max(figures, key=lambda rank: (rank.peak_bytes, rank.port_bytes))


def _message(transfer: Transfer, workload: Workload) -> Message:
    home = workload.node_of(transfer.rank)
    near = [workload.node_of(peer) == home for peer in range(len(transfer.group))]
    ring = transfer.op in _RINGS

    def split(sizes: tuple[int, ...]) -> tuple[int, int, int]:
        """In all, inside the node, and through this rank's share of the network."""
        whole = sum(sizes)
        inside = sum(size for size, here in zip(sizes, near, strict=True) if here)
        if ring and inside < whole:
            return whole, whole, -(-whole // sum(near))
        return whole, inside, whole - inside

    sent, received = split(transfer.sent), split(transfer.received)
    return Message(
        transfer.kind, transfer.op, transfer.phase,
        sent[0], received[0], sent[1], received[1], sent[2], received[2],
    )  # fmt: skip
