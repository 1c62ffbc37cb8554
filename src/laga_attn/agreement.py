"""agree(): all ranks learn together that a call is wrong, before a collective can hang."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from laga_attn.collectives import all_gather_rows
from laga_attn.grid import ContextParallel

__all__ = ["agree"]

_DIGEST_BYTES = 16
_MAX_SHOWN = 300  # characters of one value in an error


def agree(cp: ContextParallel, signature: Mapping[str, object], error: str | None = None) -> None:
    """Return if all ranks make the same valid call; otherwise raise the same error on all of them.

    Every rank calls this at the same point, before the first data collective, with what must be equal
    everywhere and with the error that it found in its own arguments, if any: raising that error at once would
    leave the other ranks waiting for this one.

    A digest of 16 bytes is all-gathered; the values themselves travel only to explain a mismatch.
    ``cp.check`` says how often: on every call, or (the default on device groups, where reading the digest
    waits for the device) only for a signature that is new to ``cp``. In that mode a rank that leaves a
    signature on which all had agreed is not caught, and its own error is raised on that rank alone.

    Args:
        cp: the ranks. One rank, or a group of the ``"fake"`` backend, exchanges nothing.
        signature: what must be equal on all ranks, by names fit for an error message. The ``repr`` of the
            values is compared: use plain values (numbers, strings, dtypes, tuples or dataclasses of them).
        error: the text of this rank's own error, or ``None``.

    Raises:
        ValueError: naming, for each entry of the signature that differs, which rank holds which value, and
            the error of each rank that has one. An error that all ranks share is raised as it is.
    """
    texts = {name: repr(value) for name, value in signature.items()}
    digest = _digest(texts, error)
    if _exchange_needed(cp, _digest(texts, None)) and not _equal_everywhere(cp, digest):
        raise ValueError(_explain(cp, texts, error))
    if error is not None:
        raise ValueError(error)
    cp.remember_agreed(digest)


def _exchange_needed(cp: ContextParallel, digest: bytes) -> bool:
    if cp.size == 1 or cp.backend == "fake":
        return False
    every_call = cp.check == "always" or (cp.check == "auto" and cp.backend == "gloo")
    return every_call or not cp.has_agreed(digest)


def _digest(texts: Mapping[str, str], error: str | None) -> bytes:
    return hashlib.blake2b(repr((sorted(texts.items()), error)).encode(), digest_size=_DIGEST_BYTES).digest()


def _equal_everywhere(cp: ContextParallel, digest: bytes) -> bool:
    # A group with a CPU backend compares there, without waiting for the device.
    device = "cpu" if cp.backend_for("cpu") else "cuda"
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(device)[None]  # [1, 16]
    all_digests = all_gather_rows(mine, cp, kind="agreement", phase="forward").wait()  # [P, 16]
    return bool((all_digests == mine).all())


def _explain(cp: ContextParallel, texts: Mapping[str, str], error: str | None) -> str:
    """Gather what every rank holds and put the differences into words, the same words on every rank."""
    gathered: list[Any] = [None] * cp.size
    dist.all_gather_object(gathered, (dict(texts), error), group=cp.group)
    held = [ranks_texts for ranks_texts, _ in gathered]
    parts = []
    names = dict.fromkeys(name for ranks_texts in held for name in ranks_texts)
    for name in names:
        values = [ranks_texts.get(name, "nothing") for ranks_texts in held]
        if len(set(values)) > 1:
            parts.append(f"{name}: {_who_has_what(values)}")
    errors = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(gathered) if text is not None]
    message = ""
    if parts:
        message = (
            f"context-parallel ranks disagree: {'; '.join(parts)}. "
            "Every rank of the group must make the same call, with the same shapes, dtypes and options. "
        )
    if errors:
        message += f"Errors of single ranks: {'; '.join(errors)}"
    return message.strip()


def _who_has_what(values: Sequence[str]) -> str:
    """``"rank 0, 1 have 16; rank 2 has 12"``."""
    holders: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        holders.setdefault(value, []).append(rank)
    return "; ".join(
        f"rank {', '.join(map(str, ranks))} {'has' if len(ranks) == 1 else 'have'} {_short(value)}"
        for value, ranks in holders.items()
    )


def _short(value: str) -> str:
    return value if len(value) <= _MAX_SHOWN else f"{value[:_MAX_SHOWN]}... ({len(value)} characters)"
