from __future__ import annotations

import torch
from laga_attn.collectives import all_gather_rows, exchange_rows
from laga_attn.grid import ContextParallel


def gathers(ctx, rows):
    cp = ContextParallel(ctx.group)
    return all_gather_rows(torch.full((rows, 2), float(ctx.rank)), cp, kind="latent", phase="forward").wait()


def test_gather(ranks):
    for out in ranks(3).run(gathers, 2):
        assert out[:, 0].tolist() == [0, 0, 1, 1, 2, 2]

def test_gather2(ranks):
    for out in ranks(4).run(gathers, 2):
        assert out[:, 0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
