"""The budget curve: what more memory would buy. In a report, and as a page of its own."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path

from penstock.report.chart import Chart, Mark, legend
from penstock.report.data import CurvePoint, MeasuredPoint
from penstock.report.document import whole_page
from penstock.report.markup import (
    Column,
    Figures,
    bytes_text,
    embedded,
    exact_bytes_text,
    seconds_text,
    table,
    text,
)

__all__ = ["CurvePoint", "curve_html", "write_curve_html"]


def write_curve_html(
    path: str | os.PathLike[str], points: Sequence[CurvePoint], title: str = "What a budget buys"
) -> None:
    """One page with the curve alone; its numbers are embedded as JSON under the id curve-data."""
    ordered = sorted(points, key=lambda point: point.budget_bytes)
    if not ordered:
        raise ValueError("a curve needs at least one point, got none")
    document = {"title": title, "curve": [dataclasses.asdict(point) for point in ordered]}
    body = (
        f'<header><h1>{text(title)}</h1></header>\n<main>\n<section aria-labelledby="curve">\n'
        f'<h2 id="curve">Time and throughput against budget</h2>\n'
        f"{curve_html(Figures(document), ordered, (), open_table=True)}</section>\n</main>\n"
        f"{embedded('curve-data', json.dumps(document))}"
    )
    Path(path).write_text(whole_page(title, body, ("chart.js",)), encoding="utf-8")


def curve_html(
    figures: Figures, points: Sequence[CurvePoint], measured: Sequence[MeasuredPoint], *, open_table: bool = False
) -> str:
    """Two charts, their key, and a table of what they show; `figures` are those of a document with a curve."""
    floor_bytes = points[0].budget_bytes

    def chart(identifier: str, title: str, unit: str, *, inverse: bool) -> str:
        def value(seconds: float) -> float:
            return 1 / seconds if inverse else seconds * 1e3

        # With nothing to compute and nothing to copy, the time is 0 and the throughput infinite.
        drawn = [point for point in points if not inverse or (point.predicted_s > 0 and point.bound_s > 0)]
        if not drawn:
            return ""
        return Chart(
            identifier,
            title,
            unit,
            predicted=[Mark(each.budget_bytes, value(each.predicted_s), _said(each)) for each in drawn],
            bound=[Mark(each.budget_bytes, value(each.bound_s), "") for each in drawn],
            measured=[Mark(each.budget_bytes, value(each.run_s), _said_measured(each)) for each in measured],
            floor_bytes=floor_bytes,
        ).html()

    return (
        '<div class="charts">\n'
        + chart("chart-time", "Time of a run", "ms", inverse=False)
        + chart("chart-throughput", "Throughput", "runs per second", inverse=True)
        + f"</div>\n{legend(measured=bool(measured))}"
        + f"<details{' open' if open_table else ''}><summary>The predicted curve as a table</summary>\n"
        + table("Predicted time of one run by budget", _COLUMNS, [_row(figures, k) for k in range(len(points))])
        + "</details>\n"
    )


_COLUMNS = (Column("budget"), Column("exactly"), Column("streamed"), Column("predicted"), Column("bound"))


def _row(figures: Figures, k: int) -> list[str]:
    return [
        figures(f"curve.{k}.budget_bytes", bytes_text),
        figures(f"curve.{k}.budget_bytes", exact_bytes_text),
        figures(f"curve.{k}.streamed_bytes", bytes_text),
        figures(f"curve.{k}.predicted_s", seconds_text),
        figures(f"curve.{k}.bound_s", seconds_text),
    ]


def _said(point: CurvePoint) -> str:
    return (
        f"Predicted in {exact_bytes_text(point.budget_bytes)}: {point.predicted_s * 1e3:.3f} ms a run, bound "
        f"{point.bound_s * 1e3:.3f} ms, {exact_bytes_text(point.streamed_bytes)} streamed"
    )


def _said_measured(point: MeasuredPoint) -> str:
    return (
        f"Measured in {exact_bytes_text(point.budget_bytes)}: {point.run_s * 1e3:.3f} ms a run, "
        f"{exact_bytes_text(point.bytes_streamed)} streamed"
    )
