"""Every figure in a table of measurements is one of the JSON that the text above the table links to.

Where no JSON was kept, the text above the table says so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.docs.pages import ROOT, pages, read_page

PAGES = (
    "README.md",
    "docs/performance.md",
    "docs/direct.md",
    "docs/experts.md",
    "docs/executorch.md",
    "docs/models.md",
    *(page for page in pages() if page.startswith("docs/bench/")),
)
NOT_KEPT = "JSON was not kept"
UNITS = r"(?:ms|us|GB/s|GB|MiB|B|times)\b"
MEASURED = re.compile(r"\d (?:ms|us|GB/s|MiB)\b")
NUMBER = re.compile(rf"(?<![\w.,])(\d+\.\d+|[\d,]*\d(?= {UNITS}))(?![\w,]|\.\d)")
LINK = re.compile(r"\]\(([\w./-]+\.json)\)")
# Seconds as ms and us, bytes as GB and MiB, bytes a second as GB/s.
SCALES = (1.0, 1e3, 1e6, 1e-9, 2.0**-20)


@dataclass(frozen=True)
class Table:
    page: str
    line: int
    # What stands between the table before it, or the heading, and this one.
    above: str
    # Without the first column, which says what a row is about.
    cells: tuple[str, ...]

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def files(self) -> list[Path]:
        return [(ROOT / self.page).parent / name for name in LINK.findall(self.above)]


def tables(page: str, text: str | None = None) -> Iterator[Table]:
    above: list[str] = []
    rows: list[str] = []
    lines = (read_page(page) if text is None else text).splitlines()
    for number, line in enumerate([*lines, ""], start=1):
        if line.startswith("|"):
            rows.append(line)
            continue
        if rows:
            cells = [cell.strip() for row in rows[2:] for cell in row.strip("|").split("|")[1:]]
            yield Table(page, number - len(rows), "\n".join(above), tuple(cells))
            above, rows = [], []
        above = [line] if line.startswith("#") else [*above, line]


def measured() -> list[Table]:
    found = [table for page in PAGES for table in tables(page)]
    return [table for table in found if any(MEASURED.search(cell) for cell in table.cells) or table.files]


# ---- what a JSON holds


def records(value: Any) -> Iterator[dict[str, Any]]:
    """Every object with what its own objects hold, by name; of rounds, their median."""
    if isinstance(value, list):
        for one in value:
            yield from records(one)
    elif isinstance(value, dict):
        flat: dict[str, Any] = {}
        for name, one in value.items():
            if isinstance(one, dict):
                for inner in records(one):
                    flat.update({f"{name}.{key}": found for key, found in inner.items()})
                    yield inner
            elif isinstance(one, list):
                if one and all(isinstance(part, (int, float)) for part in one):
                    flat[name] = median(one)
                yield from records(one)
            else:
                flat[name] = one
        yield flat


def values(document: Any) -> set[float]:
    """The numbers of a document, and what pages work out from them: rates, ratios to the bound and to each other."""
    found: set[float] = set()
    weight_bytes = document.get("model", {}).get("weight_bytes") if isinstance(document, dict) else None
    for record in records(document):
        numbers = {name: one for name, one in record.items() if isinstance(one, (int, float))}
        found.update(map(float, numbers.values()))
        seconds = numbers.get("seconds", numbers.get("back_to_back.seconds"))
        bound_s = numbers.get("bound_s", numbers.get("derived.bound_s"))
        if seconds and bound_s:
            found.add(seconds / bound_s)
        if seconds and numbers.get("host_bytes"):
            found.add(numbers["host_bytes"] / seconds)
        if numbers.get("times_faster"):
            found.add(1 / numbers["times_faster"])
        if numbers.get("ms_a_token"):
            found.add(1e3 / numbers["ms_a_token"])
            found.add(numbers.get("bytes_streamed_a_run", 0.0) / numbers["ms_a_token"] * 1e3)
        streamed, budget = numbers.get("traffic.bytes_streamed"), numbers.get("budget_bytes")
        if weight_bytes and streamed and budget:
            found.add(streamed / (weight_bytes - budget))
    if isinstance(document, dict):
        found.update(_beside_the_best(document.get("points", [])))
        found.update(_beside_penstock(document.get("rows", [])))
    return found


def _beside_the_best(points: list[dict[str, Any]]) -> Iterator[float]:
    """placement="auto" beside the best of the pure modes, at each budget."""
    budgeted = [point for point in points if "budget_bytes" in point]
    for budget in {point["budget_bytes"] for point in budgeted}:
        times = {point["way"]: point["seconds"] for point in budgeted if point["budget_bytes"] == budget}
        others = [times[way] for way in ("streamed", "direct", "split") if way in times]
        if "auto" in times and others:
            yield times["auto"] / min(others)


def _beside_penstock(rows: list[Any]) -> Iterator[float]:
    """How many times faster generation is than with each of the others at the same fraction."""
    timed = [row for row in rows if isinstance(row, dict) and "system" in row and "ms_a_token" in row]
    for system in ("penstock", "packed"):
        ours = {row["fraction"]: row["ms_a_token"] for row in timed if row["system"] == system}
        yield from (row["ms_a_token"] / ours[row["fraction"]] for row in timed if row["fraction"] in ours)


@lru_cache
def written(path: Path, decimals: int) -> frozenset[str]:
    """How each number may be written."""
    return frozenset(f"{one * scale:.{decimals}f}" for one in values(json.loads(path.read_text())) for scale in SCALES)


def not_found(table: Table) -> list[str]:
    wrong = []
    for cell in table.cells:
        for number in NUMBER.findall(cell):
            plain = number.replace(",", "")
            decimals = len(plain.partition(".")[2])
            if not any(plain in written(path, decimals) for path in table.files):
                wrong.append(f"{number} in {cell!r}")
    return wrong


# ---- the pages


def test_every_table_of_figures_names_its_json_or_says_that_it_was_not_kept() -> None:
    silent = [table.place for table in measured() if not table.files and NOT_KEPT not in " ".join(table.above.split())]
    assert silent == []
    assert len(measured()) > 10


@pytest.mark.parametrize("page", PAGES)
def test_every_figure_is_in_the_json(page: str) -> None:
    for table in measured():
        if table.page == page and table.files:
            assert not_found(table) == [], table.place


def test_every_stored_json_is_named_by_a_page() -> None:
    stored = {path.name for path in (ROOT / "docs/bench").rglob("*.json")}
    texts = [read_page(page) for page in PAGES]
    assert {name for name in stored if not any(name in text for text in texts)} == set()


def test_a_figure_that_is_in_no_json_is_noticed() -> None:
    table = next(table for table in tables("docs/direct.md") if "modes.json" in [path.name for path in table.files])
    assert not_found(table) == []
    (first, *rest) = table.cells
    number = NUMBER.findall(first)[0]
    changed = Table(table.page, table.line, table.above, (first.replace(number, f"{float(number) + 1.01:.2f}"), *rest))
    assert len(not_found(changed)) == 1
    assert [one.place for one in tables("x.md", "text\n\n| a | b |\n|---|---|\n| c | 1.5 ms |\n")] == ["x.md:3"]
