from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from laga_attn.kernels import merge_partials
from tests.compare import assert_bitwise, assert_close

INF = math.inf


def one(out: float, lse: float) -> tuple[Tensor, Tensor]:
    """A partial result of one query and head, [1, 1, 1, 2] and [1, 1, 1]."""
    return torch.tensor([[[[out, 2 * out]]]]), torch.tensor([[[lse]]])


def test_two_sides_are_weighted_by_their_sums() -> None:
    out, lse = merge_partials(*one(1.0, math.log(3.0)), *one(5.0, math.log(1.0)))
    assert_close(out, torch.tensor([[[[2.0, 4.0]]]]), rel=1e-6)
    assert_close(lse, torch.tensor([[[math.log(4.0)]]]), rel=1e-6)


@pytest.mark.parametrize("empty", [-INF, INF])
@pytest.mark.parametrize("junk", [0.0, math.nan, INF])
@pytest.mark.parametrize("swapped", [False, True])
def test_a_side_without_keys_counts_for_nothing_whatever_it_holds(empty: float, junk: float, swapped: bool) -> None:
    seen, unseen = one(1.5, -700.0), one(junk, empty)
    out, lse = merge_partials(*unseen, *seen) if swapped else merge_partials(*seen, *unseen)
    assert_bitwise(out, seen[0])
    assert_bitwise(lse, seen[1])


@pytest.mark.parametrize("a", [-INF, INF])
@pytest.mark.parametrize("b", [-INF, INF])
def test_a_query_without_keys_on_either_side_has_output_0_and_lse_minus_inf(a: float, b: float) -> None:
    out, lse = merge_partials(*one(math.nan, a), *one(math.nan, b))
    assert not out.any()
    assert (lse == -INF).all()


def test_far_apart_sums_neither_overflow_nor_vanish() -> None:
    out, lse = merge_partials(*one(1.0, 1e4), *one(3.0, -1e4))
    assert_bitwise(out, one(1.0, 0.0)[0])
    assert_bitwise(lse, torch.tensor([[[1e4]]]))


def test_heads_and_rows_keep_their_places() -> None:
    g = torch.Generator().manual_seed(0)
    shape = (2, 3, 4, 5)  # B, S, H, D
    out_a, out_b = (torch.randn(shape, generator=g, dtype=torch.float64) for _ in range(2))
    lse_a, lse_b = (torch.randn(2, 4, 3, generator=g, dtype=torch.float64) for _ in range(2))
    out, _ = merge_partials(out_a, lse_a, out_b, lse_b)
    for b in range(2):
        for s in range(3):
            for h in range(4):
                w = torch.sigmoid(lse_a[b, h, s] - lse_b[b, h, s])
                assert_close(out[b, s, h], w * out_a[b, s, h] + (1 - w) * out_b[b, s, h], rel=1e-14)


def test_half_precision_outputs_are_merged_in_the_accumulation_dtype() -> None:
    (a, lse_a), (b, lse_b) = one(1.0, 0.0), one(1.0, 0.0)
    out, lse = merge_partials(a.bfloat16(), lse_a, b.bfloat16(), lse_b)
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    assert_bitwise(out, a.bfloat16())
