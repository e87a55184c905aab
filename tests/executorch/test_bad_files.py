"""Damaged and mismatched files, in processes of their own: an error, never a crash."""

from __future__ import annotations

import io
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from penstock.executorch.file_seal import END_MAGIC, append_seal
from penstock.executorch.payload import checksum
from penstock.torch_private.loader import LOADS_FOLDERS
from penstock.weight import Weight
from penstock.weights import read_index, write_ptd
from tests.executorch.programs import child

# (the error, its text) for each pair of files; what loads is run.
LOAD = """
import torch, penstock, penstock.executorch
answer = []
for program, data in zip(arguments[::2], arguments[1::2]):
    try:
        with penstock.executorch.Module(program, "1GiB", weights=data) as module:
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


def resealed(raw: bytearray) -> bytearray:
    """A number of the last plan changed, and the hash of the payload and the seal of the file made good."""
    start = raw.index(b"PNSTKPRG")
    text_bytes, table_bytes, code_bytes = struct.unpack_from("<QQQ", raw, start + 24)
    end = start + 48 + text_bytes + table_bytes + code_bytes
    raw[start + 48 + text_bytes + table_bytes - 8] ^= 1
    struct.pack_into("<Q", raw, start + 16, checksum(bytes(raw[start + 24 : end])))
    file = io.BytesIO(bytes(raw[: raw.rindex(END_MAGIC)]))
    append_seal(file)
    return bytearray(file.getvalue())


def cut(part: float) -> Callable[[bytearray], bytearray]:
    return lambda raw: raw[: int(len(raw) * part)]


@dataclass(frozen=True)
class Case:
    program: Path
    data: Path
    # What Module raises, and a part of what it says.
    error: str
    said: str = ""
    # What ExecuTorch's own Python runtime does; None where it ends the process, over which we have no say.
    stock: str | None = "refused"


def bad_programs(program: Path, data: Path, folder: Path) -> dict[str, Case]:
    raw = program.read_bytes()
    delegate_ref, payload = raw.index(b"PNSTKDLG"), raw.index(b"PNSTKPRG")
    # Over a damaged magic ExecuTorch's Python bindings end the process: they print it as text.
    places: dict[str, tuple[int, str, str | None]] = {
        "root": (0, "", None),
        "magic": (4, "", None),
        "header": (10, "", None),
        "delegate_ref": (delegate_ref + 60, "hash", "refused"),
        "delegate_ref-magic": (delegate_ref, "", "refused"),
        "payload-version": (payload + 8, "version", "refused"),
        "description": (payload + 100, "hash", "refused"),
        "code": (len(raw) * 2 // 3, "hash", "refused"),
    }
    cases = {
        name: Case(damaged(program, folder, name, flipped(at)), data, "PackageError", said, stock)
        for name, (at, said, stock) in places.items()
    }
    changed = damaged(program, folder, "plan", resealed)
    cases["plan"] = Case(changed, data, "PackageError", "is not the one that was written", "refused")
    for part in (0, 0.0001, 0.01, 0.5, 0.99):
        cases[f"program-cut-{part}"] = Case(damaged(program, folder, f"cut-{part}", cut(part)), data, "PackageError")
    return cases


def bad_weights(program: Path, data: Path, folder: Path) -> dict[str, Case]:
    cases = {"absent": Case(program, folder / "absent.ptd", "WeightsFileError")}
    for part in (0, 0.0001, 0.3, 0.999):
        path = damaged(data, folder, f"cut-{part}", cut(part))
        cases[f"weights-cut-{part}"] = Case(program, path, "WeightsFileError")
    for at in (0, 5, 9, 13, 22, 30):
        path = damaged(data, folder, f"at-{at}", flipped(at))
        # ExecuTorch's own reader trusts the index behind the header; what is short it notices.
        cases[f"weights-at-{at}"] = Case(program, path, "WeightsFileError", stock=None)
    return cases


def other_weights(program: Path, data: Path, other: Path, folder: Path) -> dict[str, Case]:
    entries = read_index(data).unique_entries
    raw = data.read_bytes()

    def written(name: str, change: Callable[[Weight], Weight | None]) -> Path:
        path = folder / f"{name}.ptd"
        kept = [(e, w) for e in entries if (w := change(Weight(e.name, e.dtype, e.shape, e.dim_order))) is not None]
        source = {w.name: raw[e.offset_bytes : e.offset_bytes + e.length_bytes] for e, w in kept}
        write_ptd(path, [w for _, w in kept], lambda w: [source[w.name]], identity="i")
        return path

    lacking = written("lacking", lambda w: None if w.name == "gain" else w)
    reshaped = written("reshaped", lambda w: Weight(w.name, w.dtype, w.shape[::-1], w.dim_order))
    retyped = written("retyped", lambda w: Weight(w.name, "int32", w.shape, w.dim_order))
    foreign = folder / "foreign.ptd"
    write_ptd(foreign, [Weight("unknown", "uint8", (1,), (0,))], lambda _: [b"x"], identity="i")
    return {
        "lacking": Case(program, lacking, "MissingWeightError", "lacks 1 of the 12 weights of the program: 'gain'"),
        "reshaped": Case(program, reshaped, "WeightMismatchError", "'last.weight' is float32[96, 48], needs"),
        "retyped": Case(program, retyped, "WeightMismatchError", "'gain' is int32[12, 96], needs float32[12, 96]"),
        "other": Case(program, other, "MissingWeightError", "lacks"),
        "foreign": Case(program, foreign, "IdentityError", "holds none of the 12 weights"),
        "same": Case(program, written("same", lambda w: w), "none", stock="ran"),
    }


Found = tuple[dict[str, Case], dict[str, tuple[str, str]], dict[str, str], str]


@pytest.fixture(scope="module")
def files(lowered: Callable[[str], Path]) -> tuple[Path, Path]:
    path = lowered("chain")
    return path, path.with_suffix(".ptd")


@pytest.fixture(scope="module")
def found(files: tuple[Path, Path], lowered: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Found:
    """All cases, loaded by one process with Module and by one with ExecuTorch's runtime: a crash fails every test."""
    folder = tmp_path_factory.mktemp("bad")
    cases = {
        **bad_programs(*files, folder),
        **bad_weights(*files, folder),
        **other_weights(*files, lowered("split").with_suffix(".ptd"), folder),
    }
    answers, _ = child(LOAD, *(path for case in cases.values() for path in (case.program, case.data)))
    stocked = {name: case for name, case in cases.items() if case.stock is not None}
    stock, log = child(STOCK, *(path for case in stocked.values() for path in (case.program, case.data)))
    told = dict(zip(cases, map(tuple, answers), strict=True))
    return cases, told, dict(zip(stocked, stock, strict=True)), log


def test_each_is_refused_by_name(found: Found) -> None:
    cases, told, _, _ = found
    assert {name: kind for name, (kind, _) in told.items()} == {name: case.error for name, case in cases.items()}
    assert [(name, told[name][1]) for name, case in cases.items() if case.said not in told[name][1]] == []


def test_the_stock_runtime_refuses_them_too(found: Found) -> None:
    cases, told, stock, log = found
    # Where its own bindings cannot pass a tensor, nothing runs; what is refused is refused before that.
    runs = stock.pop("same")
    assert stock == {name: case.stock for name, case in cases.items() if case.stock == "refused"}
    assert runs == "ran" or torch.__version__ < "2.13"
    # Word for word.
    assert f"{told['lacking'][1]}\n" in log
    assert "does not fit the program: '" in log


def test_a_file_that_is_shortened_while_it_is_in_use_fails_the_run(files: tuple[Path, Path], tmp_path: Path) -> None:
    program, data = files
    shutil.copy(data, tmp_path / "model.ptd")
    script = """
import os, torch, penstock, penstock.executorch
program, data = arguments
floor = penstock.executorch.Module(program, "1GiB", weights=data).floor_bytes
module = penstock.executorch.Module(program, floor, weights=data)
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
        with penstock.executorch.Module(program, budget, weights=data) as module:
            module(torch.ones(3, 96))
    except penstock.PenstockError:
        pass

once("1GiB"), once(4096)
before = held()
for _ in range(3):
    once("1GiB"), once(4096)
answer = [before == held(), before[0], [p.name[:19] for p in pathlib.Path(folder).iterdir()]]
"""
    answer, _ = child(script, program, data, tmp_path)
    # Its code, unpacked once: that goes with the process.
    assert answer == [True, [], ["penstock-held-code-"] if LOADS_FOLDERS else []]
    assert list(tmp_path.iterdir()) == []
