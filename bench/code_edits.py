"""Requests to edit Python source, with the answers that a perfect model would give: for bench.prompt_lookup.

The source is the standard library's textwrap. Tokens are of a byte-level BPE that is trained for a few seconds on other
modules of the standard library: about as long as those of a real model's tokenizer.
"""

from __future__ import annotations

import re
import sysconfig
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VOCABULARY = 8000
SOURCE_TOKENS = 400


def code_edits(folder: Path) -> list[tuple[str, Tensor, Tensor]]:
    """Name, prompt and answer of each. `folder` keeps the tokenizer."""
    tokenizer = _tokenizer(folder)
    text = Path(textwrap.__file__).read_text()
    lines = text[text.index("    def _wrap_chunks") :].splitlines(keepends=True)
    source = ""
    while len(tokenizer.encode(source).ids) < SOURCE_TOKENS:
        source += lines.pop(0)

    def ids(text: str) -> Tensor:
        return torch.tensor(tokenizer.encode(text).ids)

    return [(name, ids(f"{request}\n\n{source}\n\n"), ids(edit(source))) for name, (request, edit) in _EDITS.items()]


def _without_comments(source: str) -> str:
    return "".join(line for line in source.splitlines(keepends=True) if not line.lstrip().startswith("#"))


def _traced(source: str) -> str:
    return re.sub(r"^( *)(while .*:\n)", r"\1\2\1    log.debug('%d chunks left', len(chunks))\n", source, flags=re.M)


_EDITS: dict[str, tuple[str, Callable[[str], str]]] = {
    "repeat": ("Repeat this method.", str),
    "rename": (
        "Call the variable cur_line current in this method.",
        lambda source: re.sub(r"\bcur_line\b", "current", source),
    ),
    "remove comments": ("Remove the comments from this method.", _without_comments),
    "add logging": ("Log how many chunks are left in each round of each loop.", _traced),
}


def _tokenizer(folder: Path) -> Any:
    from tokenizers import ByteLevelBPETokenizer

    if not (folder / "vocab.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        library = Path(sysconfig.get_path("stdlib"))
        files = [str(path) for path in sorted(library.glob("[a-p]*.py"))]
        made = ByteLevelBPETokenizer()
        made.train(files, vocab_size=VOCABULARY, show_progress=False)
        made.save_model(str(folder))
    return ByteLevelBPETokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
