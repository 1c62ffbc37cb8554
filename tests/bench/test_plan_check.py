"""`benchmarks/plan_check.py` on a CPU, and `benchmarks/device_check.py` where there is no GPU."""

from __future__ import annotations

import pytest
import typer
from benchmarks.device_check import main
from benchmarks.plan_check import PLANNED, PlanCheck, check_plan
from typer.testing import CliRunner


def test_on_a_cpu_a_layer_with_data_needs_and_moves_what_was_predicted():
    checks = check_plan("cpu", small=True)
    assert len(checks) == len(PLANNED)
    assert {scheme for scheme, _, _ in PLANNED} == {"explicit", "laga", "absorbed"}
    for check in checks:
        assert check.peak == check.predicted_peak > 2**20, check.candidate
        assert check.right, check
        assert min(check.port) > 2**16


@pytest.mark.parametrize(("port", "right"), [((5, 6), True), ((5, 7), False), ((6, 6), False)])
def test_a_byte_that_was_not_predicted_is_wrong(port, right):
    assert PlanCheck("laga U=1 save=latent", 1, 2, (5, 6), port).right is right


def test_without_a_gpu_it_says_so_and_what_would_work(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    app = typer.Typer()
    app.command()(main)
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 2
    assert "this PyTorch sees none; --device cpu --small" in result.output
    assert len(result.output.splitlines()) == 1
