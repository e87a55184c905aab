"""A shard that was replaced or overwritten gives another key."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from penstock.errors import CheckpointError
from penstock.store.shards import weights_key


def write_shard(path: Path, content: bytes, dtype: str = "U8") -> Path:
    header = json.dumps({"w": {"dtype": dtype, "shape": [len(content)], "data_offsets": [0, len(content)]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + content)
    return path


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    return write_shard(tmp_path / "model.safetensors", b"one")


def test_the_same_file_has_the_same_key(shard: Path) -> None:
    first, second = weights_key([shard]), weights_key([shard])
    assert first == second and json.loads(json.dumps(first)) == first
    assert first[0]["name"] == "model.safetensors" and first[0]["nbytes"] == shard.stat().st_size


def test_replaced_with_the_same_header_size_and_time(shard: Path) -> None:
    (before,), found = weights_key([shard]), shard.stat()
    other = write_shard(shard.with_name("other"), b"two")  # beside the first: it has another inode
    other.replace(shard)
    os.utime(shard, ns=(found.st_atime_ns, found.st_mtime_ns))
    (after,) = weights_key([shard])
    assert {name for name in before if before[name] != after[name]} == {"inode"}


def test_overwritten_in_place(shard: Path) -> None:
    (before,), found = weights_key([shard]), shard.stat()
    with shard.open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"two")
    os.utime(shard, ns=(found.st_atime_ns, found.st_mtime_ns + 1))  # however coarse the clock of the file system is
    (after,) = weights_key([shard])
    assert {name for name in before if before[name] != after[name]} == {"mtime_ns"}


def test_another_header_of_the_same_length(shard: Path) -> None:
    (before,), found = weights_key([shard]), shard.stat()
    with shard.open("r+b") as file:
        content = file.read().replace(b'"U8"', b'"I8"')
        file.seek(0)
        file.write(content)
    os.utime(shard, ns=(found.st_atime_ns, found.st_mtime_ns))
    (after,) = weights_key([shard])
    assert {name for name in before if before[name] != after[name]} == {"header_sha256"}


def test_the_order_and_the_links_of_a_hub_folder(shard: Path, tmp_path: Path) -> None:
    other = write_shard(tmp_path / "b.safetensors", b"longer")
    assert weights_key([shard, other]) == list(reversed(weights_key([other, shard])))
    link = tmp_path / "linked.safetensors"
    link.symlink_to(shard)
    assert weights_key([link]) == [{**weights_key([shard])[0], "name": "linked.safetensors"}]


@pytest.mark.parametrize(
    "content", [b"", b"\x01", bytes(7), (1).to_bytes(8, "little"), (2**63).to_bytes(8, "little") + bytes(100)], ids=len
)
def test_what_is_no_safetensors_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="x.safetensors is not a safetensors file: its header would have"):
        weights_key([path])


def test_a_header_that_is_longer_than_any(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:
        file.write((100_000_001).to_bytes(8, "little"))
        file.truncate(100_000_100)
    with pytest.raises(CheckpointError, match="would have 100000001 bytes"):
        weights_key([path])


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        weights_key([tmp_path / "none"])
    with pytest.raises(CheckpointError, match="a folder"):
        weights_key([tmp_path])
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="a named pipe"):
        weights_key([tmp_path / "pipe"])
