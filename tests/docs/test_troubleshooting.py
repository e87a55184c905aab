"""docs/troubleshooting.md against every error class and the messages in the sources."""

from __future__ import annotations

import ast
import re
from functools import lru_cache

from tests.docs.pages import ROOT, read_page

PAGE = read_page("docs/troubleshooting.md")
SECTIONS = {part.split("\n")[0]: part for part in re.split(r"\n### ", PAGE)[1:]}


@lru_cache(maxsize=1)
def classes() -> dict[str, str]:
    """Every public error class of the sources, and the file it stands in: PenstockError and what derives from it.

    Read, not imported: some files need packages that are not everywhere.
    """
    bases: dict[str, tuple[list[str], str]] = {}
    for path in (ROOT / "src/penstock").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                names = [
                    base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "") for base in node.bases
                ]
                bases[node.name] = names, str(path.relative_to(ROOT))
    found = {"PenstockError"}
    while more := {name for name, (above, _) in bases.items() if found.intersection(above)} - found:
        found |= more
    return {name: bases[name][1] for name in found if not name.startswith("_")}


def test_every_class_has_its_section_and_no_other() -> None:
    assert sorted(SECTIONS) == sorted(classes())
    assert len(set(classes().values())) > 4, "classes outside of errors.py are found, too"
    assert len(re.findall(r"^### ", PAGE, re.MULTILINE)) == len(SECTIONS)


@lru_cache(maxsize=1)
def messages() -> str:
    """Every string of the sources, one to a line, with … for what is filled in."""
    found: list[str] = []
    for path in (ROOT / "src/penstock").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    for path in (ROOT / "csrc").rglob("*.cpp"):
        # "a " + text(b) + " c" is a … c.
        joined = re.sub(r'"\s*\+\s*[^";]*?\+\s*"', "…", path.read_text())
        found.extend(re.findall(r'"((?:[^"\\\n]|\\.)*)"', joined))
    return "\n".join(re.sub(r"\s+", " ", text) for text in found)


def is_quoted(text: str) -> bool:
    """A message, and not a name, a call or a value: it has words."""
    return len(text.split()) >= 2 and not re.search(r"[=(\[{]", text.split()[0])


def is_a_message(quoted: str) -> bool:
    parts = [re.escape(part) for part in quoted.strip().strip("…").split("…")]
    return re.search("[^\n]*".join(parts), messages()) is not None


def test_every_quoted_message_is_one() -> None:
    quoted = [
        re.sub(r"\s+", " ", text)
        for section in SECTIONS.values()
        for text in re.findall(r"`([^`]+)`", section.split("\n## ")[0])
    ]
    assert [text for text in quoted if is_quoted(text) and not is_a_message(text)] == []
    assert sum(map(is_quoted, quoted)) > 40


def test_a_message_that_nobody_raises_is_noticed() -> None:
    assert not is_a_message("the budget is too … today")
    assert is_a_message("expected access …, got access …")
