"""PyTorch's fused kernels: what their wrapper adds, and the calls that only CUDA runs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from laga_attn.kernels import sdpa
from laga_attn.spans import Span
from tests.compare import assert_close
from tests.kernels.oracle import problem

SPANS = [Span(0, 100, 0, 100, True), Span(100, 50, 0, 210, True), Span(160, 40, 0, 60, False)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_cuda_calls_have_the_right_signatures_and_shapes(dtype: torch.dtype) -> None:
    def empty(rows: int, width: int) -> Tensor:
        return torch.empty(2, rows, 4, width, dtype=dtype, device="meta")  # takes the path of CUDA, without a GPU

    q, k, v, dout = empty(200, 192), empty(210, 192), empty(210, 128), empty(200, 128)
    delta = torch.empty(2, 4, 200, device="meta")
    out, lse = sdpa.forward(q, k, v, SPANS, 0.1)
    grads = sdpa.backward(dout, delta, q, k, v, lse, SPANS, 0.1)
    for actual, expected in zip((out, lse, *grads), (dout, delta, q, k, v), strict=True):
        assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_delta_rides_along_with_all_its_bits(dtype: torch.dtype) -> None:
    p = problem(SPANS, (16, 16), dtype)
    g = torch.Generator().manual_seed(0)
    delta = torch.randn(p.dlse.shape, generator=g) * 100
    dout, v = sdpa._with_delta(p.dout, delta, p.v)
    products = torch.einsum("bihd,bjhd->bhij", dout.double(), v.double())
    plain = torch.einsum("bihd,bjhd->bhij", p.dout.double(), p.v.double())
    assert_close(products, plain - delta.double().unsqueeze(-1), rel=1e-7)


def test_a_window_is_refused_rather_than_ignored() -> None:
    p = problem([Span(0, 20, 0, 20, True, 5)], (16, 16))
    with pytest.raises(ValueError, match="no sliding window"):
        sdpa.forward(p.q, p.k, p.v, p.spans, p.scale)
