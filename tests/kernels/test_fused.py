"""Spans cut for fused kernels, and the output that stands for delta."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from laga_attn.kernels.fused import cut_at_diagonal, out_for_delta, whole
from laga_attn.spans import Span
from tests.compare import assert_close, relative_error
from tests.kernels.oracle import problem
from tests.kernels.stand_ins import attend, differentiate

UNIT_ROUNDOFF = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-21}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def product(a: Tensor, b: Tensor) -> Tensor:
    """Sums over heads, [B, h, S]."""
    return (a.double() * b.double()).sum(-1).transpose(1, 2)


@pytest.mark.parametrize("size", [1.0, 1e-17, 1e17], ids=str)
@pytest.mark.parametrize("dtype", UNIT_ROUNDOFF, ids=str)
def test_the_product_with_dout_is_delta_up_to_one_rounding(dtype: torch.dtype, size: float) -> None:
    size = size if dtype != torch.float16 else size ** (1 / 8)  # its range is smaller
    dout, delta = (random(2, 50, 3, 128) * size).to(dtype), random(2, 3, 50, seed=1) * size
    out = out_for_delta(dout, delta)
    assert (out.shape, out.dtype, out.is_contiguous()) == (dout.shape, dtype, True)
    error = (product(dout, out) - delta).abs() / delta.abs()
    assert 0 < error.max() <= UNIT_ROUNDOFF[dtype]


def test_rows_without_gradient_get_a_zero_output() -> None:
    dout, delta = random(1, 4, 2, 8).bfloat16(), random(1, 2, 4)
    dout[:, 1] = 0
    out = out_for_delta(dout, delta)
    assert not out[:, 1].any()
    assert out[:, [0, 2, 3]].all()


def test_a_gradient_of_the_lse_is_lost_where_dout_is_zero() -> None:
    """Why kernels that use it are not given such gradients."""
    delta = torch.ones(1, 2, 4)
    assert not product(torch.zeros(1, 4, 2, 8), out_for_delta(torch.zeros(1, 4, 2, 8), delta)).any()


@pytest.mark.parametrize("aligned", [0.0, 1.0], ids=["random dout", "dout along out"])
def test_gradients_are_about_as_exact_as_with_the_rounded_output(aligned: float) -> None:
    p = problem([Span(0, 256, 0, 256, True)], (192, 128), torch.bfloat16)
    q, k, v, dout = (x[:, :256] for x in (p.q, p.k, p.v, p.dout))
    visible = torch.ones(256, 256, dtype=torch.bool).tril()
    out, lse = attend(q, k, v, p.scale, visible)
    dout = (dout + aligned * 10 * out).to(dout.dtype)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    scores = torch.einsum("bihd,bjhd->bhij", *exact[:2]) * p.scale
    result = torch.einsum("bhij,bjhd->bihd", scores.masked_fill(~visible, -torch.inf).softmax(-1), exact[2])
    expected = torch.autograd.grad(result, exact, dout.double())
    stand_in = out_for_delta(dout, product(dout, out).float())
    with_output = differentiate(dout, q, k, v, out, lse, p.scale, visible)
    without = differentiate(dout, q, k, v, stand_in, lse, p.scale, visible)
    for a, b, e in zip(with_output, without, expected, strict=True):
        assert (b - e).norm() <= 1.05 * (a - e).norm()
        assert 0 < relative_error(b, e) <= 1.2 * relative_error(a, e)


def test_a_span_is_one_piece_where_masks_are_aligned_alike() -> None:
    (piece,) = whole(Span(3, 10, 5, 20, True, 7))
    assert (piece.queries, piece.keys, piece.causal, piece.window) == (slice(3, 13), slice(5, 25), True, 7)
    assert piece.shape == (10, 20)


@pytest.mark.parametrize(
    "span", [Span(3, 10, 5, 20, True), Span(3, 10, 5, 10, True), Span(3, 10, 5, 4, False)], ids=str
)
def test_pieces_at_the_diagonal_see_what_the_span_sees(span: Span) -> None:
    def seen(visible: Tensor, s: Span) -> Tensor:
        return visible if not s.causal else visible.tril(s.k_len - s.q_len)

    expected, actual = torch.zeros(13, 25), torch.zeros(13, 25)
    ((whole_piece),) = whole(span)
    expected[whole_piece.queries, whole_piece.keys] = seen(torch.ones(span.q_len, span.k_len), span)
    for piece in cut_at_diagonal(span):
        ones = torch.ones(piece.shape)
        actual[piece.queries, piece.keys] += ones.tril() if piece.causal else ones
        assert not piece.causal or piece.shape[0] == piece.shape[1]
    assert_close(actual, expected, rel=0.0)
