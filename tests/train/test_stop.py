from __future__ import annotations

import os
import signal

import pytest

from laga_attn.train.stop import STOP_SIGNALS, StopRequest


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_is_remembered_and_the_old_handler_comes_back(number):
    before = signal.getsignal(number)
    with StopRequest().listening() as stop:
        assert not stop.requested()
        os.kill(os.getpid(), number)
        assert stop.requested()
    assert signal.getsignal(number) is before


def test_a_signal_reaches_others_through_the_file(tmp_path):
    ours, theirs = StopRequest(tmp_path / "stop", creates=True), StopRequest(tmp_path / "stop")
    assert not theirs.requested()
    with ours.listening():
        os.kill(os.getpid(), signal.SIGTERM)
    assert theirs.requested()


def test_a_folder_that_is_gone_does_not_break_the_handler(tmp_path):
    with StopRequest(tmp_path / "gone" / "stop", creates=True).listening() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested()


def test_a_worker_that_is_told_to_end_does_not_stop_the_one_that_replaces_it(tmp_path):
    with StopRequest(tmp_path / "stop").listening() as told:
        signal.raise_signal(signal.SIGTERM)
    assert told.requested()
    assert not StopRequest(tmp_path / "stop").requested()
