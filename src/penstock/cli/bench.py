"""`penstock bench`: runs the benchmark suite, if the source tree is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import click

from penstock.cli.exit_codes import OK, USAGE
from penstock.cli.output import json_option, print_json


@click.command(short_help="Run the benchmark suite.", context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@json_option
def bench(arguments: tuple[str, ...], as_json: bool) -> None:
    """Run the benchmark suite (python -m bench.suite) with ARGUMENTS as they are.

    Needs the source tree: an installed wheel has no bench/. --json prints the suite's result.json. Its own help:
    penstock bench -- --help

    \b
    penstock bench --out results --device cpu --small
    penstock bench --out results --layers 16 --json
    """
    from penstock.errors import PenstockError

    root = source_root()
    if root is None:
        raise PenstockError(
            f"the benchmark suite is not part of an installation ({Path(__file__).parents[1]}); get the source tree, "
            "and run `pip install -e .` in it"
        )
    result = _result_path(arguments)
    if as_json and result is None:
        raise click.UsageError("--json prints the suite's result.json, which needs --out FOLDER")
    path = os.pathsep.join([str(root / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    # Runs in the tree, so that its processes look for their modules there, and there first.
    code = subprocess.run(
        [sys.executable, "-m", "bench.suite", *_from_here(arguments)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": path},
        stdout=sys.stderr.fileno() if as_json else None,
        check=False,
    ).returncode
    if code == USAGE:
        raise click.UsageError("the suite did not understand its arguments: penstock bench -- --help")
    if code != OK:
        raise PenstockError(f"the suite ended with code {code}; what it said is above")
    if as_json and result is not None:
        try:
            document = json.loads(result.read_bytes())
        except (OSError, ValueError) as error:
            raise PenstockError(f"the suite left no result in {result}: {error}") from error
        print_json(document)


def source_root() -> Path | None:
    root = Path(__file__).resolve().parents[3]
    return root if (root / "bench/suite/__main__.py").is_file() else None


def _from_here(arguments: tuple[str, ...]) -> list[str]:
    """Makes the folder of --out absolute, in either spelling; leaves all other arguments as they are."""
    made: list[str] = []
    for argument in arguments:
        if made and made[-1] == "--out":
            made.append(str(Path(argument).absolute()))
        elif argument.startswith("--out="):
            made.append(f"--out={Path(argument.removeprefix('--out=')).absolute()}")
        else:
            made.append(argument)
    return made


def _result_path(arguments: tuple[str, ...]) -> Path | None:
    """Where the suite will put result.json."""
    given = _from_here(arguments)
    for number, argument in enumerate(given):
        if argument == "--out" and number + 1 < len(given):
            return Path(given[number + 1]) / "result.json"
        if argument.startswith("--out="):
            return Path(argument.removeprefix("--out=")) / "result.json"
    return None
