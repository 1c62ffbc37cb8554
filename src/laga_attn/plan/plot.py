"""The trade-off as a picture: bytes against FLOPs of every candidate, and where one scheme overtakes another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from laga_attn.attention_plan import LatentDims, Scheme
from laga_attn.auto import Cost, estimate, legal_degrees
from laga_attn.layout import SequenceLayout
from laga_attn.plan.cost import flops_per_port_byte
from laga_attn.plan.hardware import Hardware
from laga_attn.plan.sweep import Row
from laga_attn.plan.workload import Workload
from laga_attn.train.errors import UsageError

__all__ = ["draw"]

_COLOURS: Final[dict[Scheme, str]] = {"laga": "#2a9d8f", "explicit": "#d1495b", "absorbed": "#edae49"}
_RANKS: Final = tuple(2**n for n in range(1, 11))
_HEADS: Final = tuple(2**n for n in range(3, 9))


def draw(rows: Sequence[Row], workload: Workload, hardware: Hardware, path: Path) -> None:
    """Write a PNG with three panels.

    Raises:
        UsageError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("--plot needs matplotlib: pip install 'laga-attn[train]'") from None
    figure = Figure(figsize=(17, 5.2), layout="constrained")
    trade_off, over_ranks, over_heads = figure.subplots(1, 3)
    _draw_trade_off(trade_off, rows)
    ranks = [cp for cp in _RANKS if workload.seq_len % (2 * cp) == 0]
    _draw_crossover(
        over_ranks, ranks, lambda cp: (workload.dims, replace(workload, cp=cp)), hardware, "context-parallel ranks P"
    )
    heads = [h for h in _HEADS if h >= 8]
    _draw_crossover(
        over_heads, heads, lambda h: (replace(workload.dims, num_heads=h), workload), hardware,
        f"heads H, at P = {workload.cp}",
    )  # fmt: skip
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise UsageError(f"--plot {path}: {error}") from None


def _draw_trade_off(axes: Any, rows: Sequence[Row]) -> None:
    largest = max(row.figures.peak_bytes for row in rows)
    for scheme, colour in _COLOURS.items():
        mine = [row for row in rows if row.candidate.scheme == scheme]
        axes.scatter(
            [row.figures.port_bytes / 2**30 for row in mine],
            [row.figures.total_flops / 1e12 for row in mine],
            s=[900 * row.figures.peak_bytes / largest + 12 for row in mine],
            c=colour, alpha=0.55,
        )  # fmt: skip
        axes.scatter([], [], s=60, c=colour, alpha=0.55, label=scheme)  # the legend's bubble, of one size for all
        for row in mine:
            where = (row.figures.port_bytes / 2**30, row.figures.total_flops / 1e12)
            axes.annotate(f"{row.candidate.ulysses_degree}", where, fontsize=7, ha="center", va="center")
    axes.set(xscale="log", yscale="log", xlabel="port bytes per rank and layer, GiB", ylabel="TFLOP per rank and layer")
    axes.set_title("bytes against FLOPs; bubble: peak memory; number: Ulysses degree", fontsize=10)
    axes.legend(fontsize=8)


def _draw_crossover(
    axes: Any,
    values: Sequence[int],
    case: Callable[[int], tuple[LatentDims, Workload]],
    hardware: Hardware,
    label: str,
) -> None:
    """Cost of each scheme at its best degree, and its port bytes, relative to explicit at its best."""
    best = [_best_by_scheme(*case(value), hardware) for value in values]
    rates = [flops_per_port_byte(case(value)[1], hardware) for value in values]
    for scheme in ("laga", "absorbed"):
        costs = [b[scheme].total(f) / b["explicit"].total(f) for b, f in zip(best, rates, strict=True)]
        moved = [b[scheme].port_bytes / b["explicit"].port_bytes for b in best]
        axes.plot(values, costs, color=_COLOURS[scheme], marker="o", label=f"{scheme}: bytes-and-FLOPs cost")
        axes.plot(values, moved, color=_COLOURS[scheme], linestyle="--", label=f"{scheme}: port bytes")
    axes.axhline(1.0, color="grey", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel=label, ylabel="relative to explicit at its best degree")
    axes.set_xticks(values, [str(value) for value in values], minor=False)
    axes.set_title("below 1: better than explicit", fontsize=10)
    axes.legend(fontsize=8)


def _best_by_scheme(dims: LatentDims, workload: Workload, hardware: Hardware) -> dict[Scheme, Cost]:
    rate = flops_per_port_byte(workload, hardware)
    layout = SequenceLayout.zigzag(workload.seq_len, workload.cp)

    def cheapest(scheme: Scheme) -> Cost:
        costs = [
            estimate(scheme, dims, layout, degree, causal=True, itemsize=workload.itemsize, batch=workload.batch)
            for degree in legal_degrees(workload.cp, dims.num_heads)
        ]
        return min(costs, key=lambda cost: cost.total(rate))

    return {scheme: cheapest(scheme) for scheme in _COLOURS}
