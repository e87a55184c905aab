"""The `penstock` command: finds the subcommand, and turns what went wrong into a message and an exit code."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence

import click

from penstock.cli.bench import bench
from penstock.cli.doctor import doctor
from penstock.cli.exit_codes import OK, USAGE, exit_code
from penstock.cli.export import export
from penstock.cli.inspect import inspect
from penstock.cli.interrupt import interruptible
from penstock.cli.output import print_json
from penstock.cli.plan import plan
from penstock.cli.run import run
from penstock.cli.verify import verify
from penstock.errors import PenstockError
from penstock.version import VERSION


@click.group(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Every command has --help with examples, and --json. Exit codes: docs/cli.md.",
)
@click.version_option(VERSION, prog_name="penstock")
def penstock() -> None:
    """Runs a PyTorch model whose weights do not fit in GPU memory inside a byte budget."""


for command in (doctor, export, inspect, plan, run, verify, bench):
    penstock.add_command(command)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with interruptible():
            found = penstock.main(given, prog_name="penstock", standalone_mode=False)
    except click.ClickException as error:
        error.show(sys.stderr)
        return _told(given, error, error.format_message(), USAGE)
    except PenstockError as error:
        print(f"penstock: {type(error).__name__}: {error}", file=sys.stderr)
        return _told(given, error, str(error), exit_code(error))
    except KeyboardInterrupt as interrupt:
        print("penstock: interrupted", file=sys.stderr)
        return _told(given, interrupt, "interrupted", exit_code(interrupt))
    except Exception as error:  # a mistake of ours, or of the user's own code: either way the traceback tells where
        traceback.print_exc()
        return _told(given, error, str(error), exit_code(error))
    return found if isinstance(found, int) else OK


def _told(given: Sequence[str], error: BaseException, message: str, code: int) -> int:
    """With --json a failure is a document, too."""
    if "--json" in given:
        print_json({"error": {"class": type(error).__name__, "message": message, "exit_code": code}})
    return code


if __name__ == "__main__":
    sys.exit(main())
