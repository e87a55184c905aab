"""The parts of a report below its summary: HTML that says everything without a script."""

from __future__ import annotations

from penstock.report.curve import curve_html
from penstock.report.data import ReportData
from penstock.report.markup import (
    Column,
    Figures,
    bytes_text,
    count_text,
    exact_bytes_text,
    many,
    ns_text,
    seconds_text,
    table,
    text,
    yes_no_text,
)

# The longest ones matter; the page's JSON has all.
SHOWN_STALLS = 40


def timeline(data: ReportData, show: Figures) -> str:
    copies, steps = sum(run.copies for run in data.runs), sum(run.steps for run in data.runs)
    copied, stalled = sum(run.bytes_copied for run in data.runs), sum(run.stall_ns for run in data.runs)
    said = (
        f"{many(len(data.runs), 'run')} with {many(steps, 'step')} and {many(copies, 'copy', 'copies')} of "
        f"{bytes_text(copied)}. Steps waited for copies for {ns_text(stalled)} at most: a trace does not show the "
        "kernels between two steps."
    )
    columns = [
        Column("run"),
        Column("method", numeric=False),
        *(
            Column(title)
            for title in ("begins at", "takes", "steps", "copies", "copied", "link busy", "stalls, at most")
        ),
    ]
    rows = [
        [
            show(f"runs.{k}.run", count_text),
            text(run.method),
            show(f"runs.{k}.begin_ns", ns_text),
            ns_text(run.end_ns - run.begin_ns),
            show(f"runs.{k}.steps", count_text),
            show(f"runs.{k}.copies", count_text),
            show(f"runs.{k}.bytes_copied", bytes_text),
            show(f"runs.{k}.copy_ns", ns_text),
            show(f"runs.{k}.stall_ns", ns_text),
        ]
        for k, run in enumerate(data.runs)
    ]
    return (
        f'<p id="timeline-said">{text(said)}</p>\n'
        '<div id="timeline" class="timeline" data-described="timeline-said">'
        "<noscript>The timeline is drawn by a script; the table below says what it shows.</noscript></div>\n"
        '<ul class="legend" aria-label="Key to the timeline">'
        '<li><span class="swatch copy" aria-hidden="true"></span>copy</li>'
        '<li><span class="swatch step" aria-hidden="true"></span>step: a kernel that reads weights</li>'
        '<li><span class="swatch stall" aria-hidden="true"></span>stall: the step waits for its copy</li></ul>\n'
        "<details><summary>The runs of the trace as a table</summary>\n"
        f"{table('Runs in the trace', columns, rows)}</details>\n"
    )


def perfetto() -> str:
    return (
        '<p><button type="button" id="save-trace">Save the trace</button> and open the file in '
        '<a href="https://ui.perfetto.dev" target="_blank" rel="noopener noreferrer">Perfetto, ui.perfetto.dev</a> '
        "(\N{LEFT DOUBLE QUOTATION MARK}Open trace file\N{RIGHT DOUBLE QUOTATION MARK}), which searches and sums "
        "spans. This page itself loads nothing from a network.</p>\n"
    )


def budgets(data: ReportData, show: Figures) -> str:
    columns = [
        Column("budget"),
        *(Column(title) for title in ("exactly", "peak", "streamed a run", "time of a run", "stalls a run")),
        Column("identical", numeric=False),
    ]
    rows = [
        [
            show(f"measured.{k}.budget_bytes", bytes_text),
            show(f"measured.{k}.budget_bytes", exact_bytes_text),
            show(f"measured.{k}.peak_bytes", bytes_text),
            show(f"measured.{k}.bytes_streamed", bytes_text),
            show(f"measured.{k}.run_s", seconds_text),
            show(f"measured.{k}.stall_ns", ns_text),
            show(f"measured.{k}.identical", yes_no_text),
        ]
        for k in range(len(data.measured))
    ]
    measured = table(f"Measured runs of {data.summary.method} by budget", columns, rows)
    if not data.curve:
        needs = "a plan, copies in the trace, and measured times of reads in host memory where the plan has any"
        return f"<p>There is no prediction: it takes {needs}.</p>\n{measured}"
    said = (
        "Predicted by acting out each budget's plan with the times of this trace. The bound is what no plan gets "
        "below: all steps back to back, or what does not fit at the fastest rate that copies were seen at."
    )
    return f"<p>{said}</p>\n{curve_html(show, data.curve, data.measured)}{measured}"


def stalls(data: ReportData, show: Figures) -> str:
    if not data.stalls:
        return "<p>No step of the trace waited for a copy.</p>\n"
    shown = data.stalls[:SHOWN_STALLS]
    total = ns_text(sum(stall.stall_ns for stall in data.stalls))
    said = f"{many(len(data.stalls), 'stall')} in the trace, {total} at most."
    if len(shown) < len(data.stalls):
        said += f" The {len(shown)} longest are shown; the page's JSON has all."
    columns = [
        Column("stall, at most"),
        Column("begins at"),
        Column("run"),
        Column("method", numeric=False),
        Column("step"),
        Column("kernel", numeric=False),
        Column("waits for", numeric=False),
        Column("copy of"),
        Column("copied in"),
    ]
    rows = [
        [
            show(f"stalls.{k}.stall_ns", ns_text),
            show(f"stalls.{k}.begin_ns", ns_text),
            show(f"stalls.{k}.run", count_text),
            text(stall.method),
            show(f"stalls.{k}.step", count_text),
            text(stall.kernel),
            text(stall.weight),
            show(f"stalls.{k}.copy_bytes", bytes_text),
            show(f"stalls.{k}.copy_ns", ns_text),
        ]
        for k, stall in enumerate(shown)
    ]
    return f"<p>{text(said)}</p>\n{table('The longest stalls', columns, rows, kind='tall')}"
