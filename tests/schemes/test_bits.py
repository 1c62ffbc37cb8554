"""What must hold to the last bit, and what autograd itself says of the gradients."""

from __future__ import annotations

import pytest
import torch

import laga_attn as laga
from laga_attn.attention_plan import SAVE_POLICIES
from laga_attn.layout import SequenceLayout
from tests.compare import assert_bitwise, assert_close
from tests.oracle import Case, make_inputs
from tests.ranks_attention import Local, Run, attend

FIELDS = ("out", "lse", "dq", "dc_kv", "dk_rope", "dweight")


def _same_bits(one: Local, other: Local, name: str) -> None:
    for field in FIELDS:
        assert_bitwise(getattr(one, field), getattr(other, field), name=f"{name} {field}", allow_nonfinite=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", ["blockwise", "reference"])
@pytest.mark.parametrize("head_group", [1, 3, 12])
def test_one_process_laga_is_bit_identical_to_explicit(ranks, dtype, kernel, head_group):
    case = Case(lengths=(70, 33), nope=16, rope=8, v=12, rank=24, dtype=dtype)
    results = [
        ranks(1).run(attend, case, Run(scheme=scheme, save=save, kernel=kernel, head_group=head_group))[0]
        for scheme, save in (("explicit", "kv"), ("laga", "latent"), ("laga", "gathered"), ("laga", "kv"))
    ]
    for result in results[1:]:
        _same_bits(result, results[0], f"{dtype} {kernel}")


@pytest.mark.parametrize("scheme", ["laga", "explicit", "absorbed"])
@pytest.mark.parametrize(("size", "degree"), [(1, 1), (2, 2), (3, 1), (4, 2), (4, 4)])
def test_running_twice_gives_the_same_bits(ranks, scheme, size, degree):
    for dtype in (torch.float32, torch.bfloat16):
        case = Case(lengths=(61, 40), nope=16, rope=8, v=12, rank=24, dtype=dtype)
        run = Run(scheme=scheme, ulysses_degree=degree)
        first, second = (ranks(size).run(attend, case, run) for _ in range(2))
        for rank in range(size):
            _same_bits(first[rank], second[rank], f"rank {rank} {dtype}")


# A kernel that rebuilds K and V itself sums in its own order, there and where gradients are folded.
@pytest.mark.parametrize(("kernel", "saves"), [("auto", ("latent", "gathered")), ("blockwise", SAVE_POLICIES["laga"])])
@pytest.mark.parametrize("size", [2, 4])
def test_save_policies_agree_to_the_bit(ranks, size, kernel, saves):
    case = Case(lengths=(61,), nope=16, rope=8, v=12, rank=24, dtype=torch.bfloat16)
    policies = [ranks(size).run(attend, case, Run(save=save, kernel=kernel)) for save in saves]
    for parts in policies[1:]:
        for rank in range(size):
            _same_bits(parts[rank], policies[0][rank], f"rank {rank}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_keys_and_values_give_what_a_kernel_rebuilds_itself(ranks, dtype):
    case = Case(lengths=(61, 40), nope=16, rope=8, v=12, rank=24, dtype=dtype)
    rebuilt, kept = (ranks(2).run(attend, case, Run(save=save)) for save in ("latent", "kv"))
    rel = 1e-6 if dtype == torch.float32 else 1e-2
    for field in FIELDS:
        for one, other in zip(rebuilt, kept, strict=True):
            a, b = getattr(one, field), getattr(other, field)
            assert_close(a, b, rel=rel, name=field, same_infinities=field == "lse")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("scheme", ["laga", "explicit", "absorbed"])
def test_strides_change_nothing(scheme, dtype):
    """Of any input, and of the output's gradient: kernels read rows, callers may have anything.

    Matrix products of PyTorch do not round the same for all strides.
    """
    case = Case(lengths=(61,), heads=3, nope=16, rope=8, v=12, rank=24, dtype=dtype)
    inputs, layout = make_inputs(case), SequenceLayout.packed(case.cu_seqlens, 1)
    tensors = [t.to(dtype) for t in (inputs.q, inputs.c_kv, inputs.k_rope, inputs.weight, inputs.dout)]

    def run(*tensors):
        *leaves, dout = (t.detach().requires_grad_() for t in tensors)
        out = laga.latent_attention(
            *leaves, layout=layout, scheme=scheme, qk_nope_head_dim=case.nope, v_head_dim=case.v
        )
        return [out, *torch.autograd.grad(out, leaves, dout.detach())]

    expected = run(*tensors)
    for number in range(len(tensors)):
        strided = list(tensors)
        strided[number] = tensors[number].mT.contiguous().mT
        for actual, wanted in zip(run(*strided), expected, strict=True):
            assert_close(actual, wanted, rel=1e-14 if dtype == torch.float64 else 1e-6, name=f"tensor {number}")


@pytest.mark.parametrize("scheme", ["laga", "explicit", "absorbed"])
def test_overlap_changes_no_bit(ranks, scheme):
    for size, degree in ((2, 1), (2, 2), (4, 2), (4, 1)):
        case = Case(lengths=(61, 40), nope=16, rope=8, v=12, rank=24, dtype=torch.bfloat16)
        for save in SAVE_POLICIES[scheme]:
            beside, in_turn = (
                ranks(size).run(
                    attend, case, Run(scheme=scheme, ulysses_degree=degree, save=save, head_group=1, overlap=overlap)
                )
                for overlap in (True, False)
            )
            for rank in range(size):
                _same_bits(beside[rank], in_turn[rank], f"{save} rank {rank} of {size}")


@pytest.mark.parametrize("scheme", ["laga", "explicit", "absorbed"])
def test_gradcheck(scheme):
    case = Case(lengths=(3, 4), heads=2, nope=3, rope=2, v=2, rank=3)
    inputs = make_inputs(case)
    layout = SequenceLayout.packed(case.cu_seqlens, 1)
    leaves = [t.clone().requires_grad_() for t in (inputs.q, inputs.c_kv, inputs.k_rope, inputs.weight)]

    def op(*tensors):
        return laga.latent_attention(
            *tensors, layout=layout, scheme=scheme, qk_nope_head_dim=case.nope, v_head_dim=case.v, return_lse=True
        )

    assert torch.autograd.gradcheck(op, leaves)


def _gradcheck_on_a_rank(ctx, scheme, degree):
    """Perturb each rank's inputs in turn, every rank taking part in every evaluation of the function."""
    case = Case(lengths=(5,), heads=2, nope=3, rope=2, v=2, rank=3)
    inputs, layout = make_inputs(case), SequenceLayout.zigzag(5, ctx.size)
    cp = laga.ContextParallel(ctx.group, degree)
    leaves = [layout.shard(t, ctx.rank) for t in (inputs.q, inputs.c_kv, inputs.k_rope)]
    leaves.append(inputs.weight.clone())
    dout = layout.shard(inputs.dout, ctx.rank)

    def loss(tensors):
        out = laga.latent_attention(*tensors, layout=layout, cp=cp, scheme=scheme, qk_nope_head_dim=3, v_head_dim=2)
        total = (out * dout).sum()
        value = total.detach().clone()
        torch.distributed.all_reduce(value, group=ctx.group)
        return total, value

    variables = [t.clone().requires_grad_() for t in leaves]
    loss(variables)[0].backward()
    worst, step = 0.0, 1e-6
    for turn in range(ctx.size):
        for which, leaf in enumerate(leaves[:3]):  # the weight is shared: its partial sums are the oracle tests' matter
            for place in range(leaf.numel()):
                values = []
                for sign in (1, -1):
                    moved = [t.clone() for t in leaves]
                    if turn == ctx.rank:
                        moved[which].view(-1)[place] += sign * step
                    values.append(loss([t.requires_grad_() for t in moved])[1])
                if turn == ctx.rank:
                    numeric = (values[0] - values[1]) / (2 * step)
                    worst = max(worst, float((numeric - variables[which].grad.view(-1)[place]).abs()))
    return worst


@pytest.mark.parametrize(("scheme", "degree"), [("laga", 1), ("laga", 2), ("explicit", 2), ("absorbed", 2)])
def test_gradients_across_ranks_equal_finite_differences(ranks, scheme, degree):
    assert max(ranks(2).run(_gradcheck_on_a_rank, scheme, degree)) < 1e-7
