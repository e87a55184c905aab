"""Numbers and names as HTML. Everything that a user may have chosen goes through `text`."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NONE = "\N{EN DASH}"


def text(value: object) -> str:
    return html.escape(str(value), quote=True)


def bytes_text(count: float) -> str:
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 999.5:
            return f"{count} B" if unit == "B" else f"{_three(amount)} {unit}"
        amount /= 1024
    return f"{_three(amount)} TiB"


def seconds_text(seconds: float) -> str:
    if seconds == 0:
        return "0 s"
    # A number that three digits would round up to a thousand takes the next unit.
    for factor, unit in ((1e9, "ns"), (1e6, "\N{MICRO SIGN}s"), (1e3, "ms")):
        if seconds * factor < 999.5:
            return f"{_three(seconds * factor)} {unit}"
    return f"{_three(seconds)} s"


def ns_text(ns: float) -> str:
    return seconds_text(ns / 1e9)


def rate_text(bytes_per_s: float) -> str:
    return f"{_three(bytes_per_s / 1e9)} GB/s"


def part_text(part: float) -> str:
    return f"{part * 100:.0f}%" if part >= 0.0995 or part == 0 else f"{part * 100:.1f}%"


def count_text(count: int) -> str:
    return f"{count:,}"


def exact_bytes_text(count: int) -> str:
    return f"{count:,} bytes"


def yes_no_text(value: bool) -> str:
    return "yes" if value else "NO"


def many(count: int, one: str, more: str | None = None) -> str:
    return f"{count:,} {one if count == 1 else more or one + 's'}"


def _three(amount: float) -> str:
    """Three digits, more where the whole part has more."""
    decimals = 2 if amount < 9.995 else 1 if amount < 99.95 else 0
    return f"{amount:.{decimals}f}"


class Figures:
    """Shows numbers of a document by their path in it, so that a page cannot contradict its JSON."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._document = document

    def __call__(self, path: str, shown: Callable[[Any], str]) -> str:
        value: Any = self._document
        for key in path.split("."):
            value = value[int(key)] if isinstance(value, Sequence) else value[key]
        said = NONE if value is None else text(shown(value))
        return f'<data data-path="{text(path)}" value="{text(json.dumps(value))}">{said}</data>'


@dataclass(frozen=True)
class Column:
    title: str
    numeric: bool = True


def table(caption: str, columns: Sequence[Column], rows: Sequence[Sequence[str]], *, kind: str = "") -> str:
    """`caption` is plain text, cells are HTML. The first cell of a row is its heading. Scrolls by itself if need be."""
    head = "".join(f'<th scope="col"{_numeric(column)}>{text(column.title)}</th>' for column in columns)
    body = "".join(
        f'<tr><th scope="row"{_numeric(columns[0])}>{row[0]}</th>'
        + "".join(f"<td{_numeric(column)}>{cell}</td>" for column, cell in zip(columns[1:], row[1:], strict=True))
        + "</tr>\n"
        for row in rows
    )
    return (
        f'<div class="scroll {text(kind)}" role="region" tabindex="0" aria-label="{text(caption)}">\n'
        f"<table><caption>{text(caption)}</caption>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>\n"
    )


def _numeric(column: Column) -> str:
    return ' class="number"' if column.numeric else ""


def embedded(identifier: str, content: str) -> str:
    """JSON inside a page. There, < occurs only in strings, so escaping it keeps the value and ends no element."""
    safe = content.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return f'<script type="application/json" id="{text(identifier)}">{safe}</script>\n'
