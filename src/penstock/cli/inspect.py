"""`penstock inspect`: what is in a file. Nothing of it is loaded or run, and torch is not needed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.cli.output import emit, facts, json_option, table
from penstock.cli.units import short_bytes
from penstock.printable import printable
from penstock.regular_file import open_regular

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.cli.program_report import ProgramReport, WeightsReport

SUFFIXES = (".pt2", ".pte", ".ptd")
_ROWS = 10


@click.command(short_help="Show what is in a file.")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--top", type=click.IntRange(min=1), help="How many of the largest to show in each table. Default: 10.")
@click.option("--schedule", "whole", is_flag=True, help="Show every step and weight, not only the largest.")
@json_option
def inspect(file: Path, top: int | None, whole: bool, as_json: bool) -> None:
    """Show what is in FILE (.pt2, .pte or .ptd): methods, weights, schedule, the floor and what sets it.

    The JSON always holds all of it.

    \b
    penstock inspect model.pt2
    penstock inspect model.pt2 --schedule
    penstock inspect model.ptd --json | jq '.entries[].name'
    """
    if whole and top is not None:
        raise click.UsageError("--schedule shows every step and weight, so --top has no effect; give one of them")
    rows = None if whole else top or _ROWS
    if file.suffix not in SUFFIXES:
        raise click.BadParameter(f"{file} must end in {', '.join(SUFFIXES)}", param_hint="FILE")
    if file.suffix == ".ptd":
        from penstock.cli.program_report import weights_report
        from penstock.errors import WeightsFileError
        from penstock.weights.index import read_index

        open_regular(file, WeightsFileError).close()
        try:
            index = read_index(file)
        except OSError as error:
            raise WeightsFileError(f"the weights file {file} cannot be read: {error}") from error
        emit(weights_report(index), as_json, lambda to, report: _show_weights(to, report, rows))
    else:
        from penstock.cli.program_report import program_report
        from penstock.cli.subject import read_subject

        report = program_report(read_subject(file))
        emit(report, as_json, lambda to, report: _show_program(to, report, rows))


def _show_program(to: Console, report: ProgramReport, top: int | None) -> None:
    floor = report.floor
    experts = sum(weight.nbytes for weight in report.weights if weight.experts)
    splittable = sum(weight.nbytes for weight in report.weights if weight.linear)
    in_place = f'{floor.streamed_bytes} bytes with placement="stream", where nothing is read in place in host memory'
    built = ", ".join(f"{name} {version}" for name, version in report.built_with.items())
    facts(
        to,
        printable(str(report.path)),
        [
            ("file", f"{short_bytes(report.file_bytes)}, code for {report.device}, built with {built}"),
            ("weights", f"{report.weight_count}, {short_bytes(report.weight_bytes)}"),
            *([("", f"{short_bytes(splittable)} may lie on both sides of the link")] if splittable else []),
            *([("", f"{short_bytes(experts)} are experts, of which some may have slots")] if experts else []),
            ("state", short_bytes(report.state_bytes)),
            ("weights file", printable(report.weights_file)),
            ("identity", report.identity),
            ("baked budget", "none" if report.baked_budget_bytes is None else short_bytes(report.baked_budget_bytes)),
            ("all resident", f"{short_bytes(report.full_bytes)} of device memory"),
            ("floor", f"{floor.placed_bytes} bytes in pages of {floor.page_bytes} ({short_bytes(floor.placed_bytes)})"),
            ("", f"{floor.computed_bytes} bytes before pages; recorded at export: {floor.recorded_bytes}"),
            *([("", in_place)] if floor.streamed_bytes != floor.placed_bytes else []),
            ("set by", floor.reason),
            *([("plans", f"{len(report.plan_bytes)}, made at export")] if report.plan_bytes else []),
            *([("not read", ", ".join(report.unused))] if report.unused else []),
            *[("experts", f"{printable(name)} has no slots: {why}") for name, why in report.without_slots.items()],
        ],
    )
    if floor.pair:
        parts = [(part.name, "read by the two steps", short_bytes(part.nbytes)) for part in floor.pair]
        if floor.next_copy is not None:
            parts.append((floor.next_copy.name, "next copy", short_bytes(floor.next_copy.nbytes)))
        if floor.pinned_bytes:
            parts.append(("(control flow)", "held all the time", short_bytes(floor.pinned_bytes)))
        table(to, "\nwhat sets the floor", ("weight", "why", ">bytes"), parts)
    for method in report.methods:
        bound = "without a bound" if method.activation_bytes is None else short_bytes(method.activation_bytes)
        facts(
            to,
            f"\nmethod {printable(method.name)}",
            [
                ("inputs", ", ".join(method.inputs)),
                ("outputs", ", ".join(method.outputs)),
                *([("state", ", ".join(method.states))] if method.states else []),
                ("schedule", f"{len(method.steps)} steps, {method.accesses} accesses"),
                ("weights read", short_bytes(method.weight_bytes)),
                ("activations", bound),
                *[("experts", f"{printable(name)} is read whole: {why}") for name, why in method.whole_experts.items()],
            ],
        )
        steps = method.steps if top is None else method.largest_steps(top)
        rows = [(step.index, step.kernel, ", ".join(step.weights), short_bytes(step.nbytes)) for step in steps]
        table(to, _title("steps", len(rows), len(method.steps)), (">step", "kernel", "weights", ">bytes"), rows)
    weights = report.weights if top is None else sorted(report.weights, key=lambda w: -w.nbytes)[:top]
    table(
        to,
        _title("\nweights", len(weights), report.weight_count),
        ("weight", "dtype", "shape", ">accesses", ">bytes"),
        [(_names(w.name, w.aliases), w.dtype, _shape(w.shape), w.accesses, short_bytes(w.nbytes)) for w in weights],
    )


def _show_weights(to: Console, report: WeightsReport, top: int | None) -> None:
    facts(
        to,
        printable(str(report.path)),
        [
            ("file", short_bytes(report.file_bytes)),
            ("stored", f"{report.stored_count}, {short_bytes(report.stored_bytes)}; {len(report.entries)} names"),
            *([("packed", _packed(report))] if report.packed_count else []),
            ("identity", report.identity or "none: ExecuTorch wrote it"),
        ],
    )
    entries = report.entries if top is None else sorted(report.entries, key=lambda e: -e.nbytes)[:top]
    rows = [
        (
            e.name if e.alias_of is None else f"{e.name} = {e.alias_of}",
            e.kind,
            e.dtype,
            _shape(e.shape),
            short_bytes(e.nbytes),
            *([f"{e.ratio:.3f}"] if report.packed_count else []),
            e.checksum or "none",
        )
        for e in entries
    ]
    table(
        to,
        _title("\nentries", len(rows), len(report.entries)),
        ("name", "kind", "dtype", "shape", ">bytes", *([">ratio"] if report.packed_count else []), "xxh3_64"),
        rows,
    )


def _packed(report: WeightsReport) -> str:
    raw = short_bytes(report.raw_bytes)
    return f"{report.packed_count} of {report.stored_count}; {raw} without packing, ratio {report.ratio:.3f} in all"


def _title(what: str, shown: int, there: int) -> str:
    return what if shown == there else f"{what}: the {shown} largest of {there}"


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _names(name: str, aliases: Sequence[str]) -> str:
    return " = ".join((name, *aliases))
