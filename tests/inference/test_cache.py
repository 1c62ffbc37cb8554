"""LatentCache against lists of tokens, on one process and on ranks; memory to the byte; errors that change nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings

import laga_attn as laga
from laga_attn.inference import LatentCache, attend
from laga_attn.inference.storage import FP8
from tests.compare import assert_close
from tests.inference.operations import Lists, operations
from tests.inference.ranks_inference import Setup, expected_outputs, open_cache, run_on, take_step
from tests.pool import RankContext

WIDTH = 3 + 2


def latents_of(tokens: list[int], layers: int = 2) -> torch.Tensor:
    """`[layers, n, 5]` that name their token and layer."""
    columns = torch.arange(WIDTH, dtype=torch.float64) / 8
    rows = torch.tensor(tokens, dtype=torch.float64)[:, None] + columns
    return torch.stack([rows * 2**layer for layer in range(layers)])


def new_cache(cp: laga.ContextParallel | None = None, **options) -> LatentCache:
    return LatentCache(2, 3, 2, cp=cp, **{"dtype": torch.float64, "page_size": 3, **options})


def drive(cache: LatentCache, steps) -> None:
    """Apply operations to a cache and to lists, and compare all content after each."""
    lists = Lists()
    for name, which, amount in steps:
        sequence = lists.pick(which)
        if name == "add" or sequence is None:
            assert cache.add() == lists.add()
        elif name == "append" and amount:
            tokens = lists.fresh(amount)
            before, refusal = cache.book, ""
            try:
                cache.append(sequence, latents_of(tokens))
                lists.sequences[sequence] += tokens
            except ValueError as error:
                refusal = str(error)
            assert ("full" in refusal) == (cache.book is before)
        elif name == "truncate":
            length = amount % (len(lists.sequences[sequence]) + 1)
            cache.truncate(sequence, length)
            del lists.sequences[sequence][length:]
        elif name == "fork":
            assert cache.fork(sequence) == lists.add(lists.sequences[sequence])
        elif name == "free":
            cache.free(sequence)
            del lists.sequences[sequence]
        assert cache.sequences == tuple(lists.sequences)
        for held, tokens in lists.sequences.items():
            assert cache.length(held) == len(tokens)
            for layer in range(2):
                assert torch.equal(cache.read(held, layer, torch.float64), latents_of(tokens)[layer])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations())
def test_any_operations_leave_what_lists_would_hold(steps):
    drive(new_cache(), steps)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations())
def test_a_small_cache_refuses_what_does_not_fit_and_keeps_the_rest(steps):
    drive(new_cache(max_tokens=15), steps)


def drive_on_rank(ctx: RankContext, steps, max_tokens) -> None:
    drive(new_cache(laga.ContextParallel(ctx.group), max_tokens=max_tokens), steps)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations(most=12))
@pytest.mark.parametrize("size", [2, 3])
def test_any_operations_on_ranks(ranks, size, steps):
    ranks(size).run(drive_on_rank, steps, 30)


# Memory.


@pytest.mark.parametrize(
    ("dtype", "row"),
    [(torch.bfloat16, 576 * 2), (torch.float32, 576 * 4), (FP8, 576 + 8)] if FP8 else [(torch.bfloat16, 576 * 2)],
)
def test_memory_is_exact(dtype, row):
    cache = LatentCache(3, 512, 64, dtype=dtype, page_size=16, max_tokens=100)
    assert cache.memory().allocated == 3 * 7 * 16 * row  # 100 tokens are 7 pages
    assert cache.memory().used == (0,)
    sequence = cache.add()
    cache.append(sequence, torch.zeros(3, 33, 576))
    assert cache.memory().used == (3 * 3 * 16 * row,)
    cache.fork(sequence)
    assert cache.memory().total == 3 * 3 * 16 * row
    cache.truncate(sequence, 1)
    cache.free(sequence)
    assert cache.memory().total == 3 * 3 * 16 * row  # the fork's


def test_a_cache_without_limit_grows_and_keeps_its_content():
    cache = new_cache()
    assert cache.memory().allocated == 0
    sequence, tokens = cache.add(), list(range(200))
    for start in range(0, 200, 7):
        cache.append(sequence, latents_of(tokens[start : start + 7]))
    assert torch.equal(cache.read(sequence, 1, torch.float64), latents_of(tokens)[1])
    memory = cache.memory()
    assert memory.total == 67 * 3 * WIDTH * 8 * 2
    assert memory.total <= memory.allocated <= 1.5 * memory.total


def balance(ctx: RankContext) -> tuple[int, int, tuple[int, ...]]:
    cache = new_cache(laga.ContextParallel(ctx.group))
    sequence = cache.add()
    cache.append(sequence, latents_of(list(range(100))))
    held = cache.book.local_count(sequence, ctx.rank, 100)
    return held, cache.memory().allocated, cache.memory().used


def test_ranks_stay_within_one_page_of_each_other(ranks):
    results = ranks(3).run(balance)
    held = [tokens for tokens, _, _ in results]
    assert sum(held) == 100
    assert max(held) - min(held) <= 3
    page = 3 * WIDTH * 8 * 2
    assert all(used == (12 * page, 11 * page, 11 * page) for _, _, used in results)
    assert [allocated for _, allocated, _ in results] == [12 * page, 11 * page, 11 * page]


# Attention after changes.


@pytest.mark.parametrize("size", [1, 3])
def test_rollback_and_forks_are_forgotten_and_kept_by_attention(ranks, size):
    setup = Setup(lengths=(40,), rebuild_from=9)
    whole = expected_outputs(setup, 0)
    for at, tail in ranks(size).run(speculate, setup):
        for got, want in ((at, whole[12:24]), (tail, whole[15:40])):
            assert_close(got, want, rel=1e-12)


def speculate(ctx: RankContext, setup: Setup):
    """Draft wrong tokens and roll them back; fork before, and let both go on."""
    cache = open_cache(ctx, setup)
    sequence = cache.add()
    take_step(cache, setup, {sequence: 12})
    fork = cache.fork(sequence)
    assert fork == 1
    drafted = Setup(lengths=(40, 40), rebuild_from=9)  # sequence 1 has other tokens
    take_step(cache, drafted, {fork: 4})
    cache.free(fork)
    kept = cache.fork(sequence)
    outs = [take_step(cache, setup, {sequence: n})[1] for n in (3, 1, 8)]
    cache.truncate(sequence, 13)
    cache.truncate(kept, 10)
    cache.free(kept)
    take_step(cache, setup, {sequence: 2})
    tail = [take_step(cache, setup, {sequence: n}) for n in (1, 4, 6, 1, 13)]
    tail_outs = [local_to_all(ctx, step, out, cache) for step, out in tail]
    assert all(len(out) == n for out, n in zip(outs, (3, 1, 8), strict=True))
    return torch.cat(outs), torch.cat(tail_outs)


def local_to_all(ctx, step, out, cache):
    from laga_attn.inference.outputs import collect_rows

    return collect_rows(out, torch.arange(step.num_tokens).numpy(), step, cache.cp)


# Errors.


def disagree(ctx: RankContext, which: str) -> None:
    cp = laga.ContextParallel(ctx.group)
    cache = new_cache(cp, page_size=4 if which == "page size" and ctx.rank else 3)
    first, second = cache.add(), cache.add()
    cache.append(first, latents_of([1, 2, 3, 4]))
    odd = ctx.rank == 1
    if which == "lengths" and odd:
        cache.truncate(first, 3)
    if which == "sequences" and odd:
        cache.free(second)
    before, content = cache.book, cache.store.nbytes
    with laga.traffic() as ledger:
        try:
            cache.plan({first: 2 if which == "counts" and odd else 1}, rebuild_from=9)
        finally:
            assert cache.book is before
            assert cache.store.nbytes == content
            assert not ledger.select(), "data moved before the ranks agreed"


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ("lengths", "lengths of the sequences: rank 0, 2 have {0: 4, 1: 0}; rank 1 has {0: 3, 1: 0}"),
        ("counts", "new tokens of the sequences: rank 0, 2 have {0: 1}; rank 1 has {0: 2}"),
        ("sequences", "lengths of the sequences"),
        ("page size", "page size"),
    ],
)
def test_ranks_that_disagree_all_raise_the_same_before_anything_moves(ranks, which, message):
    import re

    ranks(3).run_raises(disagree, which, match=re.escape(message))


def disagree_in_attend(ctx: RankContext, which: str) -> None:
    setup = Setup(lengths=(20,))
    cache = open_cache(ctx, setup)
    sequence = cache.add()
    step = cache.plan({sequence: 3}, rebuild_from=8)
    odd = ctx.rank == 1
    heads = 5 if which == "heads" and odd else 6
    q = torch.zeros(1, 3, heads, 10, dtype=torch.float64)
    merge = "all_gather" if which == "merge" and odd else "auto"
    c_kv = torch.zeros(1, 3 if not (which == "tokens" and odd) else 4, 8, dtype=torch.float64)
    with laga.traffic() as ledger:
        try:
            attend(
                q, c_kv, q[:, :, 0, 6:], torch.zeros(heads * 11, 8, dtype=torch.float64), cache=cache, step=step,
                layer=0, qk_nope_head_dim=6, v_head_dim=5, merge=merge,
            )  # fmt: skip
        finally:
            assert not ledger.select()


@pytest.mark.parametrize(("which", "message"), [("heads", "shapes"), ("merge", "options"), ("tokens", "rank 1: c_kv")])
def test_ranks_that_attend_differently_all_raise_the_same(ranks, which, message):
    ranks(2).run_raises(disagree_in_attend, which, match=message)


def append_another_width(ctx: RankContext) -> None:
    cache = new_cache(laga.ContextParallel(ctx.group))
    cache.append(cache.add(), torch.zeros(2, 4, 6 if ctx.rank else 5))


def test_a_wrong_append_on_one_rank_is_an_error_on_all(ranks):
    ranks(2).run_raises(append_another_width, match=r"rank 1: latents have shape \[2, 4, 6\]")


def full_on_ranks(ctx: RankContext) -> None:
    setup = Setup(lengths=(40,), max_tokens=24)
    cache = open_cache(ctx, setup)
    sequence = cache.add()
    take_step(cache, setup, {sequence: 20})
    before = cache.read(sequence, 0, torch.float64)
    try:
        cache.plan({sequence: 20}, rebuild_from=8)
    finally:
        assert torch.equal(cache.read(sequence, 0, torch.float64), before)
        take_step(cache, setup, {sequence: 4})  # what fits still goes


def test_a_full_cache_says_so_on_all_ranks_and_goes_on(ranks):
    ranks(2).run_raises(
        full_on_ranks, match=r"the cache is full: rank 0 needs 2 more pages of 4 tokens, and 0 of its 3"
    )


def test_a_step_that_fails_half_way_leaves_nothing(ranks):
    setup = Setup(lengths=(30,))

    (whole,) = run_on(ranks(1), setup, [{0: 10}, {0: 3}])
    cache = open_cache(RankContext(0, 1, None), setup)  # type: ignore[arg-type]
    sequence = cache.add()
    take_step(cache, setup, {sequence: 10})
    failed = cache.plan({sequence: 3}, rebuild_from=8)
    junk = torch.full((1, 3, 6, 10), 7.0, dtype=torch.float64)
    attend(
        junk, junk[:, :, 0, :8], junk[:, :, 0, :4], torch.ones(66, 8, dtype=torch.float64), cache=cache, step=failed,
        layer=0, qk_nope_head_dim=6, v_head_dim=5,
    )  # fmt: skip
    # The second layer never came: the step is dropped, and the cache is as before.
    assert cache.length(sequence) == 10
    assert_close(take_step(cache, setup, {sequence: 3})[1], whole[10:], rel=1e-12)
    with pytest.raises(ValueError, match="changed since"):
        cache.commit(failed)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: new_cache(dtype=torch.int8), "int8"),
        (lambda: new_cache(page_size=0), "page_size=0"),
        (lambda: new_cache(max_tokens=0), "max_tokens=0"),
        (lambda: LatentCache(0, 3, 2), "num_layers"),
        (lambda: new_cache().plan({}, rebuild_from=2), "at least one new token"),
        (lambda: new_cache().plan({5: 1}, rebuild_from=2), "no sequence 5"),
        (lambda: new_cache().append(0, torch.zeros(2, 1, 4)), r"\[2, n, 5\]"),
        (lambda: new_cache().read(3, 0, torch.float64), "no sequence 3"),
    ],
)
def test_errors_say_what_is_wrong(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def wrong(**changes):
    setup = Setup(lengths=(20,))
    cache = open_cache(RankContext(0, 1, None), setup)  # type: ignore[arg-type]
    step = cache.plan({cache.add(): 9}, rebuild_from=8)
    tensors = {
        "q": torch.zeros(1, 9, 6, 10, dtype=torch.float64),
        "c_kv": torch.zeros(1, 9, 8, dtype=torch.float64),
        "k_rope": torch.zeros(1, 9, 4, dtype=torch.float64),
        "kv_b_weight": torch.zeros(66, 8, dtype=torch.float64),
    }
    arguments = {"cache": cache, "step": step, "layer": 0, "qk_nope_head_dim": 6, "v_head_dim": 5}
    for name, value in changes.items():
        (tensors if name in tensors else arguments)[name] = value
    attend(*tensors.values(), **arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer": 1}, "layer 1 is outside the 1 layers"),
        ({"heads": "some"}, "heads must be one of"),
        ({"heads": "own"}, "heads='own' is for steps whose tokens are all replicated"),
        ({"merge": "ring"}, "merge must be one of auto"),
        ({"workspace": 0}, "workspace"),
        ({"workspace": 100}, r"give at least \d+ bytes"),
        ({"q": torch.zeros(1, 8, 6, 10, dtype=torch.float64)}, "9 local tokens"),
        ({"k_rope": torch.zeros(1, 9, 5, dtype=torch.float64)}, "k_rope has shape"),
        ({"kv_b_weight": torch.zeros(60, 8, dtype=torch.float64)}, "kv_b_weight has shape"),
        ({"c_kv": torch.zeros(1, 9, 8)}, "one floating dtype"),
        ({"kernel": "sdpa"}, "sdpa"),
    ],
)
def test_wrong_calls_of_attend_say_what_is_wrong(changes, message):
    with pytest.raises(ValueError, match=message):
        wrong(**changes)


def test_chunks_beyond_the_workspace_are_refused_with_the_chunk_that_fits():
    setup = Setup(lengths=(200,), options={"workspace": 12_000})
    cache = open_cache(RankContext(0, 1, None), setup)  # type: ignore[arg-type]
    sequence = cache.add()
    with pytest.raises(ValueError, match="chunks of at most 50 tokens"):
        take_step(cache, setup, {sequence: 51})
    take_step(cache, setup, {sequence: 50})
