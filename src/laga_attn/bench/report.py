"""A bench's report as a table in the terminal and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from laga_attn.bench.summary import CellReport, Crossover, Quartiles, Report, VariantReport, crossovers

__all__ = ["FORMAT", "MIB", "by_cell", "columns", "crossover_text", "print_report", "rate_text", "to_json"]

MIB: Final = 2**20
FORMAT: Final = "laga-attn bench, version 1"
_WIDTH: Final = 112
_LEGEND: Final = (
    "time ratio: to the baseline (first line) in the same round, below 1 is faster. port: sent by a rank, forward and\n"
    "backward. saved: for backward. peak: of new tensors. resident: growth of the process. All of the rank with most."
)


def print_report(report: Report, console: Console) -> None:
    """One table per race, and the crossovers of each curve; the console is made as wide as the tables."""
    # A line that a narrow terminal wraps is better than numbers that are cut off.
    console.width = max(console.width, _WIDTH)
    for cell in report.cells:
        console.print(_table(cell))
    console.print(_LEGEND, soft_wrap=True)
    for cells in by_cell(report.cells):
        if cells[0].link is not None and len(cells) > 1:
            console.print(f"{cells[0].cell}, links from {rate_text(cells[0])} to {rate_text(cells[-1])}:")
            for crossover in crossovers(cells):
                console.print(f"  {crossover.name}: {crossover_text(crossover)}", soft_wrap=True)


def to_json(report: Report) -> str:
    """Everything in the report, all times by round included; `docs/benchmarks.md` describes the fields."""
    return json.dumps({"format": FORMAT, **asdict(report)}, indent=1) + "\n"


def by_cell(cells: Iterable[CellReport]) -> list[list[CellReport]]:
    """Races of the same cell together: over one link, or a curve over several."""
    groups: dict[Any, list[CellReport]] = {}
    for cell in cells:
        groups.setdefault(cell.cell, []).append(cell)
    return list(groups.values())


def rate_text(cell: CellReport) -> str:
    """`100 Mbit/s`."""
    assert cell.link is not None
    return _bits(cell.link.rate)


def crossover_text(crossover: Crossover) -> str:
    """Which of the two is the faster where."""
    if crossover.rate is None:
        return f"{'faster' if crossover.faster_below else 'slower'} than the baseline at every rate"
    side = "below" if crossover.faster_below else "above"
    return f"faster than the baseline {side} {_bits(crossover.rate)}"


def columns(cell: CellReport, variant: VariantReport) -> Iterator[tuple[str, str]]:
    """Title and text of every column after the name; the same titles for all variants of a cell."""
    seconds = Quartiles.of(variant.seconds).median
    yield "time ratio", f"{variant.ratio.median:.2f}"
    yield "quartiles", f"{variant.ratio.low:.2f} .. {variant.ratio.high:.2f}"
    yield "ms", f"{seconds * 1e3:.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.2f}"
    yield "of GEMM peak", f"{variant.gemm_fraction:.0%}"
    for title, nbytes in (
        ("port MiB", variant.sent),
        ("saved MiB", variant.saved),
        ("peak MiB", variant.peak),
        ("resident MiB", variant.resident),
    ):
        yield title, "" if nbytes is None else f"{nbytes / MIB:.1f}"
    if any(v.overlap for v in cell.variants):
        overlap = variant.overlap
        yield "waiting", f"{overlap.waiting.median:.0%}" if overlap else ""
        yield "hidden", f"{overlap.hidden.median:.0%}" if overlap and overlap.hidden else ""


def _bits(rate: float) -> str:
    for unit, factor in (("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if rate >= factor:
            return f"{rate / factor:.3g} {unit}"
    return f"{rate / 1e3:.3g} kbit/s"


def _table(cell: CellReport) -> Table:
    gemm = f"GEMM peak {cell.gemm_flops_per_second / 1e9:.0f} GFLOP/s ({cell.gemm_how})"
    table = Table(title=f"{cell.title}; {gemm}", title_justify="left", box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
    table.add_column("variant", no_wrap=True)
    for title, _ in columns(cell, cell.variants[0]):
        table.add_column(title.replace(" ", "\n"), justify="right", no_wrap=True)
    for variant in cell.variants:
        style = "dim" if variant.name == cell.baseline else None
        table.add_row(variant.name, *(text for _, text in columns(cell, variant)), style=style)
    return table
