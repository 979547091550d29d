"""Pictures of a run as SVG, drawn by hand: no plotting library, and the file opens in every browser, light or dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, LEFT, TOP, GAP = 420, 240, 56, 70, 70
_LABEL_WIDTH = 80       # of the longest one, like "p99 1234567"
_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #44423c; } .title { font-size: 16px; font-weight: 600; fill: #24231f; }
.name { font-size: 13px; font-weight: 600; } .axis { stroke: #cfcac0; } .grid { stroke: #ece8e0; } .line { fill: none;
stroke: #2f6b5c; stroke-width: 2; } .mark { stroke: #b0562f; stroke-dasharray: 4 3; } .back { fill: #fbfaf8; }
.label { paint-order: stroke; stroke: #fbfaf8; stroke-width: 5px; stroke-linejoin: round; }
@media (prefers-color-scheme: dark) { text { fill: #b8b4aa; } .title { fill: #e9e6df; } .axis { stroke: #4a4843; }
.grid { stroke: #2d2c29; } .line { stroke: #7fbfac; } .mark { stroke: #e09a76; } .back { fill: #1b1b1a; }
.label { stroke: #1b1b1a; } }
"""


@dataclass(frozen=True)
class Panel:
    """One line over x. `marks`: (x, label) of vertical lines."""

    name: str
    x_label: str
    y_label: str
    points: Sequence[tuple[float, float]]
    marks: Sequence[tuple[float, str]] = ()


def distribution(name: str, values: Sequence[float], unit: str = "ms", scale: float = 1000.0) -> Panel:
    """Share of values at most x, with the median and the 99th percentile marked."""
    ordered = sorted(value * scale for value in values)
    count = len(ordered)
    points = [(value, (i + 1) / count * 100) for i, value in enumerate(ordered)]
    marks = [(ordered[min(int(count * q / 100), count - 1)], f"p{q}") for q in (50, 99)] if count else []
    return Panel(name, unit, "% of all", points, marks)


def draw(title: str, facts: str, panels: Sequence[Panel]) -> str:
    """An SVG document, two panels a row."""
    rows = -(-len(panels) // 2)
    width = LEFT * 2 + 2 * WIDTH + GAP
    height = TOP + rows * (HEIGHT + GAP)
    size = f'width="{width}" height="{height}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {size} role="img">',
             f"<title>{escape(title)}</title><style>{_STYLE}</style>", f'<rect class="back" {size}/>',
             f'<text class="title" x="{LEFT}" y="28">{escape(title)}</text><text x="{LEFT}" y="48">{escape(facts)}</text>']
    for number, panel in enumerate(panels):
        x, y = LEFT + (number % 2) * (WIDTH + GAP), TOP + 20 + (number // 2) * (HEIGHT + GAP)
        parts.append(f'<g transform="translate({x},{y})">{_panel(panel)}</g>')
    return "\n".join([*parts, "</svg>\n"])


def _panel(panel: Panel) -> str:
    high = HEIGHT - 40
    right = _nice(max((x for x, _ in panel.points), default=1.0))
    top = _nice(max((y for _, y in panel.points), default=1.0))
    parts = [f'<text class="name" y="-8">{escape(panel.name)}</text>']
    for step in range(5):
        y, x = high - high * step / 4, WIDTH * step / 4
        parts.append(f'<line class="grid" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'
                     f'<text x="-8" y="{y + 4:.1f}" text-anchor="end">{_number(top * step / 4)}</text>'
                     f'<text x="{x:.1f}" y="{high + 18}" text-anchor="middle">{_number(right * step / 4)}</text>')
    parts.append(f'<line class="axis" x2="{WIDTH}" y1="{high}" y2="{high}"/>'
                 f'<text x="{WIDTH}" y="{high + 34}" text-anchor="end">{escape(panel.x_label)}</text>'
                 f'<text x="{WIDTH}" y="-8" text-anchor="end">{escape(panel.y_label)}</text>')
    places = [WIDTH * x / right for x, _ in panel.marks]
    parts += [f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y2="{high}"/>' for at in places]
    line = " ".join(f"{WIDTH * x / right:.1f},{high - high * y / top:.1f}" for x, y in _thinned(panel.points))
    if line:
        parts.append(f'<polyline class="line" points="{line}"/>')
    for number, (at, (x, label)) in enumerate(zip(places, panel.marks, strict=True)):
        parts.append(_label(at, high - 8 - 16 * number, f"{label} {_number(x)}"))
    return "".join(parts)


def _label(at: float, y: int, text: str) -> str:
    """Beside the line it names, on the side where there is room. Over all lines, on ground of its own: that of another mark
    may be as near as it likes."""
    side = f'x="{at - 4:.1f}" text-anchor="end"' if at > WIDTH - _LABEL_WIDTH else f'x="{at + 4:.1f}"'
    return f'<text class="label" {side} y="{y}">{escape(text)}</text>'


def _thinned(points: Sequence[tuple[float, float]], most: int = 400) -> Sequence[tuple[float, float]]:
    step = max(1, len(points) // most)
    return [*points[::step], points[-1]] if points else []


def _nice(value: float) -> float:
    """The next round number, whose quarters are readable."""
    if not value > 0 or not math.isfinite(value):
        return 1.0
    unit = 10 ** math.floor(math.log10(value))
    return next(unit * step for step in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10) if unit * step >= value * 0.9999)


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
