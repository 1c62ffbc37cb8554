"""Timing: contestants take turns on all ranks together, round after round."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

__all__ = ["race"]

Key = TypeVar("Key", bound=Hashable)


def race(
    steps: Mapping[Key, Callable[[], object]],
    rounds: int,
    barrier: Callable[[], object],
    finish: Callable[[], object] = lambda: None,
) -> dict[Key, list[float]]:
    """Wall seconds that this rank spent in each step, by round.

    Every round runs every step once, so the times of one round saw the same machine and their ratios are paired. The
    order is drawn anew each round, the same on all ranks: nobody always runs after the same other. All ranks leave the
    barrier before a step together; the step's duration is the longest of the ranks'.

    Args:
        steps: what to time; warmed up already. The same keys in the same order on all ranks.
        rounds: how often.
        barrier: returns once all ranks have called it.
        finish: waits for what a step has left to a device.
    """
    seconds: dict[Key, list[float]] = {key: [] for key in steps}
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds):
            for key in random.Random(number).sample(list(steps), len(steps)):
                finish()
                barrier()
                started = time.perf_counter()
                steps[key]()
                finish()
                seconds[key].append(time.perf_counter() - started)
    finally:
        if collecting:
            gc.enable()
    return seconds
