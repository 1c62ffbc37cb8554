"""The exchanges of a step, repeated without the step."""

from __future__ import annotations

import pytest
import torch

from laga_attn.bench.exchanges import Exchanges
from laga_attn.bench.grid import Cell, Variant
from laga_attn.bench.run import contestant, make_inputs
from laga_attn.grid import ContextParallel
from laga_attn.traffic import traffic


def step_and_replay(ctx, variant: Variant):
    """The test pool's world is larger than the group, so the variant gets its group by hand."""
    cell = Cell(ctx.size, 40, 2, "fp32")
    inputs = make_inputs(cell, ctx.rank, torch.device("cpu"))
    cp = ContextParallel(ctx.group, variant.ulysses_degree)
    attend = contestant(variant, cell).attend
    with traffic() as real:
        out = attend(*inputs[:4], cp=cp)  # type: ignore[call-arg]
        torch.autograd.grad(out, inputs[:4], inputs.dout)
    with traffic() as alone:
        Exchanges(real.select(), cp, torch.device("cpu"))()
    return [[(r.kind, r.op, r.phase, r.sent_to, r.received_from) for r in ledger.select()] for ledger in (real, alone)]


VARIANTS = (
    Variant("explicit", 2, "kv"),
    Variant("laga", 1, "latent"),
    Variant("laga", 2, "latent"),
    Variant("absorbed", 2, "gathered"),
)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: f"{v.scheme}-{v.ulysses_degree}")
def test_the_same_collectives_move_the_same_bytes(ranks, variant):
    for real, alone in ranks(2).run(step_and_replay, variant):
        assert alone == real
        assert sum(sum(sent) for *_, sent, _ in real) > 0
