"""The `penstock` command: finds the subcommand, and turns what went wrong into a message and an exit code."""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Sequence

import click

from penstock.cli.bench import bench
from penstock.cli.cache import cache
from penstock.cli.chat import chat
from penstock.cli.doctor import doctor
from penstock.cli.estimate import estimate
from penstock.cli.exit_codes import INTERNAL, NOBODY_READS, OK, exit_code
from penstock.cli.export import export
from penstock.cli.generate import generate
from penstock.cli.inspect import inspect
from penstock.cli.interrupt import interruptible
from penstock.cli.output import flush_stdout, print_json, printable_lines
from penstock.cli.pack import pack
from penstock.cli.plan import plan
from penstock.cli.run import run
from penstock.cli.streams import drop_stdout, nobody_reads, standard_streams
from penstock.cli.unpack import unpack
from penstock.cli.verify import verify
from penstock.errors import PenstockError
from penstock.version import VERSION

TRACEBACK_VARIABLE = "PENSTOCK_TRACEBACK"
_HINT = f"{TRACEBACK_VARIABLE}=1 shows where"
_LONGEST_LINE = 500


@click.group(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Every command has --help with examples, and --json. Exit codes: docs/cli.md.",
)
@click.version_option(VERSION, prog_name="penstock")
def penstock() -> None:
    """Run a PyTorch model whose weights do not fit in GPU memory inside a byte budget."""


for command in (doctor, estimate, generate, chat, export, pack, unpack, inspect, plan, run, verify, cache, bench):
    penstock.add_command(command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    with standard_streams():
        try:
            with interruptible():
                found = _invoked(given)
            flush_stdout()
        except BaseException as error:  # whatever it is, it ends as one message and one exit code
            return _ended(error, given)
    return found


def _invoked(given: list[str]) -> int:
    for argument in given:
        if "\0" in argument:
            raise click.UsageError(f"{argument!r} holds a NUL character, which no option and no file name can")
    if "_PENSTOCK_COMPLETE" in os.environ:
        penstock.main(given, prog_name="penstock")  # prints completions for a shell, and exits
    # Not click's main(): it turns interrupts, closed pipes and ends of files into exceptions of its own.
    try:
        with penstock.make_context("penstock", given) as context:
            found = penstock.invoke(context)
    except click.exceptions.Exit as told:  # --help and --version
        return told.exit_code
    return found if isinstance(found, int) else OK


def _ended(error: BaseException, given: Sequence[str]) -> int:
    if isinstance(error, BrokenPipeError) and nobody_reads():
        drop_stdout()
        return NOBODY_READS
    code = exit_code(error)
    try:
        if os.environ.get(TRACEBACK_VARIABLE):
            _say("".join(traceback.format_exception(error)).rstrip())
        _say(_line(error, code))
        if _wants_json(given):
            print_json({"error": {"class": type(error).__name__, "message": _message(error), "exit_code": code}})
        # What is still buffered may be what could not be written.
        sys.stdout.flush()
    except OSError:  # there is nowhere left to report it; the exit code still does
        drop_stdout()
    return code


def _say(text: str) -> None:
    print(printable_lines(text), file=sys.stderr, flush=True)


def _line(error: BaseException, code: int) -> str:
    if isinstance(error, click.ClickException):
        shown = io.StringIO()
        error.show(shown)  # with the command's usage, and where help is
        return shown.getvalue().rstrip()
    if isinstance(error, KeyboardInterrupt):
        return "penstock: interrupted"
    if isinstance(error, PenstockError) and code != INTERNAL:
        return f"penstock: {type(error).__name__}: {error}"
    message = " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST_LINE]
    if code == INTERNAL:
        return f"penstock: internal error: {message} (a fault of Penstock; {_HINT})"
    return f"penstock: {message} ({_HINT})"


def _message(error: BaseException) -> str:
    if isinstance(error, click.ClickException):
        return error.format_message()
    return "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)


def _wants_json(given: Sequence[str]) -> bool:
    """With --json a failure is a document, too, even if the command line was not understood."""
    options = given[: given.index("--")] if "--" in given else given
    return "--json" in options


if __name__ == "__main__":
    sys.exit(main())
