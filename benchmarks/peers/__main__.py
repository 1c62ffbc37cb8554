"""`python -m benchmarks.peers`, from the root of the repository."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from benchmarks.peers.contest import BASELINE, PEERS, contest
from benchmarks.peers.layers import OURS, LayerRun, race_layers
from benchmarks.peers.packages import install
from rich.console import Console
from rich.table import Table
from typer import Option

from laga_attn.bench.command import environment
from laga_attn.bench.grid import Cell
from laga_attn.bench.html import to_html
from laga_attn.bench.ranks import run_on_ranks
from laga_attn.bench.report import print_report
from laga_attn.bench.summary import Quartiles, Report, summarize


def main(
    ranks: Annotated[int, Option(help="Context-parallel ranks; divides the heads.")] = 2,
    seq_len: Annotated[int, Option(help="Tokens; a multiple of twice the ranks.")] = 2048,
    heads: Annotated[int, Option(help="Attention heads, of DeepSeek's sizes.")] = 16,
    dtype: Annotated[str, Option(metavar="bf16|fp32", help="Of everything.")] = "bf16",
    rounds: Annotated[int, Option(help="How often each contestant is timed.")] = 5,
    peer: Annotated[
        list[str] | None, Option(help=f"Peers to race, by name: {'; '.join(PEERS)}. Default: all of them.")
    ] = None,
    layers: Annotated[bool, Option(help="Also compare whole attention layers.")] = True,
    output: Annotated[Path | None, Option("--json", help="File for all measurements.")] = None,
    html: Annotated[Path | None, Option(help="File for a report for a browser.")] = None,
) -> None:
    """Race what an MLA user would run instead against the schemes of this library, on the same inputs.

    Peers are installed from PyPI into build/peers where they are not there yet. Those that cannot
    compute MLA on this machine are listed with their error.
    """
    if heads % ranks or seq_len % (2 * ranks):
        raise typer.BadParameter(f"{ranks} ranks must divide {heads} heads, and {2 * ranks} the {seq_len} tokens")
    for name in peer or ():
        if name not in PEERS:
            raise typer.BadParameter(f"--peer {name!r} is unknown; choose among {'; '.join(PEERS)}")
    console = Console()
    for module, problem in install().items():
        console.print(f"{module} could not be installed: {problem}")
    cell, cores = Cell(ranks, seq_len, heads, dtype), len(os.sched_getaffinity(0))
    threads = max(1, cores // ranks)
    outcomes = run_on_ranks(contest, ranks, cell, rounds, tuple(peer or PEERS), threads=threads)
    report = Report(environment(), {"rounds": rounds}, summarize(cell, (), [outcome.run for outcome in outcomes]))
    print_report(report, console)
    for name, difference in outcomes[0].difference.items():
        console.print(f"{name}: largest relative difference from explicit Ulysses {difference:.1e}")
    for name, error in outcomes[0].refused.items():
        console.print(f"{name} cannot run here: {error}", soft_wrap=True, markup=False)
    layer_runs: list[LayerRun] = []
    if layers:
        layer_runs = run_on_ranks(race_layers, ranks, cell, rounds, cores, threads=threads)
        console.print(_layer_table(layer_runs))
    if output is not None:
        first = outcomes[0]
        rest = {"difference": first.difference, "refused": first.refused, "layers": [asdict(r) for r in layer_runs]}
        output.write_text(json.dumps({"attention": asdict(report), "baseline": BASELINE, **rest}, indent=1) + "\n")
    if html is not None:
        html.write_text(to_html(report))


def _layer_table(runs: list[LayerRun]) -> Table:
    table = Table(title="one attention layer, forward and backward; Transformers in one process", title_justify="left")
    for title in ("layer", "time ratio", "quartiles", "ms", "peak MiB of a rank", "difference"):
        table.add_column(title)
    seconds = {name: [max(r) for r in zip(*(run.seconds[name] for run in runs), strict=True)] for name in runs[0].peak}
    for name, times in seconds.items():
        ratio = Quartiles.of([t / own for t, own in zip(times, seconds[OURS], strict=True)])
        difference = runs[0].difference.get(name)
        table.add_row(
            name,
            f"{ratio.median:.2f}",
            f"{ratio.low:.2f} .. {ratio.high:.2f}",
            f"{Quartiles.of(times).median * 1e3:.0f}",
            f"{max(run.peak[name] for run in runs) / 2**20:.0f}",
            "" if difference is None else f"{difference:.1e}",
        )
    return table


if __name__ == "__main__":
    typer.run(main)
