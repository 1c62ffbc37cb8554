"""Whole runs as real processes: signals, deaths, restarts, and what the user reads then."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from laga_attn.train.metrics import read_metrics
from laga_attn.train.options import TrainOptions
from tests.train.micro import micro_options, write_micro
from tests.train.processes import (
    children_of,
    command_line,
    launcher,
    outcome,
    ranks_by_hand,
    torchrun,
    wait_for_step,
    wait_until_replaced,
)

# Some thirty processes that each import torch and transformers: seconds each, more on a busy machine.
pytestmark = pytest.mark.timeout(600)

STEPS, SAVE_EVERY = 24, 4


def options_of(folder: Path, out: str, **changes: object) -> TrainOptions:
    return micro_options(folder, out, steps=STEPS, save_every=SAVE_EVERY, **changes)


def losses(options: TrainOptions) -> list[float]:
    metrics = read_metrics(options.out / "metrics.jsonl")
    assert [line.step for line in metrics] == list(range(1, len(metrics) + 1))
    return [line.loss for line in metrics]


def checkpoint_steps(options: TrainOptions) -> list[int]:
    return sorted(int(folder.name[5:]) for folder in (options.out / "checkpoints").glob("step-*"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("micro")
    write_micro(folder)
    return folder


@pytest.fixture(scope="module")
def reference(folder) -> list[float]:
    """The loss curve of a run that nothing disturbs."""
    return finish(options_of(folder, "reference"))


def finish(options: TrainOptions) -> list[float]:
    """Run two ranks to the end; the loss curve."""
    with ranks_by_hand(command_line(options), 2) as processes:
        for status, _, stderr in map(outcome, processes):
            assert status == 0, stderr
    assert checkpoint_steps(options)[-1] == STEPS
    return losses(options)


def test_a_signal_to_the_launcher_finishes_the_step_saves_and_ends_well(folder):
    options = options_of(folder, "launcher")
    with launcher([*command_line(options), "--nproc", "2"]) as process:
        wait_for_step(options.out, 6, process)
        process.send_signal(signal.SIGTERM)
        status, stdout, stderr = outcome(process)
    assert status == 0, stderr
    done = len(losses(options))
    assert 6 <= done < STEPS
    assert checkpoint_steps(options)[-1] == done
    # One rank reports: a line per step and one about the end.
    assert [line.split()[:2] for line in stdout.splitlines()] == [
        *(["step", f"{step}/{STEPS}"] for step in range(1, done + 1)),
        ["stopped", "after"],
    ]


def test_a_signal_to_a_single_rank_ends_all_ranks_at_the_same_step(folder, reference):
    options = options_of(folder, "one-rank")
    with ranks_by_hand(command_line(options), 2) as processes:
        wait_for_step(options.out, 3, processes[0])
        processes[1].send_signal(signal.SIGINT)
        for status, _, stderr in map(outcome, processes):
            assert status == 0, stderr
    assert 3 <= len(losses(options)) == checkpoint_steps(options)[-1] < STEPS
    assert finish(replace(options, resume=True)) == reference


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_hangs_makes_the_others_fail_within_the_timeout(folder, reference, blow):
    options = options_of(folder, f"blow-{blow}", timeout=10.0)
    with ranks_by_hand(command_line(options), 2) as processes:
        wait_for_step(options.out, 6, processes[0])
        processes[1].send_signal(blow)
        struck = time.monotonic()
        status, _, stderr = outcome(processes[0])
        waited = time.monotonic() - struck
    assert status == 1
    assert waited < 10.0 + 20.0  # the timeout, and leaving
    assert "Error: rank 0 lost another rank" in stderr
    assert "--timeout" in stderr
    assert "Traceback" not in stderr
    saved = checkpoint_steps(options)[-1]
    assert saved % SAVE_EVERY == 0
    assert saved <= len(losses(options)) <= saved + SAVE_EVERY
    if blow == signal.SIGKILL:
        assert finish(replace(options, resume=True)) == reference


def test_a_rank_killed_again_and_again_is_restarted_from_the_beginning_or_the_last_checkpoint(folder, reference):
    # Far apart, so that a slow kill still falls between the beginning and the first checkpoint.
    options = replace(options_of(folder, "restarts", timeout=10.0), save_every=12)
    with launcher([*command_line(options), "--nproc", "2", "--max-restarts", "2"]) as process:
        for step, victim in ((1, 1), (13, 0)):
            wait_for_step(options.out, step, process)
            workers = children_of(process.pid)
            os.kill(workers[victim], signal.SIGKILL)
            wait_until_replaced(process.pid, workers)
        status, stdout, stderr = outcome(process)
    assert status == 0, stderr
    assert stdout.count("step 1/") == 2
    assert "resuming from" in stdout
    assert losses(options) == reference


def test_torchrun_restarts_a_killed_rank_from_the_last_checkpoint(folder, reference):
    options = options_of(folder, "torchrun", timeout=10.0)
    with torchrun(command_line(options), 2, 1) as process:
        wait_for_step(options.out, SAVE_EVERY + 2, process)
        os.kill(children_of(process.pid)[1], signal.SIGKILL)
        status, stdout, stderr = outcome(process)
    assert status == 0, stderr
    assert "resuming from" in stdout
    assert losses(options) == reference


def test_without_restarts_the_launcher_fails_when_a_rank_dies(folder):
    options = options_of(folder, "no-restart", timeout=10.0)
    with launcher([*command_line(options), "--nproc", "2"]) as process:
        wait_for_step(options.out, 2, process)
        os.kill(children_of(process.pid)[1], signal.SIGKILL)
        status, _, stderr = outcome(process)
    assert status == 1
    assert "Error: rank 0 lost another rank" in stderr
    assert "Traceback" not in stderr


def test_a_mistake_ends_every_rank_with_one_line_and_status_2(folder):
    options = options_of(folder, "mistake", data=(str(folder / "nothing*"),))
    with ranks_by_hand(command_line(options), 2) as processes:
        for status, stdout, stderr in map(outcome, processes):
            assert status == 2
            assert stdout == ""
            assert stderr.splitlines()[-1].startswith("Error: --data")
            assert "Traceback" not in stderr
    assert not options.out.exists()
