"""Inference steps on ranks from random latents: run a schedule, and collect what every token got."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

import laga_attn as laga
from laga_attn.inference import LatentCache, Step, attend
from tests.oracle import Case, Inputs, make_inputs, oracle
from tests.pool import RankContext, RankGroup

__all__ = ["Setup", "expected_outputs", "open_cache", "parallel", "run_on", "run_schedule", "take_step"]

Schedule = Sequence[Mapping[int, int]]


@dataclass(frozen=True)
class Setup:
    """Sequences (their numbers are their ids), and how a cache and its steps treat them."""

    lengths: tuple[int, ...] = (40,)
    heads: int = 6
    nope: int = 6
    rope: int = 4
    v: int = 5
    rank: int = 8
    scale: float | None = 0.3
    dtype: torch.dtype = torch.float64
    cache_dtype: torch.dtype = torch.float64
    page_size: int = 4
    max_tokens: int | None = None
    rebuild_from: int = 8
    kind: str = "zigzag"
    ulysses_degree: int = 1
    options: dict[str, object] = field(default_factory=dict)  # of attend

    def case(self, sequence: int) -> Case:
        return Case(
            lengths=(self.lengths[sequence],), heads=self.heads, nope=self.nope, rope=self.rope, v=self.v,
            rank=self.rank, scale=self.scale, seed=sequence, dtype=self.dtype,
        )  # fmt: skip

    def inputs(self, sequence: int) -> Inputs:
        """Every sequence has its own tokens but the weights are those of the first."""
        inputs = make_inputs(self.case(sequence))
        weight = make_inputs(self.case(0)).weight
        return Inputs(inputs.q, inputs.c_kv, inputs.k_rope, weight, inputs.dout, inputs.dlse)


def parallel(ctx: RankContext, setup: Setup) -> laga.ContextParallel:
    if ctx.size == 1:
        return laga.ContextParallel.none()
    return laga.ContextParallel(ctx.group, setup.ulysses_degree)


def open_cache(ctx: RankContext, setup: Setup) -> LatentCache:
    return LatentCache(
        1, setup.rank, setup.rope, cp=parallel(ctx, setup), dtype=setup.cache_dtype, page_size=setup.page_size,
        max_tokens=setup.max_tokens,
    )  # fmt: skip


def take_step(cache: LatentCache, setup: Setup, counts: Mapping[int, int]) -> tuple[Step, Tensor]:
    """Plan, attend and commit: the step, and this rank's outputs `[s, H, v]`. Pads are NaN on the way in."""
    step = cache.plan(counts, rebuild_from=setup.rebuild_from, kind=setup.kind)
    inputs = {sequence: setup.inputs(sequence) for sequence in counts}

    def local(name: str) -> Tensor:
        parts = [
            getattr(inputs[s.sequence], name)[:, s.context : s.context + s.new].to(setup.dtype) for s in step.segments
        ]
        return step.shard(torch.cat(parts, dim=1), pad_value=float("nan"))

    weight = next(iter(inputs.values())).weight.to(setup.dtype)
    out = attend(
        local("q"), local("c_kv"), local("k_rope"), weight, cache=cache, step=step, layer=0,
        qk_nope_head_dim=setup.nope, v_head_dim=setup.v, softmax_scale=setup.scale, **setup.options,
    )  # fmt: skip
    cache.commit(step)
    return step, out[0]


def run_schedule(ctx: RankContext, setup: Setup, schedule: Schedule) -> list[tuple[list, np.ndarray, Tensor]]:
    """All steps: per step its segments, the packed token of each local row, and the outputs."""
    cache = open_cache(ctx, setup)
    for _ in setup.lengths:
        cache.add()
    results = []
    for counts in schedule:
        step, out = take_step(cache, setup, counts)
        rows = step.rows()
        assert not out[torch.tensor(rows < 0)].any(), "outputs of pads are not 0"
        results.append((list(step.segments), rows, out))
    assert [cache.length(s) for s in range(len(setup.lengths))] == [
        sum(counts.get(s, 0) for counts in schedule) for s in range(len(setup.lengths))
    ]
    return results


def run_on(ranks: RankGroup, setup: Setup, schedule: Schedule) -> list[Tensor]:
    """The outputs `[n, H, v]` of every sequence; tokens that several ranks computed must agree to the bit."""
    by_rank = ranks.run(run_schedule, setup, schedule)
    outs: list[list[Tensor]] = [[] for _ in setup.lengths]
    for step in zip(*by_rank, strict=True):
        segments = step[0][0]
        packed: dict[int, Tensor] = {}
        for _, rows, out in step:
            for row, value in zip(rows.tolist(), out, strict=True):
                if row >= 0:
                    assert row not in packed or torch.equal(packed[row], value), "ranks disagree on an output"
                    packed[row] = value
        assert sorted(packed) == list(range(sum(s.new for s in segments)))
        for s in segments:
            outs[s.sequence].append(torch.stack([packed[s.start + i] for i in range(s.new)]))
    return [torch.cat(parts) if parts else torch.empty(0, setup.heads, setup.v) for parts in outs]


def expected_outputs(setup: Setup, sequence: int, length: int | None = None) -> Tensor:
    """What one forward pass over the whole sequence gives its first `length` tokens, `[n, H, v]`, in fp64."""
    return oracle(setup.case(sequence), setup.inputs(sequence)).out[0, :length]
