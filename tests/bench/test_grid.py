"""Cells, variants and presets."""

from __future__ import annotations

import pytest

from laga_attn.auto import CPU_FLOPS_PER_PORT_BYTE, choose
from laga_attn.bench.grid import DTYPES, PRESETS, Cell, Grid, Variant, baseline_of, preset
from laga_attn.kernels.problem import backward_flops, forward_flops
from laga_attn.spans import Span, pack_spans
from laga_attn.train.errors import UsageError

SMALL = Grid((2, 4), (64,), (2, 4), ("fp32",), ("explicit", "laga"), None, ("latent", "kv"), rounds=2)


def names(grid: Grid, cell: Cell) -> list[str]:
    return [variant.name_in(cell) for variant in grid.variants(cell)]


def test_a_grid_is_a_cross_product_of_what_exists():
    assert [str(cell) for cell in SMALL.cells()] == [
        "P=2 S=64 H=2 fp32",
        "P=2 S=64 H=4 fp32",
        "P=4 S=64 H=2 fp32",
        "P=4 S=64 H=4 fp32",
    ]
    assert names(SMALL, SMALL.cells()[0]) == [
        "explicit U=2 kv",
        "explicit U=2 latent",
        "explicit U=1 kv",
        "explicit U=1 latent",
        "laga U=2 latent",
        "laga U=2 kv",
        "laga U=1 latent",
        "laga U=1 kv",
    ]


def test_the_baseline_is_first_whatever_is_asked_for_and_only_once():
    cell = SMALL.cells()[0]
    only_laga = SMALL.override(schemes=["laga"], degrees=[1], saves=["latent"])
    assert names(only_laga, cell) == ["explicit U=2 kv", "laga U=1 latent"]
    assert names(SMALL, cell).count("explicit U=2 kv") == 1


def test_with_more_ranks_than_heads_the_baseline_has_the_largest_degree_there_is():
    assert baseline_of(Cell(4, 64, 2, "fp32")) == Variant("explicit", 2, "kv")


def test_auto_says_what_it_comes_to():
    cell = Cell(2, 2048, 16, "bf16")
    for given, weight in ((None, CPU_FLOPS_PER_PORT_BYTE), (1e6, 1e6), (1.0, 1.0)):
        scheme, degree = choose(cell.dims, cell.layout, causal=True, itemsize=2, flops_per_port_byte=weight)
        (_, auto) = SMALL.override(schemes=["auto"], flops_per_port_byte=given).variants(cell)
        assert auto.name_in(cell) == f"auto ({scheme} U={degree})"
    assert auto.name_in(cell) != Variant("auto", None, "auto", 1e6).name_in(cell)  # a link decides


def test_attention_flops_are_what_the_kernels_count():
    cell = Cell(2, 100, 3, "fp32")
    spans = pack_spans([Span(0, 100, 0, 100, causal=True)])
    qk, v = [1, 100, 3, 192], [1, 100, 3, 128]
    expected = forward_flops(qk, qk, v, spans) + backward_flops(v, [], qk, qk, v, [], spans)
    assert cell.attention_flops == expected


def test_options_replace_parts_of_a_preset():
    grid = preset("quick").override(ranks=[4], heads=None, dtypes=[], rounds=3)
    assert grid.ranks == (4,)
    assert grid.rounds == 3
    assert (grid.heads, grid.dtypes) == (PRESETS["quick"].heads, PRESETS["quick"].dtypes)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_hold_every_scheme_and_the_published_form(name):
    grid = PRESETS[name]
    for cell in grid.cells():
        found = {(v.scheme, v.ulysses_degree, v.save) for v in grid.variants(cell)}
        assert {scheme for scheme, _, _ in found} == {"explicit", "laga", "absorbed", "auto"}
        assert ("laga", cell.ranks, "kv") in found


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ranks": [0]}, "--ranks 0 is not possible; choose among numbers from 1 on"),
        ({"seq_lens": [-5]}, "--seq-len -5"),
        ({"rounds": -1}, "--rounds -1"),
        ({"dtypes": ["int8"]}, f"--dtype int8 is not possible; choose among {', '.join(DTYPES)}"),
        ({"schemes": ["ring"]}, "--scheme ring is not possible; choose among explicit, absorbed, laga, auto"),
        ({"saves": ["all"]}, "--save all is not possible; choose among latent, gathered, kv"),
        ({"degrees": [3]}, "--ulysses-degree 3: none divides 2 ranks and 2 heads; choose among 1, 2"),
    ],
)
def test_what_does_not_exist_is_refused_in_one_line(fields, message):
    with pytest.raises(UsageError) as caught:
        SMALL.override(**fields)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_preset_is_refused_with_the_known_ones():
    with pytest.raises(UsageError, match="--preset 'fast' is unknown; choose one of quick, full, paper"):
        preset("fast")
