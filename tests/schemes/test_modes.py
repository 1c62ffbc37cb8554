"""The op inside the machinery that training puts around it."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import laga_attn as laga
from laga_attn.layout import SequenceLayout
from tests.compare import assert_bitwise, relative_error
from tests.oracle import Case, make_inputs
from tests.ranks_attention import Run, layout_of, parallel

SCHEMES = ("laga", "explicit", "absorbed")
CASE = Case(lengths=(37,), nope=16, rope=8, v=12, rank=24, dtype=torch.float32)


def _leaves(case, layout, rank):
    inputs = make_inputs(case)
    local = [layout.shard(t.to(case.dtype), rank) for t in (inputs.q, inputs.c_kv, inputs.k_rope)]
    leaves = [t.requires_grad_() for t in (*local, inputs.weight.to(case.dtype))]
    return leaves, layout.shard(inputs.dout.to(case.dtype), rank)


def _op(ctx, case, run):
    layout = layout_of(case, run, ctx.size)
    leaves, dout = _leaves(case, layout, ctx.rank)
    cp = parallel(ctx, run)

    def op(*tensors):
        return laga.latent_attention(
            *tensors, layout=layout, cp=cp, scheme=run.scheme, qk_nope_head_dim=case.nope, v_head_dim=case.v,
            save=run.save,
        )  # fmt: skip

    return op, leaves, dout


def _gradients(ctx, case, run, mode):
    op, leaves, dout = _op(ctx, case, run)
    if mode == "plain":
        out = op(*leaves)
    elif mode == "reentrant checkpoint":
        out = checkpoint(op, *leaves, use_reentrant=True)
    elif mode == "non-reentrant checkpoint":
        out = checkpoint(op, *leaves, use_reentrant=False)
    else:
        with torch.autograd.graph.save_on_cpu():
            out = op(*leaves)
    out.backward(dout)
    return [out.detach(), *(t.grad for t in leaves)]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("mode", ["reentrant checkpoint", "non-reentrant checkpoint", "save on cpu"])
def test_recomputation_and_offloading_change_no_bit(ranks, scheme, mode):
    for size, degree in ((1, 1), (2, 2), (4, 2)):
        run = Run(scheme=scheme, ulysses_degree=degree)
        plain = ranks(size).run(_gradients, CASE, run, "plain")
        other = ranks(size).run(_gradients, CASE, run, mode)
        for rank in range(size):
            for a, b in zip(other[rank], plain[rank], strict=True):
                assert_bitwise(a, b, name=f"{scheme} {mode} rank {rank}")


def _unpacks(ctx, case, run):
    op, leaves, dout = _op(ctx, case, run)
    unpacked: Counter[int] = Counter()
    packed = []

    def pack(tensor):
        packed.append(tensor)
        return len(packed) - 1

    def unpack(number):
        unpacked[number] += 1
        return packed[number]

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        out = op(*leaves)
    out.backward(dout)
    return len(packed), dict(unpacked)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_each_saved_tensor_is_unpacked_exactly_once(ranks, scheme):
    for save in ("auto", "latent"):
        for count, unpacked in ranks(2).run(_unpacks, CASE, Run(scheme=scheme, ulysses_degree=2, save=save)):
            assert count > 0
            assert unpacked == dict.fromkeys(range(count), 1)


def _saved_without_grad(ctx, case, run):
    op, leaves, _ = _op(ctx, case, run)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t), torch.no_grad():
        out = op(*leaves)
    return len(packed), out.requires_grad, out


@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_grad_saves_nothing_and_gives_the_same_output(ranks, scheme):
    run = Run(scheme=scheme, ulysses_degree=2)
    trained = ranks(2).run(_gradients, CASE, run, "plain")
    for rank, (saved, differentiable, out) in enumerate(ranks(2).run(_saved_without_grad, CASE, run)):
        assert (saved, differentiable) == (0, False)
        assert_bitwise(out, trained[rank][0])


def _partial(ctx, case, run, wanted):
    op, leaves, dout = _op(ctx, case, run)
    for number, leaf in enumerate(leaves):
        leaf.requires_grad_(number in wanted)
    out = op(*leaves)
    with laga.traffic() as t:
        out.backward(dout)
    return [leaf.grad for leaf in leaves], {r.kind for r in t.records}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_frozen_inputs_get_no_gradient_and_cost_no_traffic(ranks, scheme):
    run = Run(scheme=scheme, ulysses_degree=2)
    full = ranks(2).run(_gradients, CASE, run, "plain")
    latent_kind = "key_value_grad" if scheme == "explicit" else "latent_grad"
    for wanted in ((0,), (1, 2), (3,), (0, 3)):
        for rank, (grads, kinds) in enumerate(ranks(2).run(_partial, CASE, run, wanted)):
            for number, grad in enumerate(grads):
                assert (grad is not None) == (number in wanted)
                if grad is not None:
                    assert_bitwise(grad, full[rank][1 + number])
            assert ("query_grad" in kinds) == (0 in wanted)
            if scheme != "explicit":  # explicit needs the keys' gradients at home for the weight, too
                assert (latent_kind in kinds) == (1 in wanted)


def test_autocast_casts_all_inputs_and_returns_gradients_in_their_own_dtype():
    case = CASE.with_(dtype=torch.float32)
    layout = SequenceLayout.packed(case.cu_seqlens, 1)
    leaves, dout = _leaves(case, layout, 0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = laga.latent_attention(*leaves, layout=layout, qk_nope_head_dim=case.nope, v_head_dim=case.v)
    assert out.dtype == torch.bfloat16
    out.backward(dout.to(torch.bfloat16))
    assert all(leaf.grad.dtype == torch.float32 for leaf in leaves)
    exact = laga.latent_attention(*leaves, layout=layout, qk_nope_head_dim=case.nope, v_head_dim=case.v)
    assert relative_error(out, exact) < 0.03


def test_one_rank_with_no_loss_tokens_does_not_stall_the_others(ranks):
    results = ranks(3).run(_backward_of_nothing, CASE, Run(ulysses_degree=1), timeout=30)
    assert all(torch.isfinite(grad).all() for grads in results for grad in grads)
    assert float(results[0][1].abs().max()) > 0  # its keys are still seen by the other ranks' queries


def _backward_of_nothing(ctx, case, run):
    op, leaves, dout = _op(ctx, case, run)
    (op(*leaves) * (dout * (ctx.rank != 0))).sum().backward()
    return [t.grad for t in leaves]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_compiled_model_code_around_the_op_gives_the_same_numbers(scheme):
    case = CASE
    layout = SequenceLayout.packed(case.cu_seqlens, 1)
    leaves, dout = _leaves(case, layout, 0)

    def layer(q, c_kv, k_rope, weight):
        out = laga.latent_attention(
            q * 1.5, c_kv, k_rope, weight, layout=layout, scheme=scheme, qk_nope_head_dim=case.nope, v_head_dim=case.v
        )
        return out * 2

    plain = torch.autograd.grad(layer(*leaves), leaves, dout)
    compiled = torch.autograd.grad(torch.compile(layer, backend="aot_eager")(*leaves), leaves, dout)
    for a, b in zip(compiled, plain, strict=True):
        assert relative_error(a, b) < 1e-6


@pytest.fixture
def fake_world():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=5, world_size=64, store=FakeStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("degree", [1, 8, 64])
def test_a_large_layer_traces_without_memory_or_peers(fake_world, scheme, degree):
    heads, nope, rope, v, rank, tokens = 128, 128, 64, 128, 512, 2**18
    layout = SequenceLayout.zigzag(tokens, 64)
    cp = laga.ContextParallel(fake_world, degree)
    with FakeTensorMode(), laga.traffic() as t, FlopCounterMode(display=False) as flops:
        s = layout.local_len
        leaves = [
            torch.empty(*shape, dtype=torch.bfloat16, requires_grad=True)
            for shape in ((1, s, heads, nope + rope), (1, s, rank), (1, s, rope), (heads * (nope + v), rank))
        ]
        out = laga.latent_attention(
            *leaves, layout=layout, cp=cp, scheme=scheme, qk_nope_head_dim=nope, v_head_dim=v, causal=False
        )
        out.backward(torch.empty_like(out))
        assert [leaf.grad.shape for leaf in leaves] == [leaf.shape for leaf in leaves]
    width, out_width = (nope + rope, v) if scheme != "absorbed" else (rank + rope, rank)
    attention = s * tokens * heads * 2 * (4 * width + 3 * out_width)  # QK and PV; QK, dP, dV, dQ and dK
    assert attention <= flops.get_total_flops() <= 1.6 * attention
    if scheme != "explicit":
        assert t.received("latent", "forward") == s * (rank + rope) * 63 * 2
