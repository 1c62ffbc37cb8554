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
    """One collective of one rank: bytes over the links inside its node and over its share of the network.

    What is larger counts, sent or received. An all-to-all goes straight from rank to rank. An all-gather and its kin go
    round a ring that passes through every node once, so that the ranks of a node share what crosses the network.
    """

    kind: str
    op: str
    phase: Phase
    port_bytes: int
    node_bytes: int
    nic_bytes: int


@dataclass(frozen=True, slots=True)
class RankFigures:
    """One rank, forward and backward of what was traced; bytes and FLOPs.

    `sent` and `received` are bytes through its port. `top` are the largest storages at the moment of the peak.
    """

    rank: int
    sent: dict[Phase, int]
    received: dict[Phase, int]
    messages: tuple[Message, ...]
    saved_bytes: int
    peak_bytes: int
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
        return sum(message.nic_bytes for message in self.messages)

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
    return RankFigures(
        rank=rank,
        sent={p: sum(t.sent_bytes() for t in trace.transfers if t.phase == p) for p in phases},
        received={p: sum(t.received_bytes() for t in trace.transfers if t.phase == p) for p in phases},
        messages=tuple(messages),
        saved_bytes=trace.saved_bytes,
        peak_bytes=peak.nbytes,
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
    here = [workload.node_of(peer) == home for peer in range(len(transfer.group))]
    sides = []
    for sizes in (transfer.sent, transfer.received):
        inside = sum(size for size, near in zip(sizes, here, strict=True) if near)
        sides.append((sum(sizes), inside, sum(sizes) - inside))
    port, node, nic = (max(side[i] for side in sides) for i in range(3))
    if transfer.op in _RINGS and nic:
        node, nic = port, -(-port // sum(here))
    return Message(transfer.kind, transfer.op, transfer.phase, port, node, nic)
