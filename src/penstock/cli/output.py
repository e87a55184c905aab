"""What a command says: one frozen dataclass, printed as tables or as one JSON document."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from penstock.errors import OutputPathError
from penstock.printable import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

# Without a terminal there is no width to respect, and tables should not be folded at 80 columns.
_PLAIN_WIDTH = 160
_SURROGATE = re.compile("[\ud800-\udfff]")
_COLOURS = {"pass": "green", "warn": "yellow", "skip": "yellow", "fail": "bold red"}

Report = TypeVar("Report")
Decorated = TypeVar("Decorated", bound=Callable[..., Any])


def json_option(command: Decorated) -> Decorated:
    option = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout; all else on stderr.")
    return option(command)


def console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    class PlainConsole(Console):
        def on_broken_pipe(self) -> None:
            raise  # rich would exit with code 1

    stream = sys.stderr if stderr else sys.stdout
    # Names of weights are not markup, and numbers need no colours.
    return PlainConsole(
        file=stream, width=None if stream.isatty() else _PLAIN_WIDTH, markup=False, highlight=False, emoji=False
    )


def emit(report: Report, as_json: bool, show: Callable[[Console, Report], None]) -> None:
    if as_json:
        print_json(to_json(report))
    else:
        with _writing_to_stdout():
            show(console(), report)


def to_json(report: Any) -> dict[str, Any]:
    return dataclasses.asdict(report)


def print_json(document: dict[str, Any]) -> None:
    # NaN and Infinity are not JSON, and readers refuse them. dumps() escapes all but ASCII, and DEL is ASCII.
    text = json.dumps(_plain(document), allow_nan=False).replace("\x7f", "\\u007f")
    with _writing_to_stdout():
        print(text, flush=True)


def _plain(value: Any) -> Any:
    """Paths become text. Half surrogate pairs (bytes of a path that is not UTF-8) are escaped: readers refuse them."""
    if isinstance(value, (str, Path)):
        return _SURROGATE.sub(lambda match: printable(match.group()), str(value))
    if isinstance(value, dict):
        return {_plain(name): _plain(held) for name, held in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(held) for held in value]
    if value is None or isinstance(value, (bool, int, float)):
        return value
    raise TypeError(f"{type(value).__name__} has no place in a report: {value!r:.80}")


def flush_stdout() -> None:
    with _writing_to_stdout():
        sys.stdout.flush()


def write_stdout(text: str) -> None:
    """Writes text that comes in pieces, and flushes each piece."""
    with _writing_to_stdout():
        sys.stdout.write(text)
        sys.stdout.flush()


@contextmanager
def _writing_to_stdout() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise  # nobody reads: that is no failure to report
    except OSError as error:
        raise OutputPathError(f"stdout cannot be written to: {error}") from error


@contextmanager
def only_json_on_stdout(as_json: bool) -> Iterator[None]:
    """Sends everything that is printed meanwhile to stderr, including by children and native code."""
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
    """A leading '>' in a column's name marks numbers, which are aligned right. A status has its colour."""
    from rich.table import Table
    from rich.text import Text

    made = Table(title=_title(title), title_justify="left", header_style="bold", box=None)
    for column in columns:
        made.add_column(column.lstrip(">"), justify="right" if column.startswith(">") else "left", overflow="fold")
    for row in rows:
        made.add_row(*(Text(printable(str(cell)), style=_COLOURS.get(str(cell), "")) for cell in row))
    to.print(made)


def facts(to: Console, title: str, pairs: Sequence[tuple[str, object]]) -> None:
    """Names and values, one to a line."""
    from rich.table import Table
    from rich.text import Text

    made = Table(title=_title(title), title_justify="left", show_header=False, box=None)
    made.add_column(style="dim", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in pairs:
        made.add_row(Text(printable(name)), Text(printable(str(value))))
    to.print(made)


def line(to: Console, text: str, style: str = "") -> None:
    from rich.text import Text

    to.print(Text(printable_lines(text), style=style))


def printable_lines(text: str) -> str:
    """For messages of ours, which may have several lines; printable() alone is for names."""
    return "\n".join(map(printable, text.split("\n")))


def _title(text: str) -> Text | None:
    from rich.text import Text

    return Text(printable_lines(text), style="bold") if text else None
