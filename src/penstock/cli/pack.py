"""`penstock pack`: the same weights in a smaller file, so that fewer bytes cross the link."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.cli.output import emit, facts, json_option, only_json_on_stdout
from penstock.cli.units import short_bytes, short_time
from penstock.cli.whole_file import refuse_unwritable
from penstock.printable import printable

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.weights.index import WeightsIndex


@dataclass(frozen=True)
class PackReport:
    """The report of `penstock pack` and of `penstock unpack`."""

    source_path: Path
    path: Path
    source_bytes: int
    file_bytes: int
    # Sets of bytes in the file with packed entries, and how many of them are packed.
    stored_count: int
    packed_count: int
    # Bytes with packing over bytes without, of everything that is stored.
    ratio: float
    seconds: float


@click.command(short_help="Pack a weights file, without loss.")
@click.argument("weights", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The packed .ptd.")
@click.option(
    "--program",
    type=click.Path(path_type=Path),
    help="The .pt2 or .pte of these weights: what it gathers from stays unpacked. For a .pte, plans are written, too.",
)
@click.option("--overwrite", is_flag=True, help="Replace an existing file.")
@json_option
def pack(weights: Path, output: Path, program: Path | None, overwrite: bool, as_json: bool) -> None:
    """Pack WEIGHTS (.ptd) into OUTPUT: the same values to the bit, bfloat16 in 68% of the bytes, others in 78 to 91%.

    States, other dtypes, small weights, and weights that would not shrink by a twentieth stay as they are.

    \b
    penstock pack model.ptd -o packed.ptd
    penstock pack model.ptd -o packed.ptd --program model.pt2
    penstock pack raw.ptd -o packed.ptd --program model.pte
    """
    from tqdm import tqdm

    import penstock

    source = checked(weights, output, overwrite)
    began_s = time.perf_counter()
    total_bytes = sum(entry.raw_bytes for entry in source.unique_entries)
    with (
        only_json_on_stdout(as_json),
        # disable=None: silent unless standard error is a terminal.
        tqdm(total=total_bytes, desc="packing", unit="B", unit_scale=True, disable=None) as bar,
    ):
        packed = penstock.pack(weights, output, program=program, on_bytes=bar.update, overwrite=overwrite)
    emit(report(source, packed, packed, time.perf_counter() - began_s), as_json, show)


def checked(weights: Path, output: Path, overwrite: bool) -> WeightsIndex:
    """The index of `weights`. Refuses an output that cannot be written before any weight is read."""
    from penstock.errors import OutputExistsError
    from penstock.weights.index import read_index

    for path, hint in ((weights, "WEIGHTS"), (output, "--output")):
        if path.suffix != ".ptd":
            raise click.BadParameter(f"{path} must end in .ptd", param_hint=hint)
    source = read_index(weights)
    refuse_unwritable(output)
    if output.exists() and not overwrite:
        raise OutputExistsError(f"{output} exists; pass --overwrite to replace")
    return source


def report(source: WeightsIndex, written: WeightsIndex, packed: WeightsIndex, seconds: float) -> PackReport:
    """`packed` is whichever of the two indexes has packed entries."""
    entries = packed.unique_entries
    raw_bytes = sum(entry.raw_bytes for entry in entries)
    return PackReport(
        source_path=source.path,
        path=written.path,
        source_bytes=source.file_bytes,
        file_bytes=written.file_bytes,
        stored_count=len(entries),
        packed_count=sum(entry.packing is not None for entry in entries),
        ratio=sum(entry.length_bytes for entry in entries) / raw_bytes if raw_bytes else 1.0,
        seconds=seconds,
    )


def show(to: Console, report: PackReport, done: str = "packed") -> None:
    facts(
        to,
        printable(str(report.path)),
        [
            ("file", f"{short_bytes(report.file_bytes)}, from {short_bytes(report.source_bytes)}"),
            (done, f"{report.packed_count} of {report.stored_count}, ratio {report.ratio:.3f} in all"),
            ("time", short_time(report.seconds)),
        ],
    )
