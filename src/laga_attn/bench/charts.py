"""Charts as inline SVG: horizontal bars, and lines over a logarithmic axis.

Colours come from the page's style sheet, by class, so that a chart follows the reader's light or dark scheme. Every
mark carries its numbers as a tooltip.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

__all__ = ["Bar", "Line", "Point", "bar_chart", "line_chart", "ticks"]

_WIDTH: Final = 980
_LABELS, _VALUES = 190, 120  # columns left and right of the bars
_ROW, _TOP, _BOTTOM = 26, 8, 26
_LINE_HEIGHT: Final = 400
_LINE_LEFT, _LINE_RIGHT, _LINE_TOP, _LINE_BOTTOM = 52, 16, 14, 44
_DASHES: Final = ("", "7 4", "2 4", "9 4 2 4", "14 4", "1 3 5 3")


@dataclass(frozen=True, slots=True)
class Bar:
    """One row.

    Attributes:
        text: the value in words, written at the right.
        style: CSS class that colours it.
        inner: a part of `value` that is drawn in full colour, the rest pale; None: all of it.
        spread: a range around the end of the bar.
    """

    label: str
    value: float
    text: str
    style: str
    inner: float | None = None
    spread: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Point:
    x: float
    y: float
    spread: tuple[float, float]
    text: str


@dataclass(frozen=True, slots=True)
class Line:
    """A series; `dash` tells lines of one style apart."""

    label: str
    style: str
    dash: int
    points: tuple[Point, ...]


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers from `low` on that do not exceed `high`."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def bar_chart(bars: Sequence[Bar], *, name: str, reference: float | None = None) -> str:
    """Bars from 0, one below the other, with a line at `reference`."""
    largest = max([*(b.spread[1] if b.spread else b.value for b in bars), reference or 0.0]) or 1.0
    plot, height = _WIDTH - _LABELS - _VALUES, _TOP + _ROW * len(bars) + _BOTTOM

    def x(value: float) -> float:
        return _LABELS + plot * value / largest

    def marks() -> Iterator[str]:
        floor = height - _BOTTOM
        for tick in ticks(0, largest):
            yield f'<line class="grid" x1="{x(tick):.1f}" y1="{_TOP}" x2="{x(tick):.1f}" y2="{floor}"/>'
            yield f'<text class="tick" x="{x(tick):.1f}" y="{floor + 17}" text-anchor="middle">{tick:g}</text>'
        for number, bar in enumerate(bars):
            top = _TOP + _ROW * number + 4
            middle, thick = top + (_ROW - 8) / 2, _ROW - 8
            yield f'<g class="{bar.style}"><title>{escape(f"{bar.label}: {bar.text}")}</title>'
            yield f'<text x="{_LABELS - 8}" y="{middle + 4}" text-anchor="end">{escape(bar.label)}</text>'
            parts = [(bar.value, "mark")] if bar.inner is None else [(bar.value, "mark pale"), (bar.inner, "mark")]
            for value, style in parts:
                width = x(value) - _LABELS
                yield f'<rect class="{style}" x="{_LABELS}" y="{top}" width="{width:.1f}" height="{thick}"/>'
            if bar.spread:
                low, high = map(x, bar.spread)
                ends = f"M{low:.1f} {middle - 4}v8M{high:.1f} {middle - 4}v8"
                yield f'<path class="spread" d="M{low:.1f} {middle}H{high:.1f}{ends}"/>'
            yield f'<text x="{_WIDTH - _VALUES + 10}" y="{middle + 4}">{escape(bar.text)}</text></g>'
        if reference is not None:
            yield f'<line class="reference" x1="{x(reference):.1f}" y1="{_TOP}" x2="{x(reference):.1f}" y2="{floor}"/>'

    return _svg(name, height, marks())


def line_chart(lines: Sequence[Line], x_labels: Sequence[tuple[float, str]], *, name: str, reference: float) -> str:
    """Lines over a logarithmic x axis that is labelled at `x_labels`, with a horizontal line at `reference`."""
    xs = [math.log(value) for value, _ in x_labels]
    ys = [y for line in lines for p in line.points for y in p.spread] + [reference]
    margin = 0.06 * (max(ys) - min(ys) or 1.0)
    low, high = max(0.0, min(ys) - margin), max(ys) + margin
    right, floor = _WIDTH - _LINE_RIGHT, _LINE_HEIGHT - _LINE_BOTTOM
    span = max(xs) - min(xs)

    def x(value: float) -> float:
        share = (math.log(value) - min(xs)) / span if span else 0.5
        return _LINE_LEFT + 14 + (right - _LINE_LEFT - 28) * share

    def y(value: float) -> float:
        return floor - (floor - _LINE_TOP) * (value - low) / (high - low)

    def marks() -> Iterator[str]:
        for tick in ticks(low, high):
            yield f'<line class="grid" x1="{_LINE_LEFT}" y1="{y(tick):.1f}" x2="{right}" y2="{y(tick):.1f}"/>'
            yield f'<text class="tick" x="{_LINE_LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>'
        for value, label in x_labels:
            yield f'<text class="tick" x="{x(value):.1f}" y="{floor + 20}" text-anchor="middle">{escape(label)}</text>'
        level = f"{y(reference):.1f}"
        yield f'<line class="reference" x1="{_LINE_LEFT}" y1="{level}" x2="{right}" y2="{level}"/>'
        for line in lines:
            path = "L".join(f"{x(p.x):.1f} {y(p.y):.1f}" for p in line.points)
            yield f'<g class="{line.style}"><path class="curve" stroke-dasharray="{_dash(line)}" d="M{path}"/>'
            for p in line.points:
                yield f'<path class="spread" d="M{x(p.x):.1f} {y(p.spread[0]):.1f}V{y(p.spread[1]):.1f}"/>'
                yield f'<circle class="mark" cx="{x(p.x):.1f}" cy="{y(p.y):.1f}" r="3.5">'
                yield f"<title>{escape(f'{line.label}: {p.text}')}</title></circle>"
            yield "</g>"

    return _svg(name, _LINE_HEIGHT, marks()) + _legend(lines)


def _legend(lines: Sequence[Line]) -> str:
    entries = (
        f'<li class="{line.style}"><svg viewBox="0 0 34 10" width="34" height="10" aria-hidden="true">'
        f'<path class="curve" stroke-dasharray="{_dash(line)}" d="M0 5H34"/></svg>{escape(line.label)}</li>'
        for line in lines
    )
    return f'<ul class="legend">{"".join(entries)}</ul>'


def _dash(line: Line) -> str:
    return _DASHES[line.dash % len(_DASHES)]


def _svg(name: str, height: int, marks: Iterator[str]) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(name)}">{"".join(marks)}</svg>'
