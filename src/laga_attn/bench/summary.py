"""From every rank's measurements to what a report says: medians, quartiles, ratios, crossovers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from laga_attn.bench.grid import Cell
from laga_attn.bench.link import Link, node_size
from laga_attn.bench.measure import GEMM, CellRun, Key, RaceRun

__all__ = [
    "CellReport",
    "Crossover",
    "LinkReport",
    "Overlap",
    "Quartiles",
    "Report",
    "VariantReport",
    "crossovers",
    "summarize",
]


@dataclass(frozen=True, slots=True)
class Quartiles:
    """A distribution over rounds: half of the rounds lie between `low` and `high`."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quartiles:
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))


@dataclass(frozen=True, slots=True)
class Overlap:
    """Communication of a variant, and how much of it is hidden behind computation.

    Attributes:
        exchanges_seconds: median time of its collectives one after the other, with nothing to compute in between.
        hidden: (time with every collective finished where it starts - time as it is) / time of the exchanges alone,
            paired by round; None where that was not timed.
        waiting: time of the exchanges alone / time as it is: the share of its time that a variant which hides nothing
            spends waiting.
    """

    exchanges_seconds: float
    hidden: Quartiles | None
    waiting: Quartiles


@dataclass(frozen=True, slots=True)
class VariantReport:
    """One variant in one cell. Bytes are those of the rank that has most.

    Attributes:
        seconds: forward and backward, by round: the longest of the ranks'.
        ratio: time / time of the baseline in the same round; below 1 is faster.
        gemm_fraction: attention FLOPs / time / GEMM peak in the same round, median.
        sent_across: bytes that the ranks of one node together sent to the other node; None with one node.
    """

    name: str
    seconds: list[float]
    ratio: Quartiles
    gemm_fraction: float
    sent_forward: int
    sent_backward: int
    sent_across: int | None
    saved: int
    peak: int
    resident: int | None
    overlap: Overlap | None

    @property
    def sent(self) -> int:
        return self.sent_forward + self.sent_backward


@dataclass(frozen=True, slots=True)
class LinkReport:
    """What the cable was told to do, and what it did, in bits per second."""

    rate: float
    latency: float
    received_rate: float


@dataclass(frozen=True, slots=True)
class CellReport:
    """One race: a cell, over a link or over this machine's loopback (None)."""

    cell: Cell
    link: LinkReport | None
    baseline: str
    attention_flops: int
    gemm_how: str
    gemm_flops_per_second: float
    variants: list[VariantReport]

    @property
    def title(self) -> str:
        return str(self.cell) if self.link is None else f"{self.cell} over {Link(self.link.rate, self.link.latency)}"


@dataclass(frozen=True, slots=True)
class Report:
    """All races of a bench; `environment` and `options` say where and how."""

    environment: dict[str, Any]
    options: dict[str, Any]
    cells: list[CellReport]


def summarize(cell: Cell, links: Sequence[Link], runs: Sequence[CellRun]) -> list[CellReport]:
    """One report per link (or a single one), from what each rank measured; the first contestant is the baseline."""
    return [
        _summarize_race(cell, link, runs, [run.races[number] for run in runs])
        for number, link in enumerate(links or (None,))
    ]


def _summarize_race(cell: Cell, link: Link | None, runs: Sequence[CellRun], races: Sequence[RaceRun]) -> CellReport:
    seconds = {key: _slowest([race.seconds[key] for race in races]) for key in races[0].seconds}
    names = list(runs[0].usage)
    gemm_rates = [runs[0].gemm_flops * len(runs) / s for s in seconds[GEMM]]  # FLOP/s of all ranks together
    ideal_seconds = [cell.attention_flops / rate for rate in gemm_rates]
    return CellReport(
        cell=cell,
        link=None if link is None else LinkReport(link.rate, link.latency, _received(races)),
        baseline=names[0],
        attention_flops=cell.attention_flops,
        gemm_how=runs[0].gemm_how,
        gemm_flops_per_second=statistics.median(gemm_rates),
        variants=[_summarize_variant(name, seconds, names[0], runs, ideal_seconds, link) for name in names],
    )


def _summarize_variant(
    name: str,
    seconds: dict[Key, list[float]],
    baseline: str,
    runs: Sequence[CellRun],
    ideal_seconds: Sequence[float],
    link: Link | None,
) -> VariantReport:
    """`ideal_seconds`: what attention would take at GEMM peak, by round."""
    taken = seconds[name, "run"]
    usage = [run.usage[name] for run in runs]
    resident = [u.resident for u in usage if u.resident is not None]
    return VariantReport(
        name=name,
        seconds=taken,
        ratio=Quartiles.of(_divide(taken, seconds[baseline, "run"])),
        gemm_fraction=statistics.median(_divide(ideal_seconds, taken)),
        sent_forward=max(u.sent_forward for u in usage),
        sent_backward=max(u.sent_backward for u in usage),
        sent_across=None if link is None else _across([u.sent_to for u in usage]),
        saved=max(u.saved for u in usage),
        peak=max(u.peak for u in usage),
        resident=max(resident) if len(resident) == len(usage) else None,
        overlap=_overlap(name, seconds),
    )


def _overlap(name: str, seconds: dict[Key, list[float]]) -> Overlap | None:
    alone, taken = seconds.get((name, "exchanges")), seconds[name, "run"]
    if alone is None:
        return None
    in_turn = seconds.get((name, "no overlap"))
    hidden = None
    if in_turn is not None:
        hidden = Quartiles.of([(s - t) / a for s, t, a in zip(in_turn, taken, alone, strict=True)])
    return Overlap(statistics.median(alone), hidden, Quartiles.of(_divide(alone, taken)))


def _slowest(by_rank: Sequence[list[float]]) -> list[float]:
    """A step lasts until the last rank has finished it."""
    return [max(round_) for round_ in zip(*by_rank, strict=True)]


def _divide(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    return [n / d for n, d in zip(numerators, denominators, strict=True)]


def _received(races: Sequence[RaceRun]) -> float:
    (rate,) = (race.received_rate for race in races if race.received_rate is not None)
    return rate


def _across(sent_to: Sequence[tuple[int, ...]]) -> int:
    """Bytes from one node to the other, by the direction that carries more."""
    node = node_size(len(sent_to))
    return max(
        sum(sum(sent[node:]) for sent in sent_to[:node]),
        sum(sum(sent[:node]) for sent in sent_to[node:]),
    )


@dataclass(frozen=True, slots=True)
class Crossover:
    """Where a variant and the baseline take the same time.

    Attributes:
        rate: bits per second, interpolated between the measured rates around it on a logarithmic axis; None if one of
            them is the faster at every measured rate.
        faster_below: whether the variant is the faster one on links slower than that (or at every rate).
    """

    name: str
    rate: float | None
    faster_below: bool


def crossovers(curve: Sequence[CellReport]) -> list[Crossover]:
    """Where each variant meets the baseline, from races of one cell over several links: at the fastest such link."""
    by_rate = sorted(curve, key=_rate)
    found = []
    for number, variant in enumerate(by_rate[0].variants):
        if variant.name == by_rate[0].baseline:
            continue
        points = [(math.log(_rate(report)), report.variants[number].ratio.median) for report in by_rate]
        crossing = None
        for (x0, y0), (x1, y1) in pairwise(points):
            if (y0 < 1) != (y1 < 1):
                crossing = Crossover(variant.name, math.exp(x0 + (1 - y0) / (y1 - y0) * (x1 - x0)), y0 < 1)
        found.append(crossing or Crossover(variant.name, None, points[0][1] < 1))
    return found


def _rate(report: CellReport) -> float:
    assert report.link is not None
    return report.link.rate
