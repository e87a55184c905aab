"""The summary of a report: eight figures, and device memory beside all weights."""

from __future__ import annotations

from penstock.report.data import ReportData
from penstock.report.markup import (
    Figures,
    bytes_text,
    count_text,
    exact_bytes_text,
    ns_text,
    part_text,
    rate_text,
    seconds_text,
    yes_no_text,
)


def summary_section(data: ReportData, show: Figures) -> str:
    summary = data.summary
    weights = summary.weight_bytes or 1

    def of_weights(count: int) -> str:
        return f"{part_text(count / weights)} of {show('summary.weight_bytes', bytes_text)} of weights"

    link = (
        f"{show('summary.link_part', part_text)} of the link's {show('summary.link_bytes_per_s', rate_text)}"
        if summary.link_bytes_per_s is not None
        else "nothing is copied"
    )
    bound = f"bound {show('summary.bound_s', seconds_text)}, {show('summary.bound_part', part_text)} of this time"
    stall = "not timed inside a graph"
    if summary.stall_ns is not None:
        stall = f"{part_text(summary.stall_ns / 1e9 / summary.run_s)} of the run, waiting for copies"
    within = "within the budget" if summary.peak_bytes <= summary.budget_bytes else "ABOVE THE BUDGET"
    identical = "not compared" if summary.identical is None else "to the bit, with every weight resident"
    tiles = [
        ("Budget", show("summary.budget_bytes", bytes_text), of_weights(summary.budget_bytes), "budget_bytes"),
        ("Floor", show("summary.floor_bytes", bytes_text), of_weights(summary.floor_bytes), "floor_bytes"),
        ("Peak", show("summary.peak_bytes", bytes_text), within, "peak_bytes"),
        (
            "Streamed a run",
            show("summary.bytes_streamed", bytes_text),
            f"in {show('summary.copies', count_text)} copies",
            "bytes_streamed",
        ),
        ("Speed", show("summary.bytes_per_s", rate_text), link, None),
        ("Time of a run", show("summary.run_s", seconds_text), bound, None),
        ("Stalls a run", show("summary.stall_ns", ns_text), stall, None),
        ("Identical", show("summary.identical", yes_no_text), identical, None),
    ]

    def tile(name: str, figure: str, remark: str, exact: str | None) -> str:
        lines = [remark] + ([show(f"summary.{exact}", exact_bytes_text)] if exact else [])
        # A warning is a word in capitals, not a colour alone.
        wrong = (name == "Peak" and remark != "within the budget") or (name == "Identical" and not summary.identical)
        small = "".join(f'<dd class="remark">{line}</dd>' for line in lines)
        return f'<div{_class("wrong", wrong)}><dt>{name}</dt><dd class="figure">{figure}</dd>{small}</div>\n'

    return f'<dl class="tiles">\n{"".join(tile(*each) for each in tiles)}</dl>\n{_memory(data, show)}'


def _memory(data: ReportData, show: Figures) -> str:
    """Device memory beside all weights, to one scale."""
    summary = data.summary
    if summary.resident_bytes is None or summary.ring_bytes is None:
        return ""
    held_bytes = summary.resident_bytes + summary.ring_bytes
    whole_bytes = max(summary.weight_bytes, held_bytes, 1)

    def width(count: int) -> str:
        return f"{100 * count / whole_bytes:.4f}%"

    key = [
        ("resident", f"resident {show('summary.resident_bytes', bytes_text)}"),
        ("ring", f"ring {show('summary.ring_bytes', bytes_text)}"),
        ("off", f"of the weights, not on the device {bytes_text(max(0, summary.weight_bytes - held_bytes))}"),
        ("floor", "floor"),
    ]
    items = "".join(f'<li><span class="swatch {kind}" aria-hidden="true"></span>{said}</li>' for kind, said in key)
    return (
        '<div class="memory"><span class="bar" aria-hidden="true">'
        f'<span class="resident" style="width:{width(summary.resident_bytes)}"></span>'
        f'<span class="ring-pages" style="width:{width(summary.ring_bytes)}"></span>'
        f'<span class="floor" style="left:{width(summary.floor_bytes)}"></span></span>\n'
        f'<ul class="legend" aria-label="Device memory for weights">{items}</ul></div>\n'
    )


def _class(name: str, given: bool) -> str:
    return f' class="{name}"' if given else ""
