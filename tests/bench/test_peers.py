"""The peers of `benchmarks/peers` compute the same attention on the same inputs, or are out with their error."""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch
import typer
from benchmarks.peers.__main__ import main
from benchmarks.peers.contest import PEERS, try_peer
from typer.testing import CliRunner

from laga_attn.bench.grid import Cell
from laga_attn.bench.run import make_inputs
from laga_attn.traffic import traffic

CELL = Cell(ranks=2, seq_len=48, num_heads=4, dtype="fp32")
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="an optional dependency"
)


def attempt(ctx, name: str) -> tuple[float, str | None]:
    inputs = make_inputs(CELL, ctx.rank, torch.device("cpu"))
    return try_peer(PEERS[name], CELL, ctx.group, inputs)[1:]


@needs_transformers
@pytest.mark.parametrize(
    "name", ["torch flash, V padded", "torch SDPA, V as it is", "Transformers eager", "Transformers sdpa"]
)
def test_it_agrees_with_explicit_ulysses_in_output_and_gradients(ranks, name):
    for difference, problem in ranks(2).run(attempt, name):
        assert problem is None
        assert 0 < difference < 5e-6  # 0 would mean that nothing was compared


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("torch context_parallel", "mixed torch.Tensor and DTensor"),
        ("torch context_parallel, V padded", "_for_cpu.default does not have a sharding strategy registered"),
        ("Transformer Engine a2a", "computes on CUDA devices, and there is none"),
    ],
)
def test_what_cannot_run_mla_on_a_cpu_is_out_with_its_own_error(ranks, name, error):
    outcomes = ranks(2).run(attempt, name)
    assert all(problem is not None and error in problem for _, problem in outcomes)
    assert all(math.isnan(difference) for difference, _ in outcomes)


def attempt_half_wrong(ctx) -> tuple[float, str | None]:
    """A peer whose result is off by 1 % on the last rank."""

    def build(cell, group):
        right = PEERS["torch flash, V padded"](cell, group)
        factor = 1.01 if ctx.rank == ctx.size - 1 else 1.0
        return lambda *tensors: right(*tensors) * factor

    return try_peer(build, CELL, ctx.group, make_inputs(CELL, ctx.rank, torch.device("cpu")))[1:]


def test_a_wrong_result_on_one_rank_is_the_same_verdict_on_all(ranks):
    outcomes = ranks(2).run(attempt_half_wrong)
    assert len(set(outcomes)) == 1
    difference, problem = outcomes[0]
    assert difference == pytest.approx(0.01, rel=0.2)
    assert str(problem).startswith("wrong results: relative difference 0.01")


def bytes_of(ctx, name: str) -> tuple[int, int]:
    inputs = make_inputs(CELL, ctx.rank, torch.device("cpu"))
    with traffic() as ledger:
        PEERS[name](CELL, ctx.group)(*inputs[:4])
    return ledger.sent(phase="forward"), ledger.sent(phase="backward")


def test_the_ledger_holds_what_ulysses_moves(ranks):
    moved = 24 * 4 * (192 + 192 + 128 + 128) * 4 // 2  # q, k, v and out of the own tokens; half of it to the other rank
    assert ranks(2).run(bytes_of, "torch flash, V padded") == [(moved, moved)] * 2


def test_a_peer_that_does_not_exist_is_refused_with_those_that_do():
    app = typer.Typer()
    app.command()(main)
    result = CliRunner().invoke(app, ["--peer", "nobody"])
    assert result.exit_code == 2
    assert "'nobody' is unknown" in result.output
    assert "Transformer" in result.output
