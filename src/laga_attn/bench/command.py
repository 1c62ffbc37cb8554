"""`laga-attn bench`: its arguments, and the run of one."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import torch
import typer
from rich.console import Console
from typer import Option

from laga_attn.bench.grid import DTYPES, Grid, preset
from laga_attn.bench.html import to_html
from laga_attn.bench.link import Link, node_size, parse_link, two_nodes
from laga_attn.bench.ranks import Device, run_on_ranks
from laga_attn.bench.report import print_report, to_json
from laga_attn.bench.run import Task, check_kernel, resident_on_rank, run_rank, with_resident
from laga_attn.bench.summary import CellReport, Report, summarize
from laga_attn.kernels import KernelName
from laga_attn.train.errors import UsageError

__all__ = ["bench", "environment", "run_bench"]

_SIZES, _VARIANTS, _RUN, _KEEP = "Sizes", "Variants", "How to run", "What to keep"


def bench(
    preset_name: Annotated[
        str,
        Option(
            "--preset",
            metavar="quick|full|paper",
            help="Sizes and variants to start from: quick takes under two minutes on two idle cores, full and "
            "paper (128 heads, 8 ranks) hours. The options below replace parts of it.",
        ),
    ] = "quick",
    ranks: Annotated[
        list[int] | None, Option(help="Context-parallel ranks P; repeat it for several.", rich_help_panel=_SIZES)
    ] = None,
    seq_len: Annotated[
        list[int] | None, Option(help="Tokens S of the whole sequence; repeatable.", rich_help_panel=_SIZES)
    ] = None,
    heads: Annotated[
        list[int] | None,
        Option(help="Heads H, of DeepSeek's sizes (192/128, latent 512); repeatable.", rich_help_panel=_SIZES),
    ] = None,
    dtype: Annotated[
        list[str] | None, Option(metavar="|".join(DTYPES), help="Repeatable.", rich_help_panel=_SIZES)
    ] = None,
    scheme: Annotated[
        list[str] | None,
        Option(metavar="laga|explicit|absorbed|auto", help="Repeatable.", rich_help_panel=_VARIANTS),
    ] = None,
    ulysses_degree: Annotated[
        list[int] | None,
        Option(help="Degrees U; repeatable. Default: all that divide ranks and heads.", rich_help_panel=_VARIANTS),
    ] = None,
    save: Annotated[
        list[str] | None,
        Option(
            metavar="latent|gathered|kv",
            help="What is kept for backward; repeatable. Default: all that a scheme has.",
            rich_help_panel=_VARIANTS,
        ),
    ] = None,
    device: Annotated[
        str,
        Option(metavar="cpu|cuda", help="Where the ranks compute; cuda takes one GPU per rank.", rich_help_panel=_RUN),
    ] = "cpu",
    kernel: Annotated[str, Option(help="Attention kernel, the same for all variants.", rich_help_panel=_RUN)] = "auto",
    rounds: Annotated[int | None, Option(help="How often each variant is timed.", rich_help_panel=_RUN)] = None,
    link: Annotated[
        list[str] | None,
        Option(
            metavar="RATE[,LATENCY]",
            help="Place the ranks in two nodes (network namespaces) joined by a cable of this rate, such as 100mbit or "
            "2.5gbit,0.2ms; repeat it for a curve over bandwidth. Needs root, iproute2 and util-linux.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    flops_per_port_byte: Annotated[
        float | None,
        Option(
            help="What --scheme auto weighs bytes with: FLOPs of a rank while one byte passes its port, 1600 for "
            "200 GFLOP/s and 1 Gbit/s. Default: 800 on CPUs, 2000 elsewhere.",
            rich_help_panel=_VARIANTS,
        ),
    ] = None,
    overlap: Annotated[
        bool,
        Option("--overlap", help="Also measure how much communication hides behind computation.", rich_help_panel=_RUN),
    ] = False,
    json: Annotated[Path | None, Option(help="File for all measurements.", rich_help_panel=_KEEP)] = None,
    html: Annotated[
        Path | None, Option(help="File for a report with charts, for a browser.", rich_help_panel=_KEEP)
    ] = None,
) -> None:
    """Measure time, traffic and memory of the schemes side by side on this machine.

    Two ranks, all schemes, under two minutes:

        laga-attn bench --html report.html

    Where a slow network makes the latent pay:

        sudo laga-attn bench --scheme laga --link 100mbit --link 1gbit --link 10gbit --html curve.html

    All variants of a size take turns in one run, on the same ranks, weights and inputs. Times are ratios to explicit
    Ulysses with kept K and V in the same round; the median is reported with its quartiles.
    """
    try:
        _check_writable(json, html)
        grid = preset(preset_name).override(
            ranks=ranks,
            seq_lens=seq_len,
            heads=heads,
            dtypes=dtype,
            schemes=scheme,
            degrees=ulysses_degree,
            saves=save,
            rounds=rounds,
            flops_per_port_byte=flops_per_port_byte,
        )
        links = [parse_link(text) for text in link or ()]
        where = _check_device(device, grid, links)
        report = run_bench(grid, links, device=where, kernel=check_kernel(kernel, grid, where), overlap=overlap)
    except UsageError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from error
    print_report(report, Console())
    if json is not None:
        json.write_text(to_json(report))
    if html is not None:
        html.write_text(to_html(report))


def run_bench(
    grid: Grid, links: list[Link], *, device: Device = "cpu", kernel: KernelName = "auto", overlap: bool = False
) -> Report:
    """Measure every cell of the grid, ranks started once per number of ranks.

    Raises:
        UsageError: links that this machine or this number of ranks cannot have.
    """
    if links:
        for ranks in grid.ranks:
            node_size(ranks)
    facts = environment()
    reports: list[CellReport] = []
    with two_nodes(links) if links else nullcontext() as nodes:
        for ranks in grid.ranks:
            cells = tuple((cell, tuple(grid.variants(cell))) for cell in grid.cells() if cell.ranks == ranks)
            task = Task(cells, grid.rounds, device, kernel, tuple(links), overlap)
            places = [nodes[rank // node_size(ranks)] for rank in range(ranks)] if nodes else None
            threads = max(1, _cores() // ranks)
            by_rank = run_on_ranks(run_rank, ranks, task, threads=threads, device=device, places=places)
            if device == "cpu":
                grown = run_on_ranks(resident_on_rank, ranks, task, threads=threads)
                by_rank = [with_resident(*rank) for rank in zip(by_rank, grown, strict=True)]
            for (cell, _), *runs in zip(cells, *by_rank, strict=True):
                reports += summarize(cell, links, runs)
    how = {"device": device, "kernel": kernel, "links": [str(link) for link in links], "overlap": overlap}
    return Report(facts, {**asdict(grid), **how}, reports)


def environment() -> dict[str, Any]:
    """What the numbers depend on besides the options."""
    return {
        "laga-attn": importlib.metadata.version("laga-attn"),
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "processor": _processor(),
        "cores": _cores(),
        "instruction set": torch.backends.cpu.get_cpu_capability(),
        "load at start": round(os.getloadavg()[0], 2),
    }


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    """The model name that Linux gives, else what Python knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _check_writable(*files: Path | None) -> None:
    """Before an hour of measuring, not after it."""
    for file in files:
        if file is None:
            continue
        if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
            raise UsageError(f"{file} cannot be written; name a file in a folder that exists and is yours to write")


def _check_device(name: str, grid: Grid, links: list[Link]) -> Device:
    if name not in get_args(Device):
        raise UsageError(f"--device {name!r} is unknown; choose one of {', '.join(get_args(Device))}")
    if name == "cuda" and links:
        raise UsageError("--link shapes the network of ranks that compute on the CPU; leave --device cuda out")
    if name == "cuda" and torch.cuda.device_count() < max(grid.ranks):
        raise UsageError(
            f"--device cuda: {max(grid.ranks)} ranks need as many GPUs, and there are {torch.cuda.device_count()}; "
            "choose fewer with --ranks"
        )
    return cast(Device, name)
