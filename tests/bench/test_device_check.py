"""`benchmarks/device_check.py`, its checks on CPU ranks: what a GPU would be asked."""

from __future__ import annotations

import pytest
from benchmarks.device_check import CASES, SchemeCheck, scheme_errors

from laga_attn.bench.grid import Cell


def errors(ctx):
    return scheme_errors(Cell(ctx.size, 29, 4, "fp64"), "cpu")


def test_every_case_is_compared_with_fp64_and_right(ranks):
    by_rank = ranks(4).run(errors)
    assert {key[:2] for key in by_rank[0]} == set(CASES)
    assert {scheme for scheme, _ in CASES} == {"explicit", "laga", "absorbed"}
    for results in by_rank:
        for (scheme, degree, dtype), (error, alone) in results.items():
            assert SchemeCheck(scheme, degree, dtype, error, alone).right
            assert error > 0
            assert alone > (1e-3 if dtype == "bf16" else 1e-8)


@pytest.mark.parametrize(
    ("error", "right"), [(1.4e-3, True), (1.6e-3, False), (float("inf"), False), (float("nan"), False)]
)
def test_an_error_is_judged_by_that_of_one_process(error, right):
    assert SchemeCheck("laga", 1, "bf16", error, 1e-3).right is right
    assert SchemeCheck("laga", 1, "fp32", 1.9e-6, 1e-9).right
