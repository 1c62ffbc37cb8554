from __future__ import annotations

import io
import json
import struct

import pytest
from rich.console import Console

from laga_attn.train.metrics import MetricsLog, Screen, StepMetrics, draw_loss, read_metrics


def metrics(step: int, loss: float = 1.0) -> StepMetrics:
    return StepMetrics(
        step=step,
        loss=loss,
        tokens=1000,
        lr=1e-3,
        grad_norm=0.5,
        seconds=0.5,
        tokens_per_second=2000.0,
        port_bytes=3 * 2**20,
        peak_bytes=200 * 2**20,
    )


def test_a_line_is_on_disk_as_soon_as_it_is_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path, 0) as log:
        for step in (1, 2):
            log.write(metrics(step, 0.1 + step))
            assert json.loads(path.read_text().splitlines()[-1])["step"] == step
    assert read_metrics(path) == [metrics(1, 1.1), metrics(2, 2.1)]  # floats come back to the last bit


def test_resuming_drops_later_steps_and_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path, 0) as log:
        for step in range(1, 6):
            log.write(metrics(step))
    path.write_text(path.read_text() + '{"step": 6, "lo')
    assert [line.step for line in read_metrics(path)] == [1, 2, 3, 4, 5]
    with MetricsLog(path, 3) as log:
        log.write(metrics(4, 7.0))
    assert [(line.step, line.loss) for line in read_metrics(path)] == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 7.0)]


def test_damage_elsewhere_than_at_the_end_is_an_error(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path, 0) as log:
        log.write(metrics(1))
    path.write_text("{torn\n" + path.read_text())
    with pytest.raises(ValueError, match="Expecting"):
        read_metrics(path)


def test_a_pipe_gets_one_line_per_step_and_a_hidden_screen_nothing():
    for visible in (True, False):
        text = io.StringIO()
        with Screen(Console(file=text, width=60, soft_wrap=True), 0, 9, visible=visible) as screen:
            screen.show(metrics(4, 2.5))
        expected = "step 4/9  loss 2.5000  2,000 tokens/s  port 3.00 MiB/step  peak 200 MiB\n"
        assert text.getvalue() == (expected if visible else "")


def test_a_terminal_shows_progress():
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=140)
    with Screen(console, 3, 9, visible=True) as screen:
        screen.show(metrics(4, 2.5))
    assert "4/9" in text.getvalue()
    assert "loss 2.5000  2,000 tokens/s  port 3.00 MiB/step" in text.getvalue()


def test_the_loss_curve_is_a_picture(tmp_path):
    draw_loss([metrics(1, 5.0), metrics(2, 4.0)], tmp_path / "loss.png")
    content = (tmp_path / "loss.png").read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", content[16:24])
    assert (width, height) == (840, 480)
