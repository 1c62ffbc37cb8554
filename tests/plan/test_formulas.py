"""The planner's closed forms are what real ranks move and what traces of the code count, byte by byte."""

from __future__ import annotations

import pytest
import torch

import laga_attn as laga
from laga_attn.attention_plan import SAVE_POLICIES, LatentDims
from laga_attn.plan.formulas import busier_way, busy_ranks, flop_count, port_bytes, port_elements, sent_rows, view_of
from laga_attn.routing import route_tokens
from tests.oracle import Case
from tests.plan.tracing import SMALL, V3, Call, trace_call
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
@pytest.mark.parametrize("kind", ["zigzag", "contiguous"])
def test_views_count_what_routing_moves(degree, mask, kind):
    causal, window = mask
    layout = laga.SequenceLayout.packed([0, 5, 700, 701, 1500], 8, kind=kind)
    for rank in range(8):
        view = view_of(layout, rank, degree, causal=causal, window=window)
        routing = route_tokens(layout, rank, degree, causal, window)
        route = routing.keys.routes[0]
        assert view.tokens == routing.real_len
        assert view.queries == routing.num_queries
        assert view.received == routing.keys.num_keys - route.received[rank]
        sent = sent_rows(layout, rank, degree, causal=causal, window=window)
        assert sent == sum(route.sent) - route.sent[rank]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("scheme", SAVE_POLICIES)
def test_the_busiest_rank_is_among_those_that_are_looked_at(scheme, causal):
    layout = laga.SequenceLayout.zigzag(4096, 16)
    save = SAVE_POLICIES[scheme][0]
    for degree in (1, 2, 4):

        def moved(view, sent, degree=degree):
            return busier_way(scheme, save, DIMS, view, sent, degree, batch=2, itemsize=2)

        everyone = [
            moved(
                view_of(layout, rank, degree, causal=causal), sent_rows(layout, rank, degree, causal=causal)
            )
            for rank in range(16)
        ]  # fmt: skip
        busy = [moved(view, sent) for view, sent in busy_ranks(layout, degree, causal, None)]
        assert max(busy) == max(everyone)


# DESIGN's port bytes of a forward pass: elements that a rank of P sends, s tokens each, if every key is visible.
FORMULAS = {
    "explicit": lambda s, p, u: s * V3.num_heads * 320 * (2 * (u - 1) / u + p // u - 1),
    "absorbed": lambda s, p, u: s * V3.num_heads * 320 * (u - 1) / u + s * 576 * (p - 1),
    "laga": lambda s, p, u: s * V3.num_heads * 320 * (u - 1) / u + s * 576 * (p - 1),
}


@pytest.mark.parametrize(("size", "degree"), [(2, 2), (4, 1), (8, 2), (8, 8), (32, 16)])
@pytest.mark.parametrize("scheme", FORMULAS)
def test_a_trace_moves_what_the_design_says_and_computes_what_the_closed_forms_say(scheme, size, degree):
    layout = laga.SequenceLayout.zigzag(64 * size, size)
    call = Call(layout, scheme, degree, size // 2, V3, causal=False)
    trace = trace_call(call)
    sent = sum(t.sent_bytes() for t in trace.transfers if t.phase == "forward")
    assert sent == 2 * FORMULAS[scheme](64, size, degree) == 2 * port_elements(scheme, V3, 64, size, degree)


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("scheme", "save"), [(scheme, save) for scheme in SAVE_POLICIES for save in SAVE_POLICIES[scheme]]
)
def test_a_trace_counts_the_flops_and_bytes_of_the_closed_forms(scheme, save, degree):
    layout = laga.SequenceLayout.packed([0, 300, 1000], 8)
    for rank in (0, 5):
        trace = trace_call(Call(layout, scheme, degree, rank, SMALL, save))
        view = view_of(layout, rank, degree, causal=True)
        sent = sent_rows(layout, rank, degree, causal=True)
        moved = port_bytes(scheme, save, SMALL, view, degree, batch=1, itemsize=2, returned=sent)
        computed = flop_count(scheme, save, SMALL, view, degree, batch=1)
        for phase in ("forward", "backward"):
            assert sum(t.received_bytes() for t in trace.transfers if t.phase == phase) == getattr(moved, phase)
            assert trace.flops["attention", phase] == getattr(computed, f"attention_{phase}")
            assert trace.flops["expansion", phase] == getattr(computed, f"expansion_{phase}")
        assert trace.flops.total() == computed.total
