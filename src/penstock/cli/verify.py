"""`penstock verify`: whether the files are what was written, and the program does what it recorded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.cli.exit_codes import FAILED, OK
from penstock.cli.output import console, emit, json_option, line, only_json_on_stdout, table
from penstock.printable import printable

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.cli.verify_checks import Check


@dataclass(frozen=True)
class VerifyReport:
    path: Path
    weights_path: Path
    # Where the inputs of the runs came from: a file, or made from the recorded shapes with a seed.
    inputs: str
    checks: tuple[Check, ...]
    ok: bool


@click.command(short_help="Check a program and its weights.")
@click.argument("program", type=click.Path(path_type=Path))
@click.option("--weights", type=click.Path(path_type=Path), help="Default: the .ptd beside PROGRAM.")
@click.option("--inputs", type=click.Path(path_type=Path), help=".pt, .npz or .safetensors, for --method.")
@click.option("--method", help="The method that --inputs are for: only this one is run.")
@click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    help="Seed of the random inputs that are used without --inputs. Default: 0.",
)
@click.option("--no-run", is_flag=True, help="Leave out what loads and runs the program.")
@json_option
def verify(
    program: Path,
    weights: Path | None,
    inputs: Path | None,
    method: str | None,
    seed: int | None,
    no_run: bool,
    as_json: bool,
) -> int:
    """Check PROGRAM (.pt2): checksums, schedule against the generated code, floor, and poisoned runs at the floor.

    The runs are compared to the bit with runs in which every weight is resident. Without --inputs, inputs are made
    from the recorded shapes: random numbers from a seed, whole numbers counting up from 0. If any check fails, the exit
    code is 1.

    \b
    penstock verify model.pt2
    penstock verify model.pt2 --inputs inputs.pt
    penstock verify model.pt2 --no-run --json
    """
    from penstock.cli.verify_checks import Verifier

    if program.suffix != ".pt2":
        raise click.BadParameter(f"{program} must end in .pt2", param_hint="PROGRAM")
    if method is not None and inputs is None:
        raise click.UsageError("--method names the method that --inputs are for, and there are no --inputs")
    if seed is not None and inputs is not None:
        raise click.UsageError("--seed is for inputs that are made up, and --inputs gives them; give one")
    if no_run and (inputs is not None or seed is not None):
        raise click.UsageError(f"--no-run runs nothing, so {'--inputs' if seed is None else '--seed'} has no effect")
    weights_path = program.with_suffix(".ptd") if weights is None else weights
    with only_json_on_stdout(as_json), console(stderr=True).status("verifying"):
        verifier = Verifier(program, weights_path, inputs, method, seed or 0)
        checks = tuple(verifier.checks(run=not no_run))
    ok = all(check.status != "fail" for check in checks)
    used = "none: nothing was run" if no_run else verifier.inputs_text
    report = VerifyReport(program, weights_path, used, checks, ok)
    emit(report, as_json, _show)
    return OK if ok else FAILED


def _show(to: Console, report: VerifyReport) -> None:
    rows: list[tuple[str, str, str]] = []
    for check in report.checks:
        first, *others = check.finding.split("\n")  # a message may have several lines
        rows += [(check.status, check.name, first), *(("", "", other) for other in others)]
    table(to, printable(str(report.path)), ("", "", ""), rows)
    line(to, f"inputs: {printable(report.inputs)}")
