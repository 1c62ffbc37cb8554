"""Prefill, decode and mixed steps give every token what one forward pass over its sequence gives it."""

from __future__ import annotations

import itertools

import pytest
import torch

import laga_attn as laga
from laga_attn.attention_plan import LatentDims
from laga_attn.inference import crossover
from laga_attn.inference.attention import REBUILD_COST
from laga_attn.inference.merging import MERGES
from laga_attn.inference.storage import FP8
from tests.compare import assert_bitwise, assert_close, relative_error
from tests.inference.ranks_inference import Setup, expected_outputs, open_cache, run_on, take_step

EXACT = 1e-12  # fp64
SIZES = (1, 2, 3, 4)


def chunks(length: int, chunk: int) -> list[dict[int, int]]:
    return [{0: min(chunk, length - start)} for start in range(0, length, chunk)]


def assert_all_exact(outs, setup, name, rel=EXACT):
    for sequence, out in enumerate(outs):
        want = expected_outputs(setup, sequence, len(out))
        assert_close(out, want.to(out.dtype), rel=rel, name=f"{name}, sequence {sequence}")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("chunk", [1, 7, 64, 150])
def test_any_chunk_size_equals_one_forward_pass(ranks, size, chunk):
    length = 150 if chunk > 7 else 20
    for kind, rebuild_from in itertools.product(("zigzag", "contiguous"), (1, 8, 1000)):
        setup = Setup(lengths=(length,), kind=kind, rebuild_from=rebuild_from)
        outs = run_on(ranks(size), setup, chunks(length, chunk))
        assert_all_exact(outs, setup, f"P={size} chunk={chunk} {kind} rebuild_from={rebuild_from}")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["zigzag", "contiguous"])
def test_batches_of_prefill_and_decode_of_different_lengths(ranks, size, kind):
    schedule = [
        {0: 17, 1: 3, 2: 1},  # two prompts shorter than 2P among the ranks' smallest counts
        {0: 1, 1: 1, 2: 1, 3: 20},  # three decode while a fourth is prefilled
        {3: 9, 0: 1, 2: 5},  # a second chunk, one token, several at once; in another order
        {0: 8, 1: 30, 2: 12, 3: 1},
        {2: 1},
    ]
    lengths = (27, 34, 20, 30)
    setup = Setup(lengths=lengths, kind=kind, page_size=2)
    assert_all_exact(run_on(ranks(size), setup, schedule), setup, f"P={size} {kind}")


@pytest.mark.parametrize("size", SIZES)
def test_several_query_tokens_see_each_other_causally(ranks, size):
    for new, page_size in itertools.product((2, 3, 7, 20), (1, 3, 64)):
        setup = Setup(lengths=(11 + 2 * new,), rebuild_from=1000, page_size=page_size)
        outs = run_on(ranks(size), setup, [{0: 11}, {0: new}, {0: new}])
        assert_all_exact(outs, setup, f"P={size} new={new} page_size={page_size}")


@pytest.mark.parametrize(("size", "degree"), [(2, 2), (3, 3), (4, 2), (4, 4)])
def test_ulysses_groups_exchange_heads_in_prefill(ranks, size, degree):
    setup = Setup(lengths=(50, 21), heads=12, ulysses_degree=degree)
    schedule = [{0: 20, 1: 10}, {0: 1, 1: 1}, {0: 20, 1: 10}, {0: 9}]
    assert_all_exact(run_on(ranks(size), setup, schedule), setup, f"P={size} U={degree}")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("workspace", [15_000, 20_000, 100_000])
def test_small_workspaces_only_mean_more_blocks(ranks, size, workspace):
    setup = Setup(lengths=(120,), options={"workspace": workspace})
    outs = run_on(ranks(size), setup, [{0: 50}, {0: 3}, {0: 60}, {0: 7}])
    assert_all_exact(outs, setup, f"P={size} workspace={workspace}")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.parametrize("heads", [1, 6, 7])
def test_every_way_of_merging_is_exact(ranks, size, merge, heads):
    """With fewer heads than ranks and heads that do not divide; on most ranks the cache's part is empty."""
    setup = Setup(lengths=(9, 2), heads=heads, rebuild_from=1000, page_size=8, options={"merge": merge})
    outs = run_on(ranks(size), setup, [{0: 1}, {0: 6, 1: 1}, {0: 1}, {0: 1, 1: 1}])
    assert_all_exact(outs, setup, f"P={size} {merge} H={heads}")


def decode_with_own_heads(ctx, setup, merge):
    """The same decode with all heads on every rank, and with each rank's share alone."""
    from laga_attn.inference import attend

    outs = []
    inputs = setup.inputs(0)
    own = setup.heads // ctx.size
    for heads in ("all", "own"):
        cache = open_cache(ctx, setup)
        sequence = cache.add()
        take_step(cache, setup, {sequence: 20})
        step = cache.plan({sequence: 3}, rebuild_from=setup.rebuild_from)
        share = slice(None) if heads == "all" else slice(ctx.rank * own, (ctx.rank + 1) * own)
        tokens = slice(20, 23)
        weight = inputs.weight.unflatten(0, (setup.heads, -1))[share].flatten(0, 1)
        with laga.traffic() as ledger:
            out = attend(
                inputs.q[:, tokens, share], inputs.c_kv[:, tokens], inputs.k_rope[:, tokens], weight, cache=cache,
                step=step, layer=0, qk_nope_head_dim=setup.nope, v_head_dim=setup.v, softmax_scale=setup.scale,
                heads=heads, merge=merge,
            )  # fmt: skip
        outs.append((out[0], ledger.sent("query")))
    (everything, no_query), (share_out, query) = outs
    return everything, share_out, no_query, query


@pytest.mark.parametrize("merge", ["auto", "all_to_all", "reduce_scatter"])
def test_queries_of_own_heads_are_absorbed_then_gathered(ranks, merge):
    for size in (2, 3):
        setup = Setup(lengths=(23,), heads=6)
        results = ranks(size).run(decode_with_own_heads, setup, merge)
        whole = torch.cat([share for _, share, _, _ in results], dim=1)
        assert_close(whole, expected_outputs(setup, 0)[20:23], rel=EXACT)
        for everything, _, no_query, query in results:
            assert_close(whole, everything, rel=EXACT)
            assert no_query == 0
            assert query == 3 * (6 // size) * (setup.rank + setup.rope) * 8 * (size - 1)


@pytest.mark.parametrize("size", [1, 3])
def test_bf16_error_is_that_of_one_bf16_forward_pass(ranks, size):
    setup = Setup(
        lengths=(130,), heads=4, nope=32, rope=16, v=24, rank=64, dtype=torch.bfloat16, cache_dtype=torch.bfloat16
    )
    exact = expected_outputs(setup, 0)
    inputs = setup.inputs(0)
    single = laga.latent_attention(
        *(t.bfloat16() for t in (inputs.q, inputs.c_kv, inputs.k_rope, inputs.weight)), scheme="explicit",
        layout=laga.SequenceLayout.zigzag(130, 1), qk_nope_head_dim=32, v_head_dim=24, softmax_scale=setup.scale,
    )[0]  # fmt: skip
    for merge in MERGES:
        run = Setup(**{**{f: getattr(setup, f) for f in setup.__dataclass_fields__}, "options": {"merge": merge}})
        (out,) = run_on(ranks(size), run, [{0: 64}, {0: 5}, {0: 58}, {0: 1}, {0: 2}])
        assert rms(out - exact) <= 1.5 * rms(single - exact), merge


@pytest.mark.parametrize("rebuild_from", [8, 1000])
def test_bf16_error_does_not_grow_with_the_number_of_blocks(ranks, rebuild_from):
    def error(workspace: int) -> float:
        setup = Setup(
            lengths=(300,), heads=4, nope=32, rope=16, v=24, rank=64, dtype=torch.bfloat16, cache_dtype=torch.bfloat16,
            rebuild_from=rebuild_from, options={"workspace": workspace},
        )  # fmt: skip
        (out,) = run_on(ranks(1), setup, [{0: 60}] * 5)
        return rms((out - expected_outputs(setup, 0))[240:])

    assert error(40_000) <= 1.1 * error(2**28)


@pytest.mark.skipif(FP8 is None, reason="this PyTorch has no float8_e4m3fn")
@pytest.mark.parametrize("size", [1, 2])
def test_fp8_storage_costs_what_three_bits_of_mantissa_cost(ranks, size):
    setup = Setup(lengths=(60,), rank=64, rope=16, dtype=torch.float32, cache_dtype=FP8)
    (out,) = run_on(ranks(size), setup, [{0: 30}, {0: 1}, {0: 20}, {0: 2}, {0: 7}])
    error = relative_error(out, expected_outputs(setup, 0))
    assert 1e-4 < error < 0.1


@pytest.mark.parametrize("size", [1, 2])
def test_storage_in_less_precision_than_compute(ranks, size):
    setup = Setup(lengths=(40,), dtype=torch.float32, cache_dtype=torch.bfloat16)
    (out,) = run_on(ranks(size), setup, [{0: 16}, {0: 1}, {0: 20}, {0: 3}])
    assert 1e-5 < relative_error(out, expected_outputs(setup, 0)) < 2e-2


def test_the_same_steps_give_the_same_bits(ranks):
    setup = Setup(lengths=(70, 30), dtype=torch.float32, cache_dtype=torch.float32)
    schedule = [{0: 40, 1: 3}, {0: 1, 1: 20}, {0: 20, 1: 2}, {0: 1, 1: 1}]
    first, second = (run_on(ranks(4), setup, schedule) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert_bitwise(a, b)


def test_crossover_is_where_the_flops_meet():
    deepseek = LatentDims(128, 128, 64, 128, 512)
    assert crossover(deepseek) == round(REBUILD_COST * 512 * 256 / (576 + 512 - 320))
    assert 0.8 <= REBUILD_COST <= 1.25  # what was measured
    assert crossover(LatentDims(8, 32, 16, 32, 8)) > 2**30  # latents narrower than heads: absorbed always


def rms(t: torch.Tensor) -> float:
    return float(t.double().square().mean().sqrt())
