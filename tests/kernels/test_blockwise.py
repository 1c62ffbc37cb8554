"""The blockwise kernel where its tiles meet: several tiles a row, bfloat16 products, and hard scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from laga_attn.kernels import Kernel, blockwise, half
from laga_attn.kernels.tiles import Tile
from laga_attn.spans import Span
from tests.compare import assert_bitwise, assert_close, relative_error
from tests.kernels.oracle import MASKS, Problem, mask, problem

RESULTS = ("out", "lse", "dq", "dk", "dv")
KERNEL = Kernel("blockwise")


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise, "_FORWARD_TILE", (32, 48))
    monkeypatch.setattr(blockwise, "_BACKWARD_TILE", (50, 28))


@pytest.fixture
def half_products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """bfloat16 products on whatever CPU, for queries of more than 20 keys; a log of (pass, centred)."""
    monkeypatch.setattr(blockwise, "has_fast_bfloat16", lambda device: True)
    monkeypatch.setattr(blockwise, "_FEW_KEYS", 20)
    log: list[tuple[str, bool]] = []

    def watch(engine: type, label: str) -> None:
        centred: Callable[..., object] = engine._centred_weights

        def watched(self: object, tile: Tile, *args: Tensor) -> object:
            result = centred(self, tile, *args)
            log.append((label, result is not None and result is not False))
            return result

        monkeypatch.setattr(engine, "_centred_weights", watched)

    watch(half.HalfForward, "forward")
    watch(half.HalfBackward, "backward")
    return log


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("spans", MASKS.values(), ids=MASKS)
def test_many_tiles_give_what_one_gives(spans: list[Span]) -> None:
    p = problem(spans, batch=2)
    for label, a, b in zip(RESULTS, p.actual(KERNEL), p.expected(), strict=True):
        assert_close(a, b, rel=1e-12, name=label, same_infinities=label == "lse")


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("spans", MASKS.values(), ids=MASKS)
def test_bfloat16_products_are_right_on_every_mask(
    spans: list[Span], half_products: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(half, "_PROBES", 4)
    p = problem(spans, (24, 16), torch.bfloat16)
    for label, a, b in zip(RESULTS, p.actual(KERNEL), p.expected(), strict=True):
        error = relative_error(a, b, name=label, same_infinities=label == "lse")
        assert error <= 2e-2, f"{label}: {error:.1e}"
    assert {label for label, _ in half_products} == {"forward", "backward"}


def scaled(q: float, k: float) -> Callable[[Problem], Problem]:
    return lambda p: replace(p, q=p.q * q, k=p.k * k)


def sink(p: Problem) -> Problem:
    """Every query scores about 12 with key 0."""
    k = p.k.clone()
    k[:, 0, :, 0] = 12
    q = p.q.clone()
    q[..., 0] = 8
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


@pytest.mark.parametrize(
    "harden", [scaled(1, 1), scaled(0.1, 1), scaled(4, 1), sink, offset, needles], ids=lambda f: f.__qualname__[:6]
)
@pytest.mark.parametrize("causal", [True, False])
def test_bfloat16_products_are_as_exact_as_float32_ones_within_a_small_factor(
    harden: Callable[[Problem], Problem], causal: bool, half_products: list[tuple[str, bool]]
) -> None:
    p = harden(problem([Span(0, 700, 0, 700, causal)], (64, 64), torch.bfloat16, heads=1))
    expected, actual = p.expected(), p.actual(KERNEL)
    assert half_products
    exact = problem_in_float32(p)
    for label, a, b, e in zip(RESULTS, actual, exact, expected, strict=True):
        if label == "lse":
            difference = (a - e).masked_fill(e.isinf(), 0).abs().max()
            assert difference <= 5e-3, f"lse is off by {difference:.1e}"
            continue
        error, unavoidable = relative_error(a, e), relative_error(b, e)
        assert error <= max(4 * unavoidable, 1e-2), f"{label}: {error:.1e}, in float32 {unavoidable:.1e}"


def problem_in_float32(p: Problem) -> tuple[Tensor, ...]:
    """Float32 products, results rounded to bfloat16, and delta from the rounded output."""
    out, lse = KERNEL.forward(*(x.float() for x in (p.q, p.k, p.v)), p.spans, p.scale)
    delta = p.delta(out.bfloat16(), torch.float32)
    wide = p.cast(torch.float32)
    grads = KERNEL.backward(wide.dout, delta, wide.q, wide.k, wide.v, lse, p.spans, p.scale)
    return out.bfloat16(), lse, *(x.bfloat16() for x in grads)


def test_ordinary_scores_stay_centred_and_wild_ones_are_scored_again(half_products: list[tuple[str, bool]]) -> None:
    p = problem([Span(0, 700, 0, 700, False)], (64, 64), torch.bfloat16, heads=1)
    scaled(0.5, 1)(p).actual(KERNEL)
    assert all(centred for _, centred in half_products)
    half_products.clear()
    needles(p).actual(KERNEL)
    assert not all(centred for label, centred in half_products if label == "forward")
    assert not all(centred for label, centred in half_products if label == "backward")


@pytest.mark.usefixtures("half_products")
def test_a_large_common_part_of_the_output_gradient_cancels_before_rounding() -> None:
    p = problem([Span(0, 300, 0, 300, True)], (64, 32), torch.bfloat16)
    v, dout = p.v.clone(), p.dout.clone()
    v[..., 0], dout[..., 0] = 1, 1000  # 1000 in every dP and in delta, nothing in their difference
    p = replace(p, v=v, dout=dout)
    for label, a, b in zip(RESULTS, p.actual(KERNEL), p.expected(), strict=True):
        if label in ("dq", "dk"):
            assert relative_error(a, b, name=label) <= 2e-2


@pytest.mark.usefixtures("half_products")
def test_bfloat16_products_repeat_bit_for_bit() -> None:
    p = problem([Span(0, 300, 0, 300, True)], (64, 32), torch.bfloat16)
    for label, a, b in zip(RESULTS, p.actual(KERNEL), p.actual(KERNEL), strict=True):
        assert_bitwise(a, b, name=label, allow_nonfinite=label == "lse")


@pytest.mark.parametrize("spans", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("few", [1, 20, 100, 1000])
def test_splitting_by_the_number_of_keys_keeps_the_pairs(
    spans: list[Span], few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blockwise, "_FEW_KEYS", few)
    whole = mask(spans, 300, 437)
    full, halved = (mask(part, 300, 437) for part in blockwise.split(spans, half=True))
    assert not (full & halved).any()
    assert torch.equal(full | halved, whole)
    assert (full.sum(dim=1) <= few).all()
    assert (halved.sum(dim=1)[halved.any(dim=1)] > few).all()
    assert blockwise.split(spans, half=False)[1] == []
