"""penstock.compile from outside: what it writes, what it refuses, and that a refusal leaves nothing behind."""

from __future__ import annotations

import copy
import dataclasses
import errno
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch._inductor.lowering import register_lowering
from torch._inductor.scheduler import Scheduler

import penstock
import penstock.export.compile as compile_module
import penstock.export.method as method_module
from penstock.errors import (
    BudgetError,
    CheckpointError,
    CompileError,
    DeviceError,
    DiskFullError,
    MethodConflictError,
    NotAProgramError,
    NotOffloadedError,
    NoWeightsError,
    OutputExistsError,
    OutputPathError,
    PackageError,
    PenstockError,
    ProgramError,
    ScheduleError,
    ToolchainError,
    TrainingGraphError,
)
from penstock.export import toolchain
from penstock.export.method import CompiledMethod, schedule_method
from penstock.export.offload import lend_weights
from penstock.export.values import tensor_pieces
from penstock.export.weightless import make_weightless
from penstock.export.wrapper import check_wrapper
from penstock.native import core
from penstock.plan.floor import floor_bytes
from penstock.program import (
    FORMAT_VERSION,
    ConstantSpec,
    Method,
    Program,
    Signature,
    Temporary,
    TensorSpec,
    program_from_json,
    program_to_json,
    read_program,
)
from penstock.schedule import Access, Schedule, Step
from penstock.torch_private.inductor import REQUIRED_OPTIONS
from penstock.torch_private.loader import CompiledMethod as LoadedMethod
from penstock.verify.module import PoisonedModule
from penstock.verify.poison import PoisonSession
from penstock.weight import Weight
from penstock.weights import layout_identity, read_index, verify_checksums
from penstock.weights.format import PAGE_BYTES
from tests.harness import compiled, leaves, offloaded
from tests.zoo import decoder, export

GIB = 2**30


def snapshot(folder: Path) -> dict[str, bytes | None]:
    return {
        str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))
    }


@contextmanager
def unchanged(folder: Path) -> Iterator[None]:
    before = snapshot(folder)
    yield
    assert snapshot(folder) == before


def older_files(folder: Path) -> None:
    (folder / "model.pt2").write_bytes(b"an older program")
    (folder / "model.ptd").write_bytes(b"its weights")


def stored_bytes(path: Path) -> dict[str, bytes]:
    """What a .ptd holds under every name."""
    content = path.read_bytes()
    return {e.name: content[e.offset_bytes : e.offset_bytes + e.length_bytes] for e in read_index(path)}


def bytes_of(tensor: torch.Tensor, dim_order: tuple[int, ...] | None = None) -> bytes:
    return b"".join(bytes(piece) for piece in tensor_pieces(tensor, dim_order or range(tensor.dim())))


# ------------------------------------------------------------------------------- a compiler that compiles nothing


def stand_in(
    name: str,
    ep: torch.export.ExportedProgram,
    device: torch.device,
    states: frozenset[str],
    weight_names: Mapping[str, str],
    folder: Path,
    options: Mapping[str, Any],
) -> CompiledMethod:
    """As if every access were a step of its own, in the order of their numbers. Its code is a text file."""
    program = make_weightless(ep, device, states)
    (folder / name).mkdir()
    file = folder / name / "stand-in.wrapper.cpp"
    file.write_text("no code\n")
    numbers = sorted(program.weight_of)
    accesses = tuple(Access(n, weight_names[program.weight_of[n]], n in program.pinned) for n in numbers)
    schedule = Schedule(name, accesses, tuple(Step(f"kernel {n}", (n,)) for n in numbers))
    method = Method(name, schedule, program.signature, program.states, 100, None, ())
    return CompiledMethod(method, (str(file),))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what happens before and after the compiler: it takes no time, and nothing it emits can be run."""
    monkeypatch.setattr(compile_module, "compile_method", stand_in)
    monkeypatch.setattr(compile_module, "check_toolchain", lambda: None)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what must be refused before the compiler, which takes minutes, is called."""

    def called(*args: object) -> None:
        raise AssertionError("the compiler was called")

    monkeypatch.setattr(compile_module, "compile_method", called)
    monkeypatch.setattr(compile_module, "check_toolchain", called)


class Net(nn.Module):
    """A tied weight, one that is not stored row by row, buffers of each kind, states of each kind."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, width)
        self.linear = nn.Linear(width, width)
        self.skewed = nn.Parameter(torch.randn(width, 3 * width).t())
        self.head = nn.Linear(3 * width, 12, bias=False)
        self.tail = nn.Linear(width, 12, bias=False)
        self.tail.weight = self.embed.weight
        self.register_buffer("mean", torch.randn(width))
        self.register_buffer("scale", torch.rand(width), persistent=False)
        self.register_buffer("cache", torch.zeros(4, width), persistent=False)
        self.register_buffer("count", torch.full((1,), 3.0))
        self.unused = nn.Linear(2, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.linear(self.embed(tokens)) * self.scale - self.mean
        self.cache.add_(x)
        self.count.add_(1)
        return self.head(x @ self.skewed.t()) + self.tail(x) + self.count


TOKENS = torch.arange(4)


def net(seed: int = 0, device: str = "cpu") -> Net:
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        return Net()


@pytest.fixture(scope="module")
def program() -> torch.export.ExportedProgram:
    return offloaded(net(), (TOKENS,))


@pytest.fixture(scope="module")
def meta_program() -> torch.export.ExportedProgram:
    return offloaded(net(device="meta"), (TOKENS.to("meta"),))


def build(programs: Any, folder: Path, **options: Any) -> penstock.Compiled:
    return penstock.compile(programs, folder / "model.pt2", device=options.pop("device", "cpu"), **options)


# --------------------------------------------------------------------------------- one program and one weights file


class Built(NamedTuple):
    result: penstock.Compiled
    wrappers: dict[str, str]


def wrappers(path: Path) -> dict[str, str]:
    with zipfile.ZipFile(path) as archive:
        found = {re.search(r"aotinductor/(\w+)/[^/]*wrapper\.cpp$", name): name for name in archive.namelist()}
        return {match[1]: archive.read(name).decode() for match, name in found.items() if match}


CASES = decoder.methods(dataclasses.replace(decoder.TINY, layers=1))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A decoder with two methods over the same weights and caches, compiled for real."""
    programs = {name: penstock.apply_weight_offload(export(case)) for name, case in CASES.items()}
    result = compiled(tmp_path_factory.mktemp("decoder"), programs, weight_offload_budget="8GiB")
    return Built(result, wrappers(result.program_path))


class Shifted(nn.Module):
    """Reads `shift` in two kernels that cannot become one, and has a constant that export lifts."""

    def __init__(self, width: int, constant: float) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(width))
        self.linear = nn.Linear(width, width)
        self.constant = constant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shift = self.shift + 1
        return torch.relu(self.linear(x * shift)) * shift + torch.tensor([self.constant, 0.0]).repeat(4)[0]


def shifted(width: int) -> dict[str, Shifted]:
    torch.manual_seed(0)
    first, second = Shifted(width, 1.0), Shifted(width, 2.0)
    second.shift, second.linear = first.shift, first.linear
    return {"first": first.eval(), "second": second.eval()}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Built:
    programs = {name: offloaded(model, (torch.ones(2, 8),)) for name, model in shifted(8).items()}
    result = compiled(tmp_path_factory.mktemp("small"), programs)
    return Built(result, wrappers(result.program_path))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Built:
    programs = {"first": offloaded(shifted(512)["first"], (torch.ones(2, 512),))}
    result = compiled(tmp_path_factory.mktemp("wide"), programs)
    return Built(result, wrappers(result.program_path))


def test_two_files_and_nothing_else(built: Built) -> None:
    assert [p.name for p in sorted(built.result.program_path.parent.iterdir())] == ["model.pt2", "model.ptd"]
    assert built.result.weights_path == built.result.program_path.with_suffix(".ptd")


def test_every_method_runs_over_the_same_weights_and_caches(built: Built) -> None:
    module = PoisonedModule(built.result.program_path)
    reference = copy.deepcopy(CASES["prefill"].module)
    assert [m.name for m in module.program.methods] == ["prefill", "decode"]
    for name, case in CASES.items():
        with torch.no_grad():
            expected = reference(*case.args)
        torch.testing.assert_close(leaves(module.run_method(name, *case.args))[0], expected)


def test_weights_that_methods_share_are_stored_once(built: Built) -> None:
    program = built.result.program
    model = CASES["prefill"].module
    state_dict = {**model.state_dict(), "inv_freq": model.inv_freq}
    assert {w.name for w in program.weights} == state_dict.keys()
    for method in program.methods:
        assert {access.weight for access in method.schedule.accesses} == state_dict.keys()
    index = read_index(built.result.weights_path)
    assert sorted(entry.name for entry in index.entries) == sorted(state_dict)
    data = sum(-(-w.nbytes // PAGE_BYTES) * PAGE_BYTES for w in program.weights)
    assert index.file_bytes < data + 4 * PAGE_BYTES  # the index and the metadata beside the data, once


def test_the_weights_file(built: Built) -> None:
    """In the order of first access, on pages, with the values of the model, and of the program's identity."""
    program = built.result.program
    order: dict[str, None] = {}
    for method in program.methods:
        order.update(dict.fromkeys(access.weight for access in method.schedule.accesses))
    index = read_index(built.result.weights_path)
    assert [entry.name for entry in index.unique_entries] == list(order) == [w.name for w in program.weights]
    offsets = [entry.offset_bytes for entry in index.unique_entries]
    assert offsets == sorted(offsets)
    assert all(offset % PAGE_BYTES == 0 for offset in offsets)
    assert index.identity == program.identity == layout_identity(program.weights, program.states)
    verify_checksums(index)
    model = CASES["prefill"].module
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    held = stored_bytes(built.result.weights_path)
    for weight in program.weights:
        assert held[weight.name] == bytes_of(tensors[weight.name], weight.dim_order)


def test_executorch_reads_the_weights_file(built: Built) -> None:
    serialize = pytest.importorskip("executorch.extension.flat_tensor.serialize.serialize")
    cord = pytest.importorskip("executorch.exir._serialize._cord")
    theirs = serialize.FlatTensorSerializer().deserialize(cord.Cord(built.result.weights_path.read_bytes()))
    held = stored_bytes(built.result.weights_path)
    assert set(theirs.named_data) - {"penstock.json"} == set(held)
    for name, raw in held.items():
        assert bytes(theirs.buffers[theirs.named_data[name].buffer_index]) == raw


def test_the_metadata_round_trips(built: Built, small: Built) -> None:
    for result in (built.result, small.result):
        assert read_program(result.program_path) == result.program
        assert read_program(str(result.program_path)) == result.program
        assert program_from_json(program_to_json(result.program)) == result.program


def test_what_the_metadata_says(built: Built) -> None:
    with zipfile.ZipFile(built.result.program_path) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith("/extra/penstock.json")]
        table = json.loads(archive.read(name))
    assert table["format_version"] == FORMAT_VERSION == 1
    program = read_program(built.result.program_path)
    assert program.budget_bytes == 8 * GIB
    floor = floor_bytes([m.schedule for m in program.methods], {w.name: w for w in program.weights})
    assert program.floor_bytes == floor.floor_bytes == built.result.floor.floor_bytes > 0
    assert program.device == "cpu"
    assert program.built_with["torch"] == torch.__version__
    assert program.built_with["penstock"] == penstock.__version__
    assert program.unused == ()
    caches = {"layers.0.attn.k_cache", "layers.0.attn.v_cache"}
    assert {s.name: (s.dtype, s.shape, s.init) for s in program.states} == dict.fromkeys(
        caches, ("float32", (1, 2, 32, 16), "zeros")
    )
    assert program.state_bytes == 2 * 2 * 32 * 16 * 4
    assert program.weight_bytes == sum(t.nbytes for t in CASES["decode"].module.parameters()) + 8 * 4
    prefill, decode = program.methods
    assert set(prefill.states) == set(decode.states) == caches
    # The largest prompt has 32 tokens, the example 8; a decode step has one and nothing dynamic.
    assert 0 < prefill.activation_example_bytes < prefill.activation_bound_bytes
    assert 0 < decode.activation_example_bytes == decode.activation_bound_bytes
    (symbol,) = prefill.signature.symbols
    assert prefill.signature.symbols[symbol] == (2, 32)
    assert decode.signature.symbols == {}
    assert [spec.shape for spec in prefill.signature.inputs if isinstance(spec, TensorSpec)] == [(1, symbol), (symbol,)]
    with pytest.raises(PackageError, match="no method 'other'; the program has prefill, decode"):
        program.method("other")


def test_reading_files_takes_no_torch(built: Built) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"  # from here on, importing torch is an ImportError
        "import penstock\n"
        "from penstock.program import read_program\n"
        "from penstock.weights import read_index\n"
        "program, index = read_program(sys.argv[1]), read_index(sys.argv[2])\n"
        "assert penstock.read_program(sys.argv[1]) == program\n"
        "print(program.identity, index.identity, program.floor_bytes, len(program.methods[1].schedule.steps))\n"
    )
    command = [sys.executable, "-c", code, str(built.result.program_path), str(built.result.weights_path)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    program = built.result.program
    steps = len(program.methods[1].schedule.steps)
    assert child.stdout.split() == [program.identity, program.identity, str(program.floor_bytes), str(steps)]


def test_the_program_holds_no_constants(built: Built, small: Built, wide: Built) -> None:
    core()
    for result in (built.result, small.result, wide.result):
        held = stored_bytes(result.weights_path)
        with zipfile.ZipFile(result.program_path) as archive:
            members = [archive.read(name) for name in archive.namelist()]
        for method in result.program.methods:
            assert LoadedMethod(result.program_path, method.name).constant_names == []
        for name, raw in held.items():
            # Weights of random numbers; the others are too plain (ones) or too short to be told from code.
            if len(raw) >= 256 and len(set(raw)) > 64:
                assert not any(raw[64:128] in member for member in members), name


def test_the_program_does_not_grow_with_the_model(small: Built, wide: Built) -> None:
    def code_bytes(path: Path) -> int:
        with zipfile.ZipFile(path) as archive:
            return sum(i.file_size for i in archive.infolist() if "/aotinductor/first/" in i.filename)

    assert wide.result.program.weight_bytes > small.result.program.weight_bytes + 2**20
    grown = code_bytes(wide.result.program_path) - code_bytes(small.result.program_path)
    assert abs(grown) < 64 * 1024


# ------------------------------------------------------------------------------------ the wrapper against its record


def events(schedule: Schedule) -> list[tuple[str, int]]:
    """The calls that a record promises, in order."""
    found: list[tuple[str, int]] = []
    pending = list(schedule.accesses)
    for index in range(len(schedule.steps)):
        while pending and schedule.first_step.get(pending[0].number, -1) == index:
            found.append(("access", pending.pop(0).number))
        found.append(("end of step", index))
    return found


def with_steps(schedule: Schedule, steps: list[Step]) -> Schedule:
    return Schedule(schedule.method, schedule.accesses, tuple(steps))


def moved(schedule: Schedule, number: int, start: int, end: int) -> Schedule:
    """Step `end` reads the access, and step `start` does not any more."""
    steps = list(schedule.steps)
    steps[start] = dataclasses.replace(steps[start], accesses=tuple(n for n in steps[start].accesses if n != number))
    steps[end] = dataclasses.replace(steps[end], accesses=tuple(sorted({*steps[end].accesses, number})))
    return with_steps(schedule, steps)


def readers(schedule: Schedule, number: int) -> list[int]:
    return [index for index, step in enumerate(schedule.steps) if number in step.accesses]


def records(*builds: Built) -> Iterator[tuple[str, Schedule]]:
    for one in builds:
        for method in one.result.program.methods:
            yield one.wrappers[method.name], method.schedule


def assert_diverges(source: str, schedule: Schedule, altered: Schedule) -> None:
    """The error names the first call that is not as recorded: what was recorded there, and what was emitted."""
    have, want = events(schedule), events(altered)
    pairs = zip([*have, None], [*want, None], strict=False)
    position, (emitted, recorded) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
    with pytest.raises(ScheduleError) as caught:
        check_wrapper(source, altered)
    message = str(caught.value)
    assert repr(schedule.method) in message
    assert f"at call {position}: recorded {' '.join(map(str, recorded or ['nothing']))}" in message
    assert f"emitted {' '.join(map(str, emitted or ['nothing']))}" in message


def test_the_records_pass(built: Built, small: Built) -> None:
    for source, schedule in records(built, small):
        assert len(schedule.accesses) >= 4
        check_wrapper(source, schedule)


def test_two_accesses_of_a_step_swapped(built: Built, small: Built) -> None:
    tried = 0
    for source, schedule in records(built, small):
        for place in range(len(schedule.accesses) - 1):
            accesses = list(schedule.accesses)
            accesses[place : place + 2] = reversed(accesses[place : place + 2])
            if len({schedule.first_step[a.number] for a in accesses[place : place + 2]}) == 1:
                altered = Schedule(schedule.method, tuple(accesses), schedule.steps)
                assert_diverges(source, schedule, altered)
                assert f"weight {schedule.accesses[place + 1].weight!r}" in refusal(source, altered)
                tried += 1
    assert tried


def refusal(source: str, altered: Schedule) -> str:
    with pytest.raises(ScheduleError) as caught:
        check_wrapper(source, altered)
    return str(caught.value)


def test_an_access_with_another_number(built: Built) -> None:
    for source, schedule in records(built):
        for place, access in enumerate(schedule.accesses):
            accesses = list(schedule.accesses)
            accesses[place] = dataclasses.replace(access, number=99)
            renumbered = tuple(
                dataclasses.replace(s, accesses=tuple(99 if n == access.number else n for n in s.accesses))
                for s in schedule.steps
            )
            altered = Schedule(schedule.method, tuple(accesses), renumbered)
            assert_diverges(source, schedule, altered)
            assert f"recorded access 99 (weight {access.weight!r})" in refusal(source, altered)


def test_an_access_left_out(built: Built) -> None:
    for source, schedule in records(built):
        for access in schedule.accesses:
            accesses = tuple(a for a in schedule.accesses if a != access)
            steps = tuple(
                dataclasses.replace(s, accesses=tuple(n for n in s.accesses if n != access.number))
                for s in schedule.steps
            )
            assert_diverges(source, schedule, Schedule(schedule.method, accesses, steps))


def test_a_step_left_out_or_added(built: Built) -> None:
    for source, schedule in records(built):
        for place, step in enumerate(schedule.steps):
            steps = [*schedule.steps[:place], *schedule.steps[place + 1 :]]
            kept = {n for s in steps for n in s.accesses}
            accesses = tuple(a for a in schedule.accesses if a.number in kept)
            assert_diverges(source, schedule, Schedule(schedule.method, accesses, tuple(steps)))
            doubled = [*schedule.steps[:place], step, *schedule.steps[place:]]
            assert_diverges(source, schedule, with_steps(schedule, doubled))


def test_two_steps_swapped(built: Built) -> None:
    for source, schedule in records(built):
        for place in range(len(schedule.steps) - 1):
            one, other = schedule.steps[place], schedule.steps[place + 1]
            if set(one.accesses) == set(other.accesses):
                continue
            steps = [*schedule.steps[:place], other, one, *schedule.steps[place + 2 :]]
            first = with_steps(schedule, steps).first_step
            accesses = tuple(sorted(schedule.accesses, key=lambda a, first=first: first[a.number]))
            assert_diverges(source, schedule, Schedule(schedule.method, accesses, tuple(steps)))


def test_a_first_reader_moved_to_the_step_before(built: Built, small: Built) -> None:
    tried = 0
    for source, schedule in records(built, small):
        for access in schedule.accesses:
            first = schedule.first_step[access.number]
            if first:
                assert_diverges(source, schedule, moved(schedule, access.number, first, first - 1))
                tried += 1
    assert tried > 10


def several_readers(schedule: Schedule) -> list[Access]:
    return [access for access in schedule.accesses if len(readers(schedule, access.number)) > 1]


def test_a_last_reader_moved_earlier_is_seen_in_the_text(built: Built, small: Built) -> None:
    tried = 0
    for source, schedule in records(built, small):
        for access in several_readers(schedule):
            *_, before, last = readers(schedule, access.number)
            for earlier in range(before, last):
                message = refusal(source, moved(schedule, access.number, last, earlier))
                assert f"(access {access.number}, weight {access.weight!r}) is used after step {earlier}" in message
                tried += 1
    assert tried >= 4  # two methods of either program


def test_a_last_reader_moved_later_passes(built: Built, small: Built) -> None:
    """Held too long is safe."""
    for source, schedule in records(built, small):
        for access in schedule.accesses:
            last = schedule.last_step[access.number]
            for later in range(last + 1, len(schedule.steps)):
                steps = list(schedule.steps)
                steps[later] = dataclasses.replace(steps[later], accesses=(*steps[later].accesses, access.number))
                check_wrapper(source, with_steps(schedule, steps))


@pytest.mark.xfail(strict=True, reason="check_wrapper sorts a record's accesses by their first step before it compares")
def test_two_accesses_of_different_steps_swapped(built: Built) -> None:
    for source, schedule in records(built):
        for place in range(len(schedule.accesses) - 1):
            accesses = list(schedule.accesses)
            accesses[place : place + 2] = reversed(accesses[place : place + 2])
            if len({schedule.first_step[a.number] for a in accesses[place : place + 2]}) == 2:
                refusal(source, Schedule(schedule.method, tuple(accesses), schedule.steps))


@pytest.mark.xfail(strict=True, raises=KeyError, reason="check_wrapper trusts that every access has a reader")
def test_an_access_that_no_step_reads(built: Built) -> None:
    for source, schedule in records(built):
        refusal(source, with_steps(schedule, list(schedule.steps[:-1])))


# --------------------------------------------------------------------------------------------- the record under poison


class Runner:
    """One method, run under any record, each time from fresh states."""

    def __init__(self, one: Built, method: str, args: tuple[torch.Tensor, ...]) -> None:
        result = one.result
        core()
        self.schedule = result.program.method(method).schedule
        held = stored_bytes(result.weights_path)
        self._weights = {
            weight.name: torch.frombuffer(bytearray(held[weight.name]), dtype=torch.uint8)
            for weight in result.program.weights
        }
        self._loaded = LoadedMethod(result.program_path, method)
        states = {state.name: state for state in result.program.states}
        assert all(state.init == "zeros" for state in states.values())
        self._states = [states[name] for name in result.program.method(method).states]
        self._args = args

    def run(self, schedule: Schedule) -> list[torch.Tensor]:
        """Outputs, and the states after the run."""
        states = [torch.zeros(state.shape, dtype=getattr(torch, state.dtype)) for state in self._states]
        with PoisonSession(schedule, self._weights) as session:
            outputs = session.run(lambda: self._loaded([*states, *self._args]))
            return [*(tensor.clone() for tensor in outputs), *states]

    def sees_poison(self, schedule: Schedule) -> bool:
        try:
            return any(bool(tensor.isnan().any()) for tensor in self.run(schedule))
        except ScheduleError:
            return True


@pytest.fixture(scope="module")
def runners(built: Built, small: Built) -> list[Runner]:
    found = [Runner(built, name, case.args) for name, case in CASES.items()]
    return [*found, *(Runner(small, name, (torch.ones(2, 8),)) for name in ("first", "second"))]


def test_the_records_run(runners: list[Runner]) -> None:
    for runner in runners:
        assert not runner.sees_poison(runner.schedule)


def test_a_last_reader_moved_earlier_reads_poison(runners: list[Runner]) -> None:
    """For every access that more than one step reads; the others are fetched right before their only reader."""
    for runner in runners:
        accesses = several_readers(runner.schedule)
        assert accesses, runner.schedule.method
        for access in accesses:
            *_, before, last = readers(runner.schedule, access.number)
            for earlier in range(before, last):
                altered = moved(runner.schedule, access.number, last, earlier)
                assert altered.last_step[access.number] == earlier
                assert runner.sees_poison(altered), (runner.schedule.method, access, earlier)


def test_a_last_reader_moved_later_changes_nothing(runners: list[Runner]) -> None:
    for runner in runners:
        expected = runner.run(runner.schedule)
        for access in runner.schedule.accesses:
            last = runner.schedule.last_step[access.number]
            for later in {last + 1, len(runner.schedule.steps) - 1} - {last, len(runner.schedule.steps)}:
                steps = list(runner.schedule.steps)
                steps[later] = dataclasses.replace(steps[later], accesses=(*steps[later].accesses, access.number))
                found = runner.run(with_steps(runner.schedule, steps))
                assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)), access


@pytest.mark.xfail(strict=True, reason="a session does not mind an access whose recorded last reader ended before")
def test_an_only_reader_moved_earlier_fails_the_run(runners: list[Runner]) -> None:
    for runner in runners:
        for access in runner.schedule.accesses:
            first, last = readers(runner.schedule, access.number)[0], runner.schedule.last_step[access.number]
            if first == last and first:
                assert runner.sees_poison(moved(runner.schedule, access.number, first, first - 1)), access


def test_a_record_of_other_calls_fails_the_run(runners: list[Runner]) -> None:
    for runner in runners:
        schedule = runner.schedule
        for place in range(len(schedule.accesses) - 1):
            accesses = list(schedule.accesses)
            accesses[place : place + 2] = reversed(accesses[place : place + 2])
            expected = f"position {place}: recorded access {accesses[place].number}, fetched access"
            with pytest.raises(ScheduleError, match=expected):
                runner.run(Schedule(schedule.method, tuple(accesses), schedule.steps))
        with pytest.raises(ScheduleError, match=r"recorded steps|was due"):
            runner.run(with_steps(schedule, [*schedule.steps, schedule.steps[-1]]))
        last = schedule.accesses[-1]
        with pytest.raises(ScheduleError, match=f"access {last.number} was fetched after the last recorded one"):
            runner.run(Schedule(schedule.method, schedule.accesses[:-1], schedule.steps))


# -------------------------------------------------------------------------------------------------- methods and weights


def test_lifted_constants_of_one_name_and_two_values(small: Built) -> None:
    program = small.result.program
    names = {w.name for w in program.weights}
    assert names == {"shift", "linear.weight", "linear.bias", "lifted_tensor_0", "second.lifted_tensor_0"}
    held = stored_bytes(small.result.weights_path)
    assert held["lifted_tensor_0"] == bytes_of(torch.tensor([1.0, 0.0]))
    assert held["second.lifted_tensor_0"] == bytes_of(torch.tensor([2.0, 0.0]))
    module = PoisonedModule(small.result.program_path)
    for name, model in shifted(8).items():
        with torch.no_grad():
            torch.testing.assert_close(module.run_method(name, torch.ones(2, 8)), model(torch.ones(2, 8)))


def test_lifted_constants_of_one_value_are_one(quick: None, tmp_path: Path) -> None:
    models = shifted(8)
    models["second"].constant = 1.0
    result = build({name: offloaded(model, (torch.ones(2, 8),)) for name, model in models.items()}, tmp_path)
    assert {w.name for w in result.program.weights} == {"shift", "linear.weight", "linear.bias", "lifted_tensor_0"}


class Uses(nn.Module):
    def __init__(self, weight: torch.Tensor, cache: torch.Tensor, *, persistent: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.register_buffer("buffer", torch.ones(2), persistent=persistent)
        self.register_buffer("cache", cache, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache.add_(x.sum())
        return x * self.weight.sum() + self.buffer.sum()


def uses(weight: Any = None, cache: Any = None, *, buffer: Any = None, persistent: bool = True) -> Any:
    weight = torch.ones(3, 4) if weight is None else weight
    model = Uses(weight, torch.zeros(2) if cache is None else cache, persistent=persistent)
    if buffer is not None:
        model.buffer = buffer
    return offloaded(model, (torch.ones(2, device=weight.device),))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: uses(torch.full((3, 4), 2.0)), "weight 'weight' in method 'second' differs"),
        (lambda: uses(torch.ones(4, 3)), r"weight 'weight'.*here float32 \[4, 3\], there float32 \[3, 4\]"),
        (lambda: uses(torch.ones(3, 4).double()), r"weight 'weight'.*here float64 \[3, 4\], there float32 \[3, 4\]"),
        (lambda: uses(torch.ones(4, 3).t()), "weight 'weight' in method 'second' differs"),
        (lambda: uses(torch.ones(3, 4, device="meta"), torch.zeros(2, device="meta"), buffer=torch.ones(2, device="meta")), "'weight'"),
        (lambda: uses(buffer=torch.full((2,), -1.0)), "weight 'buffer' in method 'second' differs"),
        (lambda: uses(cache=torch.zeros(3)), r"state 'cache' in method 'second' \(float32 \[3\]\).*float32 \[2\]"),
        (lambda: uses(cache=torch.zeros(2).double()), "state 'cache' in method 'second'.*float64"),
        (lambda: uses(cache=torch.ones(2)), "state 'cache' in method 'second'.*other first values"),
    ],
)
def test_methods_that_disagree_are_refused(
    no_compiler: None, tmp_path: Path, other: Callable[[], Any], message: str
) -> None:
    with unchanged(tmp_path), pytest.raises(MethodConflictError, match=message):
        build({"first": uses(), "second": other()}, tmp_path)


def test_methods_that_agree(quick: None, tmp_path: Path) -> None:
    result = build({"first": uses(), "second": uses(), "third": uses()}, tmp_path)
    assert [w.name for w in result.program.weights] == ["weight", "buffer"]
    assert [s.name for s in result.program.states] == ["cache"]
    assert [m.name for m in result.program.methods] == ["first", "second", "third"]


def test_non_persistent_buffers_may_differ(quick: None, tmp_path: Path) -> None:
    programs = {
        "first": uses(persistent=False),
        "second": uses(persistent=False, buffer=torch.full((5,), 7.0)),
    }
    result = build(programs, tmp_path)
    held = stored_bytes(result.weights_path)
    assert held["buffer"] == bytes_of(torch.ones(2))
    assert held["second.buffer"] == bytes_of(torch.full((5,), 7.0))
    assert [a.weight for a in result.program.methods[1].schedule.accesses] == ["weight", "second.buffer"]


# ------------------------------------------------------------------------------------------------------------- budgets


def test_budgets_at_and_below_the_floor(
    quick: None, tmp_path: Path, program: torch.export.ExportedProgram
) -> None:
    floor = build(program, tmp_path).program.floor_bytes
    assert floor > 1
    for below in (floor - 1, 0, str(floor - 1)):
        with unchanged(tmp_path), pytest.raises(BudgetError, match=f"needs at least {floor} bytes"):
            build(program, tmp_path, weight_offload_budget=below, overwrite=True)
    for budget, expected in ((floor, floor), (str(floor), floor), ("8GiB", 8 * GIB), (2**63 - 1, 2**63 - 1)):
        result = build(program, tmp_path, weight_offload_budget=budget, overwrite=True)
        assert result.program.budget_bytes == read_program(result.program_path).budget_bytes == expected
        assert result.program.floor_bytes == floor


def test_no_files_are_left_when_the_budget_is_below_the_floor(
    quick: None, tmp_path: Path, program: torch.export.ExportedProgram
) -> None:
    with pytest.raises(BudgetError, match=r"weight_offload_budget is 1 B, below the floor"):
        build(program, tmp_path, weight_offload_budget=1)
    assert list(tmp_path.iterdir()) == []


# -------------------------------------------------------------------------------------------------------------- values

safetensors_torch = pytest.importorskip("safetensors.torch")


def checkpoint_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """As files hold it: row by row, and a tied weight under one of its names."""
    state_dict = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    del state_dict["tail.weight"]
    return state_dict


def write_shards(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    names = sorted(tensors)
    placed = {}
    for number in range(3):
        file = f"model-{number}.safetensors"
        part = {name: tensors[name] for name in names[number::3]}
        safetensors_torch.save_file(part, folder / file)
        placed |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    return folder


def test_what_a_weights_file_holds(quick: None, tmp_path: Path, program: torch.export.ExportedProgram) -> None:
    result = build(program, tmp_path)
    model = net()
    tensors = {**model.state_dict(), **dict(model.named_buffers())}
    held = stored_bytes(result.weights_path)
    assert set(held) == {
        "embed.weight", "tail.weight", "linear.weight", "linear.bias", "scale", "mean", "skewed", "head.weight", "count",
    }  # fmt: skip
    by_name = {w.name: w for w in result.program.weights}
    assert by_name["embed.weight"].aliases == ("tail.weight",)
    assert by_name["skewed"].dim_order == (1, 0)
    for name, raw in held.items():
        order = by_name[name].dim_order if name in by_name else None
        assert raw == bytes_of(tensors[name], order), name
    assert {s.name: s.init for s in result.program.states} == {"cache": "zeros", "count": "stored"}
    assert result.program.unused == ("unused.bias", "unused.weight")


@pytest.fixture
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*treespec", category=FutureWarning)
        yield


def test_a_model_on_meta_gives_the_same_file(
    quick: None, tmp_path: Path, program: torch.export.ExportedProgram, meta_program: torch.export.ExportedProgram
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "meta").mkdir()
    (tmp_path / "checkpoint").mkdir()
    model = net()
    real = build(program, tmp_path / "real")
    write_shards(tmp_path / "checkpoint", checkpoint_of(model))
    sources = [tmp_path / "checkpoint", {"scale": model.scale, "cache": model.cache}]
    with pytest.warns(UserWarning, match="state 'cache' has no first value") as seen:
        meta = build(meta_program, tmp_path / "meta", weights=[tmp_path / "checkpoint", {"scale": model.scale}])
    assert [Path(w.filename).name for w in seen if "first value" in str(w.message)] == ["test_compile.py"]
    assert meta.weights_path.read_bytes() == real.weights_path.read_bytes()
    assert meta.program == real.program
    # A first value that is given is stored, even if it is all zeros.
    stored = build(meta_program, tmp_path / "meta", weights=sources, overwrite=True)
    assert {s.name: s.init for s in stored.program.states} == {"cache": "stored", "count": "stored"}
    assert stored_bytes(stored.weights_path)["cache"] == bytes(4 * 8 * 4)


def test_without_values_everything_that_lacks_them_is_named(
    no_compiler: None, tmp_path: Path, meta_program: torch.export.ExportedProgram
) -> None:
    with (
        unchanged(tmp_path),
        pytest.warns(UserWarning, match="state 'cache'"),
        pytest.raises(CheckpointError, match=r"^8 tensors of the program have no values .*pass weights=") as caught,
    ):
        build(meta_program, tmp_path)
    for name in ("embed.weight", "linear.weight", "linear.bias", "scale", "mean", "skewed", "head.weight", "count"):
        assert name in str(caught.value)
    assert "unused" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:state 'cache'")
def test_every_fault_of_a_checkpoint_is_listed_at_once(
    no_compiler: None, tmp_path: Path, meta_program: torch.export.ExportedProgram
) -> None:
    tensors = checkpoint_of(net())
    del tensors["mean"], tensors["embed.weight"], tensors["count"]
    tensors["linear.weight"] = torch.zeros(8, 9)
    tensors["head.weight"] = tensors["head.weight"].to(torch.bfloat16)
    tensors["skewed"] = tensors["skewed"].t().contiguous()
    path = tmp_path / "model.safetensors"
    safetensors_torch.save_file(tensors, path)
    with unchanged(tmp_path), pytest.raises(CheckpointError) as caught:
        build(meta_program, tmp_path, weights=path)
    first, *lines, hint = str(caught.value).splitlines()
    assert first == f"the checkpoint {path} does not fit the program, 7 mismatches:"
    assert sorted(line.strip() for line in lines) == sorted(
        [
            "embed.weight / tail.weight: missing",
            "mean: missing",
            "scale: missing",
            "count: missing",
            "linear.weight: has shape [8, 9], needs [8, 8]",
            "head.weight: has dtype bfloat16, needs float32",
            "skewed: has shape [8, 24], needs [24, 8]",
        ]
    )
    assert "weights=[checkpoint, {name: tensor}]" in hint


@pytest.mark.filterwarnings("ignore:state 'cache'")
def test_a_buffer_that_no_checkpoint_has(
    quick: None, tmp_path: Path, meta_program: torch.export.ExportedProgram
) -> None:
    tensors = checkpoint_of(net())
    with unchanged(tmp_path), pytest.raises(CheckpointError, match=r"1 mismatches:\n  scale: missing\n.*non-persistent"):
        build(meta_program, tmp_path, weights=tensors)
    scale = torch.arange(8.0)
    result = build(meta_program, tmp_path, weights=[tensors, {"scale": scale}])
    assert stored_bytes(result.weights_path)["scale"] == bytes_of(scale)


@pytest.mark.filterwarnings("ignore:state 'cache'")
@pytest.mark.parametrize("name", ["embed.weight", "tail.weight"])
def test_a_tied_weight_under_either_name(
    quick: None, tmp_path: Path, meta_program: torch.export.ExportedProgram, name: str
) -> None:
    model = net()
    tensors = {**checkpoint_of(model), "scale": model.scale}
    value = tensors.pop("embed.weight")
    result = build(meta_program, tmp_path, weights={**tensors, name: value})
    held = stored_bytes(result.weights_path)
    assert held["embed.weight"] == held["tail.weight"] == bytes_of(value)
    with pytest.raises(CheckpointError, match="tail.weight: differs from embed.weight, to which the program ties it"):
        build(
            meta_program, tmp_path, weights={**tensors, "embed.weight": value, "tail.weight": value + 1}, overwrite=True
        )


def test_a_checkpoint_comes_before_the_model_s_own_values(
    quick: None, tmp_path: Path, program: torch.export.ExportedProgram, no_warning: None
) -> None:
    other = net(seed=1)
    result = build(program, tmp_path, weights=checkpoint_of(other))
    held = stored_bytes(result.weights_path)
    for name, tensor in checkpoint_of(other).items():
        if not name.startswith("unused"):
            order = (1, 0) if name == "skewed" else None
            assert held[name] == bytes_of(tensor, order), name
            assert held[name] != bytes_of(program.state_dict[name], order) or name == "count"
    assert held["scale"] == bytes_of(net().scale)  # not in the checkpoint, and need not be
    given = torch.full((8,), 5.0)
    result = build(program, tmp_path, weights=[checkpoint_of(other), {"scale": given}], overwrite=True)
    assert stored_bytes(result.weights_path)["scale"] == bytes_of(given)


def test_nothing_is_cast(no_compiler: None, tmp_path: Path, program: torch.export.ExportedProgram) -> None:
    tensors = {name: tensor.double() for name, tensor in checkpoint_of(net()).items()}
    with pytest.raises(CheckpointError, match="linear.bias: has dtype float64, needs float32"):
        build(program, tmp_path, weights=tensors)


def test_a_checkpoint_that_is_cut_while_it_is_read(
    quick: None, tmp_path: Path, program: torch.export.ExportedProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    path = tmp_path / "model.safetensors"
    safetensors_torch.save_file(checkpoint_of(net()), path)
    pack = compile_module.pack_program

    def cut(*args: Any) -> bytes:
        path.write_bytes(path.read_bytes()[:-1000])
        return pack(*args)

    monkeypatch.setattr(compile_module, "pack_program", cut)
    with unchanged(tmp_path / "out"), pytest.raises(CheckpointError, match="ends early; the file changed"):
        build(program, tmp_path / "out", weights=path)


def test_values_are_those_of_the_time_of_writing_and_the_program_stays(
    quick: None, tmp_path: Path, program: torch.export.ExportedProgram
) -> None:
    before = str(program.graph), {name: bytes_of(t) for name, t in program.state_dict.items()}
    build(program, tmp_path)
    assert (str(program.graph), {name: bytes_of(t) for name, t in program.state_dict.items()}) == before


# --------------------------------------------------------------------------------------------------------------- input


def exported() -> torch.export.ExportedProgram:
    return torch.export.export(nn.Linear(2, 2).eval(), (torch.ones(1, 2),))


def training_program() -> torch.export.ExportedProgram:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)).train()
    ep = torch.export.export(model, (torch.ones(1, 2),)).run_decompositions({})
    lend_weights(ep)  # what apply_weight_offload does after it has refused such a program
    return ep


@pytest.mark.parametrize(
    ("programs", "error", "message"),
    [
        (lambda p: nn.Linear(2, 2), NotAProgramError, r"got Linear; call torch\.export\.export"),
        (lambda p: "model.pt2", NotAProgramError, "got str"),
        (lambda p: None, NotAProgramError, "got NoneType"),
        (lambda p: [p], NotAProgramError, "got list"),
        (lambda p: {"forward": nn.Linear(2, 2)}, NotAProgramError, "got Linear"),
        (lambda p: {"good": p, "bad": 5}, NotAProgramError, "got int"),
        (lambda p: exported(), NotOffloadedError, r"method 'forward' did not go through penstock\.apply_weight_offload"),
        (lambda p: {"good": p, "raw": exported()}, NotOffloadedError, "method 'raw'"),
        (lambda p: torch.export.export(nn.ReLU(), (torch.ones(2),)), NotOffloadedError, "method 'forward'"),
        (lambda p: training_program(), TrainingGraphError, "runs in training mode; call model.eval"),
        (lambda p: {}, ProgramError, "no program was given"),
        *(
            (lambda p, name=name: {name: p}, ProgramError, re.escape(f"{name!r} is not a method name"))
            for name in ("", "1st", "a b", "a.b", "a/b", "../up", "é", "run\n", 5, None, ("a",))
        ),
    ],
)
def test_what_is_no_program_is_refused(
    no_compiler: None,
    tmp_path: Path,
    program: torch.export.ExportedProgram,
    programs: Callable[[Any], Any],
    error: type[PenstockError],
    message: str,
) -> None:
    bad = programs(program)
    with unchanged(tmp_path), pytest.raises(error, match=message):
        build(bad, tmp_path)
    older_files(tmp_path)
    with unchanged(tmp_path), pytest.raises(error, match=message):
        build(bad, tmp_path, overwrite=True)


def test_a_program_without_weights_never_gets_here() -> None:
    with pytest.raises(NoWeightsError, match="reads no weight"):
        penstock.apply_weight_offload(torch.export.export(nn.ReLU(), (torch.ones(2),)))


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("tpu", "'tpu'"),
        ("", "'' is no device"),
        ("meta", "cannot compile for 'meta'; valid targets are 'cpu' and 'cuda'"),
        (torch.device("meta"), "cannot compile for 'meta'"),
        ("mps", "cannot compile for 'mps'"),
        ("cuda:x", "'cuda:x' is no device"),
        (3.5, "3.5 is no device"),
        (["cpu"], "is no device"),
        ("cuda", "torch sees no GPU"),
        ("cuda:0", "torch sees no GPU"),
    ],
)
def test_what_is_no_device_is_refused(
    no_compiler: None,
    tmp_path: Path,
    program: torch.export.ExportedProgram,
    monkeypatch: pytest.MonkeyPatch,
    device: Any,
    message: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with unchanged(tmp_path), pytest.raises(DeviceError, match=message):
        build(program, tmp_path, device=device)


@pytest.mark.parametrize("device", ["cuda:9", torch.device("cuda", 9), "cuda:2"])
def test_a_gpu_that_is_not_there(
    no_compiler: None,
    tmp_path: Path,
    program: torch.export.ExportedProgram,
    monkeypatch: pytest.MonkeyPatch,
    device: Any,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with unchanged(tmp_path), pytest.raises(DeviceError, match=r"there is no device cuda:[92]; torch sees 2"):
        build(program, tmp_path, device=device)


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu")])
def test_the_target_is_a_kind_of_device(
    quick: None, tmp_path: Path, program: torch.export.ExportedProgram, device: Any
) -> None:
    assert build(program, tmp_path, device=device).program.device == "cpu"


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("model", OutputPathError, "model must end in .pt2"),
        ("model.pt", OutputPathError, "model.pt must end in .pt2"),
        ("model.PT2", OutputPathError, "must end in .pt2"),
        ("model.ptd", OutputPathError, "must end in .pt2"),
        (".pt2", OutputPathError, "must end in .pt2"),
        ("", OutputPathError, "must end in .pt2"),
        ("nowhere/model.pt2", OutputPathError, "nowhere does not exist"),
        ("file/model.pt2", OutputPathError, "file does not exist"),
        ("program.pt2", OutputExistsError, r"program\.pt2 exist; pass overwrite=True"),
        ("weights.pt2", OutputExistsError, r"weights\.ptd exist; pass overwrite=True"),
        ("both.pt2", OutputExistsError, r"both\.pt2 and \S*both\.ptd exist"),
        ("folder.pt2", OutputExistsError, r"folder\.pt2 exist"),
    ],
)
def test_a_place_that_cannot_be_written_to(
    no_compiler: None, tmp_path: Path, program: torch.export.ExportedProgram, path: str, error: type, message: str
) -> None:
    for name in ("file", "program.pt2", "weights.ptd", "both.pt2", "both.ptd"):
        (tmp_path / name).write_text("older")
    (tmp_path / "folder.pt2").mkdir()
    with unchanged(tmp_path), pytest.raises(error, match=message):
        penstock.compile(program, os.path.join(tmp_path, path) if path else path, device="cpu")  # noqa: PTH118


@pytest.mark.parametrize("path", [None, 5, b"model.pt2", ["model.pt2"]])
def test_what_is_no_path(
    no_compiler: None, tmp_path: Path, program: torch.export.ExportedProgram, path: Any
) -> None:
    with pytest.raises(OutputPathError, match=re.escape(f"{path!r} is not a path")):
        penstock.compile(program, path, device="cpu")


@pytest.mark.parametrize("name", ["model.pt2", "model.ptd"])
def test_a_folder_in_the_place_of_a_file(
    no_compiler: None, tmp_path: Path, program: torch.export.ExportedProgram, name: str
) -> None:
    older_files(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with unchanged(tmp_path), pytest.raises(OutputPathError, match=rf"{name} cannot be replaced: a folder"):
        build(program, tmp_path, overwrite=True)


def test_a_folder_that_is_read_only(
    no_compiler: None, tmp_path: Path, program: torch.export.ExportedProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o500)
    if os.access(tmp_path, os.W_OK):  # root may
        monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(OutputPathError, match=f"{tmp_path} cannot be written to"):
        build(program, tmp_path)
    tmp_path.chmod(0o700)


@pytest.mark.parametrize("budget", ["8 gigs", "", -1, 1.5, True, 2**63, "1.1GiB"])
def test_a_budget_that_is_none(
    no_compiler: None, tmp_path: Path, program: torch.export.ExportedProgram, budget: Any
) -> None:
    with unchanged(tmp_path), pytest.raises(BudgetError):
        build(program, tmp_path, weight_offload_budget=budget)


@pytest.mark.parametrize("weights", ["/nowhere", 5, [], {"linear.weight": None}])
def test_weights_that_are_none(
    no_compiler: None, tmp_path: Path, program: torch.export.ExportedProgram, weights: Any
) -> None:
    with unchanged(tmp_path), pytest.raises(CheckpointError):
        build(program, tmp_path, weights=weights)


@pytest.mark.parametrize("name", REQUIRED_OPTIONS)
def test_options_that_are_ours(
    no_compiler: None, tmp_path: Path, program: torch.export.ExportedProgram, name: str
) -> None:
    with unchanged(tmp_path), pytest.raises(CompileError, match=f"'{re.escape(name)}' is set by penstock"):
        build(program, tmp_path, inductor_configs={"max_autotune": False, name: False})


@pytest.mark.parametrize("name", ["nonsense", "cpp.nonsense", "nonsense.cpp", "", "max_autotune.x", 5, None])
def test_options_that_nobody_has(
    no_compiler: None, tmp_path: Path, program: torch.export.ExportedProgram, name: Any
) -> None:
    with unchanged(tmp_path), pytest.raises(CompileError, match=re.escape(f"has no option {name!r}")):
        build(program, tmp_path, inductor_configs={name: False})


# ------------------------------------------------------------------------------------------------ compilers that fail


@torch.library.custom_op("penstock_tests::unlowered", mutates_args=())
def unlowered(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@unlowered.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@register_lowering(torch.ops.penstock_tests.unlowered.default, type_promotion_kind=None)
def _lower(x: Any) -> Any:
    raise NotImplementedError("nobody lowers this")


class Unlowered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return unlowered(self.linear(x))


def causes(error: BaseException) -> list[str]:
    found = []
    current: BaseException | None = error
    while current is not None:
        found.append(f"{type(current).__name__}: {current}")
        current = current.__cause__ or current.__context__
    return found


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders go; a test can look whether they are gone."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_an_op_that_the_compiler_cannot_compile(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_module, "check_toolchain", lambda: None)
    out = tmp_path / "out"
    out.mkdir()
    older_files(out)
    bad, good = offloaded(Unlowered(), (torch.ones(1, 4),)), exported_good()
    codegen, enter_context = Scheduler.codegen, Scheduler.enter_context
    with unchanged(out), pytest.raises(CompileError, match="method 'bad': Inductor could not compile it: ") as caught:
        build({"bad": bad}, out, overwrite=True)
    assert "nobody lowers this" in str(caught.value)
    assert caught.value.__cause__ is not None
    assert any(text.startswith("NotImplementedError: nobody lowers this") for text in causes(caught.value))
    assert list(temporary.glob("penstock-*")) == []
    # The compiler is as it was, and the next program compiles.
    assert (Scheduler.codegen, Scheduler.enter_context) == (codegen, enter_context)
    names = {"weight": "weight", "bias": "bias"}
    method = schedule_method("good", good, torch.device("cpu"), frozenset(), names)
    assert {access.weight for access in method.schedule.accesses} == {"weight", "bias"}


def exported_good() -> torch.export.ExportedProgram:
    return offloaded(nn.Linear(4, 4), (torch.ones(1, 4),))


def test_no_c_plus_plus_compiler(tmp_path: Path) -> None:
    """In a process of its own: Inductor reads CXX once, when it is imported."""
    code = (
        "import sys, torch, penstock\n"
        "ep = torch.export.export(torch.nn.Linear(2, 2).eval(), (torch.ones(1, 2),))\n"
        "penstock.compile(penstock.apply_weight_offload(ep), sys.argv[1], device='cpu', overwrite=True)\n"
    )
    older_files(tmp_path)
    env = {**os.environ, "CXX": "/bin/false", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "model.pt2")]
    with unchanged(tmp_path):
        child = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert child.returncode == 1
    assert "penstock.errors.ToolchainError: no C++ compiler" in child.stderr
    assert "CXX is '/bin/false'" in child.stderr
    assert "EXPORT_" not in child.stdout


def test_a_c_plus_plus_compiler_that_is_unusable(
    tmp_path: Path, temporary: Path, program: torch.export.ExportedProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "c++"
    script.write_text('#!/bin/sh\nif [ "$1" = --version ]; then echo "compiler 1.0"; exit 0; fi\nexec false\n')
    script.chmod(0o755)
    monkeypatch.setattr(toolchain, "_checked", {})
    monkeypatch.setattr(toolchain, "cpp_compiler", lambda: str(script))
    with unchanged(tmp_path), pytest.raises(ToolchainError, match=f"{script} cannot build a shared library") as caught:
        build(program, tmp_path)
    assert isinstance(caught.value, CompileError)


def test_a_compiler_that_gives_no_wrapper_or_two(
    tmp_path: Path, temporary: Path, program: torch.export.ExportedProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_module, "check_toolchain", lambda: None)
    for files in ([], ["kernel.cpp"], ["a.wrapper.cpp", "b.wrapper.cpp"]):
        monkeypatch.setattr(method_module, "compile_graph", lambda *args, files=files: files)
        with unchanged(tmp_path), pytest.raises(CompileError):
            build(program, tmp_path)


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
    with unchanged(out):
        attempts = 0
        while True:
            attempts += 1
            function.arm(OSError(errno.ENOSPC, "No space left on device"), attempts)
            if attempts > 1 and attempts > total:
                break
            with pytest.raises((DiskFullError, OSError)) as caught:
                build(program, out, overwrite=True)
            if call != "ftruncate":
                assert isinstance(caught.value, DiskFullError), caught.value
                assert re.search(r"model\.pt[2d]: needs \d+ bytes, \d+ bytes are free", str(caught.value))
            if attempts == 1:
                total = calls_of_a_whole_run(function, program, tmp_path)
        assert attempts - 1 == total >= 2  # both files
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
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with unchanged(tmp_path):
        # The compiler's own files are refused too, where the limit is smaller than they are: as what they are.
        with pytest.raises((DiskFullError, OSError)) as caught:
            try:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
                build(program, tmp_path, overwrite=True)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert caught.value.errno == errno.EFBIG
        assert isinstance(caught.value, DiskFullError) or limit_bytes == 1


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
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)
        return []

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


# ----------------------------------------------------------------------------------------------------- program files


def a_program() -> Program:
    """Every kind of value that metadata can hold."""
    signature = Signature(
        inputs=(
            TensorSpec("x", "float32", ("s0", 4), (4, 1)),
            ConstantSpec("flag", True),
            ConstantSpec("none", None),
            ConstantSpec("text", 'quo"te ü \n'),
            ConstantSpec("number", float("inf")),
            ConstantSpec("big", 2**70),
        ),
        outputs=(ConstantSpec("", -0.5), TensorSpec("y", "bfloat16", (), ())),
        in_spec="[1, {}]",
        out_spec="[1, {}]",
        symbols={"s0": (2, None), "s1": (0, 2**40)},
    )
    schedule = Schedule("forward", (Access(7, "w"), Access(3, "w", True)), (Step("k", (7,)), Step("l", (7, 3))))
    weight = Weight("w", "float8_e4m3fn", (3, 0, 5), (2, 0, 1), ("ü", "b"))
    method = Method("forward", schedule, signature, ("cache",), 5, None, (Temporary("buf", "k", 12, ("w",)),))
    return Program((method,), (weight,), (), "identity", 30, None, ("unused",), "cuda", {"torch": "2"})


def test_every_kind_of_metadata_round_trips() -> None:
    program = a_program()
    assert program_from_json(program_to_json(program)) == program


@pytest.mark.parametrize("version", [0, 2, 99, None, "1", [1]])
def test_another_format_version_is_refused_by_number(version: Any) -> None:
    table = {**json.loads(program_to_json(a_program())), "format_version": version}
    with pytest.raises(PackageError, match=re.escape(f"has format version {version}; this release reads version 1")):
        program_from_json(json.dumps(table))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in nested JSON, containers included."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


TABLE = json.loads(program_to_json(a_program()))


@pytest.mark.parametrize("path", [p for p in places(TABLE) if isinstance(p[-1], str)], ids=str)
def test_metadata_that_lacks_something(path: tuple[Any, ...]) -> None:
    table = copy.deepcopy(TABLE)
    inner = table
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    try:
        found = program_from_json(json.dumps(table))
    except PackageError as error:
        assert "damaged" in str(error)  # noqa: PT017
        return
    # Only free tables may lack an entry, and a schedule's copy of its method's name is not read.
    assert path[0] == "built_with" or "symbols" in path, path
    assert found != a_program()


@given(
    st.sampled_from(sorted(places(TABLE), key=str)),
    st.sampled_from([None, True, -1, 1.5, "x", [], {}, [[]], [None], {"a": 1}]),
)
@settings(max_examples=300, deadline=None)
def test_metadata_with_something_else_in_a_place(path: tuple[Any, ...], value: Any) -> None:
    table = copy.deepcopy(TABLE)
    inner = table
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    try:
        assert isinstance(program_from_json(json.dumps(table)), Program)
    except PackageError as error:
        assert "damaged" in str(error) or path == ("format_version",)  # noqa: PT017


@pytest.mark.parametrize("text", ["", "null", "[]", "{}", "7", '"x"', "{nonsense", "[" * 100_000])
def test_metadata_that_is_something_else(text: str) -> None:
    with pytest.raises(PackageError, match="damaged"):
        program_from_json(text)


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory, program: torch.export.ExportedProgram) -> bytes:
    folder = tmp_path_factory.mktemp("archive")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_module, "compile_method", stand_in)
        patch.setattr(compile_module, "check_toolchain", lambda: None)
        return build(program, folder).program_path.read_bytes()


def test_files_that_are_no_programs(tmp_path: Path, archive: bytes) -> None:
    path = tmp_path / "model.pt2"
    with pytest.raises(PackageError, match=r"model\.pt2 does not exist"):
        read_program(path)
    for content in (b"", b"not an archive", archive[: len(archive) // 2], archive[:-30], bytes(5000)):
        path.write_bytes(content)
        with pytest.raises(PackageError, match=r"model\.pt2 is not a \.pt2 archive, or is damaged"):
            read_program(path)
    with zipfile.ZipFile(path, "w") as other:
        other.writestr("archive/extra/other.json", "{}")
    with pytest.raises(PackageError, match=r"model\.pt2 is no weightless program: it has no penstock\.json"):
        read_program(path)
    with zipfile.ZipFile(path, "w") as other:
        other.writestr("archive/extra/penstock.json", b"\xff\xfe")
    with pytest.raises(PackageError, match=r"model\.pt2 is not a \.pt2 archive, or is damaged"):
        read_program(path)
    with pytest.raises(PackageError, match="cannot be read"):
        read_program(tmp_path)


@given(st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=3))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_archives(tmp_path: Path, archive: bytes, changes: list[tuple[float, int]]) -> None:
    """The archive's own checksum is over the metadata: either they are whole or they are refused."""
    raw = bytearray(archive)
    for place, byte in changes:
        raw[int(place * len(raw))] = byte
    path = tmp_path / "model.pt2"
    path.write_bytes(archive)
    expected = read_program(path)
    path.write_bytes(raw)
    try:
        found = read_program(path)
    except PackageError as error:
        refusal = str(error)
    else:
        assert found == expected
        return
    assert "model.pt2" in refusal
