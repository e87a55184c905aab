"""A slice of `make fuzz` with a fixed seed: no fault, in any target that needs no compiled program."""

from __future__ import annotations

import os
import random
import shutil
import zipfile
from pathlib import Path

import pytest

import penstock
from penstock.errors import PackageError, WeightsFileError
from penstock.torch_private import loader
from penstock.weights import read_index
from tests.fuzz import targets
from tests.fuzz.campaign import campaign
from tests.fuzz.seeds import CORPUS
from tests.fuzz.targets import TARGETS
from tests.runtime.conftest import chain, gate, program_path  # noqa: F401 - fixtures

SEED = "slice"
CASES = {"ptd": 400, "ptd-resealed": 400, "pt2": 400, "pt2-resealed": 300, "pte-parse": 200, "plan-records": 150}


@pytest.mark.parametrize("name", CASES)
def test_a_slice(name: str) -> None:
    found = campaign(name, SEED, lambda count: count < CASES[name])
    assert found.faults == []
    assert found.cases == CASES[name] and found.outcomes["refused"] > CASES[name] // 3


def test_the_corpus_is_small_and_read_as_it_stands() -> None:
    assert sum(path.stat().st_size for path in CORPUS.iterdir()) < 300_000
    assert penstock.read_program(CORPUS / "program.pt2").methods[0].states == ("left", "right")


def test_a_fault_a_crash_and_a_hang_are_faults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The harness itself: what a worker does not survive is counted, told, and the next one goes on."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'tests.fuzz.worker' in ' '.join(sys.orig_argv):\n"
        "    import os, tests.fuzz.targets as t\n"
        "    def case(rng, folder):\n"
        "        kind = rng.randrange(3)\n"
        "        if kind == 0: raise KeyError('raw')\n"
        "        if kind == 1: os.abort()\n"
        "        return 'refused'\n"
        "    t.TARGETS['broken'] = case\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}:{Path(__file__).parents[2]}")
    kinds = [random.Random(f"broken {SEED}:{number}").randrange(3) for number in range(9)]
    found = campaign("broken", SEED, lambda count: count < len(kinds))
    assert found.outcomes == {"fault": sum(kind < 2 for kind in kinds), "refused": kinds.count(2)}
    assert {0, 1, 2} == set(kinds)
    details = " ".join(detail for _, detail in found.faults)
    assert "KeyError" in details and "ended with -6" in details


# ------------------------------------------------------------------------------------------------- a compiled program


def test_damaged_code_is_never_run(
    chain: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Each member damaged in turn: refused by its name, before torch is given the file."""

    def must_not_be_loaded(*arguments: object) -> None:
        raise AssertionError("native code of a damaged program was loaded")

    monkeypatch.setattr(loader.CompiledMethod, "__init__", must_not_be_loaded)
    whole = chain.read_bytes()
    path = tmp_path / "model.pt2"
    rng = random.Random(SEED)
    with zipfile.ZipFile(chain) as archive:
        members = [(info, archive.read(info)) for info in archive.infolist()]
    for info, content in members:
        for _ in range(5):
            raw = bytearray(whole)
            raw[whole.index(content, info.header_offset) + rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            path.write_bytes(raw)
            with pytest.raises(PackageError, match=f"{info.filename} is damaged: its bytes have the CRC"):
                penstock.Module(path, "1GiB", weights=chain.with_suffix(".ptd"))


def test_code_of_another_program_is_refused_though_every_crc_is_right(
    chain: Path,  # noqa: F811
    gate: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """The seal binds a description to the code that it was written for."""
    with (
        zipfile.ZipFile(chain) as old,
        zipfile.ZipFile(gate) as other,
        zipfile.ZipFile(tmp_path / "model.pt2", "w") as new,
    ):
        (foreign,) = [name for name in other.namelist() if name.endswith(".so")]
        for name in old.namelist():
            new.writestr(name, other.read(foreign) if name.endswith(".so") else old.read(name))
    with pytest.raises(PackageError, match=r"wrapper\.so is not that of the description"):
        penstock.Module(tmp_path / "model.pt2", "1GiB", weights=chain.with_suffix(".ptd"))


def test_random_damage_to_a_compiled_program(
    chain: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv(targets.COMPILED_VARIABLE, str(chain.parent))
    found = [TARGETS["pt2-load"](random.Random(f"{SEED}:{number}"), tmp_path) for number in range(40)]
    assert found.count("refused") > 30


def test_swapped_segments_of_one_shape_do_not_run(chain: Path, tmp_path: Path) -> None:  # noqa: F811
    """Without verify=True, too."""
    program, weights = tmp_path / "model.pt2", tmp_path / "model.ptd"
    shutil.copy(chain, program)
    raw = chain.with_suffix(".ptd").read_bytes()
    left, right = (read_index(chain.with_suffix(".ptd"))[f"middle.{number}.weight"] for number in (0, 1))
    assert left.shape == right.shape
    head = raw[: read_index(chain.with_suffix(".ptd")).entries[0].offset_bytes]
    swapped = (
        head.replace(b"middle.0.", b"middle.?.").replace(b"middle.1.", b"middle.0.").replace(b"middle.?.", b"middle.1.")
    )
    assert swapped != head
    weights.write_bytes(swapped + raw[len(head) :])
    with pytest.raises(WeightsFileError, match="something was changed"):
        penstock.Module(program, "1GiB")


def test_a_load_that_fails_leaves_no_file_behind(
    chain: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Code is unpacked under TMPDIR, by Penstock or by an older torch, and where that is full a half is written."""
    import torch

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("penstock.torch_private.loader._unpacked", {})

    def full_for_us(archive: zipfile.ZipFile, folder: Path) -> None:
        (folder / "half").write_bytes(b"half of the code")
        raise OSError(28, "no space left on device")

    def full_for_torch(*arguments: object) -> None:
        Path(os.environ["TMPDIR"], "aotinductor_half").write_bytes(b"half of the code")
        raise RuntimeError("Failed to extract file: no space left on device")

    monkeypatch.setattr(zipfile.ZipFile, "extractall", full_for_us)
    monkeypatch.setattr(torch._C._aoti, "AOTIModelPackageLoader", full_for_torch)
    with pytest.raises(PackageError, match="no space left"):
        penstock.Module(chain, "1GiB")
    assert list(tmp_path.iterdir()) == [] and os.environ["TMPDIR"] == str(tmp_path)


def test_an_unpacked_program_that_somebody_removed_is_unpacked_again(
    chain: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Machines that live for long tidy up their temporary files."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("penstock.torch_private.loader._unpacked", {})
    for _ in range(2):
        with penstock.Module(chain, "1GiB"):
            pass
        for folder in tmp_path.iterdir():
            shutil.rmtree(folder)
