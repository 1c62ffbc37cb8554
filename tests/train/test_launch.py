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
from tests.train.held import hold_after
from tests.train.micro import micro_options, write_micro
from tests.train.processes import (
    children_of,
    command_line,
    launcher,
    outcome,
    ranks_by_hand,
    torchrun,
    wait_for_step,
)

# Some thirty processes that each import torch and transformers: seconds each, more on a busy machine.
pytestmark = pytest.mark.timeout(600)

STEPS, SAVE_EVERY = 24, 4
HANGS = 10.0  # seconds until a rank that hangs is given up


def options_of(folder: Path, out: str, timeout: float = 120.0, **changes: object) -> TrainOptions:
    """By default ranks wait for each other longer than a busy machine makes them."""
    return micro_options(folder, out, steps=STEPS, save_every=SAVE_EVERY, timeout=timeout, **changes)


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
    hold = hold_after(options.out, 6)
    with launcher([*command_line(options), "--nproc", "2"]) as process:
        wait_for_step(options.out, 6, process)
        process.send_signal(signal.SIGTERM)
        hold.unlink()
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
    hold = hold_after(options.out, 3)
    with ranks_by_hand(command_line(options), 2) as processes:
        wait_for_step(options.out, 3, processes[0])
        processes[1].send_signal(signal.SIGINT)
        hold.unlink()
        for status, _, stderr in map(outcome, processes):
            assert status == 0, stderr
    assert 3 <= len(losses(options)) == checkpoint_steps(options)[-1] < STEPS
    assert finish(replace(options, resume=True)) == reference


@pytest.mark.parametrize(("blow", "timeout"), [(signal.SIGKILL, 120.0), (signal.SIGSTOP, HANGS)])
def test_a_rank_that_dies_or_hangs_makes_the_others_fail_within_the_timeout(folder, reference, blow, timeout):
    options = options_of(folder, f"blow-{blow}", timeout)
    hold = hold_after(options.out, 6)
    with ranks_by_hand(command_line(options), 2) as processes:
        wait_for_step(options.out, 6, processes[0])
        processes[1].send_signal(blow)
        hold.unlink()
        struck = time.monotonic()
        status, _, stderr = outcome(processes[0])
        waited = time.monotonic() - struck
    assert status == 1
    assert waited < HANGS + 20.0  # a death is noticed at once, whatever the timeout; and leaving
    assert "Error: rank 0 lost another rank" in stderr
    assert "--timeout" in stderr
    assert "Traceback" not in stderr
    saved = checkpoint_steps(options)[-1]
    assert saved % SAVE_EVERY == 0
    assert saved <= len(losses(options)) <= saved + SAVE_EVERY
    if blow == signal.SIGKILL:
        assert finish(replace(options, resume=True)) == reference


def test_a_rank_killed_again_and_again_is_restarted_from_the_beginning_or_the_last_checkpoint(folder, reference):
    options = options_of(folder, "restarts")
    holds = {step: hold_after(options.out, step) for step in (1, SAVE_EVERY + 2)}
    with launcher([*command_line(options), "--nproc", "2", "--max-restarts", "2"]) as process:
        for victim, (step, hold) in zip((1, 0), holds.items(), strict=True):
            wait_for_step(options.out, step, process)
            os.kill(children_of(process.pid)[victim], signal.SIGKILL)
            hold.unlink()
        status, stdout, stderr = outcome(process)
    assert status == 0, stderr
    assert stdout.count("step 1/") == 2
    assert "resuming from" in stdout
    assert losses(options) == reference


def test_torchrun_restarts_a_killed_rank_from_the_last_checkpoint(folder, reference):
    options = options_of(folder, "torchrun")
    hold = hold_after(options.out, SAVE_EVERY + 2)
    with torchrun(command_line(options), 2, 1) as process:
        wait_for_step(options.out, SAVE_EVERY + 2, process)
        os.kill(children_of(process.pid)[1], signal.SIGKILL)
        hold.unlink()
        status, stdout, stderr = outcome(process)
    assert status == 0, stderr
    assert "resuming from" in stdout
    assert losses(options) == reference


def test_without_restarts_the_launcher_fails_when_a_rank_dies(folder):
    options = options_of(folder, "no-restart")
    hold = hold_after(options.out, 2)
    with launcher([*command_line(options), "--nproc", "2"]) as process:
        wait_for_step(options.out, 2, process)
        os.kill(children_of(process.pid)[1], signal.SIGKILL)
        hold.unlink()
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
