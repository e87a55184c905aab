"""The delegate library: built at its first use, once for what it is built against, whoever asks."""

from __future__ import annotations

import importlib.metadata
import logging
import threading
from pathlib import Path

import pytest

from penstock.errors import OutputPathError, PenstockError, ToolchainError
from penstock.executorch import build as building
from penstock.executorch import library
from penstock.executorch.library import ENVIRONMENT, LIBRARY


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """What was built, in a cache folder of its own. Building takes a while, and nothing else."""
    monkeypatch.delenv(ENVIRONMENT)
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))
    found: list[Path] = []

    def pretended(target: Path) -> None:
        found.append(target)
        target.write_text("a library")

    monkeypatch.setattr(building, "_build", pretended)
    return found


def test_at_first_use_and_once(built: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = library.library_path()
    assert path == library.library_path() == building.build() and built == [path]
    assert path.name == LIBRARY and path.is_relative_to(tmp_path / "cache")
    versions = f"executorch {importlib.metadata.version('executorch')} and torch {importlib.metadata.version('torch')}"
    assert [(each.levelno, each.message) for each in caplog.records] == [
        (logging.WARNING, f"building the ExecuTorch delegate for {versions}, once: it takes up to a minute")
    ]


@pytest.mark.parametrize("other", ["executorch", "torch"])
def test_for_other_versions_another(built: list[Path], monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    first = library.library_path()
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9" if name == other else version(name))
    assert library.library_path() != first and len(built) == 2


def test_for_other_sources_another(built: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = library.library_path()
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "delegate.cpp").write_text("int other;")
    monkeypatch.setattr(building, "sources_folder", lambda: tmp_path / "csrc")
    assert library.library_path() != first and len(built) == 2


def test_two_at_once_build_one(built: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The second asks while the first builds, and waits for it."""
    builds, asked, pretended = threading.Event(), threading.Event(), building._build

    def slow(target: Path) -> None:
        builds.set()
        assert asked.wait(60)
        pretended(target)

    monkeypatch.setattr(building, "_build", slow)
    monkeypatch.setattr(building.LOGGER, "warning", lambda line, *_: asked.set() if "waiting for" in line else None)
    found: list[Path] = []
    first = threading.Thread(target=lambda: found.append(library.library_path()))
    first.start()
    assert builds.wait(60)
    found.append(library.library_path())
    first.join()
    assert found == [built[0]] * 2 and len(built) == 1


def test_a_build_that_failed_is_tried_again(built: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(target: Path) -> None:
        raise ToolchainError("it failed")

    with monkeypatch.context() as patched:
        patched.setattr(building, "_build", failing)
        with pytest.raises(ToolchainError):
            library.library_path()
    assert [library.library_path()] == built


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ToolchainError, match=r"no C\+\+ compiler 'no-such-compiler': install g\+\+, or name one with"):
        building.build(tmp_path / LIBRARY)


def test_a_folder_that_others_may_write_to(built: list[Path], tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    with pytest.raises(OutputPathError, match="others may write to it"):
        library.library_path()
    assert not built


def test_one_that_is_named_and_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "none.so"))
    with pytest.raises(PenstockError, match=r"\$PENSTOCK_EXECUTORCH_LIBRARY names .*none.so, which does not exist"):
        library.library_path()
