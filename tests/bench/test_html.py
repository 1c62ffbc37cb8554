"""The HTML report: what is in it, and that a browser shows it in both colour schemes."""

from __future__ import annotations

import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from laga_attn.bench.charts import Bar, Line, Point, bar_chart, line_chart, ticks
from laga_attn.bench.html import to_html
from tests.bench.tables import AUTO, BASE, LAGA, report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def screenshot(page: Path, *flags: str) -> np.ndarray:
    """What a headless browser shows of the page, `[height, width, RGB]` from 0 to 1."""
    assert CHROMIUM is not None
    picture = page.with_suffix(".png")
    fixed = [
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-dev-shm-usage", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
        f"--user-data-dir={page.parent / 'profile'}", "--window-size=1100,2400", f"--screenshot={picture}",
    ]  # fmt: skip
    subprocess.run([CHROMIUM, *fixed, *flags, page.as_uri()], check=True, capture_output=True, timeout=120)
    return imread(picture)[..., :3]


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize(
    ("flags", "darkest", "brightest"),
    [((), 0.85, 1.0), (("--blink-settings=preferredColorScheme=0",), 0.0, 0.25)],
    ids=["light", "dark"],
)
def test_a_browser_shows_text_and_coloured_charts_in_the_readers_scheme(tmp_path, flags, darkest, brightest):
    page = tmp_path / "report.html"
    page.write_text(to_html(report()))
    pixels = screenshot(page, *flags)
    brightness = pixels.mean(axis=2)
    assert darkest <= np.median(brightness) <= brightest
    background = pixels[5, 5]
    shown = np.abs(pixels - background).max(axis=2)
    assert (shown > 0.5).mean() > 0.01  # text stands out from the page
    # Bars are the only large areas of colour; every scheme's must be there.
    saturation = pixels.max(axis=2) - pixels.min(axis=2)
    assert (saturation > 0.25).mean() > 0.02
    hues = {tuple(colour) for colour in (pixels[saturation > 0.25] * 255).astype(int)[::50].tolist()}
    assert len(hues) >= 3


def test_the_page_is_whole_without_any_other_file():
    page = to_html(report())
    assert not re.search(r"(?:src|href)=|@import|url\(|<script", page)
    assert "prefers-color-scheme: dark" in page


def test_every_chart_and_table_is_well_formed_and_names_every_variant():
    page = to_html(report())
    body = page[page.index("<body>") : page.index("</html>")]
    root = ElementTree.fromstring(body)
    headings = [h.text for h in root.iter("h2")]
    assert headings == ["2 ranks, 1024 tokens, 16 heads, bf16", "2 ranks, 9 tokens, 16 heads, bf16"]
    charts = [svg.get("aria-label") for svg in root.iter("svg") if svg.get("role") == "img"]
    assert charts.count("Time ratios over bandwidth") == 1
    assert charts.count("Time ratios") == charts.count("Memory in MiB") == charts.count("Port bytes in MiB") == 4
    assert len(list(root.iter("details"))) == 3  # one per rate
    for table in root.iter("table"):
        assert [row[0].text for row in table.findall("tbody/tr")] == [BASE, LAGA, AUTO]
    assert f"{LAGA}: faster than the baseline below 5.08 Gbit/s" in body


def test_what_was_measured_is_escaped():
    page = to_html(report())
    assert "a &lt;fast&gt; one" in page
    assert "<fast>" not in page


def rectangles(chart: str) -> list[float]:
    return [float(width) for width in re.findall(r'<rect[^>]* width="([\d.]+)"', chart)]


def test_bars_are_as_long_as_their_values():
    bars = [Bar("a", 1.0, "one", "laga"), Bar("b", 4.0, "four", "auto", inner=1.0), Bar("c", 0.0, "none", "other")]
    one, four, inner, none = rectangles(bar_chart(bars, name="x"))
    assert four == pytest.approx(4 * one, rel=1e-3)
    assert inner == one
    assert none == 0.0


def test_a_line_goes_through_its_points_on_a_logarithmic_axis():
    points = tuple(Point(x, y, (y, y), f"{y}") for x, y in ((1e8, 0.5), (1e9, 1.0), (1e10, 2.0)))
    chart = line_chart([Line("a", "laga", 0, points)], [(p.x, f"{p.x:g}") for p in points], name="x", reference=1.0)
    places = re.findall(r'<circle class="mark" cx="([\d.]+)" cy="([\d.]+)"', chart)
    (x0, y0), (x1, y1), (x2, y2) = [(float(x), float(y)) for x, y in places]
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y1 - y2 == pytest.approx(2 * (y0 - y1), abs=0.3)  # y grows downwards
    level = re.search(r'class="reference"[^>]* y1="([\d.]+)"', chart)
    assert level is not None
    assert float(level[1]) == pytest.approx(y1, abs=0.1)


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.0, 0.37), (0.85, 1.31), (0.0, 5400.0)])
def test_ticks_are_few_round_numbers_inside_the_range(low, high):
    found = ticks(low, high)
    assert 3 <= len(found) <= 7
    assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in found)
    assert all(len(f"{tick:g}") <= 5 for tick in found)
