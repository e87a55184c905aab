"""`penstock doctor`: whether this machine has what is needed, and what to do about what it lacks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.cli.exit_codes import FAILED, OK
from penstock.cli.output import console, emit, json_option, table

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.cli.doctor_checks import Line


@dataclass(frozen=True)
class DoctorReport:
    lines: tuple[Line, ...]
    ok: bool


@click.command(short_help="Check this machine.")
@click.option(
    "--folder",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default=Path(),
    help="The folder that weights files will be in: its disk and file system are checked. Default: the current one.",
)
@json_option
def doctor(folder: Path, as_json: bool) -> int:
    """Check this machine: Python, torch, compiler, driver, GPU, link, memory, disk.

    Each line passes, warns or fails, with the remedy. A missing GPU is a warning: programs for the CPU work. If any
    line fails, the exit code is 1.

    \b
    penstock doctor
    penstock doctor --folder /data --json
    """
    from penstock.cli.doctor_checks import Doctor

    screen = console(stderr=True)
    with screen.status("looking around"):  # shows on a terminal only
        lines = tuple(Doctor(folder.resolve()).lines())
    report = DoctorReport(lines, ok=all(line.status != "fail" for line in lines))
    emit(report, as_json, _show)
    return OK if report.ok else FAILED


def _show(to: Console, report: DoctorReport) -> None:
    rows: list[tuple[str, str, str]] = []
    for line in report.lines:
        rows.append((line.status, line.name, line.finding))
        if line.remedy is not None:
            rows.append(("", "", f"-> {line.remedy}"))
    table(to, "", ("", "", ""), rows)
