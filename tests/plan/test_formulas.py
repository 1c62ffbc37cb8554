"""The planner's closed forms are what real ranks move, byte by byte."""

from __future__ import annotations

import pytest
import torch

import laga_attn as laga
from laga_attn.attention_plan import SAVE_POLICIES, LatentDims
from laga_attn.plan.formulas import busiest_view, port_bytes, sent_rows, view_of
from laga_attn.routing import route_tokens
from tests.oracle import Case
from tests.ranks_attention import Run, attend, layout_of

CASE = Case(lengths=(50,), heads=12, nope=6, rope=4, v=5, rank=8, dtype=torch.float32)
DIMS = LatentDims(12, 6, 4, 5, 8)
LSE = 4  # bytes per head and token that only `return_lse` moves


def moved(ctx, case, run):
    with laga.traffic() as t:
        attend(ctx, case, run)
    return t.received(phase="forward") - t.received("lse"), t.received(phase="backward")


@pytest.mark.parametrize(("size", "degree"), [(2, 1), (2, 2), (3, 1), (4, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize("kind", ["zigzag", "contiguous"])
def test_port_bytes_equal_the_ledger_of_every_rank(ranks, size, degree, kind):
    for lengths, causal, window in (((50,), True, None), ((50,), False, None), ((21, 30), True, 7)):
        case = CASE.with_(lengths=lengths, causal=causal, window=window)
        for scheme, policies in SAVE_POLICIES.items():
            for save in policies:
                run = Run(scheme=scheme, ulysses_degree=degree, kind=kind, save=save, with_dlse=False)
                layout = layout_of(case, run, size)
                for rank, (forward, backward) in enumerate(ranks(size).run(moved, case, run)):
                    view = view_of(layout, rank, degree, causal=causal, window=window)
                    sent = sent_rows(layout, rank, degree, causal=causal, window=window)
                    expected = port_bytes(scheme, save, DIMS, view, degree, batch=1, itemsize=4, returned=sent)
                    assert (expected.forward, expected.backward) == (forward, backward), f"{scheme} {save} rank {rank}"


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
@pytest.mark.parametrize("mask", [(True, None), (False, None), (True, 100)])
def test_views_count_what_routing_moves(degree, mask):
    causal, window = mask
    layout = laga.SequenceLayout.packed([0, 700, 701, 1500], 8)
    for rank in range(8):
        view = view_of(layout, rank, degree, causal=causal, window=window)
        routing = route_tokens(layout, rank, degree, causal, window)
        own = routing.keys.routes[0].received[rank]
        assert view.tokens == routing.real_len
        assert view.queries == routing.num_queries
        assert view.received == routing.keys.num_keys - own
    most = busiest_view(layout, degree, causal, window)
    assert most.received >= max(
        view_of(layout, rank, degree, causal=causal, window=window).received for rank in (0, 4, 7)
    )
