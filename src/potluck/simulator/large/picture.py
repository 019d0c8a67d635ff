"""A timeline of a simulated run as SVG: a row for each machine, a bar for each phase, a line for each commit."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from potluck.simulator.large.report import PhaseSpan, ScaleReport

colours = {"receive": "#4c78a8", "compute": "#54a24b", "send": "#e45756"}
most_rows = 60
most_bars_per_row = 400
width_px, left_px, top_px, row_px = 1200, 150, 50, 14


def timeline_svg(report: ScaleReport, title: str) -> str:
    """Of more than `most_rows` machines every so manieth is drawn."""
    every = max(1, -(-len(report.devices) // most_rows))
    shown = list(range(0, len(report.devices), every))
    by_device: dict[int, list[PhaseSpan]] = {number: [] for number in shown}
    for span in report.timeline:
        if span.device in by_device:
            by_device[span.device].append(span)
    scale = (width_px - left_px - 20) / max(report.seconds, 1e-9)
    height = top_px + row_px * len(shown) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width_px}" height="{height}" font-family="sans-serif" '
        'font-size="10">',
        f'<rect width="{width_px}" height="{height}" fill="white"/>',
        f'<text x="{left_px}" y="18" font-size="13">{escape(title)}</text>',
    ]
    for i, (phase, colour) in enumerate(colours.items()):
        x = left_px + 90 * i
        parts.append(
            f'<rect x="{x}" y="28" width="10" height="10" fill="{colour}"/><text x="{x + 14}" y="37">{phase}</text>'
        )
    for row, number in enumerate(shown):
        y = top_px + row_px * row
        parts.append(f'<text x="4" y="{y + 10}">{escape(report.devices[number].id)}</text>')
        for span in _merged(by_device[number], report.seconds / most_bars_per_row / 4):
            x, wide = left_px + span.start_s * scale, max((span.stop_s - span.start_s) * scale, 0.3)
            parts.append(
                f'<rect x="{x:.1f}" y="{y + 1}" width="{wide:.1f}" height="{row_px - 3}" fill="{colours[span.phase]}"/>'
            )
    bottom, at_s = top_px + row_px * len(shown), 0.0
    for seconds in report.round_s:
        at_s += seconds
        x = left_px + at_s * scale
        parts.append(
            f'<line x1="{x:.1f}" y1="{top_px}" x2="{x:.1f}" y2="{bottom}" stroke="#999" stroke-dasharray="2 3"/>'
        )
    for tenth in range(0, 11, 2):
        x = left_px + tenth / 10 * report.seconds * scale
        parts.append(f'<text x="{x:.0f}" y="{bottom + 16}">{tenth / 10 * report.seconds:.0f} s</text>')
    return "\n".join([*parts, "</svg>", ""])


def _merged(spans: Sequence[PhaseSpan], gap_s: float) -> list[PhaseSpan]:
    """Neighbours of one phase that nobody could tell apart, as one."""
    found: list[PhaseSpan] = []
    for span in spans:
        last = found[-1] if found else None
        if last is not None and last.phase == span.phase and span.start_s - last.stop_s <= gap_s:
            found[-1] = PhaseSpan(span.device, span.phase, last.start_s, max(last.stop_s, span.stop_s))
        else:
            found.append(span)
    return found
