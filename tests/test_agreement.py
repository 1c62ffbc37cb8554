"""Ranks that make different calls all raise the same error, at once, instead of hanging in a collective."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from laga_attn.agreement import agree
from laga_attn.collectives import all_gather_rows
from laga_attn.grid import ContextParallel
from laga_attn.traffic import traffic

SIGNATURE = {
    "seq rows": 16,
    "dtype": torch.bfloat16,
    "scheme": "laga",
    "ulysses_degree": 2,
    "layout": ("zigzag", 4, (64,)),
}


def agrees(ctx, changes, errors=(), check="auto"):
    """``changes[rank]`` goes over the signature of a rank, ``errors[rank]`` is its own error."""
    cp = ContextParallel(ctx.group, check=check)
    agree(cp, SIGNATURE | dict(changes.get(ctx.rank, {})), dict(errors).get(ctx.rank))
    return all_gather_rows(torch.tensor([ctx.rank]), cp, kind="latent", phase="forward").wait().tolist()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("check", ["auto", "always", "new"])
def test_equal_calls_go_on(ranks, size, check):
    assert ranks(size).run(agrees, {}, (), check) == [list(range(size))] * size


@pytest.mark.parametrize(
    ("name", "value", "others", "this"),
    [
        ("seq rows", 12, "16", "12"),
        ("dtype", torch.float32, "torch.bfloat16", "torch.float32"),
        ("scheme", "explicit", "'laga'", "'explicit'"),
        ("ulysses_degree", 1, "2", "1"),
        ("layout", ("contiguous", 4, (64,)), "('zigzag', 4, (64,))", "('contiguous', 4, (64,))"),
    ],
)
@pytest.mark.parametrize("odd_one", [0, 2])
def test_a_rank_that_differs_in_anything_is_named_by_the_same_error_on_all(ranks, name, value, others, this, odd_one):
    (text, *_) = ranks(3).run_raises(agrees, {odd_one: {name: value}})
    expected = {
        0: f"rank 0 has {this}; rank 1, 2 have {others}",
        2: f"rank 0, 1 have {others}; rank 2 has {this}",
    }
    assert text == (
        f"context-parallel ranks disagree: {name}: {expected[odd_one]}. "
        "Every rank of the group must make the same call, with the same shapes, dtypes and options."
    )


def test_every_entry_that_differs_is_listed_and_no_other(ranks):
    changes = {1: {"seq rows": 8, "scheme": "absorbed"}, 3: {"seq rows": 4, "extra": True}}
    (text, *_) = ranks(4).run_raises(agrees, changes)
    assert "seq rows: rank 0, 2 have 16; rank 1 has 8; rank 3 has 4" in text
    assert "scheme: rank 0, 2, 3 have 'laga'; rank 1 has 'absorbed'" in text
    assert "extra: rank 0, 1, 2 have nothing; rank 3 has True" in text
    assert "dtype" not in text.replace("shapes, dtypes", "")
    assert "ulysses_degree" not in text


@pytest.mark.parametrize("check", ["auto", "always", "new"])
def test_the_error_of_one_rank_is_raised_on_all_with_its_number(ranks, check):
    (text, *_) = ranks(3).run_raises(agrees, {}, {1: "q has 5 heads"}, check)
    assert text == "Errors of single ranks: rank 1: q has 5 heads"


def test_differences_and_errors_are_told_together(ranks):
    (text, *_) = ranks(2).run_raises(agrees, {1: {"seq rows": 3}}, {0: "bad scale", 1: "bad window"})
    assert "seq rows: rank 0 has 16; rank 1 has 3" in text
    assert text.endswith("Errors of single ranks: rank 0: bad scale; rank 1: bad window")


@pytest.mark.parametrize("size", [1, 2, 4])
def test_an_error_that_all_ranks_share_is_raised_as_it_is(ranks, size):
    (text, *_) = ranks(size).run_raises(agrees, {}, dict.fromkeys(range(size), "5 heads over 2 ranks"))
    assert text == "5 heads over 2 ranks"


def test_a_long_value_is_shortened(ranks):
    (text, *_) = ranks(2).run_raises(agrees, {1: {"layout": tuple(range(10_000))}})
    assert "rank 0 has ('zigzag', 4, (64,)); rank 1 has (0, 1, 2" in text
    assert "characters)" in text
    assert len(text) < 1000


def changes_after_an_agreement(ctx):
    cp = ContextParallel(ctx.group)
    for _ in range(3):
        agree(cp, SIGNATURE)
    agree(cp, SIGNATURE | ({"seq rows": 12} if ctx.rank == 1 else {}))


def test_a_rank_that_changes_after_an_agreement_is_caught_at_once(ranks):
    start = time.monotonic()
    ranks(3).run_raises(changes_after_an_agreement, match="seq rows: rank 0, 2 have 16; rank 1 has 12")
    assert time.monotonic() - start < 10


def goes_on_after_a_refusal(ctx):
    cp = ContextParallel(ctx.group)
    texts = []
    for rows in (ctx.rank, 7, 7 + ctx.rank):
        try:
            agree(cp, {"rows": rows})
            texts.append("agreed")
        except ValueError as error:
            texts.append(str(error).partition(":")[0])
    return texts


def test_the_group_is_usable_after_a_refusal(ranks):
    disagree = "context-parallel ranks disagree"
    assert ranks(2).run(goes_on_after_a_refusal) == [[disagree, "agreed", disagree]] * 2


def counts_exchanges(ctx, check):
    cp = ContextParallel(ctx.group, check=check)
    with traffic() as t:
        for _ in range(2):
            agree(cp, {"a": 1, "b": 2})
            agree(cp.with_ulysses(2), {"b": 2, "a": 1})
            agree(cp, {"a": 2, "b": 2})
    return len(t.select("agreement")), t.sent("agreement"), t.sent()


@pytest.mark.parametrize(("check", "exchanges"), [("auto", 6), ("always", 6), ("new", 2)])
def test_known_signatures_are_exchanged_again_only_where_asked_for(ranks, check, exchanges):
    assert ranks(2).run(counts_exchanges, check) == [(exchanges, 16 * exchanges, 0)] * 2


def fails_on_a_known_signature(ctx):
    cp = ContextParallel(ctx.group, check="new")
    agree(cp, SIGNATURE)
    with traffic() as t:
        try:
            agree(cp, SIGNATURE, "bad scale" if ctx.rank == 0 else None)
        except ValueError as error:
            return str(error), t.records
    return "agreed", t.records


def test_an_error_on_a_known_signature_is_raised_without_waiting_for_anyone(ranks):
    assert ranks(2).run(fails_on_a_known_signature) == [("bad scale", []), ("agreed", [])]


def fails_twice(ctx):
    cp = ContextParallel(ctx.group, check="new")
    for _ in range(2):
        try:
            agree(cp, SIGNATURE, f"error {ctx.rank}")
        except ValueError as error:
            text = str(error)
    return text


def test_a_refused_signature_is_not_remembered(ranks):
    assert ranks(2).run(fails_twice) == ["Errors of single ranks: rank 0: error 0; rank 1: error 1"] * 2


def test_one_process_raises_its_own_error():
    cp = ContextParallel.none()
    agree(cp, SIGNATURE)
    with pytest.raises(ValueError, match=r"^bad scale$"):
        agree(cp, SIGNATURE, "bad scale")


def test_fake_ranks_exchange_nothing_and_raise_their_own_error():
    dist.init_process_group("fake", rank=0, world_size=64, store=FakeStore())
    try:
        cp = ContextParallel(dist.group.WORLD, check="always")
        with traffic() as t:
            agree(cp, SIGNATURE)
            with pytest.raises(ValueError, match=r"^bad scale$"):
                agree(cp, SIGNATURE, "bad scale")
        assert t.records == []
    finally:
        dist.destroy_process_group()
