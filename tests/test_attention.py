"""Bad calls of `latent_attention`: the same ValueError on every rank, before data moves and within seconds."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import laga_attn as laga
from laga_attn import attention
from laga_attn.kernels import avx512
from laga_attn.layout import SequenceLayout
from tests.compare import assert_bitwise, relative_error
from tests.oracle import Case, make_inputs
from tests.ranks_attention import Run, attend, layout_of, parallel
from tests.threads import threads

HEADS, NOPE, ROPE, V, RANK, TOKENS = 4, 6, 4, 5, 8, 16


def _call(ctx, changes, only_rank=None):
    """A good call, but for `changes`, on all ranks or on one."""
    mine = changes if only_rank in (None, ctx.rank) else {}
    size = ctx.size
    layout = SequenceLayout.zigzag(mine.get("tokens", TOKENS), mine.get("layout_size", size))
    if "layout_kind" in mine:
        layout = getattr(SequenceLayout, mine["layout_kind"])(TOKENS, size)
    if "cu_seqlens" in mine:
        layout = SequenceLayout.packed(mine["cu_seqlens"], size)
    local = mine.get("local", layout.local_len)
    dtype = mine.get("dtype", torch.float64)
    batch, heads = mine.get("batch", 1), mine.get("heads", HEADS)
    tensors = {
        "q": torch.randn(batch, local, heads, mine.get("q_width", NOPE + ROPE), dtype=dtype),
        "c_kv": torch.randn(batch, local, mine.get("latent_width", RANK), dtype=mine.get("latent_dtype", dtype)),
        "k_rope": torch.randn(batch, local, ROPE, dtype=dtype),
        "kv_b_weight": torch.randn(*mine.get("weight_shape", (heads * (NOPE + V), RANK)), dtype=dtype),
    }
    for name in mine.get("requires_grad", ()):
        tensors[name].requires_grad_()
    if "reshape_q" in mine:
        tensors["q"] = tensors["q"].flatten(1, 2)
    cp = laga.ContextParallel(ctx.group, mine.get("degree"), two_level=mine.get("two_level", False))
    options = {"scheme": "laga", "qk_nope_head_dim": NOPE, "v_head_dim": V} | mine.get("options", {})
    return laga.latent_attention(**tensors, layout=layout, cp=cp, **options)


BAD = {
    "layout for another cp_size": ({"layout_size": 6}, "layout is for 6 ranks, but the context-parallel group has 3"),
    "tokens that the layout does not hold": ({"local": 7}, "q holds 7 tokens, but this layout gives every rank 6"),
    "wrong q width": ({"q_width": 9}, "head width 9, but qk_nope_head_dim 6"),
    "wrong number of dimensions": ({"reshape_q": True}, r"q must have shape \[B, s, H, nope \+ rope\]"),
    "wrong weight shape": ({"weight_shape": (40, RANK)}, r"kv_b_weight has shape \[40, 8\].*need \[44, 8\]"),
    "wrong latent width": ({"latent_width": 9}, r"over a latent of width 9 need \[44, 9\]"),
    "mixed dtypes": ({"latent_dtype": torch.float32}, "one dtype.*q torch.float64, c_kv torch.float32"),
    "scale that is not positive": ({"options": {"softmax_scale": 0.0}}, "softmax_scale must be positive, got 0.0"),
    "heads not divisible by U": ({"degree": 3, "heads": 4}, "4 heads cannot be divided over ulysses_degree=3"),
    "two levels of nothing": (
        {"two_level": True, "options": {"scheme": "explicit"}}, "two_level=True gathers latents, of which scheme"
    ),
    "unknown scheme": ({"options": {"scheme": "ring"}}, "unknown scheme 'ring'; choose one of explicit"),
    "save that the scheme has not": (
        {"options": {"scheme": "explicit", "save": "gathered"}}, "save='gathered' is not possible with scheme .explicit"
    ),
    "save that auto cannot promise": (
        {"options": {"scheme": "auto", "save": "kv"}}, "save='kv' is not possible with scheme 'auto'"
    ),
    "unknown kernel": ({"options": {"kernel": "flash9"}}, "unknown kernel 'flash9'"),
    "kernel that cannot": ({"options": {"kernel": "sdpa"}}, "head dims 10/5.*qk_head_dim == v_head_dim"),
    "window without causal": ({"options": {"window": 4, "causal": False}}, "window=4 needs causal=True"),
    "empty window": ({"options": {"window": 0}}, "window=0 needs causal=True and at least 1 token"),
    "no heads in a group": ({"options": {"head_group": 0}}, "head_group must be at least 1 head, got 0"),
    "batch of packs": ({"batch": 2, "cu_seqlens": [0, 6, 16]}, "batch size 1, got 2; merge the rows into one pack"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_raise_the_same_error_on_every_rank(ranks, name):
    changes, message = BAD[name]
    ranks(3).run_raises(_call, changes, match=message)


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("bad_rank", [0, 2])
def test_one_bad_rank_stops_all_ranks_with_the_same_error(ranks, name, bad_rank):
    changes, message = BAD[name]
    ranks(3).run_raises(_call, changes, bad_rank, match=f"(?s)rank {bad_rank}.*{message}|disagree")


DIFFERENT = {
    "tokens": ({"tokens": 40}, "shape of q"),
    "batch": ({"batch": 2}, "shape of q"),
    "dtype": ({"dtype": torch.float32}, "dtypes"),
    "layout": ({"layout_kind": "contiguous"}, "layout"),
    "documents": ({"cu_seqlens": [0, 8, 16]}, "layout"),
    "scheme": ({"options": {"scheme": "absorbed"}}, "scheme: rank 0, 2 have 'laga'; rank 1 has 'absorbed'"),
    "ulysses degree": ({"degree": 1}, "ulysses_degree"),
    "save policy": ({"options": {"save": "gathered"}}, "save"),
    "causal": ({"options": {"causal": False}}, "causal"),
    "scale": ({"options": {"softmax_scale": 0.25}}, "softmax_scale"),
    "head group": ({"options": {"head_group": 2}}, "head_group: rank 0, 2 have None; rank 1 has 2"),
    "return_lse": ({"options": {"return_lse": True}}, "return_lse"),
    "a rank without trainable inputs": ({"requires_grad": ("q",)}, "wanted gradients"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_that_disagree_all_hear_of_it(ranks, name):
    changes, message = DIFFERENT[name]
    ranks(3).run_raises(_call, changes, 1, match=message)


def _agree_then_disagree(ctx):
    for _ in range(2):
        _call(ctx, {})
    _call(ctx, {"options": {"causal": False}}, only_rank=1)


def test_a_rank_that_changes_its_mind_later_is_heard_too(ranks):
    ranks(3).run_raises(_agree_then_disagree, match="causal: rank 0, 2 have True; rank 1 has False")


def _good(ctx):
    return _call(ctx, {}).shape


def test_the_good_call_is_good(ranks):
    assert ranks(3).run(_good) == [torch.Size((1, 6, HEADS, V))] * 3


def test_one_process_needs_no_group():
    layout = SequenceLayout.contiguous(5, 1)
    out = laga.latent_attention(
        torch.randn(2, 5, 3, 10), torch.randn(2, 5, 8), torch.randn(2, 5, 4), torch.randn(3 * 11, 8),
        layout=layout, qk_nope_head_dim=6, v_head_dim=5,
    )  # fmt: skip
    assert out.shape == (2, 5, 3, 5)


def test_environment_variables_do_not_change_the_numbers(monkeypatch):
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(*shape, generator=generator) for shape in ((1, 9, 3, 10), (1, 9, 8), (1, 9, 4), (33, 8))]

    def run():
        return laga.latent_attention(*tensors, layout=SequenceLayout.contiguous(9, 1), qk_nope_head_dim=6, v_head_dim=5)

    plain = run()
    for name in ("NVTE_FP8_DPA_BWD", "NVTE_BATCH_MHA_P2P_COMM", "LAGA_SCHEME", "LAGA_KERNEL", "FLASH_ATTENTION"):
        monkeypatch.setenv(name, "1")
    assert torch.equal(run(), plain)


def _prefetched(ctx, case, run, changes):
    layout = layout_of(case, run, ctx.size)
    inputs, cp = make_inputs(case), parallel(ctx, run)
    q, c_kv, k_rope, dout = (layout.shard(t, ctx.rank) for t in (inputs.q, inputs.c_kv, inputs.k_rope, inputs.dout))
    leaves = [t.requires_grad_() for t in (q, c_kv, k_rope, inputs.weight.clone())]
    options = {"layout": layout, "cp": cp, "scheme": run.scheme}
    with laga.traffic() as t:
        gather = laga.prefetch_latent(c_kv, k_rope, **(options | changes.get("prefetch", {})))
        out = laga.latent_attention(
            q, c_kv.clone() if "clone" in changes else c_kv, k_rope, leaves[3], qk_nope_head_dim=case.nope,
            v_head_dim=case.v, prefetched=gather, **(options | changes.get("call", {})),
        )  # fmt: skip
    out.backward(dout)
    return [out.detach(), *(leaf.grad for leaf in leaves)], t.sent()


def _not_prefetched(ctx, case, run):
    with laga.traffic() as t:
        result = attend(ctx, case, run)
    return [result.out, result.dq, result.dc_kv, result.dk_rope, result.dweight], t.sent(phase="forward")


@pytest.mark.parametrize("scheme", ["laga", "absorbed"])
def test_a_prefetched_gather_changes_no_bit_and_no_byte(ranks, scheme):
    case = Case(lengths=(21, 9))
    for size, degree in ((1, 1), (2, 1), (2, 2), (4, 2)):
        run = Run(scheme=scheme, ulysses_degree=degree, with_dlse=False)
        plain = ranks(size).run(_not_prefetched, case, run)
        for (ahead, sent), (expected, sent_plain) in zip(
            ranks(size).run(_prefetched, case, run, {}), plain, strict=True
        ):
            for a, b in zip(ahead, expected, strict=True):
                assert_bitwise(a, b)
            lse_bytes = case.heads * case.tokens * 8  # the plain run also returns the LSE
            assert sent <= sent_plain <= sent + lse_bytes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clone": True}, "prefetched was started with other tensors"),
        ({"call": {"causal": False}}, "prefetched was started for another layout, scheme"),
        ({"call": {"scheme": "explicit"}}, "prefetched was started for another layout, scheme"),
        ({"prefetch": {"scheme": "explicit"}}, "scheme 'explicit' has no latent to gather ahead"),
        ({"prefetch": {"layout": SequenceLayout.zigzag(30, 5)}}, "layout is for 5 ranks, but .* has 2"),
    ],
)
def test_a_prefetched_gather_is_refused_where_it_does_not_belong(ranks, changes, message):
    ranks(2).run_raises(_prefetched, Case(lengths=(30,)), Run(ulysses_degree=1), changes, match=message)


@pytest.mark.parametrize("scheme", ["laga", "explicit", "absorbed"])
def test_any_strides_of_queries_and_gradients_work(scheme):
    case = Case(lengths=(11,))
    inputs, layout = make_inputs(case), SequenceLayout.zigzag(11, 1)

    def gradients(q, reduce):
        leaves = [t.detach().requires_grad_() for t in (q, inputs.c_kv, inputs.k_rope, inputs.weight)]
        out = laga.latent_attention(
            *leaves, layout=layout, scheme=scheme, qk_nope_head_dim=case.nope, v_head_dim=case.v
        )
        return torch.autograd.grad(reduce(out), leaves)

    scattered = inputs.q.mT.contiguous().mT
    assert scattered.stride(-1) != 1
    plain = gradients(inputs.q, lambda out: (out * torch.ones_like(out)).sum())
    for q, reduce in (
        (inputs.q, lambda out: out.sum()),
        (inputs.q, lambda out: out.permute(3, 0, 2, 1).contiguous().view(-1).sum()),
        (scattered, lambda out: out.mean() * out.numel()),
    ):
        for a, b in zip(gradients(q, reduce), plain, strict=True):
            assert relative_error(a, b) < 1e-13


def test_prefetch_works_under_autocast_and_autocast_leaves_fp64_alone(ranks):
    for dtype, expected in ((torch.float32, torch.bfloat16), (torch.float64, torch.float64)):
        assert ranks(2).run(_prefetched_under_autocast, dtype) == [expected] * 2


def _prefetched_under_autocast(ctx, dtype):
    layout, cp = SequenceLayout.zigzag(8, 2), laga.ContextParallel(ctx.group)
    q, c_kv, k_rope = (torch.randn(1, 4, *shape, dtype=dtype) for shape in ((3, 10), (8,), (4,)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        gather = laga.prefetch_latent(c_kv, k_rope, layout=layout, cp=cp)
        return laga.latent_attention(
            q, c_kv, k_rope, torch.randn(33, 8, dtype=dtype), layout=layout, cp=cp, qk_nope_head_dim=6, v_head_dim=5,
            prefetched=gather,
        ).dtype  # fmt: skip


def _budget_of_a_few_keys(ctx, case, run):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_REBUILD_BUDGET", 2**12)
        with laga.traffic() as t:
            attend(ctx, case, run)
    return [(r.kind, r.op, r.phase) for r in t.records]


@pytest.mark.parametrize("scheme", ["laga", "absorbed"])
def test_ranks_that_see_different_numbers_of_keys_exchange_by_the_same_head_groups(ranks, scheme):
    case = Case(lengths=(64,), heads=64)  # 4 groups of ranks: the first sees far more keys than the last
    orders = ranks(4).run(_budget_of_a_few_keys, case, Run(scheme=scheme, ulysses_degree=2))
    assert all(order == orders[0] for order in orders)
    assert sum(kind == "query" for kind, _, _ in orders[0]) > 4


def _groups_with_threads(ctx, case, run, number):
    with threads(number), laga.traffic() as ledger:
        return attend(ctx, case, run), sum(record.kind == "query" for record in ledger.records)


MANY_HEADS = Case(lengths=(2048,), heads=32, nope=16, rope=8, v=12, rank=24, dtype=torch.float32)
needs_avx512 = pytest.mark.skipif(avx512.missing(torch.float32) is not None, reason=str(avx512.missing(torch.float32)))


@needs_avx512
def test_a_group_has_a_head_for_each_thread_and_the_same_bits(ranks):
    run = Run(ulysses_degree=2, kernel="avx512")
    results = {number: ranks(2).run(_groups_with_threads, MANY_HEADS, run, number) for number in (1, 3, 8, 40)}
    for number, groups in ((1, 8), (3, 6), (8, 2), (40, 1)):  # 16 heads per rank
        for (local, exchanges), (expected, _) in zip(results[number], results[1], strict=True):
            assert exchanges == groups
            for field in dataclasses.fields(local):
                name = field.name
                assert_bitwise(getattr(local, name), getattr(expected, name), name=name, allow_nonfinite=True)


@pytest.mark.parametrize(("tokens", "batch", "groups"), [(64, 1, 1), (512, 1, 2), (512, 2, 4), (2048, 1, 8)])
def test_a_group_of_few_tokens_has_more_heads(ranks, tokens, batch, groups):
    case = dataclasses.replace(MANY_HEADS, lengths=(tokens,), batch=batch)  # 16 heads per rank
    results = ranks(2).run(_groups_with_threads, case, Run(ulysses_degree=2), 1)
    assert [exchanges for _, exchanges in results] == [groups] * 2


def _ranks_with_other_threads(ctx, changes):
    with threads(1 + ctx.rank):
        return _call(ctx, changes)


def test_ranks_with_other_numbers_of_threads_hear_that_groups_follow_them(ranks):
    ranks(2).run_raises(
        _ranks_with_other_threads,
        {"degree": 2},
        match="threads, which choose head_group .*: rank 0 has 1; rank 1 has 2",
    )


def test_where_groups_are_not_exchanged_threads_may_differ(ranks):
    ranks(2).run(_ranks_with_other_threads, {"degree": 1})
    ranks(2).run(_ranks_with_other_threads, {"degree": 2, "options": {"scheme": "explicit"}})
    ranks(2).run(_ranks_with_other_threads, {"degree": 2, "options": {"head_group": 2}})


def _group_of_a_long_call(ctx, save, kernel):
    """Exchanges of queries with a budget for K and V of one head, if that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_REBUILD_BUDGET", 2**8)
        return _groups_with_threads(ctx, MANY_HEADS, Run(ulysses_degree=2, save=save, kernel=kernel), 4)[1]


@needs_avx512
def test_groups_are_narrow_only_for_kernels_that_need_k_and_v_whole(ranks):
    for save, kernel, groups in (("latent", "avx512", 4), ("kv", "avx512", 16), ("latent", "blockwise", 16)):
        assert ranks(2).run(_group_of_a_long_call, save, kernel) == [groups] * 2


def _one_machine_lacks_a_kernel(ctx):
    found, avx512._library = avx512._library, (lambda: None) if ctx.rank == 1 else avx512._library
    try:
        return _call(ctx, {"dtype": torch.float32})
    finally:
        avx512._library = found


@needs_avx512
def test_ranks_whose_machines_have_other_kernels_do_not_mix_them(ranks):
    ranks(2).run_raises(_one_machine_lacks_a_kernel, match="kernels: rank 0 has .'avx512', .*; rank 1 has .'blockwise'")


def _kinds_of_auto(ctx, weight):
    layout = SequenceLayout.zigzag(64, ctx.size)
    g = torch.Generator().manual_seed(ctx.rank)
    shapes = ((1, layout.local_len, 4, 24), (1, layout.local_len, 16), (1, layout.local_len, 8), (4 * 32, 16))
    q, c_kv, k_rope, weights = (torch.randn(*shape, generator=g) for shape in shapes)
    cp = laga.ContextParallel(ctx.group, flops_per_port_byte=weight)
    with laga.traffic() as ledger:
        laga.latent_attention(
            q, c_kv, k_rope, weights, layout=layout, cp=cp, scheme="auto", qk_nope_head_dim=16, v_head_dim=16
        )
    return {record.kind for record in ledger.records} - {"agreement"}


def test_auto_weighs_bytes_by_what_the_grid_says_of_its_link(ranks):
    """On a slow link only latents travel; on one that costs nothing no rank expands a latent of another."""
    assert ranks(2).run(_kinds_of_auto, 1e9) == [{"latent"}] * 2
    assert ranks(2).run(_kinds_of_auto, 1e-9) == [{"key_value"}] * 2


@pytest.mark.parametrize("weight", [0, -1.0, float("inf"), float("nan")])
def test_a_weight_that_is_not_positive_is_refused(ranks, weight):
    ranks(2).run_raises(_kinds_of_auto, weight, match="flops_per_port_byte must be positive")
