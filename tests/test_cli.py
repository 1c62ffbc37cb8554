"""The command line: what each command says about itself, and one line for every mistake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from typer.testing import CliRunner

from laga_attn.cli import app, main
from tests.train.micro import MICRO, write_micro

# Typer draws its help to the width of the terminal.
WIDE = {"COLUMNS": "250", "TERMINAL_WIDTH": "250", "NO_COLOR": "1"}


def invoke(*words: str | Path, env: dict[str, str] | None = None):
    return CliRunner().invoke(app, [str(word) for word in words], env={**WIDE, **(env or {})})


@pytest.fixture
def folder(tmp_path) -> Path:
    write_micro(tmp_path)
    return tmp_path


def test_the_console_script_is_the_entry_point_of_this_module():
    (script,) = entry_points(group="console_scripts", name="laga-attn")
    assert script.load() is main


def test_help_lists_the_commands_and_no_command_shows_it():
    for words in ((), ("--help",)):
        result = invoke(*words)
        assert all(f" {name} " in result.output for name in ("train", "demo", "doctor"))


def test_help_of_train_teaches_every_option_with_its_default_and_an_example():
    text = invoke("train", "--help").output
    for option in ("--model", "--data", "--cp", "--ulysses-degree", "--scheme", "--save", "--resume", "--export"):
        assert option in text
    assert "laga-attn train --nproc 2" in text
    assert "torchrun" in text
    assert "[default: 4096]" in text
    assert "laga|explicit|absorbed|auto" in text


def test_help_also_runs_as_a_module():
    process = subprocess.run([sys.executable, "-m", "laga_attn.cli", "--help"], capture_output=True, text=True)
    assert process.returncode == 0
    assert "train" in process.stdout


def write_unusable(folder: Path) -> None:
    """Models that cannot be trained, and a folder that is not empty."""
    (folder / "llama.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 300}))
    (folder / "no.json").write_text("{}")
    (folder / "few.json").write_text(json.dumps({**MICRO, "vocab_size": 256}))
    (folder / "dropout.json").write_text(json.dumps({**MICRO, "attention_dropout": 0.1}))
    (folder / "bare").mkdir()
    (folder / "bare" / "config.json").write_text(json.dumps(MICRO))
    (folder / "full").mkdir()
    (folder / "full" / "something").touch()


def mistakes(folder: Path) -> dict[str, tuple[list[str], str]]:
    """Arguments that spoil a run that would work, and what the one line about them says."""
    return {
        "cp": (["--nproc", "4", "--cp", "3"], "--cp 3 does not divide the 4 processes; choose one of [1, 2, 4]"),
        "ulysses": (["--nproc", "4", "--ulysses-degree", "3"], "--ulysses-degree 3 does not divide the 4"),
        "heads": (["--nproc", "8", "--ulysses-degree", "8"], "does not divide the 4 attention heads"),
        "short": (["--nproc", "4", "--seq-len", "7"], "--seq-len 7 is too short for 4 context-parallel ranks"),
        "long": (["--seq-len", "513"], "--seq-len 513 exceeds the model's max_position_embeddings 512"),
        "nproc": (["--nproc", "0"], "--nproc must be at least 1, got 0"),
        "restarts": (["--nproc", "2", "--max-restarts", "-1"], "--max-restarts must be at least 0, got -1"),
        "scheme": (["--scheme", "ring"], "--scheme must be one of laga, explicit, absorbed, auto, got 'ring'"),
        "save": (["--scheme", "explicit", "--save", "gathered"], "--save gathered is not possible"),
        "steps": (["--steps", "0"], "--steps must be at least 1, got 0"),
        "data": (["--data", f"{folder}/none/*"], "matches no file"),
        "preset": (["--model", "tiny2"], "neither a preset (deepseek-v2, deepseek-v2-lite, deepseek-v3, "),
        "not mla": (["--model", f"{folder}/llama.json"], "(llama) is not a multi-head latent attention model"),
        "no model": (["--model", f"{folder}/no.json"], "is not a Hugging Face model config"),
        "vocabulary": (["--model", f"{folder}/few.json"], "has vocab_size 256; training on bytes needs at least 257"),
        "dropout": (["--model", f"{folder}/dropout.json"], "has attention_dropout 0.1"),
        "no weights": (["--model", f"{folder}/bare"], "holds no *.safetensors weights"),
        "no run": (["--resume"], "--resume: there is no checkpoint in"),
        "old run": (["--out", f"{folder}/full"], "already holds a run; continue it with --resume or choose another"),
        "out file": (["--out", f"{folder}/config.json"], "is a file; choose a folder"),
        "export": (["--export", f"{folder}/full"], "exists and is not an empty folder"),
    }


@pytest.mark.parametrize("name", mistakes(Path("FOLDER")))
def test_a_mistake_is_one_line_with_status_2_and_starts_nothing(folder, name):
    write_unusable(folder)
    extra, message = mistakes(folder)[name]
    before = sorted(folder.rglob("*"))
    base = {
        "--model": f"{folder}/config.json",
        "--data": f"{folder}/data",
        "--out": f"{folder}/run",
        "--seq-len": "64",
        "--device": "cpu",
    }
    words = [word for flag, value in base.items() if flag not in extra for word in (flag, value)]
    result = invoke("train", *words, *extra)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr
    assert sorted(folder.rglob("*")) == before


def test_a_value_of_the_wrong_type_is_refused_by_name():
    result = invoke("train", "--steps", "many")
    assert result.exit_code == 2
    assert "--steps" in result.stderr
    assert "Traceback" not in result.stderr


def test_under_torchrun_the_processes_are_not_ours_to_start():
    result = invoke("train", "--nproc", "2", env={"RANK": "0", "WORLD_SIZE": "2"})
    assert result.exit_code == 2
    assert "torchrun starts the processes here" in result.stderr


def test_one_process_trains_without_a_launcher(folder):
    words = ["--model", f"{folder}/config.json", "--data", f"{folder}/data", "--seq-len", "64", "--steps", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, "-m", "laga_attn.cli", "train", *words, "--device", "cpu"],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
    )
    assert process.returncode == 0, process.stderr
    assert [line.split()[1] for line in process.stdout.splitlines()] == ["1/2", "2/2"]
    assert "port 0.00 MiB/step" in process.stdout
    # Named after the model, below the folder that the command was given in.
    assert sorted(path.name for path in (folder / "runs" / "config").iterdir()) == [
        "checkpoints",
        "loss.png",
        "metrics.jsonl",
    ]
