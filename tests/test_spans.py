from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laga_attn.spans import Span, pack_spans, unpack_spans


@st.composite
def spans(draw: st.DrawFn) -> Span:
    """Any small span, among them those whose queries outnumber their keys and those without a visible pair."""
    causal = draw(st.booleans())
    window = draw(st.none() | st.integers(1, 12)) if causal else None
    numbers = [draw(st.integers(0, 9)) for _ in range(4)]
    return Span(*numbers, causal=causal, window=window)


def pairs(s: Span) -> set[tuple[int, int]]:
    """Visible (query, key) pairs by the definition, in the call's coordinates."""
    seen = set()
    for i in range(s.q_len):
        for j in range(s.k_len):
            d = (i + s.k_len - s.q_len) - j
            if (not s.causal or d >= 0) and (s.window is None or d < s.window):
                seen.add((s.q_start + i, s.k_start + j))
    return seen


@given(spans())
def test_area_counts_the_visible_pairs(span: Span) -> None:
    assert span.area() == len(pairs(span))


@given(spans())
def test_trimming_keeps_the_pairs_and_leaves_no_blind_query_or_unseen_key(span: Span) -> None:
    trimmed = span.trimmed()
    assert pairs(trimmed) == pairs(span)
    if span.area() and span.causal:
        assert {q for q, _ in pairs(span)} == set(range(trimmed.q_start, trimmed.q_start + trimmed.q_len))
        assert {k for _, k in pairs(span)} == set(range(trimmed.k_start, trimmed.k_start + trimmed.k_len))


def test_area_of_a_million_tokens_is_exact() -> None:
    n = 1 << 20
    assert Span(0, n, 0, n, True).area() == n * (n + 1) // 2
    assert Span(0, n, 0, n, True, window=4096).area() == 4096 * n - 4096 * 4095 // 2


@given(st.lists(spans(), max_size=5))
def test_packing_is_inverted(many: list[Span]) -> None:
    flat = pack_spans(many)
    assert all(type(x) is int for x in flat)
    assert unpack_spans(flat) == tuple(many)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, -1, 0, 4, True), "negative"),
        ((0, 4, 0, 4, False, 2), "causal=True"),
        ((0, 4, 0, 4, True, 0), "window 0"),
    ],
)
def test_impossible_spans_are_refused(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Span(*arguments)


def test_a_flat_list_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(ValueError, match="6 integers a span, got 7"):
        unpack_spans([0] * 7)


def test_spans_are_the_ones_of_the_layout_module() -> None:
    from laga_attn import layout

    assert layout.Span is Span
