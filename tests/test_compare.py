"""The comparator fails whenever it should: otherwise every other test could pass by accident."""

from __future__ import annotations

import math

import pytest
import torch

from tests.compare import assert_bitwise, assert_close, relative_error

NAN, INF = math.nan, math.inf


def _t(*values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


def test_the_error_is_relative_to_the_largest_expected_element():
    assert relative_error(_t(1.0, 2.5), _t(0.0, 4.0)) == 1.5 / 4.0
    assert relative_error(_t(0.0), _t(0.0)) == 0.0
    assert relative_error(_t(1e-30), _t(0.0)) == INF


def test_one_wrong_element_among_many_fails():
    expected = torch.randn(3, 1000, dtype=torch.float64)
    actual = expected.clone()
    assert_close(actual, expected, rel=0.0)
    actual[2, 999] += 1e-9
    with pytest.raises(AssertionError, match=r"dq: relative error .* > 1.000e-12"):
        assert_close(actual, expected, rel=1e-12, name="dq")
    with pytest.raises(AssertionError, match=r"1 of 3000 elements differ, first at \(2, 999\)"):
        assert_bitwise(actual, expected)


@pytest.mark.parametrize("compare", [lambda a, e: assert_close(a, e, rel=1e9), assert_bitwise])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_nan_and_inf_fail_on_either_side_and_on_both(compare, bad):
    good = _t(1.0, 2.0)
    for actual, expected in ((_t(1.0, bad), good), (good, _t(1.0, bad)), (_t(1.0, bad), _t(1.0, bad))):
        with pytest.raises(AssertionError):
            compare(actual, expected)


@pytest.mark.parametrize("bad", [NAN, INF])
def test_the_error_of_what_is_not_finite_is_no_number(bad):
    with pytest.raises(AssertionError, match=r"actual has 1 NaN or Inf, first at \(1,\)"):
        relative_error(_t(1.0, bad), _t(1.0, 2.0))
    with pytest.raises(AssertionError, match="expected has 1 NaN or Inf"):
        relative_error(_t(1.0, 2.0), _t(1.0, bad))


@pytest.mark.parametrize("compare", [lambda a, e: assert_close(a, e, rel=1e9), assert_bitwise])
def test_other_shapes_and_dtypes_fail_even_where_they_broadcast_or_promote(compare):
    with pytest.raises(AssertionError, match="shape"):
        compare(torch.ones(2, 1), torch.ones(2, 2))
    with pytest.raises(AssertionError, match="shape"):
        compare(torch.ones(1), torch.tensor(1.0))
    with pytest.raises(AssertionError, match=r"dtype torch.bfloat16 != torch.float32"):
        compare(torch.ones(2, dtype=torch.bfloat16), torch.ones(2))


def test_comparing_nothing_fails():
    with pytest.raises(AssertionError, match="nothing to compare"):
        assert_close(torch.ones(0, 3), torch.ones(0, 3), rel=1.0)


def test_results_of_other_precision_can_be_measured_against_an_oracle():
    oracle = torch.tensor([1.0, 1.0 + 2**-9], dtype=torch.float64)
    assert relative_error(oracle.bfloat16(), oracle) == pytest.approx(2**-9, rel=0.01)


def test_infinities_may_be_declared_legal_but_must_be_the_same_ones():
    lse = _t(-INF, 1.0)
    assert_close(_t(-INF, 1.0), lse, rel=0.0, same_infinities=True)
    assert_close(_t(-INF), _t(-INF), rel=0.0, same_infinities=True)
    for wrong in (_t(INF, 1.0), _t(0.0, 1.0), _t(-INF, -INF), _t(-INF, NAN), _t(NAN, 1.0), _t(-INF, 1.1)):
        with pytest.raises(AssertionError):
            assert_close(wrong, lse, rel=1e-3, same_infinities=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_bitwise_sees_every_dtype_and_any_strides(dtype):
    x = torch.arange(6).to(dtype).view(2, 3)
    assert_bitwise(x.t(), x.t().contiguous())
    with pytest.raises(AssertionError, match="2 of 6"):
        assert_bitwise(x, torch.where(x > 3, x + 1, x))


def test_bitwise_tells_zero_from_minus_zero_and_may_allow_equal_nan():
    with pytest.raises(AssertionError, match="1 of 1"):
        assert_bitwise(_t(0.0), _t(-0.0))
    assert_bitwise(_t(NAN, INF), _t(NAN, INF), allow_nonfinite=True)
    with pytest.raises(AssertionError, match="1 of 2"):
        assert_bitwise(_t(NAN, 1.0), _t(NAN, 2.0), allow_nonfinite=True)
