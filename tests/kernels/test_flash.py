"""FlashAttention and cuDNN as they are called: right results on stand-ins that keep to the real ones' contracts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from laga_attn.attention import latent_attention
from laga_attn.kernels import TABLE, Kernel, cudnn, table
from laga_attn.layout import SequenceLayout
from laga_attn.spans import Span
from tests.compare import assert_bitwise, assert_close
from tests.kernels.oracle import MASKS, Problem, problem
from tests.kernels.stand_ins import CUDNN, flash3_library, flash4_module

NAMES = ("flash3", "flash4", "cudnn")
RESULTS = ("out", "lse", "dq", "dk", "dv")
ROWS = {row.name: row for row in TABLE if row.name in NAMES}
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


@pytest.fixture(scope="module")
def flash3_calls() -> Iterator[list[dict[str, Any]]]:
    calls: list[dict[str, Any]] = []
    with flash3_library(calls):
        yield calls


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch, flash3_calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put the stand-ins in place; keywords of the calls of FlashAttention."""
    flash3_calls.clear()
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", flash4_module(flash3_calls))
    monkeypatch.setattr(cudnn, "aten", CUDNN)
    return flash3_calls


def problem_for(name: str, spans: list[Span], dtype: torch.dtype = torch.float16, **kwargs: Any) -> Problem:
    """With a gradient of the LSE where the kernel takes one."""
    p = problem(spans, **{"dims": (192, 128), "batch": 2, **kwargs}, dtype=dtype)
    return p if ROWS[name].lse_gradient else replace(p, dlse=torch.zeros_like(p.dlse))


def masks_of(name: str) -> list[str]:
    return [m for m, spans in MASKS.items() if ROWS[name].window or all(s.window is None for s in spans)]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("name", "mask"), [(n, m) for n in NAMES for m in masks_of(n)])
def test_forward_and_backward_equal_autograd_on_every_mask(name: str, mask: str, dtype: torch.dtype) -> None:
    p = problem_for(name, MASKS[mask], dtype)
    for label, actual, expected in zip(RESULTS, p.actual(Kernel(name)), p.expected(), strict=True):
        assert_close(
            actual.double(), expected, rel=TOLERANCE[dtype], name=label, same_infinities=label == "lse"
        )  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_any_strides_do_and_change_no_bit(name: str) -> None:
    p = problem_for(name, MASKS["shared keys"], dims=(16, 16), batch=1)

    def odd(x: Tensor) -> Tensor:
        """Rows that start at no multiple of 16 bytes: as where delta travels behind dout."""
        return torch.cat((x, x[..., :2]), dim=-1)[..., :-2]

    def shifted(x: Tensor) -> Tensor:
        return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)

    def one_buffer(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        kv = torch.cat((k, v), dim=-1)
        return kv[..., : k.shape[-1]], kv[..., k.shape[-1] :]

    def sequence_first(x: Tensor) -> Tensor:
        return x.transpose(0, 1).contiguous().transpose(0, 1)

    k, v = one_buffer(p.k, p.v)
    expected = p.actual(Kernel(name))
    for other in (
        replace(p, k=k, v=v, dout=odd(p.dout)),
        replace(p, q=odd(p.q), k=odd(p.k), v=odd(p.v)),
        replace(p, **{n: sequence_first(getattr(p, n)) for n in ("q", "k", "v", "dout")}),
        replace(p, q=shifted(p.q), k=shifted(p.k), v=shifted(p.v), dout=shifted(p.dout)),
    ):
        for label, a, b in zip(RESULTS, other.actual(Kernel(name)), expected, strict=True):
            assert_bitwise(a, b, name=label, allow_nonfinite=label == "lse")


@pytest.mark.parametrize("name", NAMES)
def test_a_broadcast_head_is_copied_out(name: str) -> None:
    p = problem_for(name, MASKS["causal"], dims=(16, 16))
    broadcast = replace(p, k=p.k[:, :, :1].expand(p.k.shape))
    plain = replace(p, k=broadcast.k.contiguous())
    for label, a, b in zip(RESULTS, broadcast.actual(Kernel(name)), plain.actual(Kernel(name)), strict=True):
        assert_bitwise(a, b, name=label, allow_nonfinite=label == "lse")


@pytest.mark.parametrize("name", NAMES)
def test_rows_in_no_visible_pair_may_hold_nan_and_have_empty_results(name: str) -> None:
    clean = problem_for(name, [Span(5, 100, 20, 50, True), Span(110, 40, 90, 60, True)], dims=(16, 16))
    seen_q = torch.zeros(clean.q.shape[1], dtype=torch.bool)
    seen_k = torch.zeros(clean.k.shape[1], dtype=torch.bool)
    seen_q[55:105] = seen_q[110:150] = True  # the first 50 queries of the first span see no key
    seen_k[20:70] = seen_k[90:150] = True
    dirty = replace(clean, **{n: getattr(clean, n).clone() for n in ("q", "k", "v", "dout")})
    for x, seen in ((dirty.q, seen_q), (dirty.dout, seen_q), (dirty.k, seen_k), (dirty.v, seen_k)):
        x[:, ~seen] = torch.nan
    out, lse, dq, dk, dv = dirty.actual(Kernel(name))
    for label, a, b in zip(RESULTS, (out, lse, dq, dk, dv), clean.actual(Kernel(name)), strict=True):
        assert_bitwise(a, b, name=label, allow_nonfinite=label == "lse")
    assert (lse[:, :, ~seen_q] == -torch.inf).all()
    assert not out[:, ~seen_q].any()
    assert not dq[:, ~seen_q].any()
    assert not dk[:, ~seen_k].any()
    assert not dv[:, ~seen_k].any()


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_keys_in_several_spans_are_rounded_once(name: str) -> None:
    spans = [Span(20 * i, 20, 0, 64, False) for i in range(6)]
    p = problem_for(name, spans, torch.bfloat16, dims=(16, 16))
    kernel = Kernel(name)
    out, lse = kernel.forward(p.q, p.k, p.v, spans, p.scale)
    delta = p.delta(out, lse.dtype)
    together = kernel.backward(p.dout, delta, p.q, p.k, p.v, lse, spans, p.scale)
    alone = [kernel.backward(p.dout, delta, p.q, p.k, p.v, lse, [s], p.scale) for s in spans]
    for total, shares in zip(together[1:], list(zip(*alone, strict=True))[1:], strict=True):
        assert_bitwise(total, sum(share.float() for share in shares).to(torch.bfloat16))


@pytest.mark.parametrize("name", NAMES)
def test_single_keys_and_single_queries_are_attended_to(name: str) -> None:
    spans = [Span(0, 1, 0, 1, True), Span(1, 40, 1, 41, True), Span(41, 1, 50, 30, False), Span(42, 9, 90, 1, False)]
    p = problem_for(name, spans, dims=(16, 16))
    for label, actual, expected in zip(RESULTS, p.actual(Kernel(name)), p.expected(), strict=True):
        assert_close(actual.double(), expected, rel=2e-3, name=label, same_infinities=label == "lse")


def test_a_window_is_refused_by_cudnn_rather_than_ignored() -> None:
    p = problem_for("cudnn", MASKS["window"])
    with pytest.raises(ValueError, match="no sliding window"):
        Kernel("cudnn").forward(p.q, p.k, p.v, p.spans, p.scale)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["flash3", "flash4"])
def test_backward_is_deterministic_where_torch_is_asked_to_be(
    name: str, deterministic: bool, calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    p = problem_for(name, MASKS["documents"])
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    p.actual(Kernel(name))
    assert [c["deterministic"] for c in calls if "deterministic" in c] == [deterministic] * 2  # one call a span
    assert len(calls) == 4


def test_a_call_that_the_real_ones_would_refuse_fails_on_the_stand_ins() -> None:
    x = torch.zeros(1, 8, 2, 16, dtype=torch.float16)
    with pytest.raises(RuntimeError, match="causal"):
        torch.ops.flash_attn_3.fwd(x, x, x, causal=True)
    with pytest.raises(TypeError, match="is_causal"):
        sys.modules["flash_attn.cute.interface"]._flash_attn_fwd(x, x, x, is_causal=True)
    with pytest.raises(RuntimeError, match="causal"):
        CUDNN._scaled_dot_product_cudnn_attention(x, x, x, None, True, 0.0, False, False, causal=True)


@pytest.mark.parametrize("scheme", ["laga", "explicit"])
@pytest.mark.parametrize("name", NAMES)
def test_schemes_run_on_it(name: str, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [replace(r, devices=("cpu",), missing=lambda dtype: None) if r.name == name else r for r in TABLE]
    monkeypatch.setattr(table, "TABLE", tuple(rows))
    g = torch.Generator().manual_seed(0)
    shapes = ((1, 70, 4, 192), (1, 70, 32), (1, 70, 64), (4 * 256, 32))
    inputs = [torch.randn(shape, generator=g).bfloat16() for shape in shapes]
    inputs[3] = inputs[3] / 32**0.5
    dout = torch.randn(1, 70, 4, 128, generator=g).bfloat16()

    def results(kernel: str, dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        layout = SequenceLayout.packed([0, 30, 70], 1)
        out = latent_attention(
            *leaves, layout=layout, scheme=scheme, kernel=kernel, qk_nope_head_dim=128, v_head_dim=128, head_group=2
        )  # fmt: skip
        return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(dtype))]

    for actual, expected in zip(results(name, torch.bfloat16), results("reference", torch.float64), strict=True):
        assert_close(actual.double(), expected, rel=2e-2)


@pytest.mark.parametrize("name", NAMES)
def test_tracing_needs_no_package_and_counts_the_visible_pairs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem_for(name, MASKS["shared keys"])
    real = p.actual(Kernel(name))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", None)
    monkeypatch.setattr(cudnn, "aten", None)
    with FakeTensorMode() as mode, FlopCounterMode(display=False) as counter:
        fields = {n: mode.from_tensor(getattr(p, n)) for n in ("q", "k", "v", "dout", "dlse")}
        fake = Problem(**fields, spans=p.spans, scale=p.scale).actual(Kernel(name))
    for a, b in zip(fake, real, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
    area = 2 * 2 * sum(s.area() for s in p.spans)
    assert counter.get_total_flops() == 2 * area * (4 * 192 + 3 * 128)
