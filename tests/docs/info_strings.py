"""What a code block says about itself behind its opening fence, and what that means for the tests.

    python                      run in the page's own folder and namespace, block after block
    python alternatives         every statement alone, in a folder of its own
    console                     run
    ... gpu                     needs a GPU: run where there is one, else looked up
    ... minutes                 takes minutes: looked up
    ... network                 downloads: looked up
    ... elsewhere PATH ...      these files make the same calls and other tests run them: looked up there
    text                        no code: a diagram, a formula, what is printed

To look commands up is to check that every command, target, module, option and file in them is there. In python blocks,
statements that say "cuda" are skipped where there is no GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.docs.pages import Block, blocks, pages

LOOKED_UP = ("gpu", "minutes", "network")
MARKERS = {
    "python": ("", "alternatives", "gpu", "elsewhere"),
    "console": ("", *LOOKED_UP),
    "cpp": ("elsewhere",),
    "text": ("",),
}

# Blocks whose page says nothing: page and how the first line begins -> info-string. A fence on the page is better.
READ_AS: dict[tuple[str, str], str] = {
    ("docs/architecture.md", "nn.Module ── torch.export"): "text",
    ("docs/cli.md", "penstock doctor"): "console minutes",
    ("docs/cli.md", '{"error": {"class"'): "text",
    ("docs/cli.md", "penstock export [MODULE:FUNCTION]"): "text",
    ("docs/cli.md", "penstock run model.pt2 --inputs inputs.pt [--budget"): "text",
    ("docs/cli.md", "penstock cache list [--cache-dir DIR]"): "text",
}


@dataclass(frozen=True)
class Info:
    language: str
    marker: str
    paths: tuple[str, ...]


def info_of(block: Block) -> Info | str:
    """What the block says, or what is wrong with it."""
    written = next((info for key, info in READ_AS.items() if _is_of(block, key)), block.info)
    if written is None:
        return f"{block.place}: an indented block; fence it, and say what it is"
    language, marker, *paths = (*written.split(), "", "")
    named = tuple(path for path in paths if path)
    if marker not in MARKERS.get(language, ()):
        return f"{block.place}: info-string {written!r} is unknown"
    if bool(named) != (marker == "elsewhere"):
        return f"{block.place}: {written!r}: where, or why a path?"
    return Info(language, marker, named)


def _is_of(block: Block, key: tuple[str, str]) -> bool:
    return key[0] == block.page and block.first_line.startswith(key[1])


def said(language: str, page: str | None = None) -> list[tuple[Block, Info]]:
    """The blocks of a language. Those with something wrong are left to the test that is about that alone."""
    found = [(block, info_of(block)) for each in (pages() if page is None else [page]) for block in blocks(each)]
    return [(block, info) for block, info in found if isinstance(info, Info) and info.language == language]
