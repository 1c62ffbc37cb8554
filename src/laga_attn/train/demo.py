"""`laga-attn demo`: train a small model on two ranks, then put the schemes side by side on its weights."""

from __future__ import annotations

import shlex
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import torch.distributed as dist
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from typer import Option

from laga_attn.bench.memory import TensorMemory, saved_tensors
from laga_attn.bench.ranks import run_on_ranks
from laga_attn.gradients import reduce_gradients
from laga_attn.grid import ContextParallel
from laga_attn.traffic import traffic
from laga_attn.train.data import Row, open_corpus, stream
from laga_attn.train.errors import UsageError
from laga_attn.train.launch import launch
from laga_attn.train.loss import shard_row, token_loss_sum
from laga_attn.train.metrics import read_metrics
from laga_attn.train.model import build, find_model
from laga_attn.train.options import TrainOptions
from laga_attn.train.together import reduce

__all__ = ["CASES", "Case", "Measurement", "compare", "demo"]

_RANKS = 2
_TIMED = 2
_MIB = 2**20
_CPU = torch.device("cpu")


class Case(NamedTuple):
    """One row of the comparison; `ulysses_degree` None: a single process."""

    scheme: str
    ulysses_degree: int | None

    @property
    def title(self) -> str:
        """Its name in the table."""
        if self.ulysses_degree is None:
            return "single process"
        return f"{self.scheme} U={self.ulysses_degree}"


CASES = (
    Case("explicit", None),
    Case("explicit", 1),
    Case("explicit", 2),
    Case("absorbed", 1),
    Case("absorbed", 2),
    Case("laga", 1),
    Case("laga", 2),
)


@dataclass(frozen=True, slots=True)
class Measurement:
    """One forward and backward pass; sizes are those of the rank with most.

    Attributes:
        loss: mean loss per token.
        gradient_error: largest difference of any gradient element to the single process, relative to the largest.
        port_bytes: sent by attention.
        saved_bytes: kept by autograd for backward, parameters not counted.
        peak_bytes: of tensors at once, beyond parameters and inputs.
        seconds: the fastest of several passes.
    """

    loss: float
    gradient_error: float
    port_bytes: int
    saved_bytes: int
    peak_bytes: int
    seconds: float


def demo(
    steps: Annotated[int, Option(help="Training steps before the comparison.")] = 30,
    seq_len: Annotated[int, Option(help="Tokens per sequence.")] = 4096,
    model: Annotated[str, Option(help="What to train, as in the train command.")] = "tiny",
    out: Annotated[
        Path | None, Option(help="Keep the run and the exported model in this folder. Default: keep nothing.")
    ] = None,
) -> None:
    """Train a small model on two ranks of this machine, then compare all schemes on its weights.

    The model learns the source code of Python's standard library. Each scheme then runs forward and backward on the
    same weights and the same sequence; the table shows that all compute the same, and what each costs.
    """
    with tempfile.TemporaryDirectory(prefix="laga-attn-") as folder:
        home = Path(folder) if out is None else out
        options = TrainOptions(
            model=model,
            steps=steps,
            seq_len=seq_len,
            warmup=min(5, steps),
            save_every=steps,
            out=home / "run",
            export=home / "model",
            device="cpu",
        )
        console = Console()
        console.print(f"[bold]Training {model} on {_RANKS} ranks[/bold], {seq_len} tokens per sequence")
        try:
            status = launch(options, _RANKS)
        except UsageError as error:
            typer.echo(f"Error: {error}", err=True)
            raise typer.Exit(2) from error
        if status:
            raise typer.Exit(status)
        losses = [line.loss for line in read_metrics(options.out / "metrics.jsonl")]
        console.print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps")
        console.print("[bold]Comparing schemes[/bold] on the trained weights")
        measurements = compare(home / "model", seq_len)
    console.print(_table(measurements, seq_len))
    if out is not None:
        words = ["laga-attn", "generate", "--model", str(home / "model"), "--prompt", "def main(", "--cp", str(_RANKS)]
        console.print(f"Let it write: {shlex.join(words)}", soft_wrap=True, markup=False, highlight=False)


def compare(model: Path, seq_len: int) -> dict[Case, Measurement]:
    """Measure every case of `CASES` on the checkpoint directory `model`, over two ranks with one thread each."""
    result: dict[Case, Measurement] = run_on_ranks(_measure_all, _RANKS, str(model), seq_len)[0]
    return result


def _measure_all(model_name: str, seq_len: int) -> dict[Case, Measurement]:
    model = build(find_model(model_name), TrainOptions(), _CPU)
    row, _ = next(islice(stream(open_corpus((), seed=1), seq_len), 1))
    results: dict[Case, Measurement] = {}
    expected: list[Tensor] = []
    for case in CASES:
        # The single process works alone; the other ranks wait for it.
        alone = case.ulysses_degree is None
        if not alone or dist.get_rank() == 0:
            measurement, gradients = _measure(model, row, case, expected)
            results[case] = measurement
            expected = expected or gradients
        if alone:
            held = [expected]
            dist.broadcast_object_list(held)
            expected = held[0]
    return results


def _measure(model: nn.Module, row: Row, case: Case, expected: list[Tensor]) -> tuple[Measurement, list[Tensor]]:
    from laga_attn.integrations.transformers import parallelize

    world = dist.group.WORLD
    assert world is not None
    alone = case.ulysses_degree is None
    cp = ContextParallel.none() if alone else ContextParallel(world, case.ulysses_degree)
    handle = parallelize(model, cp=cp, scheme=case.scheme)
    layout, shard = shard_row(row, cp.size, cp.rank, _CPU)
    tokens = sum(length - 1 for length in layout.lengths)
    parameters = list(model.parameters())

    def forward() -> Tensor:
        return token_loss_sum(model, layout, shard) / tokens

    def both() -> None:
        torch.autograd.backward(forward())
        model.zero_grad()

    with traffic() as ledger, saved_tensors(parameters) as saved:
        loss = forward()
        saved_bytes = saved.nbytes
        torch.autograd.backward(loss)
    if not alone:
        reduce_gradients(parameters, world)
    gradients = [p.grad.clone() for p in parameters if p.grad is not None]
    model.zero_grad()
    with TensorMemory() as memory:
        both()
    seconds = min(_time(both, alone) for _ in range(_TIMED))
    handle.undo()

    mine = [float(ledger.sent()), float(saved_bytes), float(memory.peak), seconds]
    total_loss = loss.item()
    if not alone:
        total_loss = reduce([total_loss], dist.ReduceOp.SUM, _CPU)[0]
        mine = reduce(mine, dist.ReduceOp.MAX, _CPU)
    sent, kept, peak, slowest = mine
    error = _difference(gradients, expected) if expected else 0.0
    return Measurement(total_loss, error, int(sent), int(kept), int(peak), slowest), gradients


def _time(action: Callable[[], None], alone: bool) -> float:
    if not alone:
        dist.barrier()
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def _difference(gradients: list[Tensor], expected: list[Tensor]) -> float:
    largest = max(float(e.abs().max()) for e in expected)
    return max(float((g - e).abs().max()) for g, e in zip(gradients, expected, strict=True)) / largest


def _table(measurements: dict[Case, Measurement], seq_len: int) -> Table:
    single, explicit = measurements[CASES[0]], measurements[CASES[1]]
    table = Table(
        title=f"forward and backward on {seq_len} tokens, {_RANKS} ranks, fp32",
        caption="differences to the single process (gradient: relative to its largest element); port, saved and "
        "peak in MiB on the rank with most: sent by attention, kept by autograd for backward, all tensors at once "
        "(weights not counted); time relative to explicit U=1",
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,  # narrow enough for 80 columns
        padding=(0, 1, 0, 0),
    )
    table.add_column("scheme", no_wrap=True)
    for column in ("loss", "loss diff", "grad diff", "port", "saved", "peak", "time"):
        table.add_column(column, justify="right", no_wrap=True)
    for case, m in measurements.items():
        table.add_row(
            case.title,
            f"{m.loss:.5f}",
            f"{abs(m.loss - single.loss):.0e}",
            f"{m.gradient_error:.0e}",
            f"{m.port_bytes / _MIB:.2f}",
            f"{m.saved_bytes / _MIB:.1f}",
            f"{m.peak_bytes / _MIB:.1f}",
            f"{m.seconds / explicit.seconds:.2f}",
        )
    return table
