"""The compiled kernel: where its blocks meet, against flash attention on hard data, and straight from latents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.flop_counter import FlopCounterMode

from laga_attn.kernels import Kernel, avx512
from laga_attn.spans import Span, pack_spans
from tests.compare import assert_bitwise, relative_error
from tests.kernels.oracle import MASKS, Problem, problem

RESULTS = ("out", "lse", "dq", "dk", "dv")
KERNEL = Kernel("avx512")
DTYPES = (torch.float32, torch.bfloat16)
# Blocks are cut at 64, 96, 192 and 512.
LONG = {
    "causal": [Span(0, 1100, 0, 2500, True)],
    "window": [Span(7, 1000, 30, 2400, True, 777)],
    "short window": [Span(7, 1000, 1, 2400, True, 3)],
    "documents": [Span(1, 333, 1, 333, True), Span(400, 500, 400, 1801, True), Span(950, 70, 5, 2100, False)],
}

pytestmark = pytest.mark.skipif(avx512.missing(torch.bfloat16) is not None, reason=str(avx512.missing(torch.bfloat16)))


def assert_near(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], dtype: torch.dtype) -> None:
    for label, a, b in zip(RESULTS, actual, expected, strict=True):
        error = relative_error(a, b, name=label, same_infinities=label == "lse")
        limit = 2e-6 if dtype == torch.float32 or label == "lse" else 1e-2
        assert error <= limit, f"{label}: {error:.1e}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spans", LONG.values(), ids=LONG)
def test_blocks_join_on_long_sequences(spans: list[Span], dtype: torch.dtype) -> None:
    p = problem(spans, (40, 24), dtype, heads=1)
    assert_near(p.actual(KERNEL), p.expected(), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", [(2, 2), (50, 34), (130, 66), (576, 512)], ids=str)
def test_head_dims_need_not_fill_registers(dims: tuple[int, int], dtype: torch.dtype) -> None:
    p = problem(MASKS["gaps"], dims, dtype, batch=2)
    assert_near(p.actual(KERNEL), p.expected(), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spans", MASKS.values(), ids=MASKS)
def test_threads_change_no_bit(spans: list[Span], dtype: torch.dtype) -> None:
    threads = torch.get_num_threads()
    p = problem(spans, (24, 16), dtype, batch=2, heads=3)
    try:
        torch.set_num_threads(1)
        one = p.actual(KERNEL)
        torch.set_num_threads(4)
        four = p.actual(KERNEL)
    finally:
        torch.set_num_threads(threads)
    for label, a, b in zip(RESULTS, four, one, strict=True):
        assert_bitwise(a, b, name=label, allow_nonfinite=label == "lse")


def scaled(q: float, k: float) -> Callable[[Problem], Problem]:
    return lambda p: replace(p, q=p.q * q, k=p.k * k)


def sink(p: Problem) -> Problem:
    """Every query scores about 12 with key 0."""
    q, k = p.q.clone(), p.k.clone()
    q[..., 0], k[:, 0, :, 0] = 8, 12
    return replace(p, q=q, k=k)


def offset(p: Problem) -> Problem:
    """All scores are about 100."""
    q, k = p.q.clone(), p.k.clone()
    q[..., 0], k[..., 0] = 32, 25
    return replace(p, q=q, k=k)


def needles(p: Problem) -> Problem:
    """Every query finds one key, anywhere, that it resembles."""
    g = torch.Generator().manual_seed(1)
    chosen = torch.randint(0, p.k.shape[1], (p.q.shape[1],), generator=g)
    return replace(p, q=p.k[:, chosen] * 3)


def common(p: Problem) -> Problem:
    """1000 in every dP and in delta, nothing in their difference."""
    v, dout = p.v.clone(), p.dout.clone()
    v[..., 0], dout[..., 0] = 1, 1000
    return replace(p, v=v, dout=dout)


def flash(p: Problem) -> tuple[Tensor, ...]:
    """PyTorch's flash attention for CPU on values padded to the query's head dim; without a gradient of LSE."""
    width, (span,) = p.v.shape[3], p.spans
    q, k = p.q.transpose(1, 2), p.k.transpose(1, 2)
    v, dout = (pad(x, (0, q.shape[3] - width)).transpose(1, 2) for x in (p.v, p.dout))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, span.causal, scale=p.scale)
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse, 0.0, span.causal, scale=p.scale
    )
    dq, dk, dv = (x.transpose(1, 2) for x in grads)
    return out.transpose(1, 2)[..., :width], lse, dq, dk, dv[..., :width]


@pytest.mark.parametrize(
    "harden",
    [scaled(1, 1), scaled(0.1, 1), scaled(4, 1), sink, offset, needles, common],
    ids=("random", "flat", "peaked", "sink", "offset", "needles", "common"),
)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_errors_are_at_most_those_of_flash_attention(
    harden: Callable[[Problem], Problem], causal: bool, dtype: torch.dtype
) -> None:
    p = problem([Span(0, 700, 0, 700, causal)], (64, 48), dtype, heads=4)
    p = harden(replace(p, q=p.q[:, :700], k=p.k[:, :700], v=p.v[:, :700], dout=p.dout[:, :700]))
    p = replace(p, dlse=torch.zeros_like(p.dlse[..., :700]))
    for label, a, f, b in zip(RESULTS, p.actual(KERNEL), flash(p), p.expected(), strict=True):
        size = float((b - b.mean()).square().mean().sqrt())
        ours, theirs = (float((x.double() - b).square().mean().sqrt()) / size for x in (a, f))
        # In float32 what counts on the hardest data is the order of sums over the head dim, which differs.
        worse = 1.1 if dtype == torch.bfloat16 else 4
        assert ours <= max(worse * theirs, 1e-6), f"{label}: {ours:.2e}, flash {theirs:.2e}"


# ---- from latents ------------------------------------------------------------------------------------------------


def latent_case(
    dtype: torch.dtype, spans: list[Span], nope: int = 24, rope: int = 8, v: int = 16, rank: int = 40, heads: int = 3
) -> tuple[Problem, Tensor, Tensor]:
    """A problem whose keys and values are those of latents and a weight, which come beside it."""
    p = problem(spans, (nope + rope, v), dtype, batch=2, heads=heads)
    g = torch.Generator().manual_seed(5)
    latent = torch.randn(p.k.shape[1], 2, rank + rope, generator=g).to(dtype).transpose(0, 1)  # sequence-first
    weight = (torch.randn(heads * (nope + v), rank, generator=g) * rank**-0.5).to(dtype)
    up = (latent[..., :rank].float() @ weight.float().t()).to(dtype).unflatten(-1, (heads, nope + v))
    k = torch.cat((up[..., :nope], latent[:, :, None, rank:].expand(-1, -1, heads, -1)), dim=-1)
    return replace(p, k=k, v=up[..., nope:].contiguous()), latent, weight


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spans", [MASKS["gaps"], *LONG.values()], ids=("gaps", *LONG))
def test_keys_and_values_rebuilt_inside_give_what_given_ones_give(spans: list[Span], dtype: torch.dtype) -> None:
    p, latent, weight = latent_case(dtype, spans)
    expected = p.actual(KERNEL)
    out, lse = KERNEL.forward_from_latent(p.q, latent, weight, p.spans, p.scale, p.v.shape[3])
    delta = p.delta(out, lse.dtype)
    grads = KERNEL.backward_from_latent(p.dout, delta, p.q, latent, weight, lse, p.spans, p.scale)
    for label, a, b in zip(RESULTS, (out, lse, *grads), expected, strict=True):
        error = relative_error(a, b, name=label, same_infinities=label == "lse")
        # Sums in another order round a few elements of K and V the other way.
        assert error <= (5e-6 if dtype == torch.float32 else 1e-2), f"{label}: {error:.1e}"
        assert (a.shape, a.dtype) == (b.shape, b.dtype)


def test_no_key_or_value_of_a_head_is_ever_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scratch grows with the queries, not with the keys."""
    seen, lend = [], avx512._lend
    monkeypatch.setattr(avx512, "_lend", lambda problem, nbytes: seen.append(nbytes) or lend(problem, nbytes))
    for keys in (2048, 20480):
        p, latent, weight = latent_case(torch.bfloat16, [Span(0, 64, 0, keys, True)], heads=1)
        out, lse = KERNEL.forward_from_latent(p.q, latent, weight, p.spans, p.scale, p.v.shape[3])
        KERNEL.backward_from_latent(p.dout, p.delta(out, lse.dtype), p.q, latent, weight, lse, p.spans, p.scale)
    assert len(seen) == 4
    assert seen[:2] == seen[2:]


def test_flops_count_the_rebuild_and_the_visible_pairs() -> None:
    p, latent, weight = latent_case(torch.float32, MASKS["causal"])
    area, (batch, keys, _), heads = 300 * 301 // 2, latent.shape, 3
    with FlopCounterMode(display=False) as forward:
        out, lse = KERNEL.forward_from_latent(p.q, latent, weight, p.spans, p.scale, 16)
    with FlopCounterMode(display=False) as backward:
        KERNEL.backward_from_latent(p.dout, p.delta(out, lse.dtype), p.q, latent, weight, lse, p.spans, p.scale)
    rebuild = 2 * batch * keys * 40 * heads * (24 + 16)
    assert forward.get_total_flops() == rebuild + 2 * batch * heads * area * (32 + 16)
    assert backward.get_total_flops() == rebuild + 2 * batch * heads * area * (3 * 32 + 2 * 16)


def test_operators_from_latents_pass_opcheck() -> None:
    p, latent, weight = latent_case(torch.float32, MASKS["causal"])
    spans = pack_spans(p.spans)
    forward, backward = (getattr(torch.ops.laga_attn, f"avx512_{x}_from_latent") for x in ("forward", "backward"))
    out, lse = forward(p.q, latent, weight, spans, p.scale, 16)
    torch.library.opcheck(forward, (p.q, latent, weight, spans, p.scale, 16))
    args = (p.dout, p.delta(out, lse.dtype), p.q, latent, weight, lse, spans, p.scale)
    torch.library.opcheck(backward, args)


def test_without_the_compiled_library_the_table_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(avx512, "_library", lambda: None)
    assert "C++ compiler" in str(avx512.missing(torch.float32))


def test_on_another_cpu_the_table_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert avx512.missing(torch.bfloat16) == "this CPU has no AVX-512 instructions for bfloat16"
