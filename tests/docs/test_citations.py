"""Every file, test, function and scenario that a page names is there."""

from __future__ import annotations

import re
from functools import lru_cache

import pytest

from tests.docs.pages import ROOT, pages, read_page
from tests.runtime.scenarios import SCENARIOS

# Where pages leave the beginning of a path out.
PLACES = ("", "src/penstock/", "csrc/", "docs/", "tests/", "tests/runtime/", "tests/gpu/", "src/penstock/executorch/")
FILE = re.compile(r"(?<![\w./*<-])((?:[\w-]+/)*[\w-]+\.(?:py|cpp|h|md))\b(?!\()")
TEST = re.compile(r"\b((?:[\w-]+/)*test_\w+\.py)::(test_\w+)")
FUNCTION = re.compile(r"`(\w+)`\s+in\s+`([\w/]+\.(?:py|cpp|h))`")
FOLDER = re.compile(r"(?<![\w./~<-])((?:tests|docs|examples|bench|csrc|src)/[\w/-]*\w)(?![\w/.*<-])")

# Names that are examples, or made by a command.
MADE_UP = {"penstock.json", "index.json"}


def resolve(path: str) -> str | None:
    """The path from the root. A name without a folder may lie anywhere in the sources."""
    for place in PLACES:
        if (ROOT / (place + path)).exists():
            return place + path
    if "/" in path:
        return None
    found = (file for folder in ("src", "csrc", "tests") for file in (ROOT / folder).rglob(path))
    return next((str(file.relative_to(ROOT)) for file in found), None)


@lru_cache(maxsize=1)
def all_tests() -> frozenset[str]:
    found: set[str] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        found.update(re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE))
    return frozenset(found)


def missing(text: str) -> list[str]:
    wrong = [name for name in FILE.findall(text) if name not in MADE_UP and resolve(name) is None]
    wrong += [name for name in FOLDER.findall(text) if resolve(name) is None and resolve(name + ".py") is None]
    for path, name in TEST.findall(text):
        found = resolve(path)
        if found is None or not re.search(rf"^def {name}\(", (ROOT / found).read_text(), re.MULTILINE):
            wrong.append(f"{path}::{name}")
    for name, path in FUNCTION.findall(text):
        found = resolve(path)
        if found is None or not re.search(rf"\b{name}\b", (ROOT / found).read_text()):
            wrong.append(f"{name} in {path}")
    names = set(re.findall(r"\btest_\w+\b(?!\.py)", text)) - {name.removesuffix(".py") for name in FILE.findall(text)}
    wrong += sorted(names - all_tests())
    return wrong


@pytest.mark.parametrize("page", pages())
def test_what_a_page_names_is_there(page: str) -> None:
    assert missing(read_page(page)) == []


def test_the_scenarios_of_the_safety_page_are_there() -> None:
    page = read_page("docs/safety.md")
    named = {name for part in re.findall(r"[Ss]cenarios?:\s+([^.]*)\.", page) for name in re.findall(r"`(\w+)`", part)}
    assert named <= set(SCENARIOS) and len(named) > 15


def test_every_invariant_has_its_paragraph() -> None:
    page = read_page("docs/safety.md")
    assert re.findall(r"^\*\*(S\d+)\.", page, re.MULTILINE) == [f"S{number}" for number in range(1, 12)]
    for paragraph in re.split(r"\n(?=\*\*S\d)", page)[1:]:
        cited = TEST.findall(paragraph) or re.findall(r"[Ss]cenarios?:", paragraph)
        assert cited, f"no test stands behind {paragraph[:60]}"


@pytest.mark.parametrize(
    "text",
    [
        "see `plan/nonsense.py`",
        "see csrc/nonsense.cpp",
        "see [it](nonsense.md)",
        "in tests/nonsense",
        "`tests/runtime/test_session.py::test_nonsense`",
        "`nonsense_at_all` in `plan/check.py`",
        "shown by test_nonsense_of_any_kind",
    ],
)
def test_what_is_not_there_is_noticed(text: str) -> None:
    assert missing(text) != []
