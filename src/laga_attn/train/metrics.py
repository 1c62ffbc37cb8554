"""The record of a run: one JSON line per step on disk, a live line on the screen, a picture at the end."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["MetricsLog", "Screen", "StepMetrics", "draw_loss", "read_metrics"]

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """What one optimizer step did.

    Attributes:
        step: 1-based number of the step.
        loss: mean negative log-likelihood per predicted token over all ranks, in nats, before the update.
        tokens: predicted tokens over all ranks.
        lr: learning rate of the update.
        grad_norm: norm of the whole gradient before clipping.
        seconds: wall time of the step.
        tokens_per_second: `tokens / seconds`.
        port_bytes: bytes that attention sent from the rank that sent most, over the step.
        peak_bytes: high-water mark of memory of the rank that used most (device memory on CUDA, else resident).
    """

    step: int
    loss: float
    tokens: int
    lr: float
    grad_norm: float
    seconds: float
    tokens_per_second: float
    port_bytes: int
    peak_bytes: int


class MetricsLog(AbstractContextManager["MetricsLog"]):
    """`metrics.jsonl`, opened to go on after `step` steps; lines of later steps are dropped.

    A line is on disk when `write` returns.
    """

    def __init__(self, path: Path, step: int) -> None:
        kept = [line for line in read_metrics(path) if line.step <= step] if path.exists() else []
        fresh = path.with_suffix(".tmp")
        with fresh.open("w") as file:
            for line in kept:
                _append(file, line)
        fresh.replace(path)
        self._file = path.open("a")

    def write(self, metrics: StepMetrics) -> None:
        """Append one step."""
        _append(self._file, metrics)

    def __exit__(self, *exception: object) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[StepMetrics]:
    """The steps in a `metrics.jsonl`; a last line that a kill tore is left out."""
    return list(_parse(path.read_text().splitlines()))


def _parse(lines: list[str]) -> Iterator[StepMetrics]:
    for number, line in enumerate(lines, start=1):
        try:
            yield StepMetrics(**json.loads(line))
        except (ValueError, TypeError):
            if number != len(lines):
                raise


def _append(file: TextIO, metrics: StepMetrics) -> None:
    file.write(json.dumps(asdict(metrics)) + "\n")
    file.flush()
    os.fsync(file.fileno())


class Screen(AbstractContextManager["Screen"]):
    """A progress bar on a terminal, a line per step in a file or pipe, nothing at all if not `visible`."""

    def __init__(self, console: Console, done: int, steps: int, *, visible: bool) -> None:
        self._console = console
        self._lines = visible and not console.is_terminal
        self._steps = steps
        self._progress = Progress(
            TextColumn("[bold]step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not (visible and console.is_terminal),
        )
        self._task = self._progress.add_task("train", total=steps, completed=done, facts="")

    def __enter__(self) -> Screen:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def show(self, metrics: StepMetrics) -> None:
        """Show one step."""
        facts = (
            f"loss {metrics.loss:.4f}  {metrics.tokens_per_second:,.0f} tokens/s  "
            f"port {metrics.port_bytes / _MIB:.2f} MiB/step  peak {metrics.peak_bytes / _MIB:,.0f} MiB"
        )
        self._progress.update(self._task, completed=metrics.step, facts=facts)
        if self._lines:
            self._console.print(f"step {metrics.step}/{self._steps}  {facts}")


def draw_loss(metrics: list[StepMetrics], path: Path) -> None:
    """Save the loss curve as a PNG; matplotlib is needed for this alone."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot([m.step for m in metrics], [m.loss for m in metrics], linewidth=1.2)
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=f"loss over {len(metrics)} steps")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
