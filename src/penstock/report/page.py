"""A report as one HTML file: data and trace embedded, nothing loaded from anywhere. No torch."""

from __future__ import annotations

import json
import os
from pathlib import Path

from penstock.report import sections
from penstock.report.data import ReportData, to_document
from penstock.report.document import whole_page
from penstock.report.markup import Figures, embedded, text
from penstock.report.residency import residency
from penstock.report.summary import summary_section

_SECTIONS = (
    ("glance", "At a glance", summary_section),
    ("time", "Timeline", sections.timeline),
    ("budgets", "Budgets", sections.budgets),
    ("residency", "Residency by weight", residency),
    ("stalls", "Stalls", sections.stalls),
)


def write_report(path: str | os.PathLike[str], data: ReportData) -> None:
    Path(path).write_text(report_html(data), encoding="utf-8")


def report_html(data: ReportData) -> str:
    """The numbers are embedded as JSON under the id report-data, and the trace under trace-data."""
    document = to_document(data)
    show = Figures(document)
    summary = data.summary
    links = "".join(f'<li><a href="#{name}">{title}</a></li>' for name, title, _ in _SECTIONS)
    parts = "".join(
        f'<section aria-labelledby="{name}">\n<h2 id="{name}">{title}</h2>\n{draw(data, show)}</section>\n'
        for name, title, draw in _SECTIONS
    )
    body = (
        f"<header>\n<h1>{text(data.title)}</h1>\n"
        f"<p>Method {text(summary.method)} of {text(summary.program)} on {text(summary.device)}, compiled with torch "
        f"{text(summary.torch)}. {text(data.made_at)}.</p>\n</header>\n"
        f'<nav aria-label="Sections"><ul>{links}<li><a href="#trace">Trace</a></li></ul></nav>\n'
        f'<main>\n{parts}<section aria-labelledby="trace">\n<h2 id="trace">The trace in Perfetto</h2>\n'
        f"{sections.perfetto()}</section>\n</main>\n"
        "<footer><p>Written by Penstock. 1 MiB is 1,048,576 bytes, 1 GB/s is 1,000,000,000 bytes a second.</p>"
        "</footer>\n"
        f"{embedded('report-data', json.dumps(document, allow_nan=False))}{embedded('trace-data', data.trace_json)}"
    )
    return whole_page(data.title, body, ("chart.js", "timeline.js"))
