"""Weights packed for a .pte: the file has plans for them, by which a process without Python runs as Module does."""

from __future__ import annotations

import ctypes
import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.cli.main import main
from penstock.errors import BelowFloorError, WeightsFileError
from penstock.executorch import merge_weights
from penstock.executorch.lowered_file import read_lowered
from penstock.executorch.native import NativeModule
from penstock.native import core
from penstock.runtime.session import Stats, counters
from penstock.weights import WeightsIndex, read_index, verify_checksums
from penstock.weights.packed_for import PlansEntry, packed_for
from penstock.weights.packing import PackedFor, pack_entries
from tests.docs.spec_reader import read_weights
from tests.executorch.cpp_program import build_program
from tests.executorch.players import CppPlayer
from tests.harness import FAST, offloaded
from tests.runtime.modules import EVERYTHING

WIDTH = 256
X = torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH)
RUNS = 3


class Mixed(nn.Module):
    """Weights of two packed dtypes, and biases that are too small for it."""

    def __init__(self) -> None:
        super().__init__()
        dtypes = (torch.float32, torch.bfloat16)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for dtype in dtypes * 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)).float())
        return x


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixed") / "model.pte"
    torch.manual_seed(0)
    penstock.executorch.export(offloaded(Mixed().eval(), (X,)), path, device="cpu", inductor_configs=FAST)
    # Of our own writer, with checksums, which packing needs.
    merge_weights([path.with_suffix(".ptd")], path.with_name("raw.ptd"))
    return path


@pytest.fixture(scope="module")
def packed(program: Path) -> WeightsIndex:
    return penstock.pack(program.with_name("raw.ptd"), program.with_name("packed.ptd"), program=program)


@dataclass(frozen=True)
class Run:
    """What Module does with a budget."""

    budget_bytes: int
    output: Tensor
    last: Stats


@pytest.fixture(scope="module")
def runs(program: Path, packed: WeightsIndex) -> list[Run]:
    """The floor, which is more than a tenth of the weights here; percentages of them; everything."""
    with penstock.Module(program, EVERYTHING, weights=packed.path) as module:
        percents = (module.program.weight_bytes * percent // 100 for percent in (25, 50, 75, 90))
        floor_bytes, full_bytes = module.floor_bytes, module.full_bytes
        found = []
        for budget_bytes in (floor_bytes, *percents, full_bytes):
            module.set_budget(budget_bytes)
            output = [module(X) for _ in range(RUNS)][-1]
            found.append(Run(budget_bytes, output, module.last_run))
    return found


class Alone:
    """The delegates in this process, which make their session by the plans in the files."""

    def __init__(self, program: Path, weights: Path, budget_bytes: int) -> None:
        self._native = NativeModule(str(program), [str(weights)], str(budget_bytes), f"{weights} {budget_bytes}")
        try:
            self._native.load_method("forward")
        except BaseException:
            self._native.close()
            raise
        made = self._native.session()
        assert made is not None
        self._handle, self.facts = made

    def run(self) -> Tensor:
        found: Tensor = self._native.execute("forward", (X,))[0]
        return found

    def last_run(self) -> Stats:
        return counters(self._handle)[0]

    def peak_bytes(self) -> int:
        held, peak = ctypes.c_int64(), ctypes.c_int64()
        assert core().penstock_session_memory(self._handle, ctypes.byref(held), ctypes.byref(peak)) == 0
        return peak.value

    def close(self) -> None:
        self._native.close()


@pytest.fixture
def alone() -> Iterator[Callable[[Path, Path, int], Alone]]:
    opened: list[Alone] = []

    def open_alone(program: Path, weights: Path, budget_bytes: int) -> Alone:
        opened.append(Alone(program, weights, budget_bytes))
        return opened[-1]

    yield open_alone
    for each in opened:
        each.close()


def moved(stats: Stats) -> tuple[int, int, int]:
    return stats.bytes_streamed, stats.bytes_decoded, stats.copies


def test_delegates_run_as_module_does(
    program: Path,
    packed: WeightsIndex,
    runs: list[Run],
    alone: Callable[[Path, Path, int], Alone],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PENSTOCK_POISON", "1")
    for run in runs:
        module = alone(program, packed.path, run.budget_bytes)
        assert module.facts.floor_bytes == runs[0].budget_bytes
        outputs = [module.run() for _ in range(RUNS)]
        assert all(torch.equal(output, run.output) for output in outputs)
        assert moved(module.last_run()) == moved(run.last)
        assert module.peak_bytes() <= run.budget_bytes
    with pytest.raises(BelowFloorError) as refused:
        alone(program, packed.path, runs[0].budget_bytes - 1)
    assert refused.value.floor_bytes == runs[0].budget_bytes
    # Some of it stays in device memory as it is packed: more is decoded than comes over the link.
    ratio = sum(entry.length_bytes for entry in packed) / sum(entry.raw_bytes for entry in packed)
    assert any(run.last.bytes_streamed < run.last.bytes_decoded * ratio / 2 for run in runs)


@pytest.mark.slow
def test_a_process_in_cpp_runs_as_module_does(
    program: Path, packed: WeightsIndex, runs: list[Run], library: Path, tmp_path: Path
) -> None:
    source = Path(__file__).with_name("behaviour_probe.cpp")
    player = CppPlayer(build_program(source, library, tmp_path / "behaviour_probe"))
    with pytest.raises(BelowFloorError) as refused:
        player.open(program, packed.path, runs[0].budget_bytes - 1)
    assert refused.value.floor_bytes == runs[0].budget_bytes
    for run in runs:
        player.open(program, packed.path, run.budget_bytes)
        for _ in range(RUNS):
            assert torch.equal(player.run("forward", X), run.output)
        names = ("bytes_streamed", "bytes_decoded", "copies")
        assert tuple(player.figure(f"last_run_{name}") for name in names) == moved(run.last)
        assert player.figure("peak_device_bytes") <= run.budget_bytes
    # And without loading anything again.
    for run in reversed(runs):
        player.set_budget(run.budget_bytes)
        for _ in range(RUNS):
            assert torch.equal(player.run("forward", X), run.output)
        assert player.figure("last_run_bytes_streamed") == run.last.bytes_streamed
    player.close()


def test_a_file_packed_without_the_program_has_the_plans_of_the_pte(
    program: Path, packed: WeightsIndex, runs: list[Run], alone: Callable[[Path, Path, int], Alone], tmp_path: Path
) -> None:
    raw = read_index(program.with_name("raw.ptd"))
    plain = pack_entries(raw, tmp_path / "plain.ptd", PackedFor())
    other = pack_entries(
        raw, tmp_path / "other.ptd", PackedFor(plans=PlansEntry("penstock.plans.0", lambda _: b"none"))
    )
    counts = {len(read_lowered(program).plan_bytes)}
    for run in runs:
        found = [alone(program, index.path, run.budget_bytes) for index in (plain, other)]
        assert {one.facts.plan_count for one in found} == counts
        for one in found:
            assert torch.equal([one.run() for _ in range(RUNS)][-1], run.output)
            assert one.last_run().bytes_streamed >= run.last.bytes_streamed


def changed(packed: WeightsIndex, target: Path, at: int, content: bytes) -> Path:
    """`at`: of the entry with plans."""
    (entry,) = (one for one in packed if one.kind == "plans")
    whole = bytearray(packed.path.read_bytes())
    at += entry.length_bytes if at < 0 else 0
    begin = entry.offset_bytes + at
    whole[begin : begin + len(content)] = content
    target.write_bytes(whole)
    return target


DAMAGE = {
    "magic": (0, b"PNSTKPLM", "does not begin as one does"),
    "version": (8, struct.pack("<Q", 1), "has format version 1, .* pack the weights again"),
    "seal": (16, bytes(8), "is damaged"),
    "length": (24, struct.pack("<Q", 1 << 62), "is truncated"),
    "record": (64, b"\xff", "is damaged"),
    "plans": (-8, b"\xff", "is damaged"),
}


@pytest.mark.parametrize("fault", DAMAGE)
def test_damaged_plans_are_refused(
    program: Path, packed: WeightsIndex, alone: Callable[[Path, Path, int], Alone], tmp_path: Path, fault: str
) -> None:
    at, content, said = DAMAGE[fault]
    path = changed(packed, tmp_path / "damaged.ptd", at, content)
    with pytest.raises(WeightsFileError, match=rf"entry 'penstock\.plans\.\w+' of the weights file {said}"):
        alone(program, path, 1 << 30)


def test_plans_for_other_packed_weights_are_refused(
    program: Path, alone: Callable[[Path, Path, int], Alone], tmp_path: Path
) -> None:
    raw = read_index(program.with_name("raw.ptd"))
    asked = packed_for(program, raw)
    assert asked.plans is not None
    make = asked.plans.content
    plans = PlansEntry(asked.plans.name, lambda blocks: make(dict(list(blocks.items())[1:])))
    index = pack_entries(raw, tmp_path / "packed.ptd", PackedFor(asked.left, plans))
    with pytest.raises(WeightsFileError, match="is for other packed weights than the file has"):
        alone(program, index.path, 1 << 30)


def test_the_file_is_otherwise_a_packed_one(program: Path, packed: WeightsIndex, tmp_path: Path) -> None:
    raw = program.with_name("raw.ptd")
    penstock.unpack(packed.path, tmp_path / "unpacked.ptd")
    assert (tmp_path / "unpacked.ptd").read_bytes() == raw.read_bytes()
    verify_checksums(packed)
    _, found = read_weights(packed.path)
    assert {name: one.kind for name, one in found.items()} == {entry.name: entry.kind for entry in packed}
    (plans,) = (entry for entry in packed if entry.kind == "plans")
    assert plans.name == f"penstock.plans.{read_lowered(program).name}"
    # Nothing is planned for where nothing is packed.
    untouched = {entry.name for entry in read_index(raw)}
    asked = packed_for(program, read_index(raw))
    index = pack_entries(read_index(raw), tmp_path / "none.ptd", PackedFor(frozenset(untouched), asked.plans))
    assert {entry.kind for entry in index} == {"weight"}


def test_commands_tell_the_floor_of_packed_weights(
    program: Path, packed: WeightsIndex, runs: list[Run], capfd: pytest.CaptureFixture[str]
) -> None:
    for run in runs[:-1]:
        assert (
            main(["plan", str(program), "--weights", str(packed.path), "--budget", str(run.budget_bytes), "--json"])
            == 0
        )
        told = json.loads(capfd.readouterr().out)
        (method,) = told["methods"]
        assert told["floor_bytes"] == runs[0].budget_bytes
        assert (method["bytes_streamed"], method["copies"]) == (run.last.bytes_streamed, run.last.copies)
    assert main(["plan", str(program), "--weights", str(packed.path), "--budget", str(runs[0].budget_bytes - 1)]) == 10


def test_a_baked_budget_below_the_floor_of_packed_weights(program: Path, runs: list[Run], tmp_path: Path) -> None:
    """One that unpacked weights would do with is refused at export, and nothing is left behind."""
    with penstock.Module(program, EVERYTHING) as module:
        raw_floor_bytes = module.floor_bytes
    assert raw_floor_bytes < runs[0].budget_bytes
    torch.manual_seed(0)
    exported = offloaded(Mixed().eval(), (X,))
    with pytest.raises(BelowFloorError) as refused:
        penstock.executorch.export(
            exported,
            tmp_path / "model.pte",
            device="cpu",
            inductor_configs=FAST,
            pack=True,
            weight_offload_budget=raw_floor_bytes,
        )
    assert refused.value.floor_bytes == runs[0].budget_bytes and not list(tmp_path.iterdir())
