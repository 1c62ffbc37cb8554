"""`laga-attn plan` answers, and refuses in one line what it cannot answer."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from laga_attn.cli import app


def _plan(*words):
    return CliRunner().invoke(app, ["plan", *words])


def test_a_sweep_ranks_configurations_and_recommends_one(tmp_path):
    target = tmp_path / "plan.json"
    words = ("--model", "deepseek-v3", "--seq-len", "8K", "--cp", "4", "--hardware", "h100", "--json", str(target))
    result = _plan(*words)
    assert result.exit_code == 0, result.output
    report = json.loads(target.read_text())
    assert "laga" in result.output
    assert report


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model", "deepseek-v9", "--seq-len", "8K", "--cp", "4"), "deepseek-v3"),
        (("--model", "deepseek-v3", "--seq-len", "8Q", "--cp", "4"), "8Q"),
        (("--model", "deepseek-v3", "--seq-len", "8K", "--cp", "4", "--hardware", "abacus"), "h100"),
    ],
)
def test_bad_input_is_one_line_that_says_what_would_be_valid(words, message):
    result = _plan(*words)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output
