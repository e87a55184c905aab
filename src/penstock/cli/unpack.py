"""`penstock unpack`: the weights file that a packed one was made from."""

from __future__ import annotations

import time
from pathlib import Path

import click

from penstock.cli.output import emit, json_option, only_json_on_stdout
from penstock.cli.pack import checked, report, show


@click.command(short_help="Unpack a packed weights file.")
@click.argument("weights", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The .ptd without packing.")
@click.option("--overwrite", is_flag=True, help="Replace an existing file.")
@json_option
def unpack(weights: Path, output: Path, overwrite: bool, as_json: bool) -> None:
    """Unpack WEIGHTS (.ptd) into OUTPUT: the file that was packed, byte for byte.

    \b
    penstock unpack packed.ptd -o model.ptd
    """
    from tqdm import tqdm

    import penstock

    source = checked(weights, output, overwrite)
    began_s = time.perf_counter()
    total_bytes = sum(entry.raw_bytes for entry in source.unique_entries)
    with (
        only_json_on_stdout(as_json),
        # disable=None: silent unless standard error is a terminal.
        tqdm(total=total_bytes, desc="unpacking", unit="B", unit_scale=True, disable=None) as bar,
    ):
        written = penstock.unpack(weights, output, on_bytes=bar.update, overwrite=overwrite)
    emit(
        report(source, written, source, time.perf_counter() - began_s),
        as_json,
        lambda to, report: show(to, report, "unpacked"),
    )
