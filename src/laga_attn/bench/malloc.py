"""What glibc does with the memory of tensors that are freed: by its own rules, which depend on what was freed before.

A tensor's memory may stay in a heap, with gaps between tensors, or go back to the kernel, which clears its pages before
they come again. What a contestant takes then depends on those that came before it, in memory and in time. Both
functions hold from the call on in this process, for what is not yet in the heap, so call them early; the last call
counts. Without glibc they do nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Final

__all__ = ["keep_freed_memory", "return_freed_memory"]

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -2, -3, -4  # see mallopt(3)
_SMALL: Final = 2**16  # bytes
_NEVER: Final = -1
_MAPPED: Final = 2**16  # blocks outside the heap, as many as without being told


def keep_freed_memory() -> None:
    """Memory stays with the process, as in the caches that PyTorch has for devices: where time is measured."""
    _set({_MMAP_MAX: 0, _TRIM_THRESHOLD: _NEVER})


def return_freed_memory() -> None:
    """All but small tensors give their memory back when they are freed: where memory is measured."""
    _set({_MMAP_MAX: _MAPPED, _TRIM_THRESHOLD: _SMALL, _TOP_PAD: 0, _MMAP_THRESHOLD: _SMALL})


def _set(options: Mapping[int, int]) -> None:
    try:
        libc = ctypes.CDLL(None)
        for option, value in options.items():
            libc.mallopt(option, value)
    except (OSError, AttributeError, TypeError):  # another C library, or none that can be asked (Windows)
        return
