"""A ledger of what attention moves between ranks, in bytes through the port of this rank."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

__all__ = ["Phase", "Record", "Traffic", "record", "traffic"]

Phase: TypeAlias = Literal["forward", "backward"]

# Messages by which ranks check each other's arguments; not part of what attention has to move.
_CONTROL = "agreement"
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Record:
    """One collective as this rank sees it.

    Attributes:
        kind: what travelled, e.g. ``"latent"``, ``"query"``, ``"output"``, ``"key_value"``, ``"lse"``, their
            gradients ``"latent_grad"`` ..., or ``"agreement"`` for control messages.
        op: ``"all_gather"`` or ``"all_to_all"``.
        phase: ``"forward"`` or ``"backward"``.
        sent_to: bytes for each rank of the group, in rank order; 0 for this rank itself.
        received_from: bytes from each rank. An all-gather counts each rank's part as coming straight from it, whatever
            route the backend takes.
    """

    kind: str
    op: str
    phase: Phase
    sent_to: tuple[int, ...]
    received_from: tuple[int, ...]

    @property
    def sent(self) -> int:
        """Bytes that left this rank for others."""
        return sum(self.sent_to)

    @property
    def received(self) -> int:
        """Bytes that came from others."""
        return sum(self.received_from)


@dataclass(slots=True)
class Traffic:
    """The collectives of this rank inside one :func:`traffic` block, in the order of their start."""

    records: list[Record] = field(default_factory=list)

    def select(self, kind: str | None = None, phase: Phase | None = None) -> list[Record]:
        """The records of a kind and phase. Without a kind: all but the control messages (``"agreement"``)."""
        return [
            r
            for r in self.records
            if (r.kind != _CONTROL if kind is None else r.kind == kind) and phase in (None, r.phase)
        ]

    def sent(self, kind: str | None = None, phase: Phase | None = None) -> int:
        """Bytes sent to other ranks, see :meth:`select`."""
        return sum(r.sent for r in self.select(kind, phase))

    def received(self, kind: str | None = None, phase: Phase | None = None) -> int:
        """Bytes received from other ranks, see :meth:`select`."""
        return sum(r.received for r in self.select(kind, phase))

    def sent_across(self, ulysses_degree: int, rank: int, kind: str | None = None, phase: Phase | None = None) -> int:
        """Bytes that this rank sent to ranks outside its own Ulysses group: between nodes, where groups are nodes."""
        first = rank // ulysses_degree * ulysses_degree
        inside = range(first, first + ulysses_degree)
        return sum(size for r in self.select(kind, phase) for peer, size in enumerate(r.sent_to) if peer not in inside)

    def table(self) -> str:
        """Plain-text table of calls and MiB sent and received, one line per kind and phase, with a total."""
        groups: dict[tuple[str, str], list[Record]] = {}
        for r in self.select():
            groups.setdefault((r.kind, r.phase), []).append(r)
        groups["total", ""] = self.select()
        lines = [("kind", "phase", "calls", "sent MiB", "received MiB")]
        for (kind, phase), records in groups.items():
            sent, received = sum(r.sent for r in records), sum(r.received for r in records)
            lines.append((kind, phase, str(len(records)), f"{sent / _MIB:.3f}", f"{received / _MIB:.3f}"))
        widths = [max(len(line[i]) for line in lines) for i in range(5)]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if i < 2 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            for line in lines
        )


# The one piece of module state in the library. A backward pass runs in a thread that autograd owns, where a
# context variable set by the caller of traffic() would not be visible.
_lock = threading.Lock()
_active: list[Traffic] = []


@contextmanager
def traffic() -> Iterator[Traffic]:
    """Record every collective that this process issues inside the block, from any thread.

    Blocks may be nested; each records everything issued while it is open::

        with laga.traffic() as t:
            out = laga.latent_attention(...)
        print(t.sent("latent"), t.table())

    Sizes are those of the messages, so a run under ``FakeTensorMode`` records what a real run would move.
    """
    ledger = Traffic()
    with _lock:
        _active.append(ledger)
    try:
        yield ledger
    finally:
        with _lock:
            # By identity: two open ledgers with equal records are still two ledgers.
            _active[:] = [other for other in _active if other is not ledger]


def record(entry: Record) -> None:
    """Write one collective into every open ledger."""
    with _lock:
        for ledger in _active:
            ledger.records.append(entry)
