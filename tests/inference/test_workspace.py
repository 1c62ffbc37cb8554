"""Prefill over a long context stays within its byte budget, and says so when the budget is too small."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laga_attn.attention_plan import LatentDims
from laga_attn.bench.memory import TensorMemory
from laga_attn.inference import attend
from laga_attn.inference.workspace import blocks_within, longest_chunk
from tests.inference.ranks_inference import Setup, open_cache
from tests.pool import RankContext

WIDE = Setup(heads=8, nope=16, rope=8, v=16, rank=32, dtype=torch.float32, cache_dtype=torch.float32)
CHUNK = 24


def peak(ctx: RankContext, context: int, workspace: int, ulysses_degree: int, new: int, interleaved: bool) -> int:
    """Most bytes of tensors that one `attend` over this context makes, those of its result included."""
    setup = Setup(**{**{f: getattr(WIDE, f) for f in WIDE.__dataclass_fields__}, "ulysses_degree": ulysses_degree})
    cache = open_cache(ctx, setup)
    sequence, other = cache.add(), cache.add()
    for _ in range(8):  # interleaved, so that pages are not consecutive and must be picked
        cache.append(sequence, torch.zeros(1, context // 8, 40))
        if interleaved:
            cache.append(other, torch.zeros(1, 9, 40))
    step = cache.plan({sequence: new}, rebuild_from=8)
    q = torch.randn(1, step.local_len, 8, 24)
    c_kv, k_rope, weight = torch.randn(1, step.local_len, 32), torch.randn(1, step.local_len, 8), torch.randn(256, 32)
    with TensorMemory() as memory:
        attend(
            q, c_kv, k_rope, weight, cache=cache, step=step, layer=0, qk_nope_head_dim=16, v_head_dim=16,
            workspace=workspace,
        )  # fmt: skip
    return memory.peak


@pytest.mark.parametrize(("size", "degree"), [(1, 1), (2, 1), (2, 2), (3, 1)])
@pytest.mark.parametrize("workspace", [60_000, 150_000])
def test_the_context_takes_no_more_than_the_workspace(ranks, size, degree, workspace):
    arguments = (workspace, degree, CHUNK, True)
    alone, short, long = (max(ranks(size).run(peak, context, *arguments)) for context in (8, 768, 2304))
    assert long <= alone + workspace
    assert long <= 1.05 * short, "memory grows with the context"
    assert long > alone + workspace // 8, "the budget is hardly used"


def test_new_tokens_are_worked_on_by_groups_of_heads(ranks):
    """Nothing in fp32 for all heads at once, which would be a third more."""
    assert ranks(1).run(peak, 8, 10**6, 1, 512, False)[0] <= 5.5 * 512 * 8 * 16 * 4  # times the output


def test_decode_takes_no_more_than_the_workspace(ranks):
    for interleaved in (False, True):
        alone, short, long = (ranks(1).run(peak, context, 150_000, 1, 1, interleaved)[0] for context in (8, 1024, 4096))
        # Of whatever context, a kernel's: scores of a tile, 8 heads by 512 keys, and those keys and values, packed.
        assert long <= alone + 150_000 + 8 * 512 * 4 * 2 + 512 * (40 + 64) * 4
        assert long <= 1.05 * short + 3072 // 4 * 8  # page numbers


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 2**24), st.integers(1, 64), st.integers(1, 16), st.sampled_from([2, 4, 8]), st.integers(1, 64),
    st.integers(1, 700), st.booleans(),
)  # fmt: skip
def test_blocks_fit_their_budget_or_are_refused(budget, heads, cp_size, itemsize, page_size, rank, streams):
    dims = LatentDims(heads, 16, 8, 16, rank)
    row = dims.latent_dim * itemsize
    head, copies = (0, 0) if streams else (dims.kv_head_dim * itemsize, dims.kv_head_dim * max(4, itemsize))
    least = 2 * page_size * row + cp_size * (4 * row + dims.latent_dim * itemsize + head + copies)
    if budget < least:
        with pytest.raises(ValueError, match=f"give at least {least} bytes"):
            blocks_within(budget, dims, heads, cp_size, itemsize, row, page_size, streams)
        return
    blocks = blocks_within(budget, dims, heads, cp_size, itemsize, row, page_size, streams)
    assert 1 <= blocks.head_group <= max(1, heads // 8)
    assert blocks.tokens % cp_size == 0
    assert blocks.tokens > 0
    rebuilt = blocks.head_group * head + copies
    buffers = blocks.tokens * (4 * row + dims.latent_dim * itemsize + rebuilt)
    assert buffers + 2 * page_size * row <= budget


def test_longest_chunk_is_what_one_head_fits():
    assert longest_chunk(2**28, LatentDims(128, 128, 64, 128, 512), 2) == 2**28 // (320 * 6)


@pytest.mark.parametrize("size", [1, 2])
def test_too_small_a_workspace_is_refused_on_all_ranks(ranks, size):
    ranks(size).run_raises(peak, 8, 1000, 1, CHUNK, False, match=r"give at least \d+ bytes")
