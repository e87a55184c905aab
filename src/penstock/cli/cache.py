"""`penstock cache`: lists and clears what `penstock.from_pretrained` compiled and wrote."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from penstock.cli.exit_codes import FAILED, OK
from penstock.cli.output import emit, json_option, line, printable_lines, table
from penstock.cli.units import short_bytes
from penstock.printable import printable

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.store.store import Store

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


@dataclass(frozen=True)
class CachedThing:
    kind: str
    name: str
    # As the key names it; None if the key is unreadable or names no model.
    model: str | None
    key: Mapping[str, Any] | None
    nbytes: int
    created_s: float
    used_s: float


@dataclass(frozen=True)
class CacheReport:
    folder: Path
    nbytes: int
    entries: tuple[CachedThing, ...]


@dataclass(frozen=True)
class ClearReport:
    folder: Path
    # False: the answer to the question was no.
    cleared: bool
    freed_bytes: int
    # A sentence for each entry that stayed.
    kept: tuple[str, ...]


def _cache_dir_option(command: Decorated) -> Decorated:
    told = "Default: $PENSTOCK_CACHE_DIR, $XDG_CACHE_HOME/penstock or ~/.cache/penstock."
    return click.option("--cache-dir", type=click.Path(path_type=Path), metavar="DIR", help=told)(command)


@click.group(short_help="List or clear what was compiled earlier.")
def cache() -> None:
    """List or clear the programs and weights files that penstock.from_pretrained keeps.

    Both subcommands take --cache-dir and --json.

    \b
    penstock cache list
    penstock cache clear --weights
    """


@cache.command("list", short_help="List what is in the cache.")
@_cache_dir_option
@json_option
def list_cache(cache_dir: Path | None, as_json: bool) -> int:
    """List what is in the cache: kind, model, size, and when it was last used.

    \b
    penstock cache list
    penstock cache list --cache-dir /data/penstock --json
    """
    store = _store(cache_dir)
    found = store.list()
    entries = tuple(
        CachedThing(entry.kind, entry.name, entry.model, entry.key, entry.nbytes, entry.created_s, entry.used_s)
        for entry in found
    )
    emit(CacheReport(store.folder, sum(entry.nbytes for entry in entries), entries), as_json, _show_list)
    return OK


@cache.command("clear", short_help="Remove what is in the cache.")
@_cache_dir_option
@click.option("--programs", is_flag=True, help="Compiled programs only.")
@click.option("--weights", is_flag=True, help="Weights files only.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def clear_cache(cache_dir: Path | None, programs: bool, weights: bool, yes: bool, as_json: bool) -> int:
    """Remove what is in the cache, and what killed processes left there. What a process uses or makes stays.

    Asks first, and ends with exit code 1 if the answer is no.

    \b
    penstock cache clear
    penstock cache clear --weights --yes
    """
    if programs and weights:
        raise click.UsageError("--programs and --weights each leave out the other; give one, or neither to clear both")
    kind = "programs" if programs else "weights" if weights else None
    store = _store(cache_dir)
    found = [entry for entry in store.list() if kind in (None, entry.kind)]
    if found and not yes:
        nbytes = sum(entry.nbytes for entry in found)
        count = "1 entry" if len(found) == 1 else f"{len(found)} entries"
        if not _confirmed(f"Remove {count} ({short_bytes(nbytes)}) from {printable(str(store.folder))}?"):
            emit(ClearReport(store.folder, False, 0, ()), as_json, _show_clear)
            return FAILED
    kept: list[str] = []
    freed_bytes = store.clear(kind, kept.append)
    emit(ClearReport(store.folder, True, freed_bytes, tuple(kept)), as_json, _show_clear)
    return OK


def _store(cache_dir: Path | None) -> Store:
    from penstock.store.store import Store

    if cache_dir is not None and not cache_dir.is_dir():
        raise click.BadParameter(f"{cache_dir} is not a folder", param_hint="--cache-dir")
    return Store(cache_dir)


def _confirmed(question: str) -> bool:
    """Not click's own: that turns interrupts and the end of the input into exceptions of its own."""
    print(printable_lines(f"{question} [y/N] "), end="", file=sys.stderr, flush=True)
    answer = "" if sys.stdin is None else sys.stdin.readline()
    if not answer:
        print(file=sys.stderr)
        raise click.UsageError(
            "the input ended without an answer, and nothing was removed. Pass --yes to remove without being asked"
        )
    return answer.strip().lower() in ("y", "yes")


def _show_list(to: Console, report: CacheReport) -> None:
    rows = [
        (entry.kind, "?" if entry.model is None else entry.model, short_bytes(entry.nbytes), _when(entry.used_s))
        for entry in report.entries
    ]
    if rows:
        table(to, printable(str(report.folder)), ("kind", "model", ">bytes", "last used"), rows)
        line(to, f"{short_bytes(report.nbytes)} in all")
    else:
        line(to, f"nothing in {printable(str(report.folder))}")


def _show_clear(to: Console, report: ClearReport) -> None:
    for sentence in report.kept:
        line(to, sentence)
    done = f"freed {short_bytes(report.freed_bytes)}" if report.cleared else "nothing was removed"
    line(to, f"{done} in {printable(str(report.folder))}")


def _when(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")
    except (OverflowError, ValueError, OSError):
        return "?"  # a file can have a time that no calendar has
