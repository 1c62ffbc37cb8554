"""A bench's report as one HTML file without any other: tables and charts, light or dark as the reader prefers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape
from importlib import resources
from typing import Final

from laga_attn.bench.charts import Bar, Line, Point, bar_chart, line_chart
from laga_attn.bench.report import MIB, by_cell, columns, crossover_text, rate_text
from laga_attn.bench.summary import CellReport, Report, VariantReport, crossovers

__all__ = ["to_html"]

_HOW_TO_READ: Final = """
<p>Time is that of one forward and backward pass of attention between two barriers, on the slowest rank.
<b>Time ratio</b> is the median over rounds of its ratio to the baseline in the same round, explicit Ulysses with kept K
and V and the same kernel; below 1 is faster. Whiskers span half of the rounds. <b>Of GEMM peak</b>: attention's FLOPs
over the visible pairs (not those of rebuilding) per second, as a share of the fastest matrix product timed in the same
rounds. <b>Port</b> is what a rank sends in forward and backward, <b>saved</b> what autograd keeps between them,
<b>peak</b> the most that new tensors take at once, <b>resident</b> by how much the process grew; all of the rank that
has most. <b>Waiting</b>: time of the exchanges alone, as a share of the variant's time. <b>Hidden</b>: how much longer
the variant takes when no exchange overlaps with computation, as a share of the time of the exchanges alone.</p>
"""


def to_html(report: Report) -> str:
    """The whole page."""
    style = resources.files("laga_attn.bench").joinpath("report.css").read_text()
    facts = " · ".join(f"{escape(str(name))} {escape(str(value))}" for name, value in report.environment.items())
    body = "".join(_section(cells) for cells in by_cell(report.cells))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>laga-attn bench</title><style>{style}</style></head>\n<body><h1>laga-attn bench</h1>"
        f'<p class="quiet">{facts}</p>{_HOW_TO_READ}{body}</body></html>\n'
    )


def _section(cells: Sequence[CellReport]) -> str:
    """One cell: a single race, or a curve of races over links with each race folded away."""
    first = cells[0]
    if first.link is None or len(cells) == 1:
        return f"<section><h2>{escape(_heading(first))}</h2>{_race(first)}</section>\n"
    ordered = sorted(cells, key=_rate)
    folded = "".join(
        f"<details><summary>{escape(rate_text(cell))}</summary>{_race(cell)}</details>" for cell in ordered
    )
    return f"<section><h2>{escape(_sizes(first))}</h2>{_curve(ordered)}{folded}</section>\n"


def _sizes(cell: CellReport) -> str:
    sizes = cell.cell
    return f"{sizes.ranks} ranks, {sizes.seq_len} tokens, {sizes.num_heads} heads, {sizes.dtype}"


def _heading(cell: CellReport) -> str:
    return _sizes(cell) if cell.link is None else f"{_sizes(cell)}, {rate_text(cell)}"


def _race(cell: CellReport) -> str:
    parts = [f'<p class="quiet">{escape(_circumstances(cell))}</p>', _table(cell)]
    ratios = [
        Bar(v.name, v.ratio.median, f"{v.ratio.median:.2f}", _style(v), spread=(v.ratio.low, v.ratio.high))
        for v in cell.variants
    ]
    parts.append(_panel("Time ratio", bar_chart(ratios, name="Time ratios", reference=1.0)))
    sent = [Bar(v.name, v.sent / MIB, f"{v.sent / MIB:.1f}", _style(v)) for v in cell.variants]
    parts.append(_panel("Bytes through a rank's port, MiB", bar_chart(sent, name="Port bytes in MiB")))
    memory = [
        Bar(v.name, v.peak / MIB, f"{v.saved / MIB:.1f} of {v.peak / MIB:.1f}", _style(v), inner=v.saved / MIB)
        for v in cell.variants
    ]
    parts.append(
        _panel("Memory, MiB: saved for backward (dark) of the peak (pale)", bar_chart(memory, name="Memory in MiB"))
    )
    return "".join(parts)


def _circumstances(cell: CellReport) -> str:
    text = f"GEMM peak {cell.gemm_flops_per_second / 1e9:.0f} GFLOP/s on all ranks together ({cell.gemm_how}). "
    if cell.link is not None:
        text += f"Between the nodes {cell.link.received_rate / 1e6:.4g} Mbit/s of payload arrived when tried. "
    return text + f"Baseline: {cell.baseline}."


def _curve(cells: Sequence[CellReport]) -> str:
    lines, places = [], Counter[str]()
    for number, variant in enumerate(cells[0].variants):
        style = _style(variant)
        points = tuple(_point(cell, cell.variants[number]) for cell in cells)
        lines.append(Line(variant.name, style, places[style], points))
        places[style] += 1
    labels = [(_rate(cell), rate_text(cell)) for cell in cells]
    chart = line_chart(lines, labels, name="Time ratios over bandwidth", reference=1.0)
    crossings = "".join(f"<li>{escape(f'{c.name}: {crossover_text(c)}')}</li>" for c in crossovers(cells))
    return _panel("Time ratio over the bandwidth between two nodes", f"{chart}<ul>{crossings}</ul>")


def _point(cell: CellReport, variant: VariantReport) -> Point:
    ratio = variant.ratio
    return Point(_rate(cell), ratio.median, (ratio.low, ratio.high), f"{ratio.median:.2f} at {rate_text(cell)}")


def _rate(cell: CellReport) -> float:
    assert cell.link is not None
    return cell.link.rate


def _table(cell: CellReport) -> str:
    titles = ["variant", *(title for title, _ in columns(cell, cell.variants[0]))]
    rows = (
        f'<tr class="{_style(variant)}"><td>{escape(variant.name)}</td>'
        + "".join(f"<td>{text}</td>" for _, text in columns(cell, variant))
        + "</tr>"
        for variant in cell.variants
    )
    head = "".join(f"<th>{title}</th>" for title in titles)
    return (
        f'<div class="panel scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    )


def _style(variant: VariantReport) -> str:
    """The scheme decides the colour; contestants that are none of ours are grey."""
    first = variant.name.split()[0]
    return first if first in ("explicit", "laga", "absorbed", "auto") else "other"


def _panel(title: str, content: str) -> str:
    return f'<div class="panel"><h3>{escape(title)}</h3>{content}</div>'
