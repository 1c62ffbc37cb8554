"""The compiled kernel: where its blocks meet, against flash attention on hard data, and straight from latents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.flop_counter import FlopCounterMode

from laga_attn.kernels import Kernel, avx512
from laga_attn.spans import Span, pack_spans
from tests.compare import assert_bitwise, relative_error
from tests.kernels.oracle import MASKS, Problem, problem
from tests.threads import threads

RESULTS = ("out", "lse", "dq", "dk", "dv")
KERNEL = Kernel("avx512")
DTYPES = (torch.float32, torch.bfloat16)
# Blocks are cut at 16, 24, 64, 96, 144 and 512.
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
    p = problem(spans, (24, 16), dtype, batch=2, heads=3)
    with threads(1):
        one = p.actual(KERNEL)
    with threads(4):
        four = p.actual(KERNEL)
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
    p = problem([Span(0, 700, 0, 700, causal)], (64, 48), dtype, heads=8)
    p = harden(replace(p, q=p.q[:, :700], k=p.k[:, :700], v=p.v[:, :700], dout=p.dout[:, :700]))
    p = replace(p, dlse=torch.zeros_like(p.dlse[..., :700]))
    for label, a, f, b in zip(RESULTS, p.actual(KERNEL), flash(p), p.expected(), strict=True):
        size = float((b - b.mean()).square().mean().sqrt())
        ours, theirs = (float((x.double() - b).square().mean().sqrt()) / size for x in (a, f))
        # In float32 what counts on the hardest data is the order of sums over the head dim, which differs.
        worse = 1.1 if dtype == torch.bfloat16 else 4
        assert ours <= max(worse * theirs, 1e-6), f"{label}: {ours:.2e}, flash {theirs:.2e}"


# ---- from latents ------------------------------------------------------------------------------------------------

FROM_LATENT = ("out", "lse", "dq", "d_latent", "d_weight")


@dataclass(frozen=True, slots=True)
class LatentProblem:
    """A problem whose keys and values are those of latents and a weight."""

    attention: Problem
    latent: Tensor  # [B, Sk, rank + rope], stored sequence-first
    weight: Tensor  # [h * (nope + Dv), rank]

    @staticmethod
    def random(
        dtype: torch.dtype,
        spans: list[Span],
        nope: int = 24,
        rope: int = 8,
        v: int = 16,
        rank: int = 40,
        heads: int = 3,
    ) -> LatentProblem:
        p = problem(spans, (nope + rope, v), dtype, batch=2, heads=heads)
        g = torch.Generator().manual_seed(5)
        latent = torch.randn(p.k.shape[1], 2, rank + rope, generator=g).to(dtype).transpose(0, 1)
        weight = (torch.randn(heads * (nope + v), rank, generator=g) * rank**-0.5).to(dtype)
        up = (latent[..., :rank].float() @ weight.float().t()).to(dtype).unflatten(-1, (heads, nope + v))
        k = torch.cat((up[..., :nope], latent[:, :, None, rank:].expand(-1, -1, heads, -1)), dim=-1)
        return LatentProblem(replace(p, k=k, v=up[..., nope:].contiguous()), latent, weight)

    def expected(self) -> tuple[Tensor, ...]:
        """In float64, with the gradients of keys and values folded by einsum."""
        out, lse, dq, dk, dv = self.attention.expected()
        heads, rank = dk.shape[2], self.weight.shape[1]
        weight, c_kv = self.weight.double().unflatten(0, (heads, -1)), self.latent[..., :rank].double()
        nope = weight.shape[1] - dv.shape[3]
        d_up = torch.cat((dk[..., :nope], dv), dim=-1)
        d_c_kv, d_k_rope = torch.einsum("bshn,hnr->bsr", d_up, weight), dk[..., nope:].sum(dim=2)
        d_weight = torch.einsum("bshn,bsr->hnr", d_up, c_kv).flatten(0, 1)
        return out, lse, dq, torch.cat((d_c_kv, d_k_rope), dim=-1), d_weight

    def actual(self) -> tuple[Tensor, ...]:
        """By the kernel, which finds something in the sums that it adds to."""
        p = self.attention
        out, lse = KERNEL.forward_from_latent(p.q, self.latent, self.weight, p.spans, p.scale, p.v.shape[3])
        sums = [torch.full_like(x, 0.5, dtype=torch.float32) for x in (self.latent, self.weight)]
        given = p.dout, p.delta(out, lse.dtype), p.q, self.latent, self.weight, lse
        dq = KERNEL.backward_from_latent(*given, p.spans, p.scale, *sums)
        return out, lse, dq, *(x - 0.5 for x in sums)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spans", [MASKS["gaps"], *LONG.values()], ids=("gaps", *LONG))
def test_from_latents_gives_what_keys_and_values_give(spans: list[Span], dtype: torch.dtype) -> None:
    p = LatentProblem.random(dtype, spans)
    for label, a, b in zip(FROM_LATENT, p.actual(), p.expected(), strict=True):
        error = relative_error(a, b, name=label, same_infinities=label == "lse")
        # Sums in another order round a few elements of K and V the other way.
        assert error <= (5e-6 if dtype == torch.float32 else 1e-2), f"{label}: {error:.1e}"
        assert a.dtype == (dtype if label in ("out", "dq") else torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", [(2, 2, 2, 2), (130, 4, 66, 70), (64, 64, 128, 128)], ids=str)
def test_latents_need_not_fill_registers(dims: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    p = LatentProblem.random(dtype, MASKS["more keys"], *dims)
    for label, a, b in zip(FROM_LATENT, p.actual(), p.expected(), strict=True):
        error = relative_error(a, b, name=label, same_infinities=label == "lse")
        assert error <= (5e-6 if dtype == torch.float32 else 1e-2), f"{label}: {error:.1e}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_over_heads_and_batch_run_in_order_whatever_the_threads(dtype: torch.dtype) -> None:
    p = LatentProblem.random(dtype, LONG["causal"], heads=7)
    with threads(1):
        one = p.actual()
    with threads(5):
        runs = [p.actual() for _ in range(3)]
    for label, a, *others in zip(FROM_LATENT, one, *runs, strict=True):
        for b in others:
            assert_bitwise(b, a, name=label, allow_nonfinite=label == "lse")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_latents_that_no_span_holds_may_be_anything(dtype: torch.dtype) -> None:
    spans = [Span(0, 90, 1, 90, True), Span(91, 80, 96, 75, True)]  # keys 0 and 91 .. 95 are in none, and the last two
    p = LatentProblem.random(dtype, spans)
    expected = p.actual()
    unseen = torch.tensor([0, 91, 92, 93, 94, 95, -2, -1])
    p.latent[:, unseen] = torch.nan
    for x in (p.attention.q, p.attention.dout):
        x[:, 90] = torch.nan
    p.attention.dlse[..., 90] = torch.nan
    for label, a, b in zip(FROM_LATENT, p.actual(), expected, strict=True):
        assert_bitwise(a, b, name=label, allow_nonfinite=label == "lse")


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FC00001, 0x7FFFFFFF, 0xFFC00101 - 2**32], ids=hex)
def test_a_nan_stays_one_whatever_its_last_bits_are(bits: int) -> None:
    nan = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    p = problem(MASKS["full"], (24, 16), torch.float32)
    p.q[0, 7, 0, 3] = nan
    out, lse, dq, dk, dv = p.actual(KERNEL)
    for x in (out[0, 7, 0], lse[0, 0, 7], dq[0, 7, 0], dk[0, :437, 0], dv[0, :437, 0]):
        assert x.isnan().all()
    assert not any(x.isnan().any() for x in (out[0, 8:], dk[0, :, 1], dv[0, :, 1]))


def sums_of(latents: LatentProblem) -> dict[str, Tensor]:
    names = {"d_latent": latents.latent, "d_weight": latents.weight}
    return {name: torch.zeros_like(x, dtype=torch.float32) for name, x in names.items()}


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("latent", lambda x: x[:1], "for 3 heads of 32 and values of 16, weight needs 3"),
        ("latent", lambda x: x[..., 1:], "latent rank \\+ 32 - nope columns"),
        ("weight", lambda x: x[1:], "weight needs 3"),
        ("weight", lambda x: x.double(), "have dtype .*: they need the same"),
        ("weight", lambda x: x.mT.contiguous().mT, "last dim of weight must be contiguous"),
        ("latent", lambda x: x[0], r"must be \[batch, queries"),
        ("lse", lambda x: x.double(), r"lse is .* torch\.float64: it must be"),
        ("d_latent", lambda x: x.bfloat16(), "d_latent is .* torch.bfloat16 .*: it must be"),
        ("d_latent", lambda x: x[:, 1:], "d_latent is"),
        ("d_weight", lambda x: x.mT.contiguous().mT, "last dim of d_weight must be contiguous"),
        ("d_weight", lambda x: x[:, 1:], "d_weight is"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, change: Callable[[Tensor], Tensor], message: str) -> None:
    latents = LatentProblem.random(torch.float32, MASKS["causal"])
    p = latents.attention
    out, lse = KERNEL.forward_from_latent(p.q, latents.latent, latents.weight, p.spans, p.scale, 16)
    arguments = {"dout": p.dout, "delta": p.delta(out, lse.dtype), "q": p.q, "latent": latents.latent}
    arguments |= {"weight": latents.weight, "lse": lse, "spans": p.spans, "softmax_scale": p.scale}
    arguments |= sums_of(latents)
    KERNEL.backward_from_latent(**arguments)
    arguments[name] = change(arguments[name])
    with pytest.raises(ValueError, match=message):
        KERNEL.backward_from_latent(**arguments)


def test_a_sum_that_nobody_wants_is_not_computed() -> None:
    latents = LatentProblem.random(torch.float32, MASKS["causal"])
    p = latents.attention
    out, lse = KERNEL.forward_from_latent(p.q, latents.latent, latents.weight, p.spans, p.scale, 16)
    given = p.dout, p.delta(out, lse.dtype), p.q, latents.latent, latents.weight, lse, p.spans, p.scale

    def run(*names: str) -> tuple[Tensor, dict[str, Tensor], int]:
        sums = {name: x for name, x in sums_of(latents).items() if name in names}
        with FlopCounterMode(display=False) as counter:
            dq = KERNEL.backward_from_latent(*given, sums.get("d_latent"), sums.get("d_weight"))
        return dq, sums, counter.get_total_flops()

    dq, both, flops = run("d_latent", "d_weight")
    fold = 2 * latents.latent.shape[0] * latents.latent.shape[1] * latents.weight.numel()
    for names in (("d_latent",), ("d_weight",), ()):
        other_dq, sums, fewer = run(*names)
        assert_bitwise(other_dq, dq, name="dq")
        assert fewer == flops - (2 - len(names)) * fold
        for name in names:
            assert_bitwise(sums[name], both[name], name=name)


def test_no_key_or_value_of_a_head_is_ever_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scratch grows with the queries, not with the keys. Nor is a gradient of theirs: dq is all that is returned."""
    seen, lend = [], avx512._lend
    monkeypatch.setattr(avx512, "_lend", lambda problem, nbytes: seen.append(nbytes) or lend(problem, nbytes))
    for keys in (2048, 20480):
        LatentProblem.random(torch.bfloat16, [Span(0, 64, 0, keys, True)], heads=1).actual()
    assert len(seen) == 4
    assert seen[:2] == seen[2:]


def test_flops_count_the_rebuild_the_visible_pairs_and_the_fold() -> None:
    latents = LatentProblem.random(torch.float32, MASKS["causal"])
    area, (batch, keys, _), heads = 300 * 301 // 2, latents.latent.shape, 3
    with FlopCounterMode(display=False) as both:
        latents.actual()
    forward, backward = (both.get_flop_counts()["Global"][op] for op in operators_from_latent())
    rebuild = 2 * batch * keys * 40 * heads * (24 + 16)
    assert forward == rebuild + 2 * batch * heads * area * (32 + 16)
    assert backward == 3 * rebuild + 2 * batch * heads * area * (3 * 32 + 2 * 16)


def operators_from_latent() -> tuple[torch._ops.OpOverloadPacket, ...]:
    return tuple(getattr(torch.ops.laga_attn, f"avx512_{x}_from_latent") for x in ("forward", "backward"))


def test_operators_from_latents_pass_opcheck() -> None:
    latents = LatentProblem.random(torch.float32, MASKS["causal"])
    p, keys = latents.attention, (latents.latent, latents.weight)
    spans = pack_spans(p.spans)
    forward, backward = operators_from_latent()
    out, lse = forward(p.q, *keys, spans, p.scale, 16)
    torch.library.opcheck(forward, (p.q, *keys, spans, p.scale, 16))
    sums = [torch.zeros_like(x) for x in keys]
    torch.library.opcheck(backward, (p.dout, p.delta(out, lse.dtype), p.q, *keys, lse, spans, p.scale, *sums))


def test_without_the_compiled_library_the_table_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(avx512, "_library", lambda: None)
    assert "C++ compiler" in str(avx512.missing(torch.float32))


def test_on_another_cpu_the_table_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert avx512.missing(torch.bfloat16) == "this CPU has no AVX-512 instructions for bfloat16"
