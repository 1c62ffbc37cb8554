from __future__ import annotations

import pytest
import torch

from laga_attn.kernels import select
from laga_attn.layout import Span
from laga_attn.plan.trace import Trace


def _flops(action) -> int:
    with Trace() as trace:
        action()
    assert not trace.uncounted
    return trace.flops.total()


A, B, V = torch.ones(3, 5), torch.ones(5, 7), torch.ones(5)


@pytest.mark.parametrize(
    ("action", "multiplications"),
    [
        (lambda: A @ B, 3 * 5 * 7),
        (lambda: torch.mm(A, B, out=torch.empty(3, 7)), 3 * 5 * 7),
        (lambda: torch.zeros(3, 7).addmm_(A, B), 3 * 5 * 7),
        (lambda: torch.addmm(torch.zeros(3, 7), A, B), 3 * 5 * 7),
        (lambda: torch.zeros(2, 3, 7).baddbmm_(A.expand(2, 3, 5), B.expand(2, 5, 7)), 2 * 3 * 5 * 7),
        (lambda: torch.bmm(A.expand(2, 3, 5), B.expand(2, 5, 7)), 2 * 3 * 5 * 7),
        (lambda: A @ V, 3 * 5),
        (lambda: torch.zeros(3).addmv_(A, V), 3 * 5),
        (lambda: V @ V, 5),
        (lambda: torch.zeros(5, 7).addr_(V, torch.ones(7)), 5 * 7),
        (lambda: torch.einsum("bsh,th->bst", A.expand(2, 3, 5), B.t()), 2 * 3 * 5 * 7),
        (lambda: torch.nn.functional.linear(A.expand(4, 3, 5), B.t(), torch.zeros(7)), 4 * 3 * 5 * 7),
    ],
)
def test_products_count_two_flops_for_each_multiplication(action, multiplications):
    assert _flops(action) == 2 * multiplications


def test_grouped_products_count_each_row_once():
    rows, width, out, groups = 16, 8, 24, 4
    x = torch.ones(rows, width, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.ones(groups, width, out, dtype=torch.bfloat16, requires_grad=True)
    ends = torch.tensor([4, 8, 12, 16], dtype=torch.int32)
    one = 2 * rows * width * out
    assert _flops(lambda: torch._grouped_mm(x, weights, ends)) == one
    assert _flops(lambda: torch._grouped_mm(x, weights, ends).backward(torch.ones(rows, out, dtype=x.dtype))) == 3 * one


@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (4, 6), (6, 4)])
@pytest.mark.parametrize("causal", [False, True])
def test_fused_attention_on_cpu_counts_the_pairs_that_it_shows(queries, keys, causal):
    q, k, v = torch.ones(2, 3, queries, 8, requires_grad=True), torch.ones(2, 3, keys, 8), torch.ones(2, 3, keys, 8)
    seen = torch.ones(queries, keys).tril() if causal else torch.ones(queries, keys)
    pairs = int(seen.sum())
    forward = 2 * 2 * 3 * pairs * (8 + 8)

    def attend() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        assert _flops(attend) == forward
        assert _flops(lambda: attend().sum().backward()) == forward + 2 * 2 * 3 * pairs * 5 * 8


@pytest.mark.parametrize("look_inside", [False, True])
def test_kernels_count_visible_pairs_and_what_happens_inside_does_not_count_twice(look_inside):
    spans = [Span(0, 64, 0, 64, causal=True)]
    q, k, v = torch.zeros(1, 64, 2, 24), torch.zeros(1, 64, 2, 24), torch.zeros(1, 64, 2, 16)
    kernel = select("blockwise", device="cpu", dtype=torch.float32, qk_head_dim=24, v_head_dim=16)
    with Trace(look_inside=look_inside) as trace:
        kernel.forward(q, k, v, spans, 1.0)
    assert dict(trace.flops) == {("attention", "forward"): 2 * 2 * (64 * 65 // 2) * (24 + 16)}
    assert trace.calls["forward"] == 1


def test_operators_of_other_libraries_without_a_formula_are_named():
    with torch.library._scoped_library("planner_test", "DEF") as library:
        library.define("mystery(Tensor x) -> Tensor")
        library.impl("mystery", lambda x: x.clone(), "CPU")
        with Trace() as trace:
            torch.ops.planner_test.mystery(A)
    assert trace.uncounted == {"planner_test.mystery.default"}


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        (lambda x, rows: x + x, 3 * 4000),
        (lambda x, rows: x.mul_(2.0), 2 * 4000),
        (lambda x, rows: x.view(10, 100)[:, :3].t(), 0),
        (lambda x, rows: torch.empty(50), 0),
        (lambda x, rows: x.index_select(0, rows), 2 * 200),
        (lambda x, rows: x.index_add_(0, rows, x.new_empty(5, 10)), 3 * 200),
    ],
)
def test_memory_traffic_counts_what_passes_through_once(action, expected):
    x, rows = torch.zeros(100, 10), torch.arange(5)
    with Trace() as trace:
        action(x, rows)
    assert trace.hbm_bytes.total() == expected
