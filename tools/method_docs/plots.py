"""Draws a `Chart` as a small SVG on a white ground, which reads on light and dark pages alike. Needs matplotlib."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, ScalarFormatter

from .chart import Chart, Colour

PAINT: dict[Colour, str] = {1: "#1368ce", -1: "#d9480f", 0: "#7048b6"}
WIDTH: dict[Colour, float] = {1: 3.2, -1: 1.6, 0: 2.4}
"""The thinner lies upon the thicker, so that both show where they agree."""
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.2, 1.8)))
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "mathtext.fontset": "dejavusans",
    "svg.fonttype": "path",
    "svg.hashsalt": "megatron_rl",
    "axes.edgecolor": "#888888",
    "axes.labelcolor": "#333333",
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "path.simplify_threshold": 0.3,
}


def draw(chart: Chart, path: Path) -> None:
    """Writes the SVG, 560 x 320."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.6, 3.2), dpi=100, facecolor="white", layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08))
        axes = figure.subplots()
        for line in chart.lines:
            paint, dash, width = PAINT[line.colour], DASHES[line.dash], WIDTH[line.colour]
            axes.plot(line.x, line.y, color=paint, linestyle=dash, linewidth=width, drawstyle=chart.drawstyle, zorder=6 - width)
        _frame(axes, chart)
        figure.legend(handles=_handles(chart), loc="outside upper center", ncols=5, frameon=False, fontsize=9, handlelength=2.2)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    path.write_text(_shorter(buffer.getvalue()))


def _frame(axes: Axes, chart: Chart) -> None:
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.margins(x=0)
    if chart.y_range:
        axes.set_ylim(*chart.y_range)
    counted = all((line.x == line.x.round()).all() for line in chart.lines)
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10] if counted else [1, 2, 2.5, 5, 10], integer=counted))
    formatter = ScalarFormatter(useMathText=True)
    formatter.set_powerlimits((-3, 5))
    axes.xaxis.set_major_formatter(formatter)
    axes.grid(color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_xlim()[0] < 0 < axes.get_xlim()[1]:
        axes.axvline(0, color="#aaaaaa", linewidth=0.8, zorder=0.5)


def _handles(chart: Chart) -> list[Line2D]:
    """The colours, then, where they have names, the dashes in grey."""
    used = {line.colour for line in chart.lines}
    handles = [Line2D([], [], color=PAINT[c], linewidth=WIDTH[c], label=name) for c, name in chart.colours.items() if c in used]
    labels = {line.dash: line.label for line in chart.lines if line.label}
    return handles + [Line2D([], [], color="#555555", linestyle=DASHES[d], linewidth=2, label=name) for d, name in labels.items()]


def _shorter(svg: str) -> str:
    """Two decimals in paths, no metadata, no blanks at line ends."""
    svg = re.sub(r" *<metadata>.*?</metadata>\n|<!DOCTYPE.*?>\n| *<!--.*?-->\n", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(?<= d=")[^"]+', lambda d: re.sub(r"-?\d+\.\d{3,}", lambda x: f"{float(x[0]):.2f}", d[0]), svg)
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"
