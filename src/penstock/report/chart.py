"""A chart over budgets as SVG: lines, measured points, and the budgets below the floor. The numbers are in its text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.report.markup import bytes_text, text

_WIDTH, _HEIGHT = 480, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 12, 34


@dataclass(frozen=True)
class Mark:
    budget_bytes: int
    value: float
    # The text shown when it is pointed at or focused.
    said: str


@dataclass(frozen=True)
class Chart:
    identifier: str
    title: str
    unit: str
    predicted: Sequence[Mark]
    bound: Sequence[Mark]
    measured: Sequence[Mark]
    floor_bytes: int

    def html(self) -> str:
        marks = [*self.predicted, *self.bound, *self.measured]
        most_bytes = max(mark.budget_bytes for mark in marks)
        ticks = _ticks(max(mark.value for mark in marks))
        unit_bytes, unit_name = _byte_unit(most_bytes)

        def x(budget_bytes: float) -> float:
            return _LEFT + (_WIDTH - _LEFT - _RIGHT) * budget_bytes / most_bytes

        def y(value: float) -> float:
            return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * value / ticks[-1]

        parts = [*_value_axis(ticks, y), *_budget_axis(most_bytes, unit_bytes, unit_name, x)]
        parts.append(_below_floor(x(0), x(self.floor_bytes)))
        for kind, line in (("bound", self.bound), ("predicted", self.predicted)):
            path = " ".join(f"{x(mark.budget_bytes):.2f},{y(mark.value):.2f}" for mark in line)
            parts.append(f'<polyline class="{kind}" points="{path}"/>')
        parts += [_dot("predicted", mark, x, y) for mark in self.predicted]
        parts += [_dot("measured", mark, x, y) for mark in self.measured]
        label = text(f"{self.title}, {self.unit}, against the budget. The table below has the numbers.")
        return (
            f'<figure class="chart" id="{self.identifier}">\n'
            f"<figcaption>{text(self.title)} <span>{text(self.unit)}</span></figcaption>\n"
            f'<div class="plot"><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">\n'
            + "\n".join(parts)
            + f'\n</svg></div>\n<p class="readout" id="{self.identifier}-readout">{_HINT}</p>\n</figure>\n'
        )


_HINT = "Point at the chart, or focus it and use the arrow keys."

_KEY = (
    ('<line class="predicted" x2="28" y1="6" y2="6"/>', "predicted"),
    ('<line class="bound" x2="28" y1="6" y2="6"/>', "bound"),
    ('<path class="measured" d="M14 1l5 5-5 5-5-5z"/>', "measured"),
    ('<rect class="refused" width="28" height="12"/>', "below the floor: refused"),
)


def legend(*, measured: bool) -> str:
    items = "".join(
        f'<li><svg viewBox="0 0 28 12" aria-hidden="true">{shape}</svg>{name}</li>'
        for shape, name in _KEY
        if measured or name != "measured"
    )
    return f'<ul class="legend" aria-label="Key to the charts">{items}</ul>\n'


def _dot(kind: str, mark: Mark, x: Callable[[float], float], y: Callable[[float], float]) -> str:
    at_x, at_y = x(mark.budget_bytes), y(mark.value)
    facts = f'data-budget="{mark.budget_bytes}" data-value="{mark.value!r}" data-said="{text(mark.said)}"'
    where = f'data-x="{at_x:.2f}" data-y="{at_y:.2f}"'
    if kind == "measured":
        return f'<path class="mark measured" {facts} {where} d="M{at_x:.2f} {at_y - 5:.2f}l5 5-5 5-5-5z"/>'
    return f'<circle class="mark predicted" {facts} {where} cx="{at_x:.2f}" cy="{at_y:.2f}" r="1.8"/>'


def _value_axis(ticks: Sequence[float], y: Callable[[float], float]) -> list[str]:
    return [
        f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(tick):.2f}" y2="{y(tick):.2f}"/>'
        f'<text class="end" x="{_LEFT - 6}" y="{y(tick) + 4:.2f}">{tick:g}</text>'
        for tick in ticks
    ]


def _budget_axis(most_bytes: int, unit_bytes: int, unit_name: str, x: Callable[[float], float]) -> list[str]:
    ticks = [tick for tick in _ticks(most_bytes / unit_bytes) if tick * unit_bytes <= most_bytes]
    base = _HEIGHT - _BOTTOM
    return [
        f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{base}" y2="{base}"/>',
        *(f'<text class="middle" x="{x(tick * unit_bytes):.2f}" y="{base + 15}">{tick:g}</text>' for tick in ticks),
        f'<text class="end" x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 4}">budget, {unit_name}</text>',
    ]


def _below_floor(begin: float, end: float) -> str:
    return (
        f'<rect class="refused" x="{begin:.2f}" y="{_TOP}" width="{end - begin:.2f}" '
        f'height="{_HEIGHT - _TOP - _BOTTOM}"/>'
    )


def _byte_unit(most_bytes: int) -> tuple[int, str]:
    name = bytes_text(most_bytes).split()[1]
    return 1024 ** ("B", "KiB", "MiB", "GiB", "TiB").index(name), name


def _ticks(most: float, about: int = 5) -> list[float]:
    """From 0, in steps of 1, 2 or 5 times a power of ten, to the first that is not below `most`."""
    if not most > 0:
        return [0.0, 1.0]
    power = 10 ** math.floor(math.log10(most / about))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power * about >= most)
    return [k * step for k in range(math.ceil(most / step - 1e-9) + 1)]
