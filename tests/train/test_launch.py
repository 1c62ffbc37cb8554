"""Whole runs as real processes: signals, deaths, restarts, and what the user reads then."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from laga_attn.train.metrics import read_metrics
from laga_attn.train.options import TrainOptions
from tests.train.micro import micro_options, write_micro
from tests.train.processes import children_of, command_line, ranks_by_hand, start, torchrun, wait_for_step

STEPS = 60


def options_of(folder: Path, out: str, **changes: object) -> TrainOptions:
    return micro_options(folder, out, steps=STEPS, save_every=5, **changes)


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
    options = options_of(folder, "reference")
    process = start([*command_line(options), "--nproc", "2"])
    stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr
    assert stdout.count("\n") == STEPS  # a line per step, from one rank
    return losses(options)


def finish(options: TrainOptions) -> list[float]:
    """Resume a run until its end."""
    process = start([*command_line(options), "--resume", "--nproc", "2"])
    _, stderr = process.communicate()
    assert process.returncode == 0, stderr
    return losses(options)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_finishes_the_step_saves_and_ends_well(folder, reference, number):
    options = options_of(folder, f"launcher-{number}")
    process = start([*command_line(options), "--nproc", "2"])
    wait_for_step(options.out, 7, process)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    done = len(losses(options))
    assert 7 <= done < STEPS
    assert f"stopped after step {done} of {STEPS}; continue" in stdout
    assert checkpoint_steps(options)[-1] == done
    assert finish(options) == reference


def test_a_signal_to_a_single_rank_ends_all_ranks_at_the_same_step(folder, reference):
    options = options_of(folder, "one-rank")
    with ranks_by_hand(command_line(options), 2) as processes:
        wait_for_step(options.out, 3, processes[0])
        processes[1].send_signal(signal.SIGTERM)
        for process in processes:
            _, stderr = process.communicate(timeout=60)
            assert process.returncode == 0, stderr
    assert 3 <= len(losses(options)) == checkpoint_steps(options)[-1] < STEPS


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_hangs_makes_the_others_fail_within_the_timeout(folder, reference, blow):
    options = options_of(folder, f"blow-{blow}", timeout=6.0)
    with ranks_by_hand(command_line(options), 2) as processes:
        wait_for_step(options.out, 8, processes[0])
        processes[1].send_signal(blow)
        struck = time.monotonic()
        _, stderr = processes[0].communicate(timeout=60)
        waited = time.monotonic() - struck
    assert processes[0].returncode == 1
    assert waited < 6.0 + 20.0
    assert "Error: rank 0 lost another rank" in stderr
    assert "--timeout" in stderr
    assert "Traceback" not in stderr
    resumed_from = checkpoint_steps(options)[-1]
    assert resumed_from % 5 == 0
    assert len(losses(options)) - resumed_from <= 5
    assert finish(options) == reference


@pytest.mark.parametrize("launcher", ["laga-attn", "torchrun"])
def test_a_killed_rank_is_restarted_from_the_last_checkpoint(folder, reference, launcher):
    options = options_of(folder, f"restart-{launcher}", timeout=10.0)
    words = command_line(options)
    process = torchrun(words, 2, 1) if launcher == "torchrun" else start([*words, "--nproc", "2", "--max-restarts", "1"])
    wait_for_step(options.out, 7, process)
    os.kill(children_of(process.pid)[1], signal.SIGKILL)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert "resuming from" in stdout
    assert losses(options) == reference


def test_a_rank_killed_before_the_first_checkpoint_is_restarted_from_the_beginning(folder, reference):
    options = micro_options(folder, "restart-early", steps=STEPS, save_every=50)
    process = start([*command_line(options), "--nproc", "2", "--max-restarts", "1"])
    wait_for_step(options.out, 3, process)
    os.kill(children_of(process.pid)[0], signal.SIGKILL)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert stdout.count("step 1/") == 2
    assert losses(options) == reference


def test_without_restarts_the_launcher_fails_when_a_rank_dies(folder):
    options = options_of(folder, "no-restart", timeout=10.0)
    process = start([*command_line(options), "--nproc", "2"])
    wait_for_step(options.out, 2, process)
    os.kill(children_of(process.pid)[1], signal.SIGKILL)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "Error: rank 0 lost another rank" in stderr
    assert "Traceback" not in stderr


def test_a_mistake_ends_every_rank_with_one_line_and_status_2(folder):
    options = options_of(folder, "mistake", cp=2, data=(str(folder / "nothing*"),))
    with ranks_by_hand(command_line(options), 2) as processes:
        for process in processes:
            stdout, stderr = process.communicate(timeout=60)
            assert process.returncode == 2
            assert stdout == ""
            assert stderr.splitlines()[-1].startswith("Error: --data")
            assert "Traceback" not in stderr
    assert not options.out.exists()
