"""`laga-attn` whose training waits before a step for as long as a test wants it to.

A step takes milliseconds here. A test that only watched the run and then struck would strike too late on a busy
machine: in a later step than it means, or after the end.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from laga_attn import cli
from laga_attn.train import loop

__all__ = ["hold_after"]

_go_on = loop._step


def hold_after(out: Path, step: int) -> Path:
    """Let no rank of the run in `out` go on after `step` until the file returned here is removed."""
    hold = _hold(out, step)
    hold.parent.mkdir(parents=True, exist_ok=True)
    hold.touch()
    return hold


def _hold(out: Path, step: int) -> Path:
    return out.with_name(f"{out.name}-held-after-{step}")


def _step(worker: Any, done: int, *arguments: Any) -> Any:
    while _hold(worker.run.options.out, done).exists():
        time.sleep(0.01)
    return _go_on(worker, done, *arguments)


# Processes that the launcher spawns import this as their main module, under another name than "__main__".
if __name__ in ("__main__", "__mp_main__"):
    loop._step = _step
if __name__ == "__main__":
    cli.main()
