"""What crosses the wire is what the formulas say, record by record."""

from __future__ import annotations

import pytest
import torch

import laga_attn as laga
from tests.oracle import Case, visibility
from tests.ranks_attention import Run, attend, layout_of

CASE = Case(lengths=(96,), batch=2, heads=12, nope=6, rope=4, v=5, rank=8, dtype=torch.float32)
D_QK, D_V, LATENT, ITEM = 10, 5, 12, 4
GRIDS = [(2, 1), (2, 2), (3, 1), (3, 3), (4, 1), (4, 2), (4, 4)]


def _ledger(ctx, case, run):
    with laga.traffic() as t:
        attend(ctx, case, run)
    return {
        (kind, phase): (t.sent(kind, phase), t.received(kind, phase))
        for kind, phase in {(r.kind, r.phase) for r in t.records}
    }


def _heads_exchanged(case: Case, size: int, degree: int, width: int) -> int:
    return case.batch * case.tokens // size * case.heads * width * (degree - 1) // degree * ITEM


def _full(case: Case, size: int) -> int:
    """Bytes of the latent gather when every rank needs everything: s * L * (P - 1)."""
    return case.batch * case.tokens // size * LATENT * (size - 1) * ITEM


@pytest.mark.parametrize(("size", "degree"), GRIDS)
@pytest.mark.parametrize("scheme", ["laga", "absorbed", "explicit"])
def test_bytes_equal_the_closed_forms_when_everything_is_visible(ranks, size, degree, scheme):
    case = CASE.with_(causal=False)
    run = Run(scheme=scheme, ulysses_degree=degree, with_dlse=False)
    delta = 1  # one fp32 number per head and token travels with the output's gradient
    expected = {
        ("query", "forward"): _heads_exchanged(case, size, degree, D_QK),
        ("output", "forward"): _heads_exchanged(case, size, degree, D_V),
        ("lse", "forward"): _heads_exchanged(case, size, degree, 1),
        ("output_grad", "backward"): _heads_exchanged(case, size, degree, D_V + delta),
        ("query_grad", "backward"): _heads_exchanged(case, size, degree, D_QK),
    }
    if degree == 1:
        expected = {}
    if scheme == "explicit":
        groups = size // degree
        tokens = case.batch * case.tokens // size
        kv = tokens * case.heads * (D_QK + D_V) * ((degree - 1) + degree * (groups - 1)) // degree * ITEM
        expected |= {("key_value", "forward"): kv, ("key_value_grad", "backward"): kv}
    else:
        kinds = (("latent", "forward"), ("latent", "backward"), ("latent_grad", "backward"))
        expected |= dict.fromkeys(kinds, _full(case, size))
    for ledger in ranks(size).run(_ledger, case, run):
        control = {key for key in ledger if key[0] == "agreement"}
        assert {key: value for key, value in ledger.items() if key not in control} == {
            key: (value, value) for key, value in expected.items()
        }


@pytest.mark.parametrize("kind", ["zigzag", "contiguous"])
@pytest.mark.parametrize("mask", [{"causal": True}, {"causal": True, "window": 7}])
@pytest.mark.parametrize("lengths", [(96,), (21, 50, 3)])
@pytest.mark.parametrize(("size", "degree"), [(2, 1), (3, 1), (4, 1), (4, 2)])
def test_only_visible_latents_are_received(ranks, kind, mask, lengths, size, degree):
    case = CASE.with_(lengths=lengths, batch=1, **mask)
    run = Run(ulysses_degree=degree, kind=kind, with_dlse=False)
    layout = layout_of(case, run, size)
    seen = visibility(lengths, case.causal, case.window)
    holders = [torch.from_numpy(rows[rows >= 0]) for rows in layout.rows_by_rank()]
    for rank, ledger in enumerate(ranks(size).run(_ledger, case, run)):
        first = rank // degree * degree
        queries = torch.cat(holders[first : first + degree])
        visible = seen[queries].any(0)
        visible[holders[rank]] = False  # what the rank holds itself does not travel
        received = int(visible.sum()) * LATENT * ITEM
        for key in (("latent", "forward"), ("latent", "backward")):
            assert ledger[key][1] == received, f"rank {rank} {key}"
        assert ledger[("latent_grad", "backward")][0] == received  # gradients go back the same way


def test_zigzag_without_head_exchange_spares_half_a_shard_per_rank(ranks):
    """Rank r never sees the last r chunks: it receives s * L * (P - 1 - r / 2)."""
    case, size = CASE.with_(batch=1), 4
    for rank, ledger in enumerate(ranks(size).run(_ledger, case, Run(with_dlse=False))):
        shard = case.tokens // size * LATENT * ITEM
        assert ledger[("latent", "forward")][1] == shard * (size - 1) - shard * rank // 2


def _collective_counts(ctx, case, run):
    with laga.traffic() as t:
        attend(ctx, case, run)
    return [(r.kind, r.op, r.phase) for r in t.records]


@pytest.mark.parametrize("scheme", ["laga", "absorbed", "explicit"])
@pytest.mark.parametrize("lengths", [(96,), (1, 2)])
def test_all_ranks_issue_the_same_collectives_in_the_same_order(ranks, scheme, lengths):
    for size, degree in GRIDS:
        run = Run(scheme=scheme, ulysses_degree=degree)
        orders = ranks(size).run(_collective_counts, CASE.with_(lengths=lengths, batch=1), run)
        assert all(order == orders[0] for order in orders)
        assert (
            orders[0].count(("latent_grad" if scheme != "explicit" else "key_value_grad", "all_to_all", "backward"))
            == 1
        )


def test_gathering_once_is_what_save_gathered_and_kv_buy(ranks):
    for save, gathers in (("latent", 2), ("gathered", 1), ("kv", 1)):
        for order in ranks(2).run(_collective_counts, CASE, Run(save=save, ulysses_degree=2)):
            assert sum(kind == "latent" for kind, _, _ in order) == gathers


def _across(ctx, case, run):
    with laga.traffic() as t:
        attend(ctx, case, run)
    kinds = ("latent", "latent_grad")
    return {kind: (t.sent(kind), t.sent_across(run.ulysses_degree, ctx.rank, kind)) for kind in kinds}


def test_two_levels_move_the_same_bytes_but_each_latent_enters_a_group_once(ranks):
    case, size, degree = CASE.with_(causal=False), 4, 2
    shard = case.batch * case.tokens // size * LATENT * ITEM
    for scheme in ("laga", "absorbed"):
        flat = ranks(size).run(_across, case, Run(scheme=scheme, ulysses_degree=degree))
        two = ranks(size).run(_across, case, Run(scheme=scheme, ulysses_degree=degree, two_level=True))
        for kind, passes in (("latent", 2), ("latent_grad", 1)):  # gathered in forward and again in backward
            assert {ledger[kind] for ledger in flat} == {(passes * 3 * shard, passes * 2 * shard)}
            assert {ledger[kind] for ledger in two} == {(passes * 3 * shard, passes * 1 * shard)}
