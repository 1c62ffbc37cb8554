"""The kernels as PyTorch operators: schema, fake tensors, FLOP counts, compilation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from laga_attn.kernels import Kernel, avx512
from laga_attn.spans import Span, pack_spans
from tests.compare import assert_bitwise
from tests.kernels.oracle import MASKS, Problem, problem

NAMES = [n for n in ("avx512", "blockwise", "reference", "sdpa") if n != "avx512" or not avx512.missing(torch.bfloat16)]
ANY_DIMS = [name for name in NAMES if name != "sdpa"]


def both_passes(kernel: Kernel, p: Problem) -> tuple[Tensor, ...]:
    out, lse = kernel.forward(p.q, p.k, p.v, p.spans, p.scale)
    return out, lse, *kernel.backward(p.dout, p.dlse, p.q, p.k, p.v, lse, p.spans, p.scale)


@pytest.mark.parametrize("name", NAMES)
def test_operators_pass_the_checks_of_pytorch(name: str) -> None:
    p = problem([Span(0, 20, 0, 30, True)], (16, 16), torch.float32)
    ops = torch.ops.laga_attn
    forward = (p.q, p.k, p.v, pack_spans(p.spans), p.scale)
    torch.library.opcheck(getattr(ops, f"{name}_forward").default, forward)
    _, lse = Kernel(name).forward(p.q, p.k, p.v, p.spans, p.scale)
    torch.library.opcheck(getattr(ops, f"{name}_backward").default, (p.dout, p.dlse, *forward[:3], lse, *forward[3:]))


@pytest.mark.parametrize("kv_heads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ANY_DIMS)
def test_fake_results_have_the_shapes_strides_and_dtypes_of_real_ones(
    name: str, dtype: torch.dtype, kv_heads: int
) -> None:
    if name == "avx512" and dtype == torch.float64:
        dtype = torch.float32  # it has no other
    p = problem(MASKS["shared keys"], dtype=dtype, batch=2, heads=3, kv_heads=kv_heads)
    real = both_passes(Kernel(name), p)
    with FakeTensorMode() as mode:
        fields = {n: mode.from_tensor(getattr(p, n)) for n in ("q", "k", "v", "dout", "dlse")}
        fake = both_passes(Kernel(name), Problem(**fields, spans=p.spans, scale=p.scale))
    for a, b in zip(fake, real, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
    out, _, dq, dk, dv = real
    for x in (out, dq, dk, dv):
        assert x.transpose(0, 1).is_contiguous(), "results are stored sequence-first"


def test_a_million_tokens_trace_at_once() -> None:
    n = 1 << 20
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        q = torch.empty(1, n, 128, 192, dtype=torch.bfloat16)
        v = torch.empty(1, n, 128, 128, dtype=torch.bfloat16)
        out, _ = Kernel("blockwise").forward(q, q, v, [Span(0, n, 0, n, True)], 1.0)
    assert out.shape == v.shape
    assert counter.get_total_flops() == 2 * 128 * (n * (n + 1) // 2) * (192 + 128)


@pytest.mark.parametrize("spans", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("name", ANY_DIMS)
def test_flops_are_those_of_the_visible_pairs(name: str, spans: list[Span]) -> None:
    p = problem(spans, (24, 16), torch.float32, batch=2, heads=3)
    area = 2 * 3 * sum(s.area() for s in spans)
    kernel = Kernel(name)
    with FlopCounterMode(display=False) as counter:
        _, lse = kernel.forward(p.q, p.k, p.v, p.spans, p.scale)
    assert counter.get_total_flops() == 2 * area * (24 + 16)
    with FlopCounterMode(display=False) as counter:
        kernel.backward(p.dout, p.dlse, p.q, p.k, p.v, lse, p.spans, p.scale)
    assert counter.get_total_flops() == 2 * area * (3 * 24 + 2 * 16)


def test_a_compiled_function_holds_the_kernel_without_a_graph_break() -> None:
    p = problem([Span(0, 20, 0, 30, True)], dtype=torch.float32)

    def doubled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, _ = Kernel("blockwise").forward(q + q, k, v, p.spans, p.scale)
        return out + out

    compiled = torch.compile(doubled, fullgraph=True, backend="aot_eager")
    assert_bitwise(compiled(p.q, p.k, p.v), doubled(p.q, p.k, p.v))
