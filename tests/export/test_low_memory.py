"""Host memory while exporting, of processes that do nothing else; and what such a process shows on its terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import shutil
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from penstock.weights import read_index
from tests.export.large_model import LAYER_BYTES, write_checkpoint

MIB = 2**20
HOST_LINE = "EXPORT_HOST_PEAK_MEMORY_MB: "


class Run(NamedTuple):
    layers: int
    stdout: str
    stderr: str
    start_bytes: int
    peak_bytes: int
    program_bytes: int

    @property
    def peak_mb(self) -> int:
        """As printed."""
        return int(self.stdout.splitlines()[-1].removeprefix(HOST_LINE))


def environment(**variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("EXPORT_")}
    return {**kept, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": "ignore", **variables}


def run(folder: Path, layers: int, *, per_shard: int = 0, terminal: bool = False) -> Run:
    """Compiles so many layers; from a checkpoint if `per_shard` is given. Checks the weights, and deletes all files."""
    checkpoint = folder / "checkpoint"
    command = [sys.executable, "-m", "tests.export.large_model", str(layers), str(folder), str(folder / "report.json")]
    if per_shard:
        checkpoint.mkdir()
        write_checkpoint(checkpoint, layers, per_shard)
        command.append(str(checkpoint))
    try:
        stdout, stderr = _on_terminal(command) if terminal else _on_pipes(command)
        _check_weights(folder / "model.ptd", layers, whole=not per_shard)
        report = json.loads((folder / "report.json").read_text())
        program_bytes = (folder / "model.pt2").stat().st_size
        return Run(layers, stdout, stderr, report["start"], report["peak"], program_bytes)
    finally:
        shutil.rmtree(folder)


def _on_pipes(command: list[str]) -> tuple[str, str]:
    child = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    return child.stdout, child.stderr


def _on_terminal(command: list[str]) -> tuple[str, str]:
    """Standard error is a terminal, standard output is not."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))  # it has no width of its own
    shown: list[bytes] = []

    def read() -> None:
        while True:
            try:
                part = os.read(ours, 4096)
            except OSError:  # the other side was closed
                return
            if not part:
                return
            shown.append(part)

    reader = threading.Thread(target=read)
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=theirs, text=True) as child:
        os.close(theirs)
        reader.start()
        stdout, _ = child.communicate()
    reader.join()
    os.close(ours)
    stderr = b"".join(shown).decode(errors="replace")
    assert child.returncode == 0, stderr
    return stdout, stderr


def _check_weights(path: Path, layers: int, *, whole: bool) -> None:
    index = read_index(path)
    assert {entry.name: entry.length_bytes for entry in index} == {f"layers.{n}": LAYER_BYTES for n in range(layers)}
    with path.open("rb") as file:
        for number in range(layers):
            entry = index[f"layers.{number}"]
            for offset in (0, LAYER_BYTES - 2) if whole else (0, LAYER_BYTES - 1):
                file.seek(entry.offset_bytes + offset)
                if whole:  # a bfloat16: the upper half of a float32
                    assert file.read(2) == struct.pack("<f", number + 1)[2:]
                else:
                    assert file.read(1) == bytes([number + 1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """For gibibytes, which no later session should find."""
    path = tmp_path_factory.mktemp("large")
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def in_memory(folder: Path) -> Run:
    (folder / "memory").mkdir()
    return run(folder / "memory", 8)


@pytest.fixture(scope="module")
def from_checkpoint(folder: Path) -> Run:
    (folder / "checkpoint").mkdir()
    return run(folder / "checkpoint", 12, per_shard=5)


@pytest.fixture(scope="module")
def from_a_quarter(folder: Path) -> Run:
    (folder / "quarter").mkdir()
    return run(folder / "quarter", 3, per_shard=2, terminal=True)


def test_weights_in_memory_are_not_copied(in_memory: Run) -> None:
    source_bytes = in_memory.layers * LAYER_BYTES
    assert source_bytes == 1024 * MIB
    assert in_memory.start_bytes > source_bytes  # the weights were there before
    assert in_memory.peak_mb <= source_bytes // MIB + 1024
    # What compiling added is the compiler's own: not even one layer was copied.
    assert in_memory.peak_bytes - in_memory.start_bytes < LAYER_BYTES


def test_a_checkpoint_is_never_in_memory(from_checkpoint: Run) -> None:
    assert from_checkpoint.layers * LAYER_BYTES == 1536 * MIB
    assert from_checkpoint.peak_mb < 900
    assert from_checkpoint.peak_bytes - from_checkpoint.start_bytes < LAYER_BYTES


def test_the_peak_does_not_grow_with_the_checkpoint(from_checkpoint: Run, from_a_quarter: Run) -> None:
    assert from_checkpoint.layers == 4 * from_a_quarter.layers
    assert from_checkpoint.peak_mb == pytest.approx(from_a_quarter.peak_mb, rel=0.15)


def test_the_program_does_not_grow_either(from_checkpoint: Run, from_a_quarter: Run) -> None:
    assert from_checkpoint.program_bytes < from_a_quarter.program_bytes + MIB
    assert from_checkpoint.program_bytes < 16 * MIB


@pytest.mark.parametrize("above", [0, 1])
def test_the_checker_gates_the_peak(from_checkpoint: Run, tmp_path: Path, above: int) -> None:
    log = tmp_path / "log"
    log.write_text("some compiler's noise\n" + from_checkpoint.stdout)
    limit = from_checkpoint.peak_mb - above
    child = subprocess.run(
        [sys.executable, "-m", "penstock.export.peak_check", str(log)],
        env=environment(EXPORT_HOST_PEAK_MB_LIMIT=str(limit)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == above, child.stderr
    told = child.stderr if above else child.stdout
    assert f"host peak {from_checkpoint.peak_mb} MiB (limit {limit})" in told
    assert ("above the limit is the host peak by 1 MiB" in told) == bool(above)


def test_nothing_but_two_lines_where_there_is_no_terminal(in_memory: Run, from_checkpoint: Run) -> None:
    for one in (in_memory, from_checkpoint):
        first, second = one.stdout.splitlines()
        assert first == "EXPORT_GPU_PEAK_MEMORY_MB: 0"
        assert second == f"{HOST_LINE}{-(-one.peak_bytes // MIB)}"
        # torch itself may have something to say there.
        assert not any(shown in one.stderr for shown in ("compiling", "writing", "%|", "\r"))


def test_progress_on_a_terminal(from_a_quarter: Run) -> None:
    assert len(from_a_quarter.stdout.splitlines()) == 2  # progress goes to standard error
    bars = from_a_quarter.stderr
    assert "compiling" in bars
    assert "forward" in bars  # the method that is being compiled
    assert "1/1" in bars
    writing = bars[bars.index("writing") :]
    assert "100%" in writing
    assert "403M/403M" in writing  # 3 * 128 MiB
