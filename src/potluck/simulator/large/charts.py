"""Lines on logarithmic axes as SVG: time and bytes against the number of devices, and times of recovery.

Lines beyond the number of colours are dotted, with hollow marks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

colours = ("#4c78a8", "#e45756", "#54a24b", "#f58518", "#72b7b2", "#b279a2", "#9d755d", "#444444", "#bab0ac")
most_marks = 8
"""Values of x that are all written; of more, round ones are."""
_steps = ((1.0,), (1.0, 2.0, 5.0), tuple(map(float, range(1, 10))), tuple(step / 4 for step in range(4, 40)))
width_px, height_px, left_px, top_px, right_px, bottom_px = 760, 400, 80, 40, 240, 50


@dataclass(frozen=True, kw_only=True)
class Line:
    name: str
    points: tuple[tuple[float, float], ...]  # x, y, both above 0
    is_dashed: bool = False


@dataclass(frozen=True, kw_only=True)
class Chart:
    title: str
    x_name: str
    y_name: str
    lines: tuple[Line, ...]


def charts_svg(charts: Sequence[Chart]) -> str:
    """One below the other. A chart without a point is left out."""
    drawn = [chart for chart in charts if any(line.points for line in chart.lines)]
    height = height_px * max(len(drawn), 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width_px}" height="{height}" font-family="sans-serif" '
        'font-size="11">',
        f'<rect width="{width_px}" height="{height}" fill="white"/>',
    ]
    for number, chart in enumerate(drawn):
        parts += [f'<g transform="translate(0 {number * height_px})">', *_chart(chart), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _chart(chart: Chart) -> list[str]:
    xs = [x for line in chart.lines for x, _ in line.points]
    ys = [y for line in chart.lines for _, y in line.points]
    across, up = _Axis(xs, left_px, width_px - right_px), _Axis(ys, height_px - bottom_px, top_px)
    base = height_px - bottom_px
    parts = [f'<text x="{left_px}" y="20" font-size="13">{escape(chart.title)}</text>']
    distinct = sorted(set(xs))
    for at in distinct if len(distinct) <= most_marks else across.marks():
        x = across.at(at)
        parts.append(f'<line x1="{x:.1f}" y1="{base}" x2="{x:.1f}" y2="{base + 4}" stroke="#888"/>')
        parts.append(f'<text x="{x:.1f}" y="{base + 17}" text-anchor="middle">{at:,.0f}</text>')
    for at in up.marks():
        y = up.at(at)
        parts.append(f'<line x1="{left_px}" y1="{y:.1f}" x2="{width_px - right_px}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left_px - 6}" y="{y + 4:.1f}" text-anchor="end">{at:g}</text>')
    middle = (left_px + width_px - right_px) // 2
    parts.append(f'<text x="{middle}" y="{height_px - 12}" text-anchor="middle">{escape(chart.x_name)}</text>')
    parts.append(
        f'<text x="16" y="{height_px // 2}" transform="rotate(-90 16 {height_px // 2})" text-anchor="middle">'
        f"{escape(chart.y_name)}</text>"
    )
    for number, line in enumerate(chart.lines):
        colour, is_second = colours[number % len(colours)], number >= len(colours)
        dashes = f' stroke-dasharray="{"5 4" if line.is_dashed else "1 3"}"' if line.is_dashed or is_second else ""
        fill = "white" if is_second else colour
        places = [(across.at(x), up.at(y)) for x, y in sorted(line.points)]
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="1.8"{dashes}/>')
        key_y, key_x = top_px + 16 * number, width_px - right_px + 14
        parts.append(
            f'<line x1="{key_x}" y1="{key_y}" x2="{key_x + 18}" y2="{key_y}" stroke="{colour}" '
            f'stroke-width="2"{dashes}/>'
        )
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{fill}" stroke="{colour}"/>'
            for x, y in [*places, (key_x + 9, key_y)]
        ]
        parts.append(f'<text x="{key_x + 24}" y="{key_y + 4}">{escape(line.name)}</text>')
    return parts


class _Axis:
    """Values to places, by their logarithms."""

    def __init__(self, values: Sequence[float], begin: float, end: float) -> None:
        low, high = math.log10(min(values)), math.log10(max(values))
        margin = max(0.04 * (high - low), 0.05)
        self._low, self._high = low - margin, high + margin
        self._begin, self._end = begin, end

    def at(self, value: float) -> float:
        share = (math.log10(value) - self._low) / (self._high - self._low)
        return self._begin + share * (self._end - self._begin)

    def marks(self) -> list[float]:
        """Powers of ten, with as few numbers between them as make it three."""
        found: list[float] = []
        for steps in _steps:
            powers = range(math.floor(self._low), math.ceil(self._high) + 1)
            every = [step * 10.0**power for power in powers for step in steps]
            found = [value for value in every if self._low <= math.log10(value) <= self._high]
            if len(found) >= 3:
                break
        return found
