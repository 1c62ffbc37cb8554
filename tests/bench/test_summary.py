"""From a timing table to medians, quartiles, ratios and crossovers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from laga_attn.bench.summary import Quartiles, VariantReport, crossovers, summarize
from tests.bench.tables import AUTO, BASE, CELL, GEMM_FLOPS, LAGA, LINKS, curve, race_report, rank_0, rank_1


def variant(name: str) -> VariantReport:
    return next(v for v in race_report().variants if v.name == name)


def test_a_round_lasts_as_long_as_its_slowest_rank():
    assert variant(LAGA).seconds == [1.0, 3.5, 4.0]
    assert variant(BASE).seconds == [2.0, 4.0, 8.0]


def test_ratios_are_those_of_the_same_round_and_not_of_medians():
    ratio = variant(LAGA).ratio  # 1/2, 3.5/4, 4/8
    assert (ratio.low, ratio.median, ratio.high) == (0.5, 0.5, 0.6875)
    assert variant(BASE).ratio == Quartiles(1.0, 1.0, 1.0)
    assert variant(AUTO).ratio.median == 0.75  # 1.5, 0.75, 0.375; of the medians it would be 3/4 as well
    assert variant(AUTO).ratio.high == pytest.approx(1.125)


def test_fraction_of_gemm_peak_counts_all_ranks_and_pairs_rounds():
    peak = [2 * GEMM_FLOPS / seconds for seconds in (0.5, 1.0, 2.0)]
    fractions = sorted(CELL.attention_flops / t / p for t, p in zip([1.0, 3.5, 4.0], peak, strict=True))
    assert variant(LAGA).gemm_fraction == pytest.approx(fractions[1])
    assert race_report().gemm_flops_per_second == peak[1]


def test_bytes_are_those_of_the_rank_that_has_most():
    assert variant(BASE).sent == 400
    assert variant(LAGA).saved == 500
    assert variant(BASE).peak == 5001
    assert variant(BASE).resident == 6000
    assert variant(AUTO).resident is None
    assert variant(BASE).sent_across is None


def test_overlap_is_what_finishing_at_once_costs_over_the_time_of_the_exchanges():
    overlap = variant(LAGA).overlap
    assert overlap is not None
    assert overlap.hidden is not None
    assert overlap.hidden.median == pytest.approx(0.5)  # (2-1)/1, (4-3.5)/2, (6-4)/4
    assert overlap.waiting.median == pytest.approx(1.0)  # 1/1, 2/3.5, 4/4
    assert overlap.exchanges_seconds == 2.0
    base = variant(BASE).overlap
    assert base is not None
    assert base.hidden is None
    assert base.waiting.median == pytest.approx(0.25)
    assert variant(AUTO).overlap is None


def test_over_a_link_the_busier_direction_counts_and_the_measured_rate_is_the_receivers():
    first = curve()[0]
    assert first.link is not None
    assert first.link.received_rate == pytest.approx(0.95e9)
    assert [v.sent_across for v in first.variants] == [400, 400, 400]
    assert first.title == "P=2 S=1024 H=16 bf16 over 1gbit"


def test_a_curve_crosses_the_baseline_between_the_rates_around_it():
    """laga: ratio 0.1 at 0.1 Gbit/s, 0.4 at 1, 1.25 at 10: 1 is 0.6 / 0.85 of the way there on a logarithmic axis."""
    found = {c.name: c for c in crossovers(curve())}
    assert set(found) == {LAGA, AUTO}
    assert found[LAGA].faster_below
    assert math.log10(found[LAGA].rate or 0) == pytest.approx(9 + 0.6 / 0.85)


@pytest.mark.parametrize(("slower", "faster_below"), [(100.0, True), (0.01, False)])
def test_a_curve_that_never_crosses_says_which_side_it_stays_on(slower, faster_below):
    runs = [rank_0(slower=slower), rank_1(1e9, slower)]
    reports = summarize(CELL, LINKS, [replace(run, races=run.races * 3) for run in runs])
    assert all(c.rate is None and c.faster_below is faster_below for c in crossovers(reports))


def test_one_round_has_no_spread():
    assert Quartiles.of([3.0]) == Quartiles(3.0, 3.0, 3.0)
    assert Quartiles.of([1.0, 2.0, 3.0, 4.0, 5.0]) == Quartiles(2.0, 3.0, 4.0)
