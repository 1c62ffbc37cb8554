"""Bytes on the wire are those of the formulas, to the byte; the cheapest way of merging is the one taken."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import laga_attn as laga
from laga_attn.attention_plan import LatentDims
from laga_attn.inference import LatentCache, attend, crossover
from laga_attn.inference.merging import MERGES, Partial, cheapest, head_share, merge, sent_bytes
from laga_attn.inference.storage import FP8
from tests.compare import assert_close
from tests.inference.ranks_inference import Setup, open_cache, take_step
from tests.pool import RankContext

DEEPSEEK = LatentDims(128, 128, 64, 128, 512)
SIZES = (2, 3, 4)


def traffic_of(ctx: RankContext, setup: Setup, schedule) -> list[tuple[int, int, dict[str, int]]]:
    cache = open_cache(ctx, setup)
    for _ in setup.lengths:
        cache.add()
    results = []
    for counts in schedule:
        with laga.traffic() as ledger:
            take_step(cache, setup, counts)
        kinds = {kind: ledger.sent(kind) for kind in ("query", "output", "lse", "latent", "cache")}
        results.append((ledger.sent(), ledger.received(), kinds))
    return results


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("how", MERGES)
@pytest.mark.parametrize(
    ("heads", "dtype"), [(6, torch.float64), (7, torch.float32), (12, torch.bfloat16), (2, torch.bfloat16)]
)
def test_a_decode_step_sends_what_the_formula_says(ranks, size, how, heads, dtype):
    setup = Setup(lengths=(30, 30), heads=heads, dtype=dtype, cache_dtype=dtype, options={"merge": how})
    dims = LatentDims(heads, setup.nope, setup.rope, setup.v, setup.rank)
    schedule = [{0: 7, 1: 3}, {0: 1, 1: 1}, {0: 2, 1: 5}]
    for rank, steps in enumerate(ranks(size).run(traffic_of, setup, schedule)):
        for counts, (sent, _, kinds) in zip(schedule, steps, strict=True):
            tokens = sum(counts.values())
            assert sent == sent_bytes(how, dims, tokens, size, rank, dtype.itemsize, "all")
            assert kinds["cache"] == kinds["latent"] == kinds["query"] == 0  # every rank has the new tokens


@pytest.mark.parametrize("size", SIZES)
def test_bytes_of_a_decode_step_do_not_depend_on_the_context(ranks, size):
    setup = Setup(lengths=(150,), rebuild_from=10)
    for steps in ranks(size).run(traffic_of, setup, [{0: 1}, {0: 50}, {0: 1}, {0: 90}, {0: 1}]):
        assert steps[0][0] == steps[2][0] == steps[4][0] > 0


@pytest.mark.parametrize("size", SIZES)
def test_a_prefill_chunk_gathers_its_context_once_and_stores_its_tokens_once(ranks, size):
    """Latents of the chunk as in training, the context's rows in the dtype of storage, new rows to their owners."""
    setup = Setup(lengths=(240,), dtype=torch.float64, cache_dtype=torch.bfloat16, page_size=5)
    context, chunk = 120, 120
    results = ranks(size).run(traffic_of, setup, [{0: context}, {0: chunk}])
    row, latent = setup.rank + setup.rope, (setup.rank + setup.rope) * 8
    alone = sum(steps[0][2]["latent"] for steps in results)
    both = sum(steps[1][2]["latent"] for steps in results)
    assert both - alone == context * (size - 1) * row * 2  # every rank gets what it does not hold
    assert alone <= chunk * (size - 1) * latent
    stored = sum(steps[1][2]["cache"] for steps in results)
    assert 0 < stored <= chunk * row * 2
    assert all(steps[1][2]["query"] == 0 for steps in results)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 130), st.integers(1, 80), st.integers(1, 600), st.integers(2, 16), st.integers(1, 40),
    st.sampled_from([2, 4, 8]),
)  # fmt: skip
def test_the_cheapest_way_is_taken(heads, v, rank, size, tokens, itemsize):
    dims = LatentDims(heads, 8, 4, v, rank)

    def busiest(how):
        return max(sent_bytes(how, dims, tokens, size, r, itemsize, "all") for r in range(size))

    assert busiest(cheapest(dims, tokens, size, itemsize, "all")) == min(map(busiest, MERGES))


def test_what_is_cheapest_depends_on_the_widths():
    assert cheapest(DEEPSEEK, 1, 8, 2, "all") == "all_to_all"
    assert cheapest(DEEPSEEK, 1, 8, 2, "own") == "all_to_all"
    assert cheapest(LatentDims(4, 8, 4, 128, 8), 1, 2, 2, "all") == "all_gather"  # values far wider than latents


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 200), st.integers(1, 40))
def test_head_shares_are_a_partition(heads, size):
    shares = [head_share(heads, size, rank) for rank in range(size)]
    assert [h for share in shares for h in range(share.start, share.stop)] == list(range(heads))
    widths = [share.stop - share.start for share in shares]
    assert max(widths) - min(widths) <= 1


def merge_partials_of(ctx: RankContext, how, everywhere_empty):
    """Ranks 1 and beyond saw nothing, and what they hold instead of an output is NaN."""
    generator = torch.Generator().manual_seed(0)
    out = torch.randn(2, 4, 3, generator=generator)
    lse = torch.randn(2, 4, generator=generator)
    if ctx.rank or everywhere_empty:
        out, lse = torch.full_like(out, torch.nan), torch.full_like(lse, -torch.inf)
    return merge(Partial(out, lse), how, laga.ContextParallel(ctx.group))


@pytest.mark.parametrize("how", MERGES)
def test_ranks_that_saw_nothing_contribute_nothing(ranks, how):
    expected = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0))
    for rank, out in enumerate(ranks(3).run(merge_partials_of, how, False)):
        share = slice(None) if how == "all_gather" else head_share(4, 3, rank)
        assert_close(out, expected[:, share], rel=1e-6)
    for out in ranks(2).run(merge_partials_of, how, True):
        assert torch.equal(out, torch.zeros_like(out))


@pytest.fixture
def fake_group():
    dist.init_process_group("fake", rank=5, world_size=64, store=FakeStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_million_tokens_of_deepseek_v3_on_64_ranks(fake_group):
    """The real code, without data: bytes of cache and wire of one layer at a size that no test machine has."""
    cp = laga.ContextParallel(fake_group)
    with FakeTensorMode():
        cache = LatentCache(1, 512, 64, cp=cp, page_size=64, dtype=FP8 or torch.bfloat16)
        sequence = cache.add()
        new = 2**20
        for counts in ({sequence: new}, {sequence: 2}):
            step = cache.plan(counts, rebuild_from=crossover(DEEPSEEK))
            q, c_kv, k_rope = (
                torch.empty(1, step.local_len, *s, dtype=torch.bfloat16) for s in ((128, 192), (512,), (64,))
            )
            weight = torch.empty(128 * 256, 512, dtype=torch.bfloat16)
            with laga.traffic() as ledger:
                out = attend(
                    q, c_kv, k_rope, weight, cache=cache, step=step, layer=0, qk_nope_head_dim=128, v_head_dim=128,
                    workspace=2**31,
                )  # fmt: skip
            cache.commit(step)
            assert out.shape == (1, step.local_len, 128, 128)
        per_token = 2 * 126 * (512 * 2 + 4) + 2 * 2 * 128 * 2 * 63  # two tokens, two of 128 heads are this rank's
        assert ledger.sent() == per_token == sent_bytes("all_to_all", DEEPSEEK, 2, 64, 5, 2, "all")
        row = 584 if FP8 else 1152
        assert cache.memory().total == -(-(new + 2) // 64) * 64 * row
        assert cache.memory().allocated == 2**20 // 64 // 64 * 64 * row  # of this rank: the last page is another's
