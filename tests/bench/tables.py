"""A fake timing table, and the report that it makes: two ranks, three rounds, numbers that are easy to check."""

from __future__ import annotations

from dataclasses import replace

from laga_attn.bench.grid import Cell
from laga_attn.bench.link import Link
from laga_attn.bench.measure import GEMM, CellRun, RaceRun, Usage
from laga_attn.bench.summary import CellReport, Report, summarize

CELL = Cell(ranks=2, seq_len=1024, num_heads=16, dtype="bf16")
GEMM_FLOPS = 10**9
LINKS = (Link(1e9), Link(1e8), Link(1e10))

BASE, LAGA, AUTO = "explicit U=2 kv", "laga U=2 latent", "auto (laga U=2)"
USAGE = Usage(sent_forward=100, sent_backward=300, sent_to=(0, 400), saved=1000, peak=5000, resident=6000)


def rank_0(rate: float | None = None, slower: float = 1.0) -> CellRun:
    """`slower`: what the baseline's times are multiplied with."""
    seconds = {
        (BASE, "run"): [2.0 * slower, 4.0 * slower, 8.0 * slower],
        (BASE, "exchanges"): [1.0, 1.0, 1.0],
        (LAGA, "run"): [1.0, 3.0, 4.0],
        (LAGA, "no overlap"): [2.0, 4.0, 6.0],
        (LAGA, "exchanges"): [1.0, 2.0, 4.0],
        (AUTO, "run"): [3.0, 3.0, 3.0],
        GEMM: [0.5, 1.0, 2.0],
    }
    usage = {BASE: USAGE, LAGA: replace(USAGE, saved=500, sent_forward=50), AUTO: replace(USAGE, resident=None)}
    return CellRun(usage, "torch.mm", GEMM_FLOPS, [RaceRun(seconds, rate)])


def rank_1(rate: float | None = None, slower: float = 1.0) -> CellRun:
    """Faster than rank 0 in everything but one round of one variant."""
    first = rank_0(slower=slower)
    seconds = {key: [0.5 * s for s in values] for key, values in first.races[0].seconds.items()}
    seconds[LAGA, "run"] = [0.5, 3.5, 2.0]
    usage = {name: replace(u, peak=u.peak + 1, sent_to=(7, 0)) for name, u in first.usage.items()}
    return CellRun(usage, "torch.mm", GEMM_FLOPS, [RaceRun(seconds, rate)])


def race_report() -> CellReport:
    (report,) = summarize(CELL, (), [rank_0(), rank_1()])
    return report


def curve() -> list[CellReport]:
    """The slower the link, the slower the baseline."""
    slower = (1.25, 5.0, 0.4)
    by_rank = [
        [rank_0(slower=factor) for factor in slower],
        [rank_1(0.95 * link.rate, factor) for link, factor in zip(LINKS, slower, strict=True)],
    ]
    return summarize(CELL, LINKS, [replace(runs[0], races=[run.races[0] for run in runs]) for runs in by_rank])


def report() -> Report:
    environment = {"laga-attn": "0.1", "processor": "a <fast> one"}
    over_links = [replace(race, cell=replace(CELL, seq_len=9)) for race in curve()]
    return Report(environment, {"rounds": 3}, [race_report(), *over_links])
