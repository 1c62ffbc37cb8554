"""Who runs when, and whose time is whose."""

from __future__ import annotations

import gc
import time

import pytest

from laga_attn.bench.race import race


class Clock:
    """A clock that only steps move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def lasts(self, seconds: float, log: list[str] | None = None, name: str = ""):
        def step() -> None:
            self.now += seconds
            if log is not None:
                log.append(name)

        return step


def test_each_step_gets_its_own_time_and_barriers_none(monkeypatch):
    clock = Clock(monkeypatch)
    times = race({"a": clock.lasts(1.0), "b": clock.lasts(3.0)}, 4, barrier=clock.lasts(100.0))
    assert times == {"a": [1.0] * 4, "b": [3.0] * 4}


def test_what_is_left_to_a_device_counts_for_the_step_that_left_it(monkeypatch):
    clock = Clock(monkeypatch)
    left = [0.0]

    def finish() -> None:
        clock.now += left[0]
        left[0] = 0.0

    times = race({"a": lambda: left.__setitem__(0, 5.0)}, 2, barrier=clock.lasts(1.0), finish=finish)
    assert times == {"a": [5.0, 5.0]}


def test_every_round_runs_every_step_once_in_an_order_that_changes_but_is_the_same_on_all_ranks(monkeypatch):
    clock = Clock(monkeypatch)

    def orders() -> list[str]:
        log: list[str] = []
        race({n: clock.lasts(1.0, log, n) for n in "abcd"}, 6, barrier=lambda: None)
        return ["".join(log[i : i + 4]) for i in range(0, 24, 4)]

    first = orders()
    assert all(sorted(order) == list("abcd") for order in first)
    assert len(set(first)) > 3
    assert orders() == first


def test_no_garbage_collection_in_the_middle_of_a_step():
    enabled = []
    race({"a": lambda: enabled.append(gc.isenabled())}, 2, barrier=lambda: None)
    assert enabled == [False, False]
    assert gc.isenabled()
