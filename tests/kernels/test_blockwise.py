"""The blockwise kernel where its tiles meet: several tiles a row, in float64 and widened from half precision."""

from __future__ import annotations

import pytest
import torch

from laga_attn.kernels import Kernel, blockwise
from laga_attn.spans import Span
from tests.compare import assert_close, relative_error
from tests.kernels.oracle import MASKS, problem

RESULTS = ("out", "lse", "dq", "dk", "dv")
KERNEL = Kernel("blockwise")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise, "_FORWARD_TILE", (32, 48))
    monkeypatch.setattr(blockwise, "_BACKWARD_TILE", (50, 28))


@pytest.mark.parametrize("spans", MASKS.values(), ids=MASKS)
def test_many_tiles_give_what_one_gives(spans: list[Span]) -> None:
    p = problem(spans, batch=2)
    for label, a, b in zip(RESULTS, p.actual(KERNEL), p.expected(), strict=True):
        assert_close(a, b, rel=1e-12, name=label, same_infinities=label == "lse")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_rounded_at_the_end_only(dtype: torch.dtype) -> None:
    p = problem(MASKS["causal"], (24, 16), dtype)
    wide = p.cast(torch.float32)
    out, lse = KERNEL.forward(wide.q, wide.k, wide.v, wide.spans, wide.scale)
    delta = p.delta(out.to(dtype), torch.float32)
    exact = (out, lse, *KERNEL.backward(wide.dout, delta, wide.q, wide.k, wide.v, lse, wide.spans, wide.scale))
    for label, a, b in zip(RESULTS, p.actual(KERNEL), exact, strict=True):
        error = relative_error(a, b, name=label, same_infinities=label == "lse")
        assert error <= torch.finfo(dtype).eps, f"{label}: {error:.1e}"
