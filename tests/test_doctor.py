from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

import laga_attn.doctor
from laga_attn.cli import app
from laga_attn.doctor import SELF_TEST_CASES, self_test, worst_error


def run_doctor():
    return CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "200"})


def test_the_self_test_covers_every_scheme_and_finds_nothing_wrong():
    errors = self_test()
    assert set(errors) == set(SELF_TEST_CASES)
    assert {scheme for scheme, _ in SELF_TEST_CASES} == {"explicit", "absorbed", "laga"}
    assert {degree for _, degree in SELF_TEST_CASES} == {1, 2}
    assert all(0 < error < 1e-13 for error in errors.values())  # 0 would mean that nothing was compared


def test_doctor_says_what_there_is_and_why_a_kernel_is_not_usable(monkeypatch):
    monkeypatch.setattr(laga_attn.doctor, "self_test", lambda: dict.fromkeys(SELF_TEST_CASES, 1e-15))
    result = run_doctor()
    assert result.exit_code == 0
    for fact in (torch.__version__, "gloo", "nccl", "blockwise", "yes (auto)", "it needs qk_head_dim == v_head_dim"):
        assert fact in result.output
    assert "self-test passed" in result.output


@pytest.mark.parametrize("error", [1e-3, float("inf"), float("nan")])
def test_a_wrong_result_is_named_and_ends_with_status_1(monkeypatch, error):
    errors = {**dict.fromkeys(SELF_TEST_CASES, 1e-15), ("laga", 2): error}
    monkeypatch.setattr(laga_attn.doctor, "self_test", lambda: errors)
    result = run_doctor()
    assert result.exit_code == 1
    assert "self-test failed for laga U=2" in result.output


def test_processes_that_cannot_run_are_reported_with_status_1(monkeypatch):
    def broken():
        raise RuntimeError("no route to host")

    monkeypatch.setattr(laga_attn.doctor, "self_test", broken)
    result = run_doctor()
    assert result.exit_code == 1
    assert "no route to host" in result.output


def test_the_comparison_sees_single_elements_and_nan():
    expected = [torch.ones(4), torch.full((3,), 2.0)]
    assert worst_error(expected, expected) == 0.0
    assert worst_error([torch.ones(4), torch.tensor([2.0, 2.0, 3.0])], expected) == 0.5
    assert worst_error([torch.tensor([1.0, float("nan"), 1.0, 1.0]), expected[1]], expected) == float("inf")
