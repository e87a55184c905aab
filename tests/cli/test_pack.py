"""pack and unpack: files there and back, what they say of them, and what they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.weights import read_index
from tests.cli.conftest import Cli
from tests.weights.packed_cases import PACKED, WEIGHTS, packable

# With one state.
STORED = len(WEIGHTS) + 1


@pytest.fixture
def packed(cli: Cli, tmp_path: Path) -> Path:
    packable(tmp_path / "model.ptd")
    assert cli("pack", tmp_path / "model.ptd", "-o", tmp_path / "packed.ptd").code == 0
    return tmp_path / "packed.ptd"


def test_there_and_back(cli: Cli, tmp_path: Path) -> None:
    path, packed = packable(tmp_path / "model.ptd"), tmp_path / "packed.ptd"
    told = cli("pack", path, "-o", packed, "--json").document
    assert (told["source_path"], told["path"]) == (str(path), str(packed))
    assert (told["source_bytes"], told["file_bytes"]) == (path.stat().st_size, packed.stat().st_size)
    assert (told["packed_count"], told["stored_count"]) == (len(PACKED), STORED) and 0.7 < told["ratio"] < 1
    back = cli("unpack", packed, "-o", tmp_path / "again.ptd", "--json").document
    assert (back["packed_count"], back["ratio"]) == (len(PACKED), told["ratio"])
    assert (tmp_path / "again.ptd").read_bytes() == path.read_bytes()
    shown = cli("pack", path, "-o", packed, "--overwrite").stdout
    assert f"{len(PACKED)} of {STORED}, ratio 0." in shown


def test_inspect_tells_the_ratios(cli: Cli, packed: Path) -> None:
    told = cli("inspect", packed, "--json").document
    index = read_index(packed)
    for row in told["entries"]:
        entry = index[row["name"]]
        assert (row["packed"], row["nbytes"]) == (entry.packing is not None, entry.length_bytes)
        assert row["raw_bytes"] == entry.raw_bytes
        assert row["ratio"] == (entry.length_bytes / entry.raw_bytes if entry.raw_bytes else 1)
    assert told["packed_count"] == len(PACKED) and told["ratio"] == told["stored_bytes"] / told["raw_bytes"]
    shown = cli("inspect", packed).stdout
    assert f"ratio {told['ratio']:.3f} in all" in shown
    for row in told["entries"]:
        # The empty one is not among the ten that are shown.
        if row["alias_of"] is None and row["raw_bytes"]:
            (line,) = (line for line in shown.splitlines() if line.split()[:2] == [row["name"], row["kind"]])
            assert f" {row['ratio']:.3f} " in line
    plain = cli("inspect", packed.with_name("model.ptd"))
    assert " ratio" not in plain.stdout and " packed" not in plain.stdout


def test_what_is_refused(cli: Cli, packed: Path) -> None:
    plain, out = packed.with_name("model.ptd"), packed.with_name("out.ptd")
    for arguments, code, message in (
        (("pack", packed, "-o", out), 7, "entry 'tied' is packed already"),
        (("unpack", plain, "-o", out), 7, "has no packed entry"),
        (("pack", plain, "-o", packed), 9, "pass --overwrite to replace"),
        (("unpack", packed, "-o", plain), 9, "pass --overwrite to replace"),
        (("pack", plain, "-o", packed.with_name("none") / "out.ptd"), 9, "does not exist"),
        (("pack", plain, "-o", "out.pt2"), 2, "must end in .ptd"),
        (("pack", "model.pt2", "-o", out), 2, "must end in .ptd"),
        (("pack", plain), 2, "Missing option"),
        (("pack", packed.with_name("none.ptd"), "-o", out), 7, "does not exist"),
        (("pack", plain, "-o", out, "--program", packed.with_name("none.pt2")), 8, "none.pt2"),
    ):
        told = cli(*arguments)
        assert told.code == code and message in told.stderr, told.stderr
        assert not out.exists()
