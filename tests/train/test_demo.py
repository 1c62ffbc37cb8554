from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
from typer.testing import CliRunner

from laga_attn.cli import app
from laga_attn.train import demo
from laga_attn.train.demo import CASES, Case, Measurement, compare
from laga_attn.train.model import find_model
from tests.train.micro import MICRO, SEQ_LEN, write_micro

LAYERS, HEADS, ITEM = MICRO["num_hidden_layers"], MICRO["num_attention_heads"], 4
HEAD_WIDTH = MICRO["qk_nope_head_dim"] + MICRO["qk_rope_head_dim"] + MICRO["v_head_dim"]
LATENT_WIDTH = MICRO["kv_lora_rank"] + MICRO["qk_rope_head_dim"]


@dataclass(frozen=True)
class Demo:
    """What the command made in `folder`, measured and said."""

    folder: Path
    measured: dict[Case, Measurement]
    lines: list[str]


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> Demo:
    """The command runs once, in this process: it starts four others, which takes most of the time."""
    folder = tmp_path_factory.mktemp("micro")
    write_micro(folder)
    words = ["--model", str(folder / "config.json"), "--steps", "8", "--seq-len", str(SEQ_LEN)]
    words += ["--out", str(folder / "kept")]
    measured: dict[Case, Measurement] = {}

    def spy(model: Path, seq_len: int) -> dict[Case, Measurement]:
        measured.update(compare(model, seq_len))
        return measured

    environment = {"OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    with mock.patch.object(demo, "compare", spy), mock.patch.dict(os.environ, environment):
        result = CliRunner().invoke(app, ["demo", *words])
    assert result.exit_code == 0, result.output
    return Demo(folder, measured, result.stdout.splitlines())


@pytest.fixture
def measured(ran) -> dict[Case, Measurement]:
    return ran.measured


def test_every_scheme_computes_what_a_single_process_does(measured):
    assert list(measured) == list(CASES)
    single = measured[CASES[0]]
    for case in CASES[1:]:
        assert measured[case].loss == pytest.approx(single.loss, rel=1e-6), case
        assert 0 < measured[case].gradient_error < 1e-5, case  # 0 would mean that nothing was compared


def test_the_sizes_are_those_of_the_schemes(measured):
    single, explicit_1, explicit_2, absorbed_1, _, laga_1, laga_2 = (measured[case] for case in CASES)
    assert single.port_bytes == 0
    # A zigzag rank sends what the other can see: at most all its rows, each way once, and latents twice forward.
    rows = -(-SEQ_LEN // 4) * 2
    assert 0 < laga_1.port_bytes <= 3 * LAYERS * rows * LATENT_WIDTH * ITEM
    assert explicit_1.port_bytes > laga_1.port_bytes
    assert explicit_2.port_bytes > laga_2.port_bytes > laga_1.port_bytes
    assert laga_1.saved_bytes < explicit_1.saved_bytes < single.saved_bytes
    assert absorbed_1.saved_bytes < single.saved_bytes
    for case in CASES:
        assert measured[case].peak_bytes > measured[case].saved_bytes / 2
        assert measured[case].seconds > 0


def test_the_command_trains_compares_and_keeps_what_it_made(ran):
    folder, lines = ran.folder, ran.lines
    (summary,) = (line for line in lines if line.startswith("loss "))
    first, last = float(summary.split()[1]), float(summary.split()[3])
    assert last < first - 0.1
    rows = [case.title for line in lines for case in CASES if line.strip().startswith(f"{case.title}  ")]
    assert rows == [case.title for case in CASES]
    assert find_model(str(folder / "kept" / "model")).weights is not None
    assert (folder / "kept" / "run" / "loss.png").exists()
    assert lines[-1] == f"Let it write: laga-attn generate --model {folder}/kept/model --prompt 'def main(' --cp 2"
