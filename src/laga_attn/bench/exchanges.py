"""The exchanges of a step alone: the same collectives with the same sizes, and nothing to compute in between."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from laga_attn.collectives import all_gather_rows, exchange_rows
from laga_attn.grid import ContextParallel
from laga_attn.traffic import Record

__all__ = ["Exchanges"]


class Exchanges:
    """Repeats what a ledger recorded, one collective after the other.

    Args:
        records: of one step, from `laga_attn.traffic`; all ranks bring those of the same step.
        cp: the ranks.
        device: that the bytes are on.
    """

    def __init__(self, records: Sequence[Record], cp: ContextParallel, device: torch.device) -> None:
        self._records, self._cp = list(records), cp
        largest = max((size for r in records for size in r.sent_to), default=0)
        self._payload = torch.zeros(largest, dtype=torch.uint8, device=device)

    def __call__(self) -> None:
        for record in self._records:
            kind, phase = record.kind, record.phase
            parts = [self._payload[:size] for size in record.sent_to]
            if record.op == "all_gather":  # everyone but this rank itself is sent the same part
                pending = all_gather_rows(max(parts, key=len), self._cp, kind=kind, phase=phase)
            else:
                pending = exchange_rows(parts, record.received_from, self._cp, kind=kind, phase=phase)
            pending.wait()
