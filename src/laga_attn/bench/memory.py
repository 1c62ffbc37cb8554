"""Two measurements of memory: what autograd keeps for backward, and the most that exists at once."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

__all__ = ["SavedTensors", "TensorMemory", "saved_tensors"]

_BELOW_MODES = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


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


class TensorMemory(TorchDispatchMode):
    """Bytes of tensors that exist at once, counted while the mode is active.

    A storage counts from the operator that returned it until it is freed; what existed before does not count. The
    kernels of this library are looked into, so their temporaries count too; those inside torch's own operators do
    not. Works on real tensors on the CPU; on a GPU the allocator's statistics say more.

    Attributes:
        live: bytes that exist now.
        peak: the most that existed at once.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self._count((args, kwargs), new=False)
        if func.namespace == "laga_attn":
            # The mode is off in here. Switched on again, it would see this operator anew, hence the redispatch to
            # what lies below all modes.
            with self:
                out = func.redispatch(_BELOW_MODES, *args, **(kwargs or {}))
        else:
            out = func(*args, **(kwargs or {}))
        self._count(out, new=True)
        return out

    def _count(self, values: object, *, new: bool) -> None:
        """Take note of storages not seen before; those that an operator gets as inputs existed all along."""
        for value in tree_iter(values):
            if not isinstance(value, Tensor):
                continue
            storage = value.untyped_storage()
            key, nbytes = storage._cdata, storage.nbytes() if new else 0
            if key in self._known:
                continue
            self._known.add(key)
            self.live += nbytes
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._release, key, nbytes)

    def _release(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.live -= nbytes
