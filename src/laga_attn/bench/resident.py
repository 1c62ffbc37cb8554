"""The resident high-water mark of a piece of work, from the kernel's own books (Linux)."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Final

__all__ = ["resident_growth"]

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK: Final = "5"  # see proc_pid_clear_refs(5)


def resident_growth(step: Callable[[], object]) -> int | None:
    """Bytes by which this process's resident memory grew at most while `step` ran; None where the kernel cannot tell.

    Memory that was freed earlier is given back to the kernel first, so that it is not reused unseen; for what `step`
    frees see `laga_attn.bench.malloc`. Pages of shared libraries that are touched for the first time count too: run the
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
