"""Every code block of the README and of docs/ is run, or says in its info-string why it is not (info_strings.py)."""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import penstock
from tests.docs.info_strings import READ_AS, info_of, said
from tests.docs.pages import ROOT, Block, blocks, pages
from tests.docs.shared_program import RememberedCompiles, SharedProgram


@pytest.mark.parametrize("page", pages())
def test_every_block_says_what_it_is(page: str) -> None:
    assert [info for block in blocks(page) if isinstance(info := info_of(block), str)] == []
    for block, _ in said("python", page):
        ast.parse(block.code)


def test_what_the_pages_leave_unsaid_is_there() -> None:
    for (page, beginning), info in READ_AS.items():
        there = [block for block in blocks(page) if block.first_line.startswith(beginning)]
        assert there, f"{page} has no block that begins with {beginning!r}: take it out of READ_AS"
        assert all(block.info != info for block in there), f"{page} says {info!r} itself: take it out of READ_AS"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("    some code\n", "an indented block"),
        ("```python sometimes\npass\n```\n", "'python sometimes' is unknown"),
        ("```ruby\nputs 1\n```\n", "'ruby' is unknown"),
        ("```\ncode\n```\n", "'' is unknown"),
        ("```python elsewhere\npass\n```\n", "where, or why a path"),
        ("```python gpu tests/x.py\npass\n```\n", "where, or why a path"),
    ],
)
def test_a_block_that_does_not_say_is_refused(text: str, message: str) -> None:
    (block,) = blocks("docs/new.md", text)
    assert message in str(info_of(block))


@pytest.fixture
def names(shared_program: SharedProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What pages take for granted, in a folder that has a checkpoint."""
    folder = tmp_path / "start"
    (folder / "checkpoint_folder").mkdir(parents=True)
    model = shared_program.model
    tensors = {name: tensor.contiguous() for name, tensor in model.named_parameters()}  # tied ones once
    save_file(tensors, folder / "checkpoint_folder" / "model.safetensors")
    ep = penstock.apply_weight_offload(torch.export.export(model, shared_program.args))
    monkeypatch.chdir(folder)
    return {
        "penstock": penstock,
        "torch": torch,
        "model": model,
        "args": shared_program.args,
        "x": shared_program.args[0],
        "ep": ep,
        "ep1": ep,
        "ep2": ep,
        "t": model.inv_freq,
    }


def run(statements: list[ast.stmt], block: Block, namespace: dict[str, Any]) -> None:
    module = ast.Module(statements, type_ignores=[])
    ast.increment_lineno(module, block.line - 1)
    exec(compile(module, str(ROOT / block.page), "exec"), namespace)


def runnable(code: str) -> Iterator[ast.stmt]:
    for statement in ast.parse(code).body:
        if torch.cuda.is_available() or '"cuda"' not in (ast.get_source_segment(code, statement) or ""):
            yield statement


def run_alternatives(block: Block, namespace: dict[str, Any], folder: Path, patch: pytest.MonkeyPatch) -> None:
    for number, statement in enumerate(runnable(block.code)):
        own = folder.with_name(f"{folder.name}-{block.line}-{number}")
        shutil.copytree(folder, own, ignore=shutil.ignore_patterns("*.pt2", "*.ptd"))
        patch.chdir(own)
        run([statement], block, dict(namespace))
    patch.chdir(folder)


def run_here(page: str) -> int:
    """How many python blocks of a page are run without a GPU."""
    return sum(info.marker in ("", "alternatives") for _, info in said("python", page))


def test_blocks_are_found() -> None:
    assert run_here("README.md") >= 2 and run_here("docs/runtime.md") >= 2 and run_here("docs/troubleshooting.md") == 1


@pytest.mark.parametrize("page", [page for page in pages() if run_here(page)])
def test_python_blocks_run(
    page: str, names: dict[str, Any], shared_program: SharedProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path.cwd()
    if page != "README.md":  # which begins with the export
        for suffix in (".pt2", ".ptd"):
            shutil.copy(shared_program.path.with_suffix(suffix), folder)
    for block, info in said("python", page):
        if info.marker == "alternatives":
            run_alternatives(block, names, folder, monkeypatch)
        elif info.marker == "" or (info.marker == "gpu" and torch.cuda.is_available()):
            run(list(runnable(block.code)), block, names)
        if page == "docs/runtime.md":
            # The reader's model does not fit its budget; this one must be made not to.
            names["m"].set_budget(names["m"].floor_bytes)
    for value in names.values():
        if isinstance(value, penstock.Module):
            value.close()
    if page == "README.md":
        torch.testing.assert_close(names["y"], names["model"](*names["args"]))


def test_all_of_it_compiled_one_program(compiles: RememberedCompiles, shared_program: SharedProgram) -> None:
    assert compiles.count == 1


def called_names(language: str, code: str) -> set[str]:
    if language == "cpp":
        return set(re.findall(r"\b(\w+)\(", code)) | set(re.findall(r"^(\w+)[< ]", code, re.MULTILINE))
    nodes = list(ast.walk(ast.parse(code)))
    # A module that was loaded, in this block or before it, is the reader's own.
    made_here = {"m"} | {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    calls = [node.func for node in nodes if isinstance(node, ast.Call)]
    return {call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "?") for call in calls} - made_here


def test_what_is_tested_elsewhere_is_called_there() -> None:
    for block, info in [*said("python"), *said("cpp")]:
        if info.marker == "elsewhere":
            text = "".join((ROOT / path).read_text() for path in info.paths)
            missing = {name for name in called_names(info.language, block.code) if not re.search(rf"\b{name}\b", text)}
            assert not missing, f"{block.place}: {info.paths} have no {sorted(missing)}"
