"""The plan as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.cli.empty_gpu import GpuRow
from penstock.cli.output import facts, line, table
from penstock.cli.plan_report import PlanReport
from penstock.cli.units import short_bytes, short_rate, short_time
from penstock.printable import printable

if TYPE_CHECKING:
    from rich.console import Console


def show_plan(to: Console, report: PlanReport) -> None:
    part = report.budget_bytes / report.weight_bytes if report.weight_bytes else 0.0
    link = "not given" if report.link_bytes_per_s is None else short_rate(report.link_bytes_per_s)
    facts(
        to,
        printable(str(report.path)),
        [
            ("budget", f"{report.budget_bytes} bytes ({short_bytes(report.budget_bytes)}, {report.budget_source})"),
            *(
                [("", f"cut from {short_bytes(report.asked_bytes)}: the weights take no more")]
                if report.asked_bytes > report.budget_bytes
                else []
            ),
            ("weights", f"{short_bytes(report.weight_bytes)}; the budget is {part:.1%} of them"),
            ("weights file", printable(report.weights_file)),
            ("floor", f"{report.floor_bytes} bytes ({short_bytes(report.floor_bytes)})"),
            ("all resident", f"{report.full_bytes} bytes ({short_bytes(report.full_bytes)})"),
            (
                "device memory",
                f"{short_bytes(report.device_bytes)}: {short_bytes(report.resident_bytes)} resident, "
                f"{short_bytes(report.ring_bytes)} for what streams, in pages of {short_bytes(report.page_bytes)}",
            ),
            ("link", f"{link}, step times {report.step_times}"),
            *([("GPU", _gpu_text(report.gpu))] if report.gpu is not None else []),
        ],
    )
    table(
        to,
        "\nper run",
        ("method", ">streamed", ">copies", ">predicted", ">bound", ">ratio", ">all resident"),
        [
            (
                one.method,
                short_bytes(one.bytes_streamed),
                one.copies,
                _time(one.predicted_s),
                _time(one.bound_s),
                f"{one.predicted_s / one.bound_s:.3f}" if one.predicted_s and one.bound_s else "-",
                "-" if report.step_times == "unknown" else short_time(one.resident_s),
            )
            for one in report.methods
        ],
    )
    table(
        to,
        "\nplacements",
        ("weight", "where", ">resident", ">streamed", ">in place"),
        [
            (
                row.name,
                row.kind,
                short_bytes(row.resident_bytes),
                short_bytes(row.streamed_bytes),
                short_bytes(row.in_place_bytes),
            )
            for row in report.placements
        ],
    )
    if report.curve:
        table(
            to,
            "\nby budget, one run of each method shown",
            (">budget", ">of weights", ">streamed", ">predicted", ">bound", ">runs/s"),
            [
                (
                    short_bytes(row.budget_bytes),
                    f"{row.budget_bytes / report.weight_bytes:.1%}",
                    short_bytes(row.streamed_bytes),
                    short_time(row.predicted_s),
                    short_time(row.bound_s),
                    "-" if row.runs_per_s is None else f"{row.runs_per_s:.1f}",
                )
                for row in report.curve
            ],
        )
    for note in report.notes:
        line(to, f"\nnote: {printable(note)}", style="yellow")


def _gpu_text(gpu: GpuRow) -> str:
    return (
        f"{short_bytes(gpu.memory_bytes)} - activations {short_bytes(gpu.activation_bytes)} - state "
        f"{short_bytes(gpu.state_bytes)} - reserve {short_bytes(gpu.reserve_bytes)} leaves "
        f"{short_bytes(gpu.left_bytes)} for weights: {'enough' if gpu.enough else 'NOT enough'}"
    )


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else short_time(seconds)
