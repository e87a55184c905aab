"""Temporary folders: what a killed process leaves goes with the next one, and nothing else does."""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

import pytest
import torch

import penstock.temporary as temporary
from penstock.temporary import PREFIX, TemporaryFolder, sweep
from tests.harness import compiled, offloaded

ROOT = Path(__file__).parents[1]
# Says where its folder is, then waits for the end of its input; `after` runs in between.
OWNER = """
import os, sys
from penstock.temporary import TemporaryFolder
with TemporaryFolder("test") as folder:
    (folder / "deep").mkdir()
    (folder / "deep" / "file").write_bytes(bytes(5000))
    print(folder, flush=True)
    {after}
    sys.stdin.read()
"""
COMPILER = """#!/bin/sh
case "$1" in --version) exec "{real}" --version;; esac
touch "{mark}"
exec sleep 600
"""
COMPILING = """
import sys, torch, penstock
from tests.harness import offloaded
import penstock.export.compile as compile_module
compile_module.check_toolchain = lambda: None
penstock.compile(offloaded(torch.nn.Linear(8, 8), (torch.ones(2, 8),)), sys.argv[1], device="cpu")
"""


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made. Code that torch keeps between compiles lies elsewhere."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torchinductor"))
    return folder


def owner(after: str = "pass") -> tuple[subprocess.Popen[str], Path]:
    """A process that holds a folder, and the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER.format(after=after)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}"},
    )
    return process, Path(stream(process.stdout).readline().strip())


def stream(found: IO[str] | None) -> IO[str]:
    assert found is not None
    return found


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def test_a_folder_goes_with_its_block(base: Path) -> None:
    with TemporaryFolder("test") as folder:
        assert folder.parent == base and folder.name.startswith(f"{PREFIX}test-")
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "file").write_text("x")
    assert list(base.iterdir()) == []


def test_a_folder_goes_after_an_error_and_with_its_last_reference(base: Path) -> None:
    gc.collect()  # what earlier tests have left goes now, and not while this one counts
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(KeyboardInterrupt), TemporaryFolder("test"):
        raise KeyboardInterrupt
    held = TemporaryFolder("test")
    assert [held.path] == list(base.iterdir())
    del held
    gc.collect()
    assert list(base.iterdir()) == []
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


def test_what_a_killed_process_left_goes_with_the_next_folder(base: Path) -> None:
    process, left = owner()
    kill(process)
    assert (left / "deep" / "file").exists()
    with TemporaryFolder("test") as folder:
        assert list(base.iterdir()) == [folder]


def test_a_living_process_keeps_its_folder(base: Path) -> None:
    process, kept = owner()
    sweep(base)
    with TemporaryFolder("test") as folder:
        assert set(base.iterdir()) == {folder, kept}
        assert (kept / "deep" / "file").exists()
    process.communicate("")
    assert process.returncode == 0
    assert list(base.iterdir()) == []


def test_this_process_keeps_its_own(base: Path) -> None:
    with TemporaryFolder("one") as one, TemporaryFolder("other") as other:
        sweep(base)
        assert set(base.iterdir()) == {one, other}


def test_a_forked_child_neither_removes_it_nor_lets_go_of_it(base: Path) -> None:
    # The child lives on when its parent was killed: whatever it still does there is not disturbed.
    process, kept = owner(after="child = os.fork(); print(child, flush=True) if child else sys.stdin.read()")
    stream(process.stdout).readline()
    process.kill()
    process.wait()
    sweep(base)
    assert (kept / "deep" / "file").exists()
    stream(process.stdin).close()  # the child reaches its end
    descriptor = os.open(kept, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # waits for that
    os.close(descriptor)
    assert (kept / "deep" / "file").exists()  # it was not the child's to remove
    sweep(base)
    assert list(base.iterdir()) == []


def test_names_that_are_not_ours_are_left_alone(base: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").write_text("x")
    (base / f"{PREFIX}link-abcdefgh").symlink_to(elsewhere)
    (base / f"{PREFIX}file-abcdefgh").write_text("x")
    (base / "penstock-abcdefgh").mkdir()  # as an earlier version made them, without a lock
    (base / "other").mkdir()
    before = set(base.iterdir())
    sweep(base)
    assert set(base.iterdir()) == before and (elsewhere / "file").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_another_users_folder_is_left_alone(base: Path) -> None:
    theirs = base / f"{PREFIX}test-abcdefgh"
    theirs.mkdir()
    os.chown(theirs, 12345, 12345)
    sweep(base)
    assert theirs.exists()


def test_somebody_sweeps_between_the_making_and_the_locking(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, flock = temporary._lock, fcntl.flock
    swept: list[Path] = []

    def late(path: Path) -> int | None:
        if len(swept) < 3:
            swept.append(path)
            if len(swept) == 1:
                path.rmdir()  # has been swept
            elif len(swept) == 2:
                held = os.open(path, os.O_RDONLY)  # is being swept
                fcntl.flock(held, fcntl.LOCK_EX)
                try:
                    return lock(path)
                finally:
                    path.rmdir()
                    os.close(held)
            else:
                # Has been swept after it was opened.
                monkeypatch.setattr(temporary.fcntl, "flock", lambda *_: path.rmdir())
                try:
                    return lock(path)
                finally:
                    monkeypatch.setattr(temporary.fcntl, "flock", flock)
        return lock(path)

    monkeypatch.setattr(temporary, "_lock", late)
    with TemporaryFolder("test") as folder:
        assert folder.is_dir() and folder not in swept
    assert len(swept) == 3


def test_without_locks_nothing_is_swept(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(temporary.fcntl, "flock", none)
    gc.collect()  # what earlier tests have left goes now, and not while this one counts
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    with TemporaryFolder("test") as folder:
        sweep(base)
        assert folder.is_dir()
    assert list(base.iterdir()) == []
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


@pytest.mark.slow
def test_a_compile_that_was_killed(base: Path, tmp_path: Path) -> None:
    """SIGKILL while the C++ compiler works; the next compile removes what is left, and its own."""
    mark, compiler = tmp_path / "started", tmp_path / "compiler"
    compiler.write_text(COMPILER.format(real="g++", mark=mark))
    compiler.chmod(0o755)
    process = subprocess.Popen(
        [sys.executable, "-c", COMPILING, str(tmp_path / "killed.pt2")],
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "CXX": str(compiler)},
        start_new_session=True,
    )
    while not mark.exists():
        assert process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert list(base.glob(f"{PREFIX}compile-*"))
    compiled(tmp_path, offloaded(torch.nn.Linear(8, 8), (torch.ones(2, 8),)))
    assert list(base.glob("penstock*")) == []
    assert not (tmp_path / "killed.pt2").exists()


# A limit on the size of files does what a full disk does. The program itself is smaller than its code unpacked.
UNPACKING = """
import resource, sys
from pathlib import Path
import torch
from penstock.native import core
from penstock.torch_private.loader import CompiledMethod
assert core().penstock_load_torch() == 0
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    CompiledMethod(Path(sys.argv[1]), "forward")
except (RuntimeError, OSError) as error:
    print(f"refused: {error}")
"""


def test_a_full_disk_leaves_nothing_unpacked(base: Path, tmp_path: Path) -> None:
    compiled(tmp_path, offloaded(torch.nn.Linear(8, 8), (torch.ones(2, 8),)))
    done = subprocess.run(
        [sys.executable, "-c", UNPACKING, str(tmp_path / "model.pt2")],
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("refused: ") and str(base) in done.stdout
    assert list(base.rglob("*.so")) == []
    assert [path.name for path in base.iterdir() if not path.name.startswith("torchinductor")] == []
