"""Damaged and mismatched files, in processes of their own: an error, never a crash."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.weight import Weight
from penstock.weights import read_index, write_ptd
from tests.executorch.programs import child

# (the error, its text) for each pair of files; what loads is run.
LOAD = """
import torch, penstock, penstock.executorch
answer = []
for program, data in zip(arguments[::2], arguments[1::2]):
    try:
        with penstock.executorch.Module(program, "1GiB", weights=data, quiet=True) as module:
            module(torch.ones(3, 96))
        answer.append(["none", ""])
    except penstock.PenstockError as error:
        answer.append([type(error).__name__, str(error)])
"""
STOCK = """
import torch
from penstock.executorch import load_library
load_library()
from executorch.runtime import Runtime
answer = []
for program, data in zip(arguments[::2], arguments[1::2]):
    try:
        Runtime.get().load_program(program, data_path=data).load_method("forward").execute([torch.ones(3, 96)])
        answer.append("ran")
    except RuntimeError as error:
        answer.append("refused")
"""


@pytest.fixture(scope="module")
def files(lowered: Callable[[str], Path]) -> tuple[Path, Path]:
    path = lowered("chain")
    return path, path.with_suffix(".ptd")


def damaged(path: Path, folder: Path, name: str, change: Callable[[bytearray], bytearray]) -> Path:
    folder.mkdir(exist_ok=True)
    out = folder / f"{name}{path.suffix}"
    out.write_bytes(change(bytearray(path.read_bytes())))
    return out


def flipped(at: int) -> Callable[[bytearray], bytearray]:
    def change(raw: bytearray) -> bytearray:
        raw[at] ^= 0xFF
        return raw

    return change


def cut(part: float) -> Callable[[bytearray], bytearray]:
    return lambda raw: raw[: int(len(raw) * part)]


def pairs(*files: tuple[Path, Path]) -> list[Path]:
    return [path for pair in files for path in pair]


def test_a_damaged_program_is_refused(files: tuple[Path, Path], tmp_path: Path) -> None:
    program, data = files
    raw = program.read_bytes()
    places = {
        "root": 0,
        "magic": 4,
        "header": 10,
        "ticket": raw.index(b"PNSTKDLG") + 60,
        "ticket-magic": raw.index(b"PNSTKDLG"),
        "payload-version": raw.index(b"PNSTKPRG") + 8,
        "description": raw.index(b"PNSTKPRG") + 100,
        "code": len(raw) * 2 // 3,
    }
    bad = [damaged(program, tmp_path, name, flipped(at)) for name, at in places.items()]
    bad += [damaged(program, tmp_path, f"cut-{part}", cut(part)) for part in (0, 0.0001, 0.01, 0.5, 0.99)]
    answers, _ = child(LOAD, *pairs(*((path, data) for path in bad)))
    assert {path.stem: kind for path, (kind, _) in zip(bad, answers, strict=True)} == {
        path.stem: "PackageError" for path in bad
    }
    told = dict(zip((path.stem for path in bad), (text for _, text in answers), strict=True))
    assert "hash" in told["description"] and "hash" in told["code"] and "hash" in told["ticket"]
    assert "version" in told["payload-version"]
    # Over a damaged magic ExecuTorch's Python bindings end the process: they print it as text.
    stock, _ = child(STOCK, *pairs(*((path, data) for path in bad if path.stem not in ("root", "magic", "header"))))
    assert set(stock) == {"refused"}


def test_a_damaged_weights_file_is_refused(files: tuple[Path, Path], tmp_path: Path) -> None:
    program, data = files
    index_bytes = min(entry.offset_bytes for entry in read_index(data))
    bad = [damaged(data, tmp_path, f"cut-{part}", cut(part)) for part in (0, 0.0001, 0.3, 0.999)]
    bad += [damaged(data, tmp_path, f"at-{at}", flipped(at)) for at in (0, 5, 9, 13, 22, 30)]
    absent = tmp_path / "absent.ptd"
    answers, _ = child(LOAD, *pairs(*((program, path) for path in (*bad, absent))))
    assert {kind for kind, _ in answers} == {"WeightsFileError"}
    # ExecuTorch's own reader trusts the index behind the header; what is short it notices.
    stock, _ = child(STOCK, *pairs(*((program, path) for path in bad[:4])))
    assert set(stock) == {"refused"}
    assert index_bytes == 4096


def test_another_model_s_weights_are_refused(
    files: tuple[Path, Path], lowered: Callable[[str], Path], tmp_path: Path
) -> None:
    program, data = files
    entries = read_index(data).unique_entries
    raw = data.read_bytes()

    def written(name: str, change: Callable[[Weight], Weight | None]) -> Path:
        path = tmp_path / f"{name}.ptd"
        kept = [(e, w) for e in entries if (w := change(Weight(e.name, e.dtype, e.shape, e.dim_order))) is not None]
        source = {w.name: raw[e.offset_bytes : e.offset_bytes + e.length_bytes] for e, w in kept}
        write_ptd(path, [w for _, w in kept], lambda w: [source[w.name]], identity="i")
        return path

    lacking = written("lacking", lambda w: None if w.name == "gain" else w)
    reshaped = written("reshaped", lambda w: Weight(w.name, w.dtype, w.shape[::-1], w.dim_order))
    retyped = written("retyped", lambda w: Weight(w.name, "int32", w.shape, w.dim_order))
    same = written("same", lambda w: w)
    other = lowered("split").with_suffix(".ptd")
    answers, _ = child(LOAD, *pairs(*((program, path) for path in (lacking, reshaped, retyped, other, same))))
    assert [kind for kind, _ in answers] == [
        "MissingWeightError",
        "WeightMismatchError",
        "WeightMismatchError",
        "WeightMismatchError",
        "none",
    ]
    assert "lack 1 of the" in answers[0][1] and "'gain'" in answers[0][1]
    assert "shape" in answers[1][1]
    stock, log = child(STOCK, *pairs(*((program, path) for path in (lacking, reshaped, retyped, other, same))))
    assert stock == ["refused"] * 4 + ["ran"]
    assert "lack 1 of the" in log


def test_a_file_that_is_shortened_while_it_is_in_use_fails_the_run(files: tuple[Path, Path], tmp_path: Path) -> None:
    program, data = files
    shutil.copy(data, tmp_path / "model.ptd")
    script = """
import os, torch, penstock, penstock.executorch
program, data = arguments
floor = penstock.executorch.Module(program, "1GiB", weights=data, quiet=True).floor_bytes
module = penstock.executorch.Module(program, floor, weights=data, quiet=True)
module(torch.ones(3, 96))
os.truncate(data, 8192)
try:
    module(torch.ones(3, 96))
    answer = "ran"
except penstock.PenstockError as error:
    answer = type(error).__name__
"""
    answer, _ = child(script, program, tmp_path / "model.ptd")
    assert answer == "WeightsChangedError"


def test_nothing_is_left_behind(files: tuple[Path, Path], tmp_path: Path) -> None:
    """Neither after a load nor after a refusal: no file, no mapping of the weights, no open file."""
    program, data = files
    script = """
import os, pathlib, torch, penstock, penstock.executorch
program, data, folder = arguments
os.environ["TMPDIR"] = folder

def held():
    return [line for line in open("/proc/self/maps") if data in line], len(os.listdir("/proc/self/fd"))

def once(budget):
    try:
        with penstock.executorch.Module(program, budget, weights=data, quiet=True) as module:
            module(torch.ones(3, 96))
    except penstock.PenstockError:
        pass

once("1GiB"), once(4096)
before = held()
for _ in range(3):
    once("1GiB"), once(4096)
answer = [before == held(), before[0], sorted(p.name for p in pathlib.Path(folder).iterdir())]
"""
    answer, _ = child(script, program, data, tmp_path)
    assert answer == [True, [], []]
