"""Values computed from weights once, and again when the weights have changed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from torch import Tensor

__all__ = ["Derived"]

T = TypeVar("T")


class Derived(Generic[T]):
    """One such value.

    A change is seen when a source is another tensor, has other storage, or was written to in place (optimizer steps,
    `load_state_dict`, `copy_`: whatever moves the version counter of autograd). Writing through `.data` moves no
    counter; call `forget()` after that.
    """

    __slots__ = ("_key", "_sources", "_value")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Compute anew at the next `get`."""
        self._key: Hashable = None
        self._sources: tuple[Tensor, ...] = ()
        self._value: T | None = None

    def get(self, sources: Sequence[Tensor], options: Hashable, compute: Callable[[], T]) -> T:
        """The value for these sources and options: the kept one if both are what it was computed from."""
        key = (options, tuple((tensor.data_ptr(), _version(tensor), tensor.dtype) for tensor in sources))
        same = len(sources) == len(self._sources) and all(a is b for a, b in zip(sources, self._sources, strict=True))
        if self._value is None or not same or key != self._key:
            # The sources are held, so that no other tensor can take their place in memory unnoticed.
            self._key, self._sources, self._value = key, tuple(sources), compute()
        return self._value


def _version(tensor: Tensor) -> int:
    # Inference tensors count no versions; they cannot be trained either.
    return 0 if tensor.is_inference() else tensor._version
