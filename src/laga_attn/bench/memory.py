"""Two measurements of memory: what autograd keeps for backward, and the most that exists at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from laga_attn.plan.trace import Trace

__all__ = ["SavedTensors", "TensorMemory", "saved_tensors"]


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


class TensorMemory(Trace):
    """Bytes of tensors that exist at once, counted while the mode is active.

    A storage counts from the operator that returned it until it is freed; what existed before does not count. The
    kernels of this library are looked into, so their temporaries count too; those inside torch's own operators do
    not. On a GPU the allocator's statistics say more.
    """

    def __init__(self) -> None:
        super().__init__(look_inside=True)

    @property
    def live(self) -> int:
        """Bytes that exist now."""
        return self.memory.live_bytes()

    @property
    def peak(self) -> int:
        """The most bytes that existed at once."""
        return self.memory.peak().nbytes
