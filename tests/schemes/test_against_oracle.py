"""Every scheme, at every P and U, gives the oracle's outputs and gradients."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.compare import relative_error
from tests.oracle import Case, make_inputs, oracle
from tests.ranks_attention import Run, assert_matches, run_on

EXACT = 1e-12  # fp64
SINGLE, PACKED = (22,), (5, 9, 1, 14)  # no length divides by anything: pads everywhere
MASKS = ({"causal": True}, {"causal": False}, {"causal": True, "window": 4})
SCHEMES = ("laga", "explicit", "absorbed")
GRIDS = [(size, u) for size in (1, 2, 3, 4) for u in range(1, size + 1) if size % u == 0]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("size", "degree"), GRIDS)
def test_outputs_and_all_gradients_equal_the_oracle(ranks, scheme, size, degree):
    for lengths, mask, kind in itertools.product((SINGLE, PACKED), MASKS, ("zigzag", "contiguous")):
        case = Case(lengths=lengths, **mask)
        run = Run(scheme=scheme, ulysses_degree=degree, kind=kind, poison_pads=True)
        expected = oracle(case, make_inputs(case), with_dlse=True)
        assert_matches(run_on(ranks(size), case, run), expected, rel=EXACT, name=f"{case} {run}")


@pytest.mark.parametrize(
    ("scheme", "save"),
    [(s, p) for s, ps in (("laga", ("latent", "gathered", "kv")), ("explicit", ("latent", "kv")),
                          ("absorbed", ("latent", "gathered"))) for p in ps],
)  # fmt: skip
@pytest.mark.parametrize(("size", "degree"), [(1, 1), (2, 2), (4, 2), (4, 1)])
def test_no_save_policy_changes_the_numbers(ranks, scheme, save, size, degree):
    case = Case(lengths=PACKED, scale=0.3)
    expected = oracle(case, make_inputs(case), with_dlse=True)
    for head_group in (1, 2, None):
        run = Run(scheme=scheme, ulysses_degree=degree, save=save, head_group=head_group)
        assert_matches(run_on(ranks(size), case, run), expected, rel=EXACT, name=f"{run}")


@pytest.mark.parametrize("scheme", [*SCHEMES, "auto"])
@pytest.mark.parametrize(("size", "degree"), [(1, None), (2, 2), (3, 1), (4, 2)])
def test_batches_without_lse_gradient(ranks, scheme, size, degree):
    case = Case(lengths=(19,), batch=3)
    run = Run(scheme=scheme, ulysses_degree=degree, with_dlse=False)
    assert_matches(run_on(ranks(size), case, run), oracle(case, make_inputs(case)), rel=EXACT)


@pytest.mark.parametrize("scheme", ["laga", "absorbed"])
@pytest.mark.parametrize("lengths", [SINGLE, PACKED])
def test_two_levels_of_network_give_the_same_numbers(ranks, scheme, lengths):
    for mask, kind in itertools.product(MASKS, ("zigzag", "contiguous")):
        case = Case(lengths=lengths, **mask)
        run = Run(scheme=scheme, ulysses_degree=2, kind=kind, two_level=True, poison_pads=True)
        assert_matches(run_on(ranks(4), case, run), oracle(case, make_inputs(case), with_dlse=True), rel=EXACT)


@pytest.mark.parametrize("heads", [1, 2, 3])
def test_more_ranks_than_heads_work_without_head_exchange(ranks, heads):
    case = Case(lengths=(37,), heads=heads)
    for scheme in SCHEMES:
        actual = run_on(ranks(4), case, Run(scheme=scheme, ulysses_degree=1))
        assert_matches(actual, oracle(case, make_inputs(case), with_dlse=True), rel=EXACT, name=scheme)


@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 8])
def test_sequences_shorter_than_their_chunks(ranks, tokens):
    case = Case(lengths=(tokens,))
    for size, degree in ((3, 3), (4, 2), (4, 1)):
        for scheme in SCHEMES:
            actual = run_on(ranks(size), case, Run(scheme=scheme, ulysses_degree=degree, poison_pads=True))
            assert_matches(actual, oracle(case, make_inputs(case), with_dlse=True), rel=EXACT)


@pytest.mark.parametrize("dims", [(128, 64, 128), (64, 64, 64), (64, 32, 128), (32, 32, 64)])
def test_head_dims_of_real_models(ranks, dims):
    nope, rope, v = dims
    case = Case(lengths=(24, 21), heads=4, nope=nope, rope=rope, v=v, rank=48)
    expected = oracle(case, make_inputs(case), with_dlse=True)
    for scheme, kernel in itertools.product(SCHEMES, ("blockwise", "reference")):
        actual = run_on(ranks(2), case, Run(scheme=scheme, ulysses_degree=2, kernel=kernel))
        assert_matches(actual, expected, rel=EXACT, name=f"{scheme} {kernel}")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("size", "degree"), GRIDS)
def test_fp32_error_is_within_rounding(ranks, scheme, size, degree):
    case = Case(lengths=(150, 99), heads=12, nope=32, rope=16, v=24, rank=64, dtype=torch.float32)
    expected = oracle(case, make_inputs(case), with_dlse=True)
    actual = run_on(ranks(size), case, Run(scheme=scheme, ulysses_degree=degree))
    for field in ("out", "lse", "dq", "dc_kv", "dk_rope", "dweight"):
        error = relative_error(getattr(actual, field), getattr(expected, field))
        assert error <= 2e-6, f"{field}: {error:.2e}"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_bf16_error_does_not_grow_with_the_ranks(ranks, scheme):
    case = Case(lengths=(256,), heads=12, nope=32, rope=16, v=24, rank=64, dtype=torch.bfloat16)
    inputs = make_inputs(case)
    exact, single = oracle(case, inputs), oracle(case, inputs, dtype=torch.bfloat16)
    for size, degree in GRIDS:
        actual = run_on(ranks(size), case, Run(scheme=scheme, ulysses_degree=degree, with_dlse=False))
        for field in ("out", "dq", "dc_kv", "dk_rope", "dweight"):
            want = getattr(exact, field)
            error = _rms(getattr(actual, field).double() - want) / _rms(want)
            yardstick = _rms(getattr(single, field).double() - want) / _rms(want)
            assert error <= 1.5 * yardstick, f"{field} at P={size}, U={degree}: {error:.2e} > 1.5 x {yardstick:.2e}"


def _rms(t: torch.Tensor) -> float:
    return float(t.double().square().mean().sqrt())
