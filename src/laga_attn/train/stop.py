"""A wish to stop, heard at the end of a step instead of in the middle of one."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

__all__ = ["STOP_SIGNALS", "StopRequest"]

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Set by SIGINT, by SIGTERM, or by a file that another process creates.

    The file reaches workers that are still starting, where a signal would kill them. Only who launches workers creates
    it: a worker whose neighbour has died is told to end by a signal too, and those that replace both must not stop.
    """

    def __init__(self, file: Path | None = None, *, creates: bool = False) -> None:
        self._file, self._creates = file, creates
        self._signalled = False

    @contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Take the signals over inside the block."""
        before = {number: signal.signal(number, self._hear) for number in STOP_SIGNALS}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def requested(self) -> bool:
        """Whether to stop."""
        return self._signalled or (self._file is not None and self._file.exists())

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True
        if self._file is not None and self._creates:
            with suppress(OSError):  # its folder may be gone
                self._file.touch()
