"""What the writer refuses, what it holds in memory, and that a failure leaves nothing behind."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock.errors
from penstock.errors import DiskFullError, WeightsFileError
from penstock.weight import State, Weight
from penstock.weights import read_index, verify_checksums, write_ptd
from tests.weights.ptd_cases import STATES, TIED, chunks_of, payload, write

SMALL = Weight("small", "float32", (10,), (0,))


def nothing_is_left(folder: Path) -> None:
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("weights", "match"),
    [
        ([Weight("w", "float4", (2,), (0,))], "weight 'w' has dtype 'float4', needs one of bool"),
        (
            [Weight("w", "int8", (2**31, 0), (0, 1))],
            "weight 'w' has size 2147483648 in dimension 0, needs 0 to 2147483647",
        ),
        ([Weight("w", "int8", (-1,), (0,))], "weight 'w' has size -1 in dimension 0"),
        ([Weight("w", "int8", (1,) * 257, tuple(range(257)))], "weight 'w' has 257 dimensions, needs at most 256"),
        ([Weight("w", "int8", (2, 3), (0, 0))], r"weight 'w' has dim order \[0, 0\], needs a permutation"),
        ([Weight("w", "int8", (2, 3), (0,))], r"weight 'w' has dim order \[0\], needs a permutation"),
        ([SMALL, SMALL], "weight 'small' is there already, needs a name of its own"),
        ([SMALL, Weight("w", "int8", (1,), (0,), ("x", "small"))], "weight 'small' is there already"),
        ([Weight("w", "int8", (1,), (0,), ("w",))], "weight 'w' is there already"),
        ([Weight("cache.positions", "int8", (1,), (0,))], "state 'cache.positions' is there already"),
        (
            [Weight("penstock.json", "int8", (1,), (0,))],
            r"weight 'penstock\.json' is the name of the file's own metadata",
        ),
        ([Weight("w", "int8", (1,), (0,), ("penstock.json",))], r"weight 'penstock\.json' is the name"),
        ([Weight("a\0b", "int8", (1,), (0,))], r"weight 'a\\x00b' needs a name of UTF-8 without NUL"),
        ([Weight("a\ud800", "int8", (1,), (0,))], r"weight 'a\\ud800' needs a name of UTF-8 without NUL"),
    ],
)
def test_weights_that_cannot_be_stored_are_refused_by_name(tmp_path: Path, weights: list[Weight], match: str) -> None:
    with pytest.raises(WeightsFileError, match=match):
        write_ptd(tmp_path / "model.ptd", weights, chunks_of, states=STATES, identity="i")
    nothing_is_left(tmp_path)


@pytest.mark.parametrize("identity", [None, 5, "\ud800"])
def test_an_identity_must_be_text(tmp_path: Path, identity: Any) -> None:
    with pytest.raises(WeightsFileError, match=r"model\.ptd: has identity .*, needs a string"):
        write_ptd(tmp_path / "model.ptd", [SMALL], chunks_of, identity=identity)
    nothing_is_left(tmp_path)


@pytest.mark.parametrize(
    ("chunks", "match"),
    [
        ([], r"model\.ptd: 'small' has 0 bytes in its chunks, needs 40"),
        ([b"x" * 39], "'small' has 39 bytes in its chunks, needs 40"),
        ([b"x" * 41], "'small' has at least 41 bytes in its chunks, needs 40"),
        ([b"x" * 40, b"", b"y"], "'small' has at least 41 bytes in its chunks, needs 40"),
    ],
)
def test_a_stream_of_the_wrong_length_is_refused(tmp_path: Path, chunks: list[bytes], match: str) -> None:
    with pytest.raises(WeightsFileError, match=match):
        write_ptd(tmp_path / "model.ptd", [SMALL], lambda _: iter(chunks), identity="i")
    nothing_is_left(tmp_path)


def test_an_empty_weight_takes_no_byte(tmp_path: Path) -> None:
    with pytest.raises(WeightsFileError, match="'none' has at least 1 bytes in its chunks, needs 0"):
        write_ptd(tmp_path / "model.ptd", [Weight("none", "int8", (0,), (0,))], lambda _: [b"x"], identity="i")


def test_256_mib_are_written_within_32_mib_of_memory(tmp_path: Path) -> None:
    chunk_bytes, count = 8 << 20, 32

    def generated(source: Weight | State) -> Iterator[bytes]:
        for number in range(count):
            yield bytes([number]) * chunk_bytes

    weight = Weight("large", "uint8", (count, chunk_bytes), (0, 1))
    tracemalloc.start()
    try:
        index = write_ptd(tmp_path / "model.ptd", [weight], generated, identity="i")
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert index["large"].length_bytes == 256 << 20
    assert chunk_bytes <= peak_bytes < 32 << 20


def test_one_chunk_is_held_at_a_time(tmp_path: Path) -> None:
    alive = 0

    class Tracked(bytearray):
        def __init__(self, count_bytes: int) -> None:
            nonlocal alive
            super().__init__(count_bytes)
            alive += 1

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    alive_before_each: list[int] = []

    def tracked(source: Weight | State) -> Iterator[bytearray]:
        for _ in range(4):
            alive_before_each.append(alive)
            yield Tracked(10)

    write_ptd(tmp_path / "model.ptd", [SMALL], tracked, identity="i")
    assert alive_before_each == [0, 0, 0, 0]


def failing(error: BaseException) -> Any:
    def chunks(source: Weight | State) -> Iterator[bytes]:
        yield payload(source)[:8]
        raise error

    return chunks


@pytest.mark.parametrize("error", [ValueError("a checkpoint is broken"), KeyboardInterrupt(), SystemExit(3)])
def test_a_failing_source_leaves_no_file(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)) as caught:
        write_ptd(tmp_path / "model.ptd", [SMALL], failing(error), identity="i")
    assert caught.value is error
    nothing_is_left(tmp_path)


def test_a_source_that_runs_out_of_room_elsewhere_keeps_its_own_error(tmp_path: Path) -> None:
    error = OSError(errno.ENOSPC, "the scratch disk is full")
    with pytest.raises(OSError, match="scratch disk") as caught:
        write_ptd(tmp_path / "model.ptd", [SMALL], failing(error), identity="i")
    assert caught.value is error
    nothing_is_left(tmp_path)


def test_a_real_interrupt_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        write_ptd(
            tmp_path / "model.ptd",
            [SMALL],
            chunks_of,
            identity="i",
            on_bytes=lambda _: os.kill(os.getpid(), signal.SIGINT),
        )
    nothing_is_left(tmp_path)


def test_a_failure_leaves_the_older_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "model.ptd"
    older = write(path, [TIED])
    with pytest.raises(ValueError, match="broken"):
        write_ptd(path, [SMALL], failing(ValueError("broken")), identity="i")
    assert read_index(path) == older
    verify_checksums(path)
    assert list(tmp_path.iterdir()) == [path]


def test_an_older_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "model.ptd"
    write(path, [TIED])
    write(path, [SMALL])
    assert [entry.name for entry in read_index(path).entries] == ["small"]


def test_a_second_writer_is_refused_and_the_first_one_finishes(tmp_path: Path) -> None:
    path = tmp_path / "model.ptd"

    def while_another_tries(source: Weight | State) -> Iterator[bytes]:
        yield payload(source)[:8]
        with pytest.raises(WeightsFileError, match=r"model\.ptd\.partial has another writer"):
            write(path, [TIED])
        yield payload(source)[8:]

    write_ptd(path, [SMALL], while_another_tries, identity="i")
    verify_checksums(path)
    assert [entry.name for entry in read_index(path).entries] == ["small"]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "fsync", "replace"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_no_room_is_a_disk_full_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int) -> None:
    def full(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, full)
    with pytest.raises(DiskFullError, match=r"model\.ptd: needs \d+ bytes, \d+ bytes are free: ") as caught:
        write_ptd(tmp_path / "model.ptd", [SMALL], chunks_of, identity="i")
    assert caught.value.errno == number
    nothing_is_left(tmp_path)


def test_the_disk_full_error_names_the_file_s_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file_bytes = write(tmp_path / "model.ptd", [SMALL]).file_bytes
    (tmp_path / "model.ptd").unlink()

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DiskFullError, match=rf"needs {file_bytes} bytes"):
        write(tmp_path / "model.ptd", [SMALL])


def test_no_room_for_the_name_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "no inode is left")

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(DiskFullError, match=r"model\.ptd: needs \d+ bytes.*no inode is left"):
        write_ptd(tmp_path / "model.ptd", [SMALL], chunks_of, identity="i")


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS])
def test_other_failures_keep_their_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def broken(*arguments: object) -> None:
        raise OSError(number, "broken")

    monkeypatch.setattr(os, "pwrite", broken)
    with pytest.raises(OSError, match="broken") as caught:
        write_ptd(tmp_path / "model.ptd", [SMALL], chunks_of, identity="i")
    assert not isinstance(caught.value, DiskFullError)
    nothing_is_left(tmp_path)


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS])
def test_a_file_system_that_cannot_reserve_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def unable(*arguments: object) -> None:
        raise OSError(number, "cannot reserve")

    monkeypatch.setattr(os, "posix_fallocate", unable)
    write(tmp_path / "model.ptd", [TIED, SMALL], STATES)
    verify_checksums(tmp_path / "model.ptd")


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, view, offset_bytes: pwrite(fd, view[:7], offset_bytes))
    write(tmp_path / "model.ptd", [SMALL])
    verify_checksums(tmp_path / "model.ptd")


LIMITED_WRITER = """
import resource, sys
import penstock.errors
from penstock.errors import DiskFullError
from penstock.weight import Weight
from penstock.weights import write_ptd

def limit():
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))

def chunks(weight):
    yield bytes(50000)
    if sys.argv[2] == "late":
        limit()
    yield bytes(50000)

if sys.argv[2] == "early":
    limit()
try:
    write_ptd(sys.argv[1], [Weight("w", "uint8", (100000,), (0,))], chunks, identity="i")
except DiskFullError as error:
    print(error)
"""


@pytest.mark.parametrize("when", ["early", "late"])
def test_the_system_s_own_refusal_to_grow_a_file(tmp_path: Path, when: str) -> None:
    """Early: the room cannot be reserved. Late: the limit arrives while the bytes are being written."""
    source = str(Path(penstock.errors.__file__).parents[1])
    child = subprocess.run(
        [sys.executable, "-c", LIMITED_WRITER, str(tmp_path / "model.ptd"), when],
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (child.returncode, child.stderr) == (0, "")
    assert "model.ptd: needs " in child.stdout
    assert "File too large" in child.stdout
    nothing_is_left(tmp_path)
