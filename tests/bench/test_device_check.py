"""`benchmarks/device_check.py`, its checks on CPU ranks: what a GPU would be asked."""

from __future__ import annotations

import pytest
from benchmarks.device_check import CASES, SchemeCheck, kernel_lines, scheme_errors
from benchmarks.kernel_check import KernelCheck

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


def test_the_worst_of_a_kernel_and_all_that_is_wrong_are_shown():
    def check(kernel, error, mask="causal", failure=""):
        return KernelCheck(kernel, "bfloat16", (192, 128), mask, True, error, failure)

    lines = kernel_lines(
        [
            check("flash3", 1e-3),
            check("flash3", 2e-3, "window"),
            check("cudnn", 0.5),
            check("cudnn", float("inf"), "full", "no engine"),
        ]
    )
    assert lines == [
        "flash3 bfloat16: error 2.0e-03 (window, 192/128): ok",
        "cudnn bfloat16: error inf (full, 192/128): WRONG no engine",
        "cudnn bfloat16: error 5.0e-01 (causal, 192/128): WRONG",
    ]
