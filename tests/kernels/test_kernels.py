"""What every kernel of the table must compute."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from laga_attn.kernels import TABLE, Kernel, merge_partials, select
from laga_attn.spans import Span
from tests.compare import assert_bitwise, assert_close, relative_error
from tests.kernels.oracle import MASKS, Problem, problem

NAMES = sorted({r.name for r in TABLE if "cpu" in (r.devices or ("cpu",)) and r.missing(torch.float32) is None})
ALL_DIMS = [name for name in NAMES if name != "sdpa"]  # those that take what MLA needs
RESULTS = ("out", "lse", "dq", "dk", "dv")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6}


def exact(name: str) -> torch.dtype:
    """The most exact dtype that a kernel takes."""
    return max((d for r in TABLE if r.name == name for d in r.dtypes), key=lambda d: torch.finfo(d).bits)


def takes(names: list[str], dtypes: Iterable[torch.dtype]) -> list[tuple[str, torch.dtype]]:
    """Pairs of a kernel and a dtype that it takes on the CPU."""
    rows = [r for r in TABLE if "cpu" in (r.devices or ("cpu",))]
    return [(n, d) for n in names for d in dtypes if any(r.name == n and d in r.dtypes for r in rows)]


def kernel_for(name: str, p: Problem) -> Kernel | None:
    """The kernel, or None where the table refuses the problem."""
    try:
        return select(
            name,
            device="cpu",
            dtype=p.q.dtype,
            qk_head_dim=p.q.shape[3],
            v_head_dim=p.v.shape[3],
            window=any(s.window is not None for s in p.spans),
            shared_kv=p.k.shape[2] < p.q.shape[2],
        )
    except ValueError:
        return None


def assert_right(p: Problem, kernel: Kernel, rel: float) -> None:
    for name, actual, expected in zip(RESULTS, p.actual(kernel), p.expected(), strict=True):
        error = relative_error(actual, expected, name=name, same_infinities=name == "lse")
        assert error <= rel, f"{kernel.name} {name}: relative error {error:.2e} > {rel:.0e}"


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fill what ``torch.empty`` returns with NaN."""
    torch.use_deterministic_algorithms(True)  # which switches the filling on
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(("name", "dtype"), takes(NAMES, TOLERANCE), ids=str)
@pytest.mark.parametrize("spans", MASKS.values(), ids=MASKS)
def test_forward_and_backward_equal_autograd_on_every_mask(name: str, spans: list[Span], dtype: torch.dtype) -> None:
    refused = 0
    for dims in ((24, 16), (16, 16)):
        p = problem(spans, dims, dtype, batch=2)
        kernel = kernel_for(name, p)
        refused += kernel is None
        if kernel is not None:
            assert_right(p, kernel, TOLERANCE[dtype])
    window = any(s.window is not None for s in spans)
    assert refused == (0 if name != "sdpa" else 2 if window else 1)


@pytest.mark.parametrize("dims", [(192, 128), (128, 64), (96, 128), (64, 64), (576, 512)], ids=str)
@pytest.mark.parametrize(("name", "dtype"), takes(ALL_DIMS, TOLERANCE), ids=str)
def test_no_head_dims_of_multi_head_latent_attention_are_refused_or_wrong(
    name: str, dims: tuple[int, int], dtype: torch.dtype
) -> None:
    p = problem([Span(0, 60, 0, 90, True), Span(60, 40, 10, 80, False)], dims, dtype)
    kernel = kernel_for(name, p)
    assert kernel is not None
    assert_right(p, kernel, TOLERANCE[dtype])


@pytest.mark.parametrize(("name", "dtype"), takes(ALL_DIMS, TOLERANCE), ids=str)
def test_one_key_value_head_serves_all_heads_as_views_of_one_buffer(name: str, dtype: torch.dtype) -> None:
    p = problem(MASKS["gaps"], (40, 40), dtype, batch=2, heads=3, kv_heads=1)
    p = replace(p, v=p.k[..., :32], dout=p.dout[..., :32].contiguous())
    kernel = kernel_for(name, p)
    assert kernel is not None
    assert_right(p, kernel, TOLERANCE[dtype])


@pytest.mark.parametrize("name", ALL_DIMS)
def test_gradients_of_a_shared_head_are_sums_in_the_accumulation_dtype(name: str) -> None:
    p = problem(MASKS["causal"], dtype=torch.bfloat16, heads=3, kv_heads=1)
    kernel = kernel_for(name, p)
    assert kernel is not None
    _, lse, dq, dk, dv = p.actual(kernel)
    assert (lse.dtype, dq.dtype, dk.dtype, dv.dtype) == (torch.float32, torch.bfloat16, torch.float32, torch.float32)


@pytest.mark.parametrize("name", NAMES)
def test_strides_do_not_matter(name: str) -> None:
    p = problem(MASKS["shared keys"], (16, 16), exact(name), batch=2)

    def restride(x: Tensor) -> Tensor:
        """The same values, heads first, with a gap after every row."""
        heads_first = x.transpose(1, 2)
        return torch.cat((heads_first, heads_first), dim=-1)[..., : x.shape[-1]].transpose(1, 2)

    strided = replace(p, **{n: restride(getattr(p, n)) for n in ("q", "k", "v", "dout")})
    assert not strided.q.is_contiguous()
    kernel = kernel_for(name, p)
    assert kernel is not None
    for label, a, b in zip(RESULTS, strided.actual(kernel), p.actual(kernel), strict=True):
        assert_close(a, b, rel=1e-14, name=label, same_infinities=label == "lse")


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(("name", "dtype"), takes(NAMES, (torch.float64, torch.float32, torch.bfloat16)), ids=str)
def test_rows_in_no_visible_pair_may_hold_nan_and_have_empty_results(name: str, dtype: torch.dtype) -> None:
    spans = [Span(5, 100, 20, 50, True), Span(110, 150, 90, 300, True), Span(270, 30, 3, 11, False)]
    clean = problem(spans, (16, 16), dtype)
    seen_q = torch.zeros(clean.q.shape[1], dtype=torch.bool)
    seen_k = torch.zeros(clean.k.shape[1], dtype=torch.bool)
    seen_q[55:105] = seen_q[110:260] = seen_q[270:300] = True  # the first 50 queries of the first span see no key
    seen_k[20:70] = seen_k[90:390] = seen_k[3:14] = True
    dirty = replace(clean, **{n: getattr(clean, n).clone() for n in ("q", "k", "v", "dout")})
    for x, seen in ((dirty.q, seen_q), (dirty.dout, seen_q), (dirty.k, seen_k), (dirty.v, seen_k)):
        x[:, ~seen] = torch.nan
    kernel = kernel_for(name, clean)
    assert kernel is not None
    actual = dict(zip(RESULTS, dirty.actual(kernel), strict=True))
    for label, expected in zip(RESULTS, clean.actual(kernel), strict=True):
        assert_bitwise(actual[label], expected, name=label, allow_nonfinite=label == "lse")
    assert (actual["lse"][:, :, ~seen_q] == -torch.inf).all()
    assert not actual["out"][:, ~seen_q].any()
    assert not actual["dq"][:, ~seen_q].any()
    assert not actual["dk"][:, ~seen_k].any()
    assert not actual["dv"][:, ~seen_k].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_the_same_call_gives_the_same_bits(name: str, dtype: torch.dtype) -> None:
    p = problem(MASKS["shared keys"], (16, 16), dtype)
    kernel = kernel_for(name, p)
    assert kernel is not None
    first, second = p.actual(kernel), p.actual(kernel)
    for label, a, b in zip(RESULTS, first, second, strict=True):
        assert_bitwise(a, b, name=label, allow_nonfinite=label == "lse")


@pytest.mark.parametrize(("name", "dtype"), takes(NAMES, (torch.bfloat16, torch.float16)), ids=str)
def test_half_precision_is_as_exact_as_its_format(name: str, dtype: torch.dtype) -> None:
    p = problem(MASKS["shared keys"], (32, 32), dtype)
    kernel = kernel_for(name, p)
    assert kernel is not None
    assert_right(p, kernel, 1e-2 if dtype == torch.bfloat16 else 2e-3)


@pytest.mark.parametrize("name", NAMES)
def test_shares_of_disjoint_keys_add_up(name: str) -> None:
    p = problem([Span(0, 120, 0, 200, True)], (16, 16), exact(name))
    kernel = kernel_for(name, p)
    assert kernel is not None
    early, late = [Span(0, 120, 0, 80, False)], [Span(0, 120, 80, 120, True)]
    parts = [kernel.forward(p.q, p.k, p.v, spans, p.scale) for spans in (early, late)]
    out, lse = merge_partials(*parts[0], *parts[1])
    delta = p.delta(out, lse.dtype)
    shares = [kernel.backward(p.dout, delta, p.q, p.k, p.v, lse, spans, p.scale) for spans in (early, late)]
    merged = (out, lse, *(a + b for a, b in zip(*shares, strict=True)))
    for label, a, b in zip(RESULTS, merged, p.expected(), strict=True):
        assert_close(a.double(), b, rel=TOLERANCE[exact(name)], name=label, same_infinities=label == "lse")


@pytest.mark.parametrize("name", NAMES)
def test_inputs_are_left_alone(name: str) -> None:
    p = problem(MASKS["causal"], (16, 16), exact(name))
    kernel = kernel_for(name, p)
    assert kernel is not None
    before = [x.clone() for x in (p.q, p.k, p.v, p.dout)]
    p.actual(kernel)
    for x, y in zip((p.q, p.k, p.v, p.dout), before, strict=True):
        assert_bitwise(x, y)


@pytest.mark.parametrize("name", NAMES)
def test_no_spans_mean_empty_results(name: str) -> None:
    p = replace(problem(MASKS["causal"], (16, 16), exact(name)), spans=[])
    p = replace(p, dlse=torch.zeros_like(p.dlse))
    kernel = kernel_for(name, p)
    assert kernel is not None
    out, lse, dq, dk, dv = p.actual(kernel)
    assert (lse == -torch.inf).all()
    assert not any(x.any() for x in (out, dq, dk, dv))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(1, 8, 2)}, "each must be"),
        ({"q": torch.zeros(1, 8, 2, 5)}, "same head dim"),
        ({"k": torch.zeros(1, 8, 3, 4), "v": torch.zeros(1, 8, 3, 4)}, "2 heads like q, or 1 head"),
        ({"v": torch.zeros(1, 7, 2, 4)}, "same rows and heads"),
        ({"k": torch.zeros(2, 8, 2, 4), "v": torch.zeros(2, 8, 2, 4)}, "batch sizes"),
        ({"k": torch.zeros(1, 8, 2, 4, dtype=torch.float64)}, "one dtype"),
        ({"k": torch.zeros(1, 8, 2, 4, device="meta")}, "one device"),
        ({"q": torch.zeros(1, 8, 4, 2).transpose(2, 3)}, "contiguous"),
        ({"spans": [Span(0, 9, 0, 8, True)]}, "outside the 8 query rows and 8 key rows"),
        ({"spans": [Span(0, 8, 1, 8, True)]}, "outside"),
        ({"spans": [Span(0, 5, 0, 8, True), Span(4, 2, 0, 8, True)]}, "two spans hold query row 4"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {n: torch.zeros(1, 8, 2, 4) for n in ("q", "k", "v")}
    arguments |= {"spans": [Span(0, 8, 0, 8, True)], "softmax_scale": 1.0} | change
    with pytest.raises(ValueError, match=message):
        Kernel("reference").forward(**arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dout": torch.zeros(1, 8, 2, 5)}, "like the output"),
        ({"dout": torch.zeros(1, 8, 2, 4).double()}, "like the output"),
        ({"dout": torch.zeros(1, 8, 4, 2).transpose(2, 3)}, "contiguous"),
        ({"delta": torch.zeros(1, 8, 2)}, "delta"),
        ({"lse": torch.zeros(1, 2, 8).double()}, "lse"),
    ],
)
def test_gradients_and_statistics_that_do_not_fit_are_refused(change: dict[str, Tensor], message: str) -> None:
    arguments = {n: torch.zeros(1, 8, 2, 4) for n in ("dout", "q", "k", "v")}
    arguments |= {n: torch.zeros(1, 2, 8) for n in ("delta", "lse")} | change
    with pytest.raises(ValueError, match=message):
        Kernel("reference").backward(**arguments, spans=[Span(0, 8, 0, 8, True)], softmax_scale=1.0)
