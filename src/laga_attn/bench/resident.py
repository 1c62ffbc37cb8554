"""The resident high-water mark of a piece of work, from the kernel's own books (Linux)."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Final

__all__ = ["resident_growth", "return_freed_memory"]

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK: Final = "5"  # see proc_pid_clear_refs(5)
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # see mallopt(3)
_SMALL: Final = 2**16  # bytes


def return_freed_memory() -> None:
    """From now on in this process, give the memory of all but small tensors back to the kernel when they are freed.

    glibc otherwise keeps most of it in a heap, with gaps that depend on what was freed before: what a contestant takes
    would depend on those before it. To be called early, since what lies free in the heap is still used, and not where
    time is measured, since pages that were given back are cleared before they come again. Without glibc nothing
    happens.
    """
    options = {_TRIM_THRESHOLD: _SMALL, _TOP_PAD: 0, _MMAP_THRESHOLD: _SMALL}
    try:
        libc = ctypes.CDLL(None)
        for option, value in options.items():
            libc.mallopt(option, value)
    except (OSError, AttributeError, TypeError):  # another C library, or none that can be asked (Windows)
        return


def resident_growth(step: Callable[[], object]) -> int | None:
    """Bytes by which this process's resident memory grew at most while `step` ran; None where the kernel cannot tell.

    Memory that was freed earlier is given back to the kernel first, so that it is not reused unseen; for what `step`
    frees see `return_freed_memory`. Pages of shared libraries that are touched for the first time count too: run the
    step once before.
    """
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        before = _status_bytes("VmRSS")
        _CLEAR.write_text(_RESET_PEAK)
    except (OSError, AttributeError):  # not Linux, not glibc, or a kernel without these files
        return None
    step()
    return max(0, _status_bytes("VmHWM") - before)


def _status_bytes(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise OSError(f"{_STATUS} has no field {field}")
