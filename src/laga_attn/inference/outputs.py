"""Rows of a step's result, from the ranks that computed them to all ranks."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from laga_attn.collectives import exchange_rows
from laga_attn.grid import ContextParallel
from laga_attn.inference.step import Step
from laga_attn.layout import Index

__all__ = ["collect_rows"]


def collect_rows(local: Tensor, wanted: Index, step: Step, cp: ContextParallel) -> Tensor:
    """What the ranks computed for some of the step's tokens, on every rank. Collective if any token was split.

    Args:
        local: `[local_len, ...]`, this rank's rows, as of hidden states.
        wanted: packed tokens, ascending; the same on all ranks.

    Returns:
        `[len(wanted), ...]`, in the order of `wanted`.
    """
    held = [step.rows(rank) for rank in range(cp.size)]
    split = [_places(rows[: step.split_len], wanted) for rows in held]
    replicated = step.split_len + _places(held[cp.rank][step.split_len :], wanted)
    own = local[torch.tensor(split[cp.rank], device=local.device)]
    if step.split:
        counts = [len(places) for places in split]
        own = exchange_rows([own] * cp.size, counts, cp, kind="hidden", phase="forward").wait()
    found = torch.cat([own, local[torch.tensor(replicated, device=local.device)]])
    tokens = np.concatenate(
        [*(rows[places] for rows, places in zip(held, split, strict=True)), held[cp.rank][replicated]]
    )
    return found[torch.tensor(np.argsort(tokens), device=local.device)]


def _places(rows: Index, wanted: Index) -> Index:
    return np.flatnonzero(np.isin(rows, wanted))
