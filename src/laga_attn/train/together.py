"""Steps that the ranks of a run take together, so that none is left waiting for one that failed.

All functions are collective over the default process group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from laga_attn.train.errors import UsageError

__all__ = ["everywhere", "on_first_rank", "reduce", "same_everywhere"]

T = TypeVar("T")


def everywhere(action: Callable[[], T]) -> T:
    """Run `action` on every rank; if it raises `UsageError` on one, raise that on all."""
    result, error = _attempt(action)
    errors: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    first = next((text for text in errors if text is not None), None)
    if first is not None:
        raise UsageError(first)
    assert result is not None
    return result[0]


def on_first_rank(action: Callable[[], T]) -> T:
    """Run `action` on rank 0 and hand its result to all ranks; an exception of it is raised on all."""
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome = [action(), None]
        except Exception as error:
            outcome = [None, error]
    dist.broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]  # type: ignore[no-any-return]


def same_everywhere(value: object) -> bool:
    """Whether every rank holds an equal value."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return all(other == values[0] for other in values)


def reduce(values: list[float], op: dist.ReduceOp.RedOpType, device: torch.device) -> list[float]:
    """Element-wise reduction of a few numbers over all ranks, in fp64."""
    tensor: Tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op)
    return tensor.tolist()


def _attempt(action: Callable[[], T]) -> tuple[tuple[T] | None, str | None]:
    try:
        return (action(),), None
    except UsageError as error:
        return None, str(error)
