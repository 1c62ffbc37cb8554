"""`docs/reproduction.md` is what the command writes, and the published figures come out of eager code."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import eager_forms

from laga_attn.config import MLAConfig
from laga_attn.plan import paper

DOCUMENT = (Path(__file__).parents[2] / "docs" / "reproduction.md").read_text(encoding="utf-8")
V3 = MLAConfig.preset("deepseek-v3")


def test_words_and_rows_of_the_document_are_those_that_the_command_writes():
    """Of the rows those of the cheapest cell; all of the words."""
    again = paper.render(eager_forms, seq_lens=(4096,), ranks=(4,))
    rows = [line for line in again.splitlines() if line.startswith("| 4096 | 4 |")]
    assert len(rows) == 2
    assert set(rows) <= set(DOCUMENT.splitlines())
    words = [line for line in again.splitlines() if not line.startswith(("|", "## Peak memory"))]
    assert words == [line for line in DOCUMENT.splitlines() if not line.startswith(("|", "## Peak memory"))]


@pytest.mark.parametrize(("form", "published"), [("explicit", 27.3), ("absorbed", 36.6), ("laga", 27.4)])
def test_eager_code_needs_the_memory_that_was_published(form, published):
    eager = paper.trace_eager(eager_forms, V3, form, 16384, 8)
    assert eager.peak_bytes / 1e9 == pytest.approx(published, rel=0.01)
    assert f"| {form} | {published:.1f} | {eager.peak_bytes / 1e9:.2f} |" in DOCUMENT


def test_the_byte_ratio_of_eager_code_is_that_of_port_bytes():
    ratios = []
    for ranks in (4, 8, 16):
        explicit, laga = (paper.trace_eager(eager_forms, V3, form, 16384, ranks).sent for form in ("explicit", "laga"))
        ratios.append(f"{explicit / laga:.2f}")
    assert ratios == ["1.89", "1.80", "1.63"]
    assert f"| 128 | 1.98 | {' | '.join(ratios)} |" in DOCUMENT
