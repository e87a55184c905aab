"""The pages of the documentation, and the code blocks in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^(`{3,})(.*)$")


@dataclass(frozen=True)
class Block:
    page: str
    # Of the first line of code, counted from 1.
    line: int
    # What stands behind the opening fence; None: the block is indented, which leaves no room for it.
    info: str | None
    code: str

    @property
    def first_line(self) -> str:
        return self.code.splitlines()[0]

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    found = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/bench/*/README.md")]
    return sorted(str(path.relative_to(ROOT)) for path in found)


def read_page(page: str) -> str:
    return (ROOT / page).read_text()


def blocks(page: str, text: str | None = None) -> list[Block]:
    """Fenced and indented blocks, in their order. Indented text inside of a list belongs to the list."""
    lines = (read_page(page) if text is None else text).splitlines()
    found: list[Block] = []
    index = 0
    in_list = False
    while index < len(lines):
        line = lines[index]
        fence = _FENCE.match(line)
        if fence:
            start = index + 1
            index = start
            while index < len(lines) and lines[index] != fence[1]:
                index += 1
            if index == len(lines):
                raise ValueError(f"{page}:{start}: the fence is never closed")
            found.append(Block(page, start + 1, fence[2].strip(), "\n".join(lines[start:index]) + "\n"))
            index += 1
            continue
        if line.strip() and not line.startswith(" "):
            in_list = bool(re.match(r"[-*+] |\d+\. ", line))
        if line.startswith("    ") and not in_list and (index == 0 or not lines[index - 1].strip()):
            start = index
            while index < len(lines) and (lines[index].startswith("    ") or not lines[index].strip()):
                index += 1
            code = "\n".join(row[4:] for row in lines[start:index]).rstrip() + "\n"
            found.append(Block(page, start + 1, None, code))
            continue
        index += 1
    return found
