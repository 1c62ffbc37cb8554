"""A sweep: every candidate traced, timed and checked against the device's memory, and one of them recommended."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from laga_attn.plan.cost import TimeEstimate, estimate_time
from laga_attn.plan.figures import RankFigures, worst
from laga_attn.plan.hardware import Hardware
from laga_attn.plan.subjects import trace_layer
from laga_attn.plan.workload import Candidate, Workload

__all__ = ["USABLE_MEMORY", "Row", "recommend", "sweep"]

USABLE_MEMORY: Final = 0.9
"""Share of a device's memory that tensors may take: the rest is for the allocator, the context and the network."""


@dataclass(frozen=True, slots=True)
class Row:
    """One candidate: the figures of the rank that needs most memory, the time of the slowest, and whether it fits."""

    candidate: Candidate
    figures: RankFigures
    time: TimeEstimate
    fits: bool


def sweep(
    workload: Workload,
    candidates: Sequence[Candidate],
    hardware: Hardware,
    *,
    ranks: Iterable[int] = (0,),
    jobs: int = 1,
    progress: Callable[[], None] = lambda: None,
) -> list[Row]:
    """Trace every candidate on the given context-parallel ranks.

    Args:
        workload: what to plan.
        candidates: what to compare.
        hardware: for the time estimate, and the memory to fit in.
        ranks: in the zigzag layout, rank 0 sees, rebuilds and holds most; the last rank sends most.
        jobs: processes to trace in; with 1, this one.
        progress: called after each candidate.
    """
    trace = partial(_trace_ranks, workload, ranks=tuple(ranks))
    rows = []
    for candidate, figures in zip(candidates, _in_processes(trace, candidates, jobs), strict=True):
        rows.append(row_of(candidate, figures, hardware))
        progress()
    return rows


def row_of(candidate: Candidate, figures: Sequence[RankFigures], hardware: Hardware) -> Row:
    """A row of the table from the figures of some ranks."""
    heaviest = worst(figures)
    slowest = max((estimate_time(rank, hardware) for rank in figures), key=lambda time: time.without_overlap)
    return Row(candidate, heaviest, slowest, heaviest.peak_bytes <= hardware.memory_bytes * USABLE_MEMORY)


def recommend(rows: Sequence[Row]) -> tuple[Row | None, str]:
    """The fastest row that fits, by the estimate without overlap, and why, in a sentence."""
    fitting = [row for row in rows if row.fits]
    if not fitting:
        least = min(rows, key=lambda row: row.figures.peak_bytes)
        return None, (
            f"nothing fits: the least that is needed is {least.figures.peak_bytes / 2**30:.1f} GiB, by "
            f"{least.candidate}; use more context-parallel ranks, tensor parallelism, or a device with more memory"
        )
    best = min(fitting, key=lambda row: (row.time.without_overlap, row.figures.peak_bytes))
    others = [row for row in rows if row.candidate.scheme != best.candidate.scheme]
    if not others:
        return best, f"{best.candidate}: the fastest that fits by the estimate"
    rival = min(others, key=lambda row: (not row.fits, row.time.without_overlap))
    compared = {  # what the rival has none of is nothing to compare with
        "port bytes": (best.figures.port_bytes, rival.figures.port_bytes),
        "network bytes": (best.figures.nic_bytes, rival.figures.nic_bytes),
        "peak memory": (best.figures.peak_bytes, rival.figures.peak_bytes),
    }
    ratios = [f"{mine / others:.2f}x its {name}" for name, (mine, others) in compared.items() if others]
    return best, (
        f"{best.candidate}: {rival.time.without_overlap / best.time.without_overlap:.2f}x as fast as the best of the "
        f"other schemes ({rival.candidate}{'' if rival.fits else ', which does not fit'}) by the estimate, with "
        f"{', '.join(ratios)}"
    )


def _trace_ranks(workload: Workload, candidate: Candidate, *, ranks: tuple[int, ...]) -> list[RankFigures]:
    return [trace_layer(workload, candidate, rank) for rank in ranks]


def _in_processes(
    function: Callable[[Candidate], list[RankFigures]], candidates: Sequence[Candidate], jobs: int
) -> Iterator[list[RankFigures]]:
    if jobs == 1 or len(candidates) == 1:
        yield from map(function, candidates)
        return
    # Processes are spawned: a forked one would inherit locks of torch's threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield from pool.map(function, candidates)
