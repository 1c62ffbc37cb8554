"""Two measurements of memory: what autograd keeps for backward, and the most that is allocated at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

__all__ = ["SavedTensors", "peak_bytes", "saved_tensors"]


@dataclass(slots=True)
class SavedTensors:
    """The storages that autograd kept in a :func:`saved_tensors` block, each counted once with its whole size."""

    storages: dict[int, int] = field(default_factory=dict)  # address -> bytes

    @property
    def nbytes(self) -> int:
        """Their sum in bytes."""
        return sum(self.storages.values())


@contextmanager
def saved_tensors(excluded: Iterable[Tensor] = ()) -> Iterator[SavedTensors]:
    """Count what a forward pass inside the block saves for backward.

    Views of one storage count once. Run backward outside the block, or at least keep the graph alive until its end:
    storages are told apart by their address.

    Args:
        excluded: tensors that exist anyway, such as parameters and inputs; their storages are not counted.
    """
    known = {tensor.untyped_storage().data_ptr() for tensor in excluded}
    saved = SavedTensors()

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved.storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def peak_bytes(action: Callable[[], object], device: torch.device) -> int:
    """The most bytes of tensors that exist at once while `action` runs, beyond those that existed before.

    On CUDA the allocator's own high-water mark. On the CPU every allocation and release that torch's allocator
    reports to the profiler is added up, so temporaries inside operators count too; `action` runs slower for it.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        action()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as record:
        action()
    assert record.profiler is not None
    results = record.profiler.kineto_results
    assert results is not None
    changes = [event for event in results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak
