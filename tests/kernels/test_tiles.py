from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from laga_attn.kernels.tiles import Tile, Triangles, live, row_blocks, tiles
from laga_attn.spans import Span
from tests.kernels.oracle import mask


@st.composite
def spans(draw: st.DrawFn) -> Span:
    causal = draw(st.booleans())
    window = draw(st.none() | st.integers(1, 30)) if causal else None
    return Span(
        draw(st.integers(0, 3)),
        draw(st.integers(0, 25)),
        draw(st.integers(0, 3)),
        draw(st.integers(0, 25)),
        causal,
        window,
    )


def scores_after_hiding(cut: list[Tile], shape: tuple[int, int], size: int) -> torch.Tensor:
    """0 where a tile shows the pair, -inf where it hides it, NaN where no tile reaches."""
    scores = torch.full(shape, torch.nan)
    triangles = Triangles.build(size, scores)
    for tile in cut:
        assert scores[tile.rows, tile.keys].isnan().all(), "tiles overlap"
        part = torch.zeros(tile.shape)
        triangles.hide(part, tile)
        scores[tile.rows, tile.keys] = part
    return scores


@given(spans(), st.integers(1, 9), st.integers(1, 9))
def test_tiles_show_exactly_the_visible_pairs(span: Span, rows: int, keys: int) -> None:
    expected = mask([span], 30, 30)
    by_rows = [tile for s in live([span]) for block in row_blocks(s, rows, keys) for tile in block]
    by_keys = [tile for s in live([span]) for tile in tiles(s, rows, keys)]
    assert sorted(map(repr, by_rows)) == sorted(map(repr, by_keys))
    scores = scores_after_hiding(by_rows, (30, 30), min(rows, keys))
    assert torch.equal(scores == 0, expected)
    for tile in by_rows:
        assert tile.shape[0] <= rows
        assert tile.shape[1] <= keys
        shown = expected[tile.rows, tile.keys]
        assert shown.any(dim=0).all(), "a key of the tile is seen by none of its queries"
        assert shown.any(dim=1).all(), "a query of the tile sees none of its keys"


def test_blocks_of_queries_hold_every_tile_of_their_rows() -> None:
    blocks = list(row_blocks(Span(0, 20, 0, 25, True), 8, 6))
    assert [{(t.q0, t.q1) for t in block} for block in blocks] == [
        {(0, 8), (1, 8), (7, 8)},
        {(8, 16), (13, 16)},
        {(16, 20), (19, 20)},
    ]
