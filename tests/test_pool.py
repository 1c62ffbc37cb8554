"""The pool reports what ranks do, and recovers from whatever they do; so does the private network."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.pool import RankGroup, RankHung, RankPool


@pytest.fixture(scope="module")
def own_pool():
    pool = RankPool()
    yield pool
    pool.close()


def says_who_it_is(ctx, tensor):
    total = torch.tensor([1 << ctx.rank])
    dist.all_reduce(total, group=ctx.group)
    return ctx.rank, ctx.size, total, (tensor * 2)[:1]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_results_come_in_rank_order_from_ranks_that_reach_each_other(ranks, size):
    results = ranks(size).run(says_who_it_is, torch.full((3,), 21.0))
    for rank, (own, of, total, tensor) in enumerate(results):
        assert (own, of, total.item(), tensor.tolist()) == (rank, size, 2**size - 1, [42.0])


def reads_uninitialised_memory(ctx):
    return torch.empty(3), torch.empty_like(torch.ones(2, dtype=torch.bfloat16)), torch.rand(2)


def test_uninitialised_memory_is_nan_and_every_task_has_the_same_seed(ranks):
    assert torch.empty(3).isnan().all()
    first, second = (ranks(2).run(reads_uninitialised_memory) for _ in range(2))
    for a, b, random in first + second:
        assert a.isnan().all()
        assert b.isnan().all()
        assert torch.equal(random, first[0][2])


class Unpicklable(Exception):
    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")


def misbehaves(ctx, what, bad_rank):
    if ctx.rank == bad_rank:
        if what == "raises":
            raise KeyError("no such thing")
        if what == "raises unpicklable":
            raise Unpicklable(1, 2)
        if what == "dies":
            os._exit(3)
        if what == "sleeps":
            time.sleep(60)
    dist.barrier(ctx.group)
    return os.getpid()


def test_the_error_of_a_rank_is_raised_even_if_a_lower_rank_hangs_because_of_it(own_pool):
    ranks = RankGroup(own_pool, 3)
    before = ranks.run(misbehaves, "nothing", 1)
    with pytest.raises(KeyError, match="no such thing") as caught:
        ranks.run(misbehaves, "raises", 1, timeout=2)
    notes = "\n".join(caught.value.__notes__)
    assert "rank 0 of 3: hung here:" in notes
    assert "in misbehaves" in notes.partition("rank 1 of 3")[0]  # where rank 0 hangs
    assert 'raise KeyError("no such thing")' in notes
    assert set(ranks.run(misbehaves, "nothing", 1)).isdisjoint(before)  # fresh workers


@pytest.mark.parametrize(
    ("what", "error", "text"),
    [
        ("raises unpicklable", RuntimeError, "Unpicklable: 1 and 2"),
        ("dies", ChildProcessError, "rank 0 of 2 died"),
        ("sleeps", RankHung, "rank 0 of 2 did not finish"),
    ],
)
def test_other_ends_of_a_rank_are_reported_and_survived(own_pool, what, error, text):
    ranks = RankGroup(own_pool, 2)
    with pytest.raises(error, match=text):
        ranks.run(misbehaves, what, 0, timeout=2)
    assert len(set(ranks.run(misbehaves, "nothing", 0))) == 2


def raises_by_rank(ctx, errors):
    error = errors[ctx.rank]
    if error is not None:
        raise error


def test_run_raises_demands_the_error_on_all_ranks(own_pool):
    ranks = RankGroup(own_pool, 2)
    same = [ValueError("rows differ"), ValueError("rows differ")]
    assert ranks.run_raises(raises_by_rank, same, match="rows") == ["rows differ", "rows differ"]
    for errors in (
        [ValueError("rows differ"), None],
        [ValueError("rows differ"), ValueError("rows are unlike")],
        [ValueError("rows differ"), UnicodeError("rows differ")],
        [ValueError("heads differ"), ValueError("heads differ")],
    ):
        with pytest.raises(AssertionError, match="differ"):
            ranks.run_raises(raises_by_rank, errors, match="rows")
    texts = ranks.run_raises(raises_by_rank, [KeyError(1), KeyError(2)], error=KeyError, same=False)
    assert texts == ["1", "2"]


def test_only_functions_that_a_worker_can_find_are_accepted(own_pool):
    with pytest.raises(ValueError, match="must be a plain function at the top of its module"):
        RankGroup(own_pool, 1).run(lambda ctx: None)
    with pytest.raises(ValueError, match="1 to 4 ranks, not 5"):
        RankGroup(own_pool, 5).run(says_who_it_is)


def test_the_private_network_reports_errors_and_goes_on(private_network):
    with pytest.raises(KeyError, match="no such thing"):
        private_network.run(misbehaves, 2, "raises", 0, timeout=2)
    assert len(set(private_network.run(misbehaves, 2, "nothing", 0).results)) == 2
