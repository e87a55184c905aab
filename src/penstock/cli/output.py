"""What a command says: one frozen dataclass, printed as tables or as one JSON document."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from rich.console import Console

# Where the output is no terminal there is no width to respect; tables should not be folded at 80 columns.
_PLAIN_WIDTH = 160
_COLOURS = {"pass": "green", "warn": "yellow", "skip": "yellow", "fail": "bold red"}

Report = TypeVar("Report")
Decorated = TypeVar("Decorated", bound=Callable[..., Any])


def json_option(command: Decorated) -> Decorated:
    option = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout; all else on stderr.")
    return option(command)


def console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    # Names of weights are no markup, and numbers need no colours.
    return Console(
        file=stream, width=None if stream.isatty() else _PLAIN_WIDTH, markup=False, highlight=False, emoji=False
    )


def emit(report: Report, as_json: bool, show: Callable[[Console, Report], None]) -> None:
    if as_json:
        print_json(to_json(report))
    else:
        show(console(), report)


def to_json(report: Any) -> dict[str, Any]:
    return dataclasses.asdict(report)


def print_json(document: dict[str, Any]) -> None:
    # allow_nan=False: NaN and Infinity are no JSON, and readers refuse them.
    print(json.dumps(document, default=_plain, allow_nan=False), flush=True)


def _plain(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no place in a report: {value!r:.80}")


@contextmanager
def only_json_on_stdout(as_json: bool) -> Iterator[None]:
    """What anybody prints meanwhile, children and native code included, goes to stderr."""
    if not as_json:
        yield
        return
    stdout = sys.stdout
    stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    try:
        yield
    finally:
        sys.stdout = stdout
        os.dup2(kept, 1)
        os.close(kept)


def table(to: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Columns named with a leading '>' are numbers, and stand to the right. A status has its colour."""
    from rich.table import Table
    from rich.text import Text

    made = Table(title=title or None, title_justify="left", title_style="bold", header_style="bold", box=None)
    for column in columns:
        made.add_column(column.lstrip(">"), justify="right" if column.startswith(">") else "left", overflow="fold")
    for row in rows:
        made.add_row(*(Text(str(cell), style=_COLOURS.get(str(cell), "")) for cell in row))
    to.print(made)


def facts(to: Console, title: str, pairs: Sequence[tuple[str, object]]) -> None:
    """Names and values, one to a line."""
    from rich.table import Table
    from rich.text import Text

    made = Table(title=title or None, title_justify="left", title_style="bold", show_header=False, box=None)
    made.add_column(style="dim", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in pairs:
        made.add_row(name, Text(str(value)))
    to.print(made)
