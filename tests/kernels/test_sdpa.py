"""The fused kernels' calls that only other devices can run: their signatures and shapes, on fake tensors."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

from laga_attn.kernels import sdpa
from laga_attn.spans import Span
from tests.compare import assert_close
from tests.kernels.oracle import problem

SPANS = [Span(0, 100, 0, 100, True), Span(100, 50, 0, 210, True), Span(160, 40, 0, 60, False)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_cuda_calls_trace_to_the_shapes_of_the_cpu_ones(dtype: torch.dtype) -> None:
    with FakeTensorMode(allow_non_fake_inputs=False):
        q, k = torch.empty(2, 200, 4, 192, dtype=dtype, device="cuda"), torch.empty(2, 210, 4, 192, dtype=dtype, device="cuda")
        v, dout = torch.empty(2, 210, 4, 128, dtype=dtype, device="cuda"), torch.empty(2, 200, 4, 128, dtype=dtype, device="cuda")
        delta = torch.empty(2, 4, 200, device="cuda")
        out, lse = sdpa.forward(q, k, v, SPANS, 0.1)
        grads = sdpa.backward(dout, delta, q, k, v, lse, SPANS, 0.1)
    assert out.shape == dout.shape
    assert lse.shape == delta.shape
    assert [x.shape for x in grads] == [x.shape for x in (q, k, v)]
    assert {x.device.type for x in (out, lse, *grads)} == {"cuda"}


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
