from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.export import Dim

import penstock
import penstock.export.compile as compile_module
from tests.export.builds import DECODE, TOKENS, Built, built, net, shifted, stand_in
from tests.harness import compiled, offloaded
from tests.zoo import export


def no_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_module, "compile_method", stand_in)
    monkeypatch.setattr(compile_module, "check_toolchain", lambda: None)
    monkeypatch.setattr(compile_module, "gc", SimpleNamespace(collect=lambda: 0))  # most of the time that is left


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what happens before and after the compiler: it takes no time, and nothing it emits can be run."""
    no_compilation(monkeypatch)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what must be refused before the compiler, which takes minutes, is called."""

    def called(*args: object, **options: object) -> None:
        raise AssertionError("the compiler was called")

    monkeypatch.setattr(compile_module, "compile_method", called)
    monkeypatch.setattr(compile_module, "check_toolchain", called)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders go; a test can look whether they are gone."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture(scope="session")
def program() -> torch.export.ExportedProgram:
    return offloaded(net(), (TOKENS,))


@pytest.fixture(scope="session")
def meta_program() -> torch.export.ExportedProgram:
    return offloaded(net(device="meta"), (TOKENS.to("meta"),))


# Compiled for real, once: what follows reads these files and writes none.


@pytest.fixture(scope="session")
def decoder_build(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A decode step: many weights, caches, and an access that several steps read."""
    program = penstock.apply_weight_offload(export(DECODE))
    return built(compiled(tmp_path_factory.mktemp("decoder"), {"decode": program}, weight_offload_budget="8GiB"))


@pytest.fixture(scope="session")
def small_build(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Two methods, the second of any number of rows."""
    rows = {"first": None, "second": ({0: Dim("rows", min=2, max=64)},)}
    programs = {name: offloaded(model, (torch.ones(3, 8),), rows[name]) for name, model in shifted(8).items()}
    return built(compiled(tmp_path_factory.mktemp("small"), programs))


@pytest.fixture(scope="session")
def wide_build(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The first method of the small one, with more than a MiB of weights."""
    programs = {"first": offloaded(shifted(512)["first"], (torch.ones(3, 512),))}
    return built(compiled(tmp_path_factory.mktemp("wide"), programs))
