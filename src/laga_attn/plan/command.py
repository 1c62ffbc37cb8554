"""`laga-attn plan`: its arguments, and what they mean."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from typer import Option

from laga_attn.attention_plan import SCHEMES
from laga_attn.plan.hardware import Hardware, load_hardware
from laga_attn.plan.report import as_json, assumptions, automatic, headline, layer_table, step_table
from laga_attn.plan.step import StepFigures, layers_of, trace_step
from laga_attn.plan.sweep import Row, recommend, sweep
from laga_attn.plan.workload import Workload, candidates, load_model, parse_tokens
from laga_attn.train.errors import UsageError

__all__ = ["plan"]

_WHAT, _WHERE, _HOW, _SHOW = "What to plan", "On what", "Which configurations", "What to show"
_TABLE_WIDTH = 116
_SAVES = ("auto", "latent", "gathered", "kv")


def plan(
    model: Annotated[
        str,
        Option(
            help="A preset (deepseek-v3, ...), a Hugging Face config.json or its folder.",
            rich_help_panel=_WHAT,
        ),
    ] = "deepseek-v3",
    seq_len: Annotated[
        str, Option(help="Tokens of one sequence, over all its ranks: 131072, 128K, 1M.", rich_help_panel=_WHAT)
    ] = "128K",
    batch: Annotated[int, Option(help="Sequences per context-parallel group.", rich_help_panel=_WHAT)] = 1,
    dtype: Annotated[str, Option(metavar="bf16|fp16|fp32", rich_help_panel=_WHAT)] = "bf16",
    model_step: Annotated[
        bool,
        Option(
            "--model-step/--layer",
            help="Also a step of the whole model, for the best configuration of each scheme; or the MLA layer alone.",
            rich_help_panel=_WHAT,
        ),
    ] = False,
    cp: Annotated[int, Option(help="Context-parallel ranks: those that share a sequence.", rich_help_panel=_WHERE)] = 8,
    tp: Annotated[
        int, Option(help="Tensor-parallel ranks: those that share a layer's heads.", rich_help_panel=_WHERE)
    ] = 1,
    dp: Annotated[int, Option(help="Data-parallel copies.", rich_help_panel=_WHERE)] = 1,
    nodes: Annotated[
        int | None, Option(help="Nodes of the cluster. Default: as many as the ranks fill.", rich_help_panel=_WHERE)
    ] = None,
    gpus_per_node: Annotated[
        int | None, Option(help="Devices per node. Default: what the hardware has.", rich_help_panel=_WHERE)
    ] = None,
    hardware: Annotated[
        str,
        Option(
            help="a100, h100, h200, b200, 910b, or a YAML file with figures of your own (see docs/plan.md).",
            rich_help_panel=_WHERE,
        ),
    ] = "h100",
    scheme: Annotated[
        list[str] | None,
        Option(metavar="explicit|absorbed|laga|all", help="Repeat for several. Default: all.", rich_help_panel=_HOW),
    ] = None,
    ulysses_degree: Annotated[
        list[int] | None, Option(help="Repeat for several. Default: all that are possible.", rich_help_panel=_HOW)
    ] = None,
    save: Annotated[
        list[str] | None,
        Option(
            metavar="auto|latent|gathered|kv|all",
            help="What is kept for backward; repeat for several. Default: auto, each scheme's own.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    ranks: Annotated[
        str,
        Option(
            metavar="first|last|all|NUMBERS",
            help="Which context-parallel ranks to trace; a row shows the one that needs most memory. The first one "
            "receives, rebuilds and holds most, the last one sends most.",
            rich_help_panel=_HOW,
        ),
    ] = "first",
    jobs: Annotated[
        int | None, Option(help="Processes to trace in. Default: one per core.", rich_help_panel=_SHOW)
    ] = None,
    json_path: Annotated[
        Path | None, Option("--json", help="Write everything as JSON; - for the terminal.", rich_help_panel=_SHOW)
    ] = None,
    plot: Annotated[
        Path | None, Option(help="Draw the trade-off and the crossovers as PNG.", rich_help_panel=_SHOW)
    ] = None,
    paper: Annotated[
        bool,
        Option(
            "--paper",
            help="Instead of a plan: trace the figures of the LAGA paper again and write docs/reproduction.md. Run it "
            "in a checkout of the repository.",
            rich_help_panel=_SHOW,
        ),
    ] = False,
) -> None:
    """Say what a configuration moves, keeps, computes and takes, before a cluster is booked for it.

    Every scheme and Ulysses degree is traced with the code that trains, on tensors without data: **port bytes, memory
    and FLOPs are exact**, at any number of ranks. Times are estimates; the constants behind them are printed.

        laga-attn plan --model deepseek-v3 --seq-len 1M --cp 256 --hardware h100
    """
    console = Console(stderr=json_path is not None and str(json_path) == "-")
    console.width = max(console.width, _TABLE_WIDTH)  # a cut table says nothing
    try:
        if paper:
            from laga_attn.plan.paper import write_reproduction

            write_reproduction(Path(), console)
            return
        device = load_hardware(hardware)
        hf, cfg = load_model(model)
        per_node = int(device.devices_per_node.value) if gpus_per_node is None else gpus_per_node
        work = Workload(cfg, parse_tokens(seq_len), cp, tp, dp, batch, per_node, dtype)
        device = device.computing_with(work.itemsize)
        _check_nodes(work, nodes)
        chosen = candidates(work, _choice("--scheme", scheme, SCHEMES), ulysses_degree, _choice("--save", save, _SAVES))
        traced = _ranks(ranks, cp)
        _check_rest(jobs, json_path, plot)
        if model_step:
            layers_of(hf)
        with _progress() as progress:
            bar = progress.add_task("tracing", total=len(chosen))
            rows = sweep(
                work, chosen, device, ranks=traced, jobs=jobs or os.cpu_count() or 1,
                progress=lambda: progress.advance(bar),
            )  # fmt: skip
            best, reason = recommend(rows)
            steps = _steps(hf, work, device, rows, progress) if model_step else []
        _show(console, work, device, rows, best, reason, steps)
        if plot is not None:
            from laga_attn.plan.plot import draw

            draw(rows, work, device, plot)
            console.print(f"plot: {plot}")
        if json_path is not None:
            _write_json(json_path, as_json(work, device, rows, best, reason, steps))
    except UsageError as error:
        typer.echo(f"laga-attn plan: {error}", err=True)
        raise typer.Exit(2) from None


def _show(
    console: Console,
    work: Workload,
    device: Hardware,
    rows: Sequence[Row],
    best: Row | None,
    reason: str,
    steps: Sequence[StepFigures],
) -> None:
    console.print(headline(work, device), highlight=False)
    console.print(layer_table(rows, best))
    if steps:
        console.print(step_table(steps, work, device))
    console.print(f"Recommended: {reason}", highlight=False)
    console.print(automatic(work, device), highlight=False)
    console.print("\nAssumptions", style="dim")
    for line in assumptions(device, rows):
        console.print(f"  {line}", style="dim", highlight=False)


def _steps(
    hf: dict[str, Any], work: Workload, device: Hardware, rows: Sequence[Row], progress: Progress
) -> list[StepFigures]:
    """The whole model with the fastest configuration of each scheme."""
    fastest: dict[str, Row] = {}
    for row in sorted(rows, key=lambda row: (not row.fits, row.time.without_overlap)):
        fastest.setdefault(row.candidate.scheme, row)
    bar = progress.add_task("tracing the model", total=len(fastest))
    steps = []
    for row in fastest.values():
        try:
            steps.append(trace_step(hf, work, row.candidate, device, row.figures.rank))
        except (ImportError, ValueError) as error:  # Transformers is missing, or does not know this model
            raise UsageError(f"--model-step: {str(error).splitlines()[0]}; --layer plans without it") from None
        progress.advance(bar)
    return steps


def _check_nodes(work: Workload, nodes: int | None) -> None:
    filled = -(-work.devices // work.devices_per_node)
    if nodes is not None and nodes != filled:
        raise UsageError(
            f"cp {work.cp} x tp {work.tp} x dp {work.dp} = {work.devices} ranks fill {filled} nodes of "
            f"{work.devices_per_node}, not {nodes}; choose --nodes {filled}, or sizes whose product is "
            f"{nodes * work.devices_per_node}"
        )


def _check_rest(jobs: int | None, *targets: Path | None) -> None:
    """What would otherwise come to light after the sweep."""
    if jobs is not None and jobs < 1:
        raise UsageError(f"--jobs must be at least 1 process, got {jobs}")
    for target in targets:
        if target is not None and not target.parent.is_dir():
            raise UsageError(f"{target}: there is no folder {target.parent}; create it, or name a file in another one")


def _choice(option: str, given: list[str] | None, known: Sequence[str]) -> list[str]:
    """The names that were chosen; by default `auto` where there is one, otherwise all."""
    names = given or (["auto"] if "auto" in known else ["all"])
    if "all" in names:
        return [name for name in known if name != "auto"]
    for name in names:
        if name not in known:
            raise UsageError(f"{option} {name} is unknown; choose among {', '.join(known)}, all")
    return names


def _ranks(text: str, cp: int) -> list[int]:
    named = {"first": [0], "last": [cp - 1], "all": list(range(cp))}
    if text in named:
        return named[text]
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        numbers = [-1]
    if numbers[0] < 0 or numbers[-1] >= cp:
        raise UsageError(f"--ranks {text}: give first, last, all, or numbers from 0 to {cp - 1} such as 0,{cp - 1}")
    return numbers


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=Console(stderr=True), transient=True,
    )  # fmt: skip


def _write_json(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=1)
    if str(path) == "-":
        sys.stdout.write(text + "\n")
        return
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--json {path}: {error}") from None
