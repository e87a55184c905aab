"""Both files or none: full disks and interrupts, at every point at which they can happen."""

from __future__ import annotations

import errno
import os
import re
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.scheduler import Scheduler

import penstock
import penstock.export.compile as compile_module
import penstock.export.method as method_module
from penstock.errors import DiskFullError
from penstock.program import read_program
from penstock.weights import read_index
from tests.export.builds import build, older_files, snapshot, stand_in, unchanged

# ----------------------------------------------------------------------------------------------- disks that fill up


class Interposed:
    """Lets the k-th call of a function of `os` fail, before or after it did its work; counts all calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self._function = getattr(os, name)
        self._failure: BaseException | None = None
        self._at = self._after = 0
        self.calls = 0
        monkeypatch.setattr(os, name, self)

    def arm(self, failure: BaseException | None, at: int = 0, *, after: bool = False) -> None:
        self._failure, self._at, self._after, self.calls = failure, at, after, 0

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        self.calls += 1
        due = self._failure if self.calls == self._at else None
        if due is not None and not self._after:
            raise due
        result = self._function(*args, **keywords)
        if due is not None:
            raise due
        return result


CALLS = ["posix_fallocate", "ftruncate", "pwrite", "fsync", "replace"]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("older", [False, True], ids=["new", "overwrite"])
def test_a_disk_that_fills_up(
    quick: None,
    tmp_path: Path,
    temporary: Path,
    program: torch.export.ExportedProgram,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    older: bool,
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    if older:
        older_files(out)
    function = Interposed(monkeypatch, call)
    total = calls_of_a_whole_run(function, program, tmp_path)
    assert total >= 2  # both files
    for attempt in range(1, total + 1):
        function.arm(OSError(errno.ENOSPC, "No space left on device"), attempt)
        with unchanged(out), pytest.raises(OSError, match="No space left on device") as caught:
            build(program, out, overwrite=True)
        if call != "ftruncate":  # which asks for no room
            assert isinstance(caught.value, DiskFullError)
            assert re.search(r"model\.pt[2d]: needs \d+ bytes, \d+ bytes are free", str(caught.value))
        assert list(temporary.iterdir()) == []
    function.arm(None)
    build(program, out, overwrite=True)
    assert read_program(out / "model.pt2").identity == read_index(out / "model.ptd").identity


def calls_of_a_whole_run(function: Interposed, program: torch.export.ExportedProgram, tmp_path: Path) -> int:
    function.arm(None)
    (tmp_path / "whole").mkdir()
    build(program, tmp_path / "whole")
    return function.calls


@pytest.mark.parametrize("limit_bytes", [1, 4096, 20_000])
def test_a_limit_on_the_size_of_files(
    quick: None, tmp_path: Path, program: torch.export.ExportedProgram, limit_bytes: int
) -> None:
    """A real one: the kernel's, which says EFBIG."""
    older_files(tmp_path)
    with unchanged(tmp_path), pytest.raises(OSError, match="File too large") as caught, file_limit(limit_bytes):
        build(program, tmp_path, overwrite=True)
    assert caught.value.errno == errno.EFBIG
    # The compiler's own files do not fit below the lowest limit, and that is said of them.
    assert isinstance(caught.value, DiskFullError) or limit_bytes == 1


@contextmanager
def file_limit(limit_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# -------------------------------------------------------------------------------------------------------- interrupts


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("older", [False, True], ids=["new", "overwrite"])
def test_interrupted_while_writing(
    quick: None,
    tmp_path: Path,
    temporary: Path,
    program: torch.export.ExportedProgram,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    after: bool,
    older: bool,
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    if older:
        older_files(out)
    before = snapshot(out)
    function = Interposed(monkeypatch, call)
    total = calls_of_a_whole_run(function, program, tmp_path)
    whole = snapshot(tmp_path / "whole")
    for attempt in range(1, total + 1):
        function.arm(KeyboardInterrupt(), attempt, after=after)
        with pytest.raises(KeyboardInterrupt):
            build(program, out, overwrite=True)
        if (call, after, attempt) == ("replace", True, total):
            # Both files have their names: too late for nothing, and nothing is half there.
            assert snapshot(out).keys() == whole.keys()
            assert snapshot(out)["model.ptd"] == whole["model.ptd"]
            assert read_program(out / "model.pt2").identity == read_index(out / "model.ptd").identity
        else:
            assert snapshot(out) == before, attempt
        assert list(temporary.iterdir()) == []


def test_interrupted_while_compiling(
    tmp_path: Path, temporary: Path, program: torch.export.ExportedProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    older_files(out)
    monkeypatch.setattr(compile_module, "check_toolchain", lambda: None)
    called: list[str] = []

    def interrupted(module: Any, inputs: Any, device: Any, folder: str, options: Any) -> list[str]:
        called.append(folder)
        Path(folder).mkdir()
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the interrupt was not heard")

    monkeypatch.setattr(method_module, "compile_graph", interrupted)
    codegen, enter_context = Scheduler.codegen, Scheduler.enter_context
    with unchanged(out), pytest.raises(KeyboardInterrupt):
        build(program, out, overwrite=True)
    assert len(called) == 1
    assert not Path(called[0]).exists()
    assert list(temporary.iterdir()) == []
    assert (Scheduler.codegen, Scheduler.enter_context) == (codegen, enter_context)
    # Nothing is held that would keep the next one from compiling.
    monkeypatch.setattr(compile_module, "compile_method", stand_in)
    build(program, out, overwrite=True)


def test_what_a_killed_writer_left_is_cleared_away(
    quick: None, tmp_path: Path, program: torch.export.ExportedProgram
) -> None:
    for name in ("model.pt2.partial", "model.ptd.partial", "model.ptd.previous"):
        (tmp_path / name).write_bytes(b"half" * 100_000)
    result = build(program, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.pt2", "model.ptd"]
    assert read_index(result.weights_path).identity == result.program.identity


def test_file_systems_without_hard_links(
    quick: None, tmp_path: Path, program: torch.export.ExportedProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: Any, **keywords: Any) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    older_files(tmp_path)
    result = build(program, tmp_path, overwrite=True)
    assert read_index(result.weights_path).identity == result.program.identity
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.pt2", "model.ptd"]


@pytest.mark.parametrize("target", ["elsewhere", "nowhere"])
def test_links_are_still_links_after_a_failure(
    quick: None,
    tmp_path: Path,
    program: torch.export.ExportedProgram,
    monkeypatch: pytest.MonkeyPatch,
    target: str,
) -> None:
    (tmp_path / "elsewhere").write_bytes(b"older weights on another disk")
    (tmp_path / "model.ptd").symlink_to(target)
    function = Interposed(monkeypatch, "replace")
    for attempt in (1, 2):  # of the weights, of the program
        function.arm(OSError(errno.ENOSPC, "No space left on device"), attempt)
        with pytest.raises(DiskFullError):
            build(program, tmp_path, overwrite=True)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["elsewhere", "model.ptd"]
        assert (tmp_path / "model.ptd").readlink() == Path(target)
        assert (tmp_path / "elsewhere").read_bytes() == b"older weights on another disk"


def test_relative_paths_and_links(
    quick: None, tmp_path: Path, program: torch.export.ExportedProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert penstock.compile(program, "model.pt2", device="cpu").program_path == Path("model.pt2")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.pt2", "model.ptd"]
    (tmp_path / "target").write_bytes(b"something else")
    (tmp_path / "model.pt2").unlink()
    (tmp_path / "model.pt2").symlink_to("target")
    penstock.compile(program, "model.pt2", device="cpu", overwrite=True)
    assert (tmp_path / "target").read_bytes() == b"something else"
    assert read_program("model.pt2").methods[0].name == "forward"


def test_what_is_printed(
    quick: None, tmp_path: Path, program: torch.export.ExportedProgram, capfd: pytest.CaptureFixture[str]
) -> None:
    result = build(program, tmp_path)
    out, err = capfd.readouterr()
    first, second = out.splitlines()
    assert first == "EXPORT_GPU_PEAK_MEMORY_MB: 0"
    assert second == f"EXPORT_HOST_PEAK_MEMORY_MB: {-(-result.peaks.host_peak_bytes // 2**20)}"
    assert err == ""
