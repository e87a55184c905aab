"""What a delegate must do, in plays that raise where it does not: against the library as it is, and against mutants.

`python -m tests.executorch.delegate_plays PROGRAM FUNCTION:NUMBER...` is tests/runtime/mutant_plays.py for them. The
program is the .pte of tests.executorch.programs.twin. Nothing waits for time to pass. TMPDIR is emptied.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.errors import PackageError
from penstock.executorch.native import NativeModule, Value, _fill
from penstock.executorch.payload import pack_payload, read_payload
from penstock.native import core
from penstock.record import VERSION
from penstock.runtime.session import counters
from tests.executorch.probe import (
    UNTOUCHED,
    Delegate,
    Option,
    Place,
    Program,
    Refused,
    drivers_wrapped_by,
    fail_later,
    library,
    logged,
    made,
    records,
    resized,
    start_trace,
)
from tests.executorch.programs import FIRST_CALLS, TWIN_ROWS, TWIN_WIDTH, Narrow, Wide
from tests.runtime.mutant_plays import LEAST_S, PATIENCE, Plays, missed, tell_missed
from tests.runtime.soft import Failure, SoftHooks
from tests.threads import thread_count

# enum class Kind in csrc/load_error.h, and ExecuTorch's numbers of errors.
PACKAGE, BUDGET, BELOW_FLOOR, OPTION, MISSING_WEIGHT, MISMATCH, BUILD, INPUT, CORE, CODE, HOST, DEVICE, STATE = (
    *(1, 2, 3, 4, 5, 6),
    *(8, 9, 10, 11, 12, 13, 14),
)
INTERNAL, INVALID_STATE, INVALID_ARGUMENT, NO_MEMORY, INVALID_PROGRAM = 0x01, 0x02, 0x12, 0x21, 0x23
PAGE = 4096
MOST_FILE_BYTES = 64 << 20
BUDGET_OPTION, CAP_OPTION, DEVICE_OPTION = (
    *("weight_offload_budget", "weight_offload_host_memory_cap"),
    "weight_offload_device",
)
GRAPH_OPTION = "weight_offload_cuda_graph"
PLAYS: dict[str, Callable[[Program], None]] = {}


def play(action: Callable[[Program], None]) -> Callable[[Program], None]:
    PLAYS[action.__name__] = action
    return action


# ------------------------------------------------------------------------------------------------------------- helpers


def whole_numbers(*shape: int, seed: int) -> Tensor:
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed)).float()


def equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """To the bit."""
    pairs = list(zip(found, expected, strict=True))
    return all(a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b) for a, b in pairs)


def room(method: str) -> list[Tensor]:
    """As ExecuTorch plans it: for the most rows."""
    if method == "narrow":
        return [torch.full((1, TWIN_WIDTH), float(UNTOUCHED))]
    return [torch.full((TWIN_ROWS, TWIN_WIDTH), float(UNTOUCHED)), torch.full((TWIN_ROWS,), UNTOUCHED)]


def inputs_of(method: str, seed: int, rows: int = 3) -> tuple[Tensor, ...]:
    """Of the narrow one, its state first."""
    if method == "narrow":
        return torch.full((4,), float(seed)), whole_numbers(1, TWIN_WIDTH, seed=seed)
    return whole_numbers(rows, TWIN_WIDTH, seed=seed), torch.eye(rows).flip(0)


def expected_of(method: str, inputs: Sequence[Tensor]) -> list[Tensor]:
    """By the eager model."""
    with torch.no_grad():
        if method == "wide":
            return list(Wide()(*inputs))
        model = Narrow()
        model.calls.copy_(inputs[0])
        result = model(inputs[1])
        return [model.calls, result]


def check_run(delegate: Delegate, seed: int, rows: int = 3) -> None:
    inputs = inputs_of(delegate.method, seed, rows)
    expected = expected_of(delegate.method, inputs)
    if delegate.method == "wide":
        assert equal(delegate.execute(inputs, room("wide")), expected)
        return
    calls, row = inputs
    delegate.write_state("calls", calls)
    found = delegate.execute((row,), room("narrow"))
    assert equal([delegate.read_state("calls", calls), *found], expected)


def refused(action: Callable[[], object], kind: int, status: int | None = None, said: str = "") -> Refused:
    """Also in the log, in the same words."""
    found = None
    with logged() as log:
        try:
            action()
        except Refused as error:
            found = error
    assert found is not None, "nothing was refused"
    assert found.kind == kind and said in found.text and f"penstock: {found.text}" in log[0], found
    assert status is None or found.status == status, found
    return found


def at_floor(program: Program, group: str, **others: Option) -> dict[str, Option]:
    budget = str(program.whole.floor_bytes)
    return {BUDGET_OPTION: budget, "weight_offload_group": group, "weight_offload_quiet": True, **others}


@contextmanager
def loaded(program: Program, options: Mapping[str, Option], *methods: str, **others: Any) -> Iterator[list[Delegate]]:
    delegates = [Delegate(program, method, options, **others) for method in methods]
    yield delegates
    for delegate in delegates:
        delegate.close()


@contextmanager
def environment(**variables: str | None) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}

    def put(values: Mapping[str, str | None]) -> None:
        for name, value in values.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value

    put(variables)
    try:
        yield
    finally:
        put(before)


def facts(group: str) -> list[int]:
    """Floor, full, budget, asked, source, plan, plans, bytes of the plan."""
    numbers = (ctypes.c_int64 * 8)()
    assert library().penstock_executorch_session(group.encode(), numbers)
    return list(numbers)


def held(program: Program) -> tuple[Any, ...]:
    """Whatever is to be given back. Memory apart: torch keeps some."""
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(program.data_path) in line]
    left = sorted(path.name for path in Path(os.environ["TMPDIR"]).glob("penstock-*"))
    return (
        made().drivers,
        made().sessions,
        maps,
        len([*Path("/proc/self/fd").iterdir()]),
        thread_count(),
        left,
    )


# --------------------------------------------------------------------------------------------------------------- plays


@play
def runs_at_the_floor(program: Program) -> None:
    """Two methods in turn over one ring, which is too small for the weights of both."""
    with environment(PENSTOCK_POISON="1"), loaded(program, at_floor(program, "floor"), "wide", "narrow") as both:
        assert (made().drivers, made().sessions) == (1, 1)
        floor_bytes, full_bytes = program.whole.floor_bytes, program.whole.full_bytes
        for seed, rows in enumerate((3, 3, 2, TWIN_ROWS, 7)):
            for delegate in both:
                check_run(delegate, seed, rows)
        now, peak = ctypes.c_int64(), ctypes.c_int64()
        assert core().penstock_session_memory(made().session, ctypes.byref(now), ctypes.byref(peak)) == 0
        assert 0 < peak.value <= floor_bytes < full_bytes
        # The first runs have found all of it poisoned, and so does a run after another method's.
        for delegate in (*both, *both, both[1], both[1], both[0], both[0]):
            check_run(delegate, 9)


@play
def everything_is_given_back(program: Program) -> None:
    def once() -> None:
        with loaded(program, at_floor(program, "back"), "wide", "narrow") as both:
            for delegate in both:
                check_run(delegate, 1)
        low = {**at_floor(program, "back"), BUDGET_OPTION: str(program.whole.floor_bytes - 1)}
        refused(lambda: Delegate(program, "wide", low), BELOW_FLOOR)
        # Made, and given back: each of the core's steps fails.
        steps = ("driver_granularity", "load_torch", "open", "session_install", "session_summary")
        steps += ("session_allocate_host", "other pages")
        for step in steps:
            library().probe_refuse(step.encode())
            refused(
                lambda: Delegate(program, "wide", at_floor(program, "back")), BUILD if step == "other pages" else CORE
            )
            assert (made().drivers, made().sessions) == (0, 0), step

    once()
    before = held(program)
    once()
    assert held(program) == before
    assert before[:3] == (0, 0, [])


@play
def nothing_of_a_run_is_kept(program: Program) -> None:
    with loaded(program, at_floor(program, "kept"), "wide") as (wide,):
        inputs = inputs_of("wide", 1)
        # Other strides than the code's: they are laid out anew in pinned memory, which is not torch's.
        strided = tuple(x.t().contiguous().t() for x in inputs)
        assert all(a.stride() != b.stride() for a, b in zip(strided, inputs, strict=True))
        library().probe_count_tensors()
        counts = []
        for given in (inputs, strided, inputs, strided):
            values, kept = wide.values(given, room("wide"))
            alive, before = library().probe_tensors_alive(), library().probe_tensors_made()
            assert library().probe_execute(wide.handle, values, len(values)) == 0
            assert library().probe_tensors_alive() == alive
            counts.append(library().probe_tensors_made() - before)
            del kept
        assert counts == [counts[0]] * 4 and counts[0] > 0, counts


@play
def code_that_cannot_be_stored(program: Program) -> None:
    def tried() -> object:
        return Delegate(program, "wide", at_floor(program, "stored"))

    before = held(program)
    with environment(TMPDIR="/nowhere"):
        refused(tried, HOST, said="cannot create /nowhere/penstock-")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Less than the code: a part of it is written. What ignores the signal is told.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    refused(tried, HOST, said="File too large")
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert held(program) == before


@play
def budgets(program: Program) -> None:
    floor_bytes, full_bytes = program.whole.floor_bytes, program.whole.full_bytes
    count = len(program.whole.plans)
    steps = [plan.device_bytes for plan in program.plans[:count]]

    def told(given: str | None, **changes: Any) -> tuple[list[int], str]:
        options: dict[str, Option] = {"weight_offload_group": "budgets"}
        if given is not None:
            options[BUDGET_OPTION] = given
        with logged() as log, loaded(program, options, "wide", "narrow", changes=changes) as both:
            found = facts("budgets")
            for delegate in both:
                check_run(delegate, 1)
        return found, log[0]

    for number in (0, count // 2, count - 1):
        found, log = told(str(steps[number]))
        assert found == [floor_bytes, full_bytes, steps[number], steps[number], 0, number, count, steps[number]]
        # Once for both, by the name of the program: what the delegate was given here is no part of a file.
        assert log.count(f"penstock: {program.description.program} on cpu: floor ") == 1
        assert log.count("(given at load), resident ") == 1 and "is more than all weights take" not in log
        plan = f"plan {number + 1} of {count} in the file takes "
        assert log.count(plan) == log.count(f", weights from {program.data_path}, held in memory\n") == 1
    found, log = told(str(full_bytes + PAGE))
    assert found[2:4] == [full_bytes, full_bytes + PAGE] and found[5] == count - 1
    assert log.count("(given at load) is more than all weights take") == 1
    assert told("auto")[0][4] == 4
    own: dict[str, Option] = {"weight_offload_group": "own", "weight_offload_budget:narrow": str(full_bytes)}
    with logged() as both_logs, loaded(program, own, "wide", "narrow"):
        pass
    assert both_logs[0].count(" on cpu: floor ") == 2 and both_logs[0].count(" (of narrow alone)\n") == 1
    assert "per run of wide" in both_logs[0] and " (of wide alone)" not in both_logs[0]
    for below in (floor_bytes - 1, 0):
        low = {**at_floor(program, "budgets"), BUDGET_OPTION: str(below)}
        error = refused(lambda: Delegate(program, "wide", low), BELOW_FLOOR, INVALID_ARGUMENT)  # noqa: B023
        assert error.detail == floor_bytes
    negative = {**at_floor(program, "budgets"), BUDGET_OPTION: "-1"}
    refused(lambda: Delegate(program, "wide", negative), BUDGET, INVALID_ARGUMENT)


@play
def poison(program: Program) -> None:
    for text, asked in ((None, 0), ("0", 0), ("1", 1)):
        with environment(PENSTOCK_POISON=text), loaded(program, at_floor(program, "poison"), "wide"):
            assert (made().driver_poison, made().session_poison) == (asked, asked)
    for wrong in ("2", ""):
        with environment(PENSTOCK_POISON=wrong):
            refused(lambda: Delegate(program, "wide", at_floor(program, "poison")), OPTION, said=f"is '{wrong}'")


def transfer_bytes(program: Program, *methods: str) -> int:
    return sum(method.transfer_bytes for method in program.description.methods if method.name in methods)


def pinned() -> tuple[int, int]:
    """Blocks of pinned memory that the driver made last holds, and their bytes."""
    counts = SoftHooks(made().driver).counts()
    return counts.host_allocations, counts.host_bytes


@play
def inputs_and_outputs_pass_through_pinned_memory(program: Program) -> None:
    """One block for each method, of what it can need at most, for all of its runs; given back with it."""
    most = -(-4 * TWIN_ROWS * TWIN_WIDTH // 256) + -(-4 * TWIN_ROWS**2 // 256) + -(-8 * TWIN_ROWS // 256)
    assert transfer_bytes(program, "wide") == 256 * (most + TWIN_ROWS * TWIN_WIDTH // 64)
    with loaded(program, at_floor(program, "pinned"), "wide", "narrow") as (wide, narrow):
        assert pinned() == (2, transfer_bytes(program, "wide", "narrow"))
        for run in range(100):
            check_run(wide, run % 7, rows=(2, TWIN_ROWS, 3)[run % 3])
        check_run(narrow, 1)
        # Of other strides than the code takes: in the order of its own.
        x, mix = inputs_of("wide", 5)
        turned = x.t().contiguous().t()
        assert equal(wide.execute((turned, mix), room("wide")), expected_of("wide", (x, mix)))
        assert pinned() == (2, transfer_bytes(program, "wide", "narrow"))
        narrow.close()
        assert pinned() == (1, transfer_bytes(program, "wide"))
        # Nothing of a run that failed is left in it.
        refused(lambda: wide.execute((x, torch.eye(4)), room("wide")), CODE)
        check_run(wide, 2)
        fail_later("allocate_host", Failure.REGISTRATION, 1)
        assert transfer_bytes(program, "narrow") == 2 * 4 * TWIN_WIDTH
        said = (
            "the inputs and outputs of method 'narrow' pass through 512 B of pinned memory, which could not be had: all"
        )
        refused(lambda: Delegate(program, "narrow", at_floor(program, "pinned")), CORE, INTERNAL, said)
        assert pinned() == (1, transfer_bytes(program, "wide"))
        narrow.handle = Delegate(program, "narrow", at_floor(program, "pinned")).handle
        check_run(narrow, 2)
    # What the file says of them is not taken on trust.
    wide_method, narrow_method = program.description.methods
    none = {"methods": (replace(wide_method, transfer_bytes=0), narrow_method)}
    with loaded(program, at_floor(program, "none"), "wide", changes=none):
        assert pinned() == (0, 0)
    short = {"methods": (replace(wide_method, transfer_bytes=256 * 4), narrow_method)}
    with loaded(program, at_floor(program, "short"), "wide", changes=short) as (wide,):
        refused(lambda: check_run(wide, 1), PACKAGE, INVALID_PROGRAM, "take more than the 1024 bytes that the program")


def not_logged(action: Callable[[], object], kind: int, said: str) -> None:
    """A refusal of a function that the log knows nothing of."""
    found = None
    try:
        action()
    except Refused as error:
        found = error
    assert found is not None and found.kind == kind and said in found.text, found


@play
def runs_are_traced_and_the_link_is_told(program: Program) -> None:
    options = at_floor(program, "traced", **{"weight_offload_budget:narrow": str(program.whole.full_bytes)})
    with loaded(program, options, "wide", "narrow") as (wide, narrow):
        (copies, nbytes, ns), *by_size = records("link", 3, "traced")
        assert copies > 0 and nbytes > 0 and ns > 0
        assert all(size % count == 0 and ns > 0 for count, size, ns in by_size)
        # With everything resident nothing is copied.
        assert records("link", 3, "traced", "narrow") == []
        check_run(wide, 1)
        start_trace("traced")
        for run in range(3):
            check_run(wide, run)
            check_run(narrow, run)
        counters(made().session)  # waits for the device
        spans = records("stop_trace", 7, "traced")
        steps, copied = ([one for one in spans if one[0] == lane] for lane in (0, 1))
        assert len({one[1] for one in steps}) == 3 and len(spans) == len(steps) + len(copied)
        assert len({(one[1], one[3]) for one in steps}) == len(steps) and len(steps) % 3 == 0
        assert len({one[3] for one in copied}) == len(copied) // 3 and all(one[4] > 0 for one in copied)
        assert all(one[5] <= one[6] for one in spans) and spans == sorted(spans, key=lambda one: one[5])
        not_logged(lambda: records("stop_trace", 7, "traced"), CORE, "no trace was started")
        # By the program's number, also where a session has this one alone.
        start_trace("traced", "narrow")
        check_run(narrow, 1)
        assert {one[2] for one in spans} == {0}
        assert {one[2] for one in records("stop_trace", 7, "traced", "narrow")} == {1}
        for group, delegate, said in (
            ("nobody", "", "no program is loaded in group 'nobody'"),
            ("traced", "wide", "no delegate 'wide' that has a budget of its own is loaded in group 'traced'"),
        ):
            not_logged(lambda: records("link", 3, group, delegate), OPTION, said)  # noqa: B023
            not_logged(lambda: start_trace(group, delegate), OPTION, said)  # noqa: B023


@play
def staging(program: Program) -> None:
    with loaded(program, at_floor(program, "staged", **{CAP_OPTION: str(10 * PAGE)}), "wide", "narrow") as both:
        extra_bytes = program.whole.floor_bytes + transfer_bytes(program, "wide", "narrow")
        assert (made().host_cap_bytes, made().extra_host_bytes) == (10 * PAGE, extra_bytes)
        for seed in range(3):
            for delegate in both:
                check_run(delegate, seed)
    with loaded(program, at_floor(program, "held"), "wide"):
        assert made().host_cap_bytes == -1
    loud = at_floor(program, "staged", **{CAP_OPTION: str(4 * PAGE), "weight_offload_quiet": False})
    with logged() as log, loaded(program, loud, "wide"):
        assert made().host_cap_bytes == 4 * PAGE
    assert log[0].count(f", weights from {program.data_path}, staged\n") == 1
    short = at_floor(program, "staged", **{CAP_OPTION: str(4 * PAGE - 1)})
    refused(lambda: Delegate(program, "wide", short), CORE, NO_MEMORY, f"at least {4 * PAGE}")


def packed(program: Program, path: Path) -> list[Place]:
    """The weights once more, in another order, without a gap between some of them, and with bytes behind them."""
    raw = program.data_path.read_bytes()
    out, places = bytearray(), []
    by_name = {place.name: place for place in program.places}
    for number, name in enumerate(("3.weight", "0.bias", "5.weight", "0.weight", "1.weight", "4.weight", "2.weight")):
        place = by_name[f"layers.{name}"]
        if number in (1, 4, 5):
            out += bytes(-len(out) % PAGE)
        places.append(Place(place.name, place.scalar_type, place.shape, place.dim_order, len(out), place.nbytes))
        out += raw[place.offset_bytes :][: place.nbytes]
    # What state starts with is read once, and streamed from nowhere: no chunk is for it.
    first = by_name["calls"]
    places.append(Place(first.name, first.scalar_type, first.shape, first.dim_order, len(out), first.nbytes))
    out += raw[first.offset_bytes :][: first.nbytes]
    path.write_bytes(out + bytes(100))
    return places


@play
def the_core_is_told_where_weights_lie(program: Program) -> None:
    """It cuts the file for registration: no weight may lie on both sides of a cut."""
    path = Path(os.environ["TMPDIR"]) / "packed"
    places = {place.name: place for place in packed(program, path)}
    try:
        with loaded(program, at_floor(program, "extents"), "wide", "narrow", file=(path, [*places.values()])) as both:
            numbers = made().extents[: 2 * made().extent_count]
            for delegate in both:
                check_run(delegate, 1)
        expected = [places[row.names[0]] for row in program.description.weights if row.nbytes]
        found = [extent for extent in zip(numbers[::2], numbers[1::2], strict=True) if extent[1]]
        assert found == [(place.offset_bytes, place.nbytes) for place in expected]
    finally:
        path.unlink()


@play
def inputs_are_checked(program: Program) -> None:
    with loaded(program, at_floor(program, "inputs"), "wide", "narrow") as (wide, narrow):
        x, mix = inputs_of("wide", 1)
        row = inputs_of("narrow", 1)[1]
        names = {method.name: [given.name for given in method.inputs] for method in program.description.methods}
        first, second = names["wide"]
        # As penstock.Module words them, which has a name for a size that may be any, and the signature behind.
        sizes, short = f"[any, {TWIN_WIDTH}]", x[:, 1:].contiguous()
        where = f"dimension 1 is {TWIN_WIDTH - 1}, needs {TWIN_WIDTH}"
        for wrong, said in (
            ((x.double(), mix), f"'{first}' has dtype float64, needs float32"),
            ((x.int(), mix), f"'{first}' has dtype int32, needs float32"),
            ((short, mix), f"'{first}' has shape {[*short.shape]}, needs {sizes}: {where}"),
            ((x[None], mix), f"'{first}' has 3 dimensions, shape {[1, *x.shape]}; needs 2, shape {sizes}"),
            ((x[0], mix), f"'{first}' has 1 dimensions, shape [{TWIN_WIDTH}]; needs 2, shape {sizes}"),
            ((x, mix[0]), f"'{second}' has 1 dimensions, shape [3]; needs 2, shape [any, any]"),
        ):
            refusal = refused(lambda: wide.execute(wrong, room("wide")), INPUT, INVALID_ARGUMENT)  # noqa: B023
            assert refusal.text == f"method 'wide': input {said}", refusal
        said = f"method 'narrow': input '{names['narrow'][-1]}' has shape [1, {TWIN_WIDTH - 1}], needs [1, "
        refused(lambda: narrow.execute((row[:, 1:].contiguous(),), room("narrow")), INPUT, said=said)
        refused(lambda: wide.execute((x, 3), room("wide")), INPUT, said="value 1 of wide is no tensor")
        refused(lambda: wide.execute((x, mix), [room("wide")[0], 3]), INPUT, said="value 3 of wide is no tensor")
        for given in ((x,), (x, mix, mix)):
            refused(lambda: wide.execute(given, room("wide")), PACKAGE, said=f"with {len(given) + 2} values")  # noqa: B023
        few = [torch.zeros(2, TWIN_WIDTH), room("wide")[1]]
        refused(lambda: wide.execute((x, mix), few), PACKAGE, INVALID_PROGRAM, "planned no room")
        other = [room("wide")[0].int(), room("wide")[1]]
        refused(lambda: wide.execute((x, mix), other), PACKAGE, said="ExecuTorch expects int32")
        # None of them has left anything behind, and strides are as the caller has them.
        check_run(wide, 1)
        strided = tuple(one.t().contiguous().t() for one in (x, mix))
        assert equal(wide.execute(strided, room("wide")), expected_of("wide", (x, mix)))
        assert equal(wide.execute((x, mix), room("wide")), expected_of("wide", (x, mix)))
        check_run(narrow, 2)


@play
def a_run_that_fails(program: Program) -> None:
    """What it fails with is told, and the next run is as any other."""
    with environment(PENSTOCK_POISON="1"), loaded(program, at_floor(program, "fails"), "wide", "narrow") as both:
        wide, narrow = both
        # Each copy of a run in its turn: some are issued when it begins, others by its code or when it ends.
        for failure, status in ((Failure.DEVICE_MEMORY, NO_MEMORY), (Failure.DRIVER, INTERNAL)):
            for delegate, other in ((wide, narrow), (narrow, wide)):
                for number in itertools.count(1):
                    check_run(other, 1)  # so that something is to be copied
                    fail_later("copy_to_device", failure, number)
                    refusal: Refused | None = None
                    try:
                        check_run(delegate, 1)
                    except Refused as error:
                        refusal = error
                    if refusal is None:
                        break
                    assert (refusal.kind, refusal.status, refusal.detail) == (CORE, status, failure), refusal
                    assert "a test asked for this failure" in refusal.text
                    if delegate is narrow:
                        must_be_reset(narrow, refusal.text)
                    check_run(delegate, 2)
                    check_run(other, 3)
                fail_later("copy_to_device", failure, 0)
                assert number > 3, "a run has several copies"
        # What the run has computed cannot be returned.
        few, row = [torch.zeros(1, TWIN_WIDTH).int()], whole_numbers(1, TWIN_WIDTH, seed=1)
        refusal = refused(lambda: narrow.execute((row,), few), PACKAGE, said="ExecuTorch expects int32")
        must_be_reset(narrow, refusal.text)
        check_run(narrow, 1)
        for call in ("session_begin", "session_end"):
            library().probe_refuse(call.encode())
            refusal = refused(lambda: check_run(narrow, 1), CORE)
            must_be_reset(narrow, refusal.text)
            check_run(narrow, 1)
        # Sizes that agree with the record, not with each other: the code itself fails, halfway.
        uneven = (inputs_of("wide", 1)[0], torch.eye(5))
        refused(
            lambda: wide.execute(uneven, room("wide")), CODE, INTERNAL, "method 'wide' failed inside its compiled code"
        )
        for delegate in (wide, narrow, wide):
            check_run(delegate, 4)


def must_be_reset(narrow: Delegate, failure: str) -> None:
    """State that a failed run may have half written: neither run with, nor read, nor written into."""
    row, calls = whole_numbers(1, TWIN_WIDTH, seed=1), torch.zeros(4)
    said = f"the state (calls) may be half written: method 'narrow' failed: {failure}; call reset_state() first"
    refused(lambda: narrow.execute((row,), room("narrow")), STATE, INVALID_STATE, said)
    for use in (lambda: narrow.read_state("calls", calls), lambda: narrow.write_state("calls", calls)):
        state_refused(use, STATE, said, INVALID_STATE)
    narrow.reset_state()
    assert narrow.read_state("calls", calls).tolist() == [FIRST_CALLS] * 4


def state_refused(use: Callable[[], object], kind: int, said: str, status: int | None = None) -> None:
    found = None
    try:
        use()
    except Refused as error:
        found = error
    assert found is not None and found.kind == kind and said in found.text, found
    assert status is None or found.status == status, found


@play
def state_belongs_to_a_loading(program: Program) -> None:
    row, calls = whole_numbers(1, TWIN_WIDTH, seed=1), torch.zeros(4)

    def run(narrow: Delegate, expected_calls: float) -> None:
        expected = expected_of("narrow", (torch.full((4,), expected_calls), row))
        assert equal(narrow.execute((row,), room("narrow")), expected[1:])

    options = at_floor(program, "state")
    with loaded(program, options, "wide", "narrow") as (wide, first):
        assert first.read_state("calls", calls).tolist() == [FIRST_CALLS] * 4
        run(first, FIRST_CALLS)
        run(first, FIRST_CALLS + 1)
        with loaded(program, at_floor(program, "another"), "narrow") as (second,):
            run(second, FIRST_CALLS)
            assert second.read_state("calls", calls).tolist() == [FIRST_CALLS + 1] * 4
        with loaded(program, options, "narrow") as (third,):
            run(third, FIRST_CALLS)
            state_refused(lambda: third.read_state("calls", calls), STATE, "2 loaded programs with state")
        check_run(wide, 1)
        assert first.read_state("calls", calls).tolist() == [FIRST_CALLS + 2] * 4
        said = "no state 'nothing'; the program has calls"
        state_refused(lambda: first.read_state("nothing", calls), INPUT, said, INVALID_ARGUMENT)
        state_refused(lambda: first.write_state("calls", calls[:3]), INPUT, "was given 12 bytes, it has 16")
        first.write_state("calls", torch.arange(4.0))
        assert first.read_state("calls", calls).tolist() == [0, 1, 2, 3]
        first.reset_state()
        run(first, FIRST_CALLS)
    state_refused(lambda: first.reset_state(), STATE, "0 loaded programs with state are of group 'state', needs one")
    others = [place for place in program.places if place.name != "calls"]
    (stored,) = [place for place in program.places if place.name == "calls"]
    without = (program.data_path, others)
    refused(lambda: Delegate(program, "narrow", options, file=without), MISSING_WEIGHT, said="program: 'calls'")
    short = (program.data_path, [*others, replace(stored, nbytes=12)])
    refused(lambda: Delegate(program, "narrow", options, file=short), MISMATCH, said="'calls' has 12 bytes")
    raw, path = program.data_path.read_bytes(), Path(os.environ["TMPDIR"]) / "packed-state"
    path.write_bytes(raw + b"PSPK" + bytes(60))
    packed_state = (path, [*others, replace(stored, offset_bytes=len(raw), nbytes=64)])
    said = "'calls' is packed in the data file, and a process without Python unpacks weights only; pack the weights"
    refused(lambda: Delegate(program, "narrow", options, file=packed_state), MISMATCH, said=said)
    path.unlink()
    with loaded(program, options, "narrow", changes=with_zeros(program), file=without) as (narrow,):
        run(narrow, 0)
    assert (made().drivers, made().sessions) == (0, 0)


@play
def state_is_there_before_a_budget_is_chosen(program: Program) -> None:
    """Also where the delegate that is loaded first has none: an automatic budget must leave room for it."""
    calls = torch.zeros(4)
    with loaded(program, at_floor(program, "first"), "wide") as (wide,):
        assert wide.read_state("calls", calls).tolist() == [FIRST_CALLS] * 4
        with loaded(program, at_floor(program, "first"), "narrow") as (narrow,):
            check_run(narrow, 1)
            library().probe_refuse(b"session_begin")
            refused(lambda: check_run(narrow, 2), CORE)
            check_run(wide, 1)  # which does not read it
    (place,) = [place for place in program.places if place.name == "calls"]
    without = (program.data_path, [other for other in program.places if other is not place])
    refused(lambda: Delegate(program, "wide", at_floor(program, "first"), file=without), MISSING_WEIGHT, said="'calls'")


def with_zeros(program: Program) -> dict[str, Any]:
    (calls,) = program.description.states
    return {"states": (replace(calls, stored=0),)}


@play
def failures_of_other_kinds(program: Program) -> None:
    for what, *told in (("memory", CORE, NO_MEMORY, "no memory left"), ("error", CODE, INTERNAL, "asked for this")):
        library().probe_refuse(what.encode())
        refused(lambda: Delegate(program, "wide", at_floor(program, "others")), *told)
    assert (made().drivers, made().sessions) == (0, 0)


@play
def one_run_at_a_time(program: Program) -> None:
    with loaded(program, at_floor(program, "threads"), "wide", "narrow") as both:
        both[1].write_state("calls", inputs_of("narrow", 1)[0])
        given = [(inputs_of("wide", 1), room("wide")), (inputs_of("narrow", 1)[1:], room("narrow"))]
        values = [one.values(*each) for one, each in zip(both, given, strict=True)]
        arguments = [part for one, (v, _) in zip(both, values, strict=True) for part in (one.handle, v, len(v))]
        assert library().probe_two_at_once(*arguments) == 1
        for one, (inputs, outputs), (v, _) in zip(both, given, values, strict=True):
            found = [resized(v[len(inputs) + at], output) for at, output in enumerate(outputs)]
            assert equal(found, expected_of(one.method, inputs_of(one.method, 1))[-len(found) :])


@play
def options(program: Program) -> None:
    narrow_floor = next(row.floor_bytes for row in program.description.plan_tables if row.methods == (1,))
    own = at_floor(program, "own", **{f"{BUDGET_OPTION}:narrow": str(narrow_floor)})
    with loaded(program, own, "wide", "narrow") as both:
        assert (made().drivers, made().sessions) == (2, 2)
        for seed in range(2):
            for delegate in both:
                check_run(delegate, seed)
    every: dict[str, Option] = {f"{BUDGET_OPTION}:{name}": own[BUDGET_OPTION] for name in ("wide", "narrow")}
    every |= {"weight_offload_group": "every", "weight_offload_quiet": True}
    with loaded(program, every, "wide", "narrow"):
        said = "every delegate that is loaded in group 'every' has a budget of its own: name one, of wide, narrow"
        not_logged(lambda: start_trace("every"), OPTION, said)
    # In Module's words.
    said = "a budget for the program was given, but every delegate has one of its own"
    refused(lambda: Delegate(program, "wide", {**every, BUDGET_OPTION: "auto"}), BUDGET, INVALID_ARGUMENT, said)
    unknown = at_floor(program, "own", **{f"{BUDGET_OPTION}:middle": "1"})
    refused(lambda: Delegate(program, "wide", unknown), OPTION, said="names no delegate; the program has wide, narrow")
    numbered = at_floor(program, "own", **{DEVICE_OPTION: 0})
    refused(lambda: Delegate(program, "wide", numbered), DEVICE, said="which has no number")
    with logged() as log, loaded(program, at_floor(program, "quiet"), "wide"):
        pass
    assert log[0] == ""


@play
def sessions_that_are_lent(program: Program) -> None:
    """As Module has it: nothing is made, and what is lent is not given back."""
    with loaded(program, at_floor(program, "lends"), "wide", "narrow") as ours:
        before = bytes(made())
        assert not library().penstock_executorch_share_session(b"lacks", made().session, 0, (ctypes.c_int64 * 1)(0), 1)
        lacking: dict[str, Option] = {"weight_offload_group": "lacks"}
        refused(lambda: Delegate(program, "narrow", lacking), PACKAGE, said="no session was made for delegate 1 of")
        library().penstock_executorch_reclaim(b"lacks")
        assert not library().penstock_executorch_share_session(
            b"borrows", made().session, 0, (ctypes.c_int64 * 2)(0, 1), 2
        )
        loud: dict[str, Option] = {"weight_offload_group": "borrows"}
        refused(lambda: Delegate(program, "narrow", loud), PACKAGE, said="no state was made")
        with loaded(program, loud, "wide") as (wide,):  # which has none
            check_run(wide, 1)
        calls, row = torch.full((4,), 3.0), whole_numbers(1, TWIN_WIDTH, seed=1)
        value = (Value * 1)()
        kept = _fill(value[0], calls)
        assert library().penstock_executorch_share_states(b"borrows", b"cpu", 0, value, 1) == 0
        with logged() as log, loaded(program, loud, "wide", "narrow") as (wide, narrow):
            check_run(wide, 1)
            expected = expected_of("narrow", (calls.clone(), row))
            assert equal([calls, *narrow.execute((row,), room("narrow"))], expected)
            state_refused(narrow.reset_state, STATE, "0 loaded programs with state are of group 'borrows'")
            # Whose it is knows whether it is whole.
            library().probe_refuse(b"session_begin")
            refused(lambda: narrow.execute((row,), room("narrow")), CORE)
            calls.fill_(5.0)
            expected = expected_of("narrow", (calls.clone(), row))
            assert equal([calls, *narrow.execute((row,), room("narrow"))], expected)
        del kept
        library().penstock_executorch_reclaim(b"borrows")
        assert "given at load" not in log[0] and bytes(made()) == before
        for delegate in ours:
            check_run(delegate, 2)


@play
def programs_for_something_else(program: Program) -> None:
    """Refused before anything is made; so they need no code."""
    built = program.description.built_with

    def tried(changes: Mapping[str, Any], delegate_ref: Mapping[str, Any] | None = None) -> Callable[[], object]:
        options = at_floor(program, "else")
        return lambda: Delegate(program, "wide", options, changes=changes, delegate_ref=delegate_ref, with_code=False)

    refused(tried({"device": "xpu"}), PACKAGE, said="compiled for 'xpu'")
    major, minor = built["torch"].split(".")[:2]
    for other in (f"{major}.{int(minor) + 1}.0", f"{int(major) + 1}.{minor}.0"):
        refused(tried({"built_with": {**built, "torch": other}}), BUILD, said=f"compiled with torch {other}")
    refused(tried({"built_with": {**built, "machine": "pdp11"}}), BUILD, said="compiled for pdp11")
    for here, cpu in (("AVX2", "AVX512"), ("AVX512", "DEFAULT"), ("DEFAULT", "AVX2")):
        with environment(PROBE_CPU=here):
            refused(tried({"built_with": {**built, "cpu": cpu}}), BUILD, said=f"torch finds {here} on this one")
    for delegate_ref in ({"number": -1}, {"number": 2}, {"number": 1 << 40}, {"number": 1}, {"method": "middle"}):
        refused(tried({}, delegate_ref), PACKAGE, said="which its delegate names")
    refused(tried({}, {"payload": "penstock.program.nobody"}), PACKAGE, said="holds no penstock.program.nobody")
    refused(lambda: Delegate(program, "wide", with_data=False), MISSING_WEIGHT, said="without any data")
    refused(tried({"page_bytes": 1000}), CORE, said="a granularity of 1000 bytes")
    # A floor of as many bytes as the core's number for memory that is not there.
    low = {"plan_tables": (replace(program.whole, floor_bytes=2), *program.description.plan_tables[1:])}
    below = {**at_floor(program, "else"), BUDGET_OPTION: "1"}
    refused(
        lambda: Delegate(program, "wide", below, changes=low, with_code=False),
        BELOW_FLOOR,
        INVALID_ARGUMENT,
        "needs at least 2",
    )
    assert (made().drivers, made().sessions) == (0, 0)


@play
def payloads_that_are_none(program: Program) -> None:
    """In the words in which Python refuses them."""
    sound, options = program.payload({}, with_code=False), at_floor(program, "none")

    def changed(at: int, value: int) -> bytes:
        return sound[:at] + bytes([value]) + sound[at + 1 :]

    broken = [sound[:40], sound[:-1], sound + b"\0", changed(0, 0), changed(8, 6), changed(len(sound) - 1, 77)]
    for payload in broken:
        found = refused(lambda: Delegate(program, "wide", options, payload=payload), PACKAGE)  # noqa: B023
        assert found.text == _refusal(payload)
    assert f"format version {VERSION - 1}, and this release reads version {VERSION}: lower it again" in _refusal(
        changed(8, VERSION - 1)
    )
    # What its seal is made good for, and Python does not look at: plans are for C++.
    swapped = pack_payload(program.description, [*program.plans[1:2], program.plans[0], *program.plans[2:]], b"")
    said = "is not the one that was written"
    refused(lambda: Delegate(program, "wide", options, payload=swapped), PACKAGE, said=said)
    assert (made().drivers, made().sessions) == (0, 0)


def _refusal(payload: bytes) -> str:
    try:
        read_payload(payload)
    except PackageError as error:
        return str(error)
    raise AssertionError("Python takes it")


def for_avx2(program: Program) -> dict[str, Any]:
    return {"built_with": {**program.description.built_with, "cpu": "AVX2"}}


def for_gpu(program: Program) -> dict[str, Any]:
    built = {**program.description.built_with, "capability": "8.6", "gpu": "Sample GPU"}
    # Without state, which torch would put on the GPU.
    methods = tuple(replace(method, states=()) for method in program.description.methods)
    return {"device": "cuda", "built_with": built, "states": (), "methods": methods}


def with_outputs(program: Program, count: int) -> dict[str, Any]:
    wide, narrow = program.description.methods
    return {"methods": (replace(wide, outputs=count), narrow)}


@play
def a_cpu_that_can_do_more(program: Program) -> None:
    with (
        environment(PROBE_CPU="AVX512"),
        loaded(program, at_floor(program, "more"), "wide", changes=for_avx2(program)) as (wide,),
    ):
        check_run(wide, 1)


@play
def records_that_do_not_fit_the_code(program: Program) -> None:
    inputs, outputs = inputs_of("wide", 1), room("wide")
    for count in (1, 3):
        given = [*outputs, torch.zeros(1)][:count]
        with loaded(program, at_floor(program, "record"), "wide", changes=with_outputs(program, count)) as (wide,):
            refused(lambda: wide.execute(inputs, given), PACKAGE, said="returned 2 tensors")  # noqa: B023
    for order in ((0, 2), (1, 1), (1 << 40, 0)):
        wrong = with_order(program, *order)
        refused(
            lambda: Delegate(program, "wide", at_floor(program, "record"), changes=wrong, with_code=False),  # noqa: B023
            PACKAGE,
            INVALID_PROGRAM,
            f"has dim order {list(order)}",
        )
    with loaded(program, at_floor(program, "record"), "wide", changes=with_flat_order(program)) as (wide,):
        refused(lambda: wide.execute(inputs, outputs), PACKAGE, said="has a dim order of")


def with_flat_order(program: Program) -> dict[str, Any]:
    return with_order(program, 0)


def with_order(program: Program, *dim_order: int) -> dict[str, Any]:
    wide, narrow = program.description.methods
    first, second = wide.inputs
    return {"methods": (replace(wide, inputs=(replace(first, dim_order=dim_order), second)), narrow)}


@play
def a_program_for_a_gpu(program: Program) -> None:
    """A library that answers as a driver does stands in for the GPU's, and a soft driver for the core's: everything is
    made but the code, which is none for a GPU."""
    changes = for_gpu(program)
    loud = at_floor(program, "gpu", **{DEVICE_OPTION: 1, "weight_offload_quiet": False})

    def log_at_load(options: Mapping[str, Option]) -> str:
        with logged() as log:
            with contextlib.suppress(Refused):
                Delegate(program, "wide", options, changes=changes)
        assert "the compiled code of method 'wide' cannot be loaded" in log[0] and made().device_index == 1
        assert made().extra_host_bytes == transfer_bytes(program, "wide", "narrow")
        return log[0]

    log = log_at_load(loud)
    assert "on cuda:1: floor" in log and ", held in memory\n" in log
    log = log_at_load({**loud, CAP_OPTION: str(4 * PAGE)})
    assert ", staged\n" in log
    refused(lambda: Delegate(program, "wide", {**loud, DEVICE_OPTION: 2}, changes=changes), DEVICE, said="cuda:2")
    if not torch.backends.cuda.is_built():
        unnamed = at_floor(program, "gpu")
        refused(lambda: Delegate(program, "wide", unnamed, changes=changes), BUILD, said="sees no GPU here")
    said = "weight_offload_cuda_graph does not go with a CPU"
    refused(lambda: Delegate(program, "wide", at_floor(program, "gpu", **{GRAPH_OPTION: True})), CORE, INTERNAL, said)
    graphs = {**loud, GRAPH_OPTION: True}
    if not torch.backends.cuda.is_built():
        said = "weight_offload_cuda_graph needs memory of torch's that this library was built without"
        # Before anything is made: what is to fail then is still to come.
        library().probe_refuse(b"cuda_create")
        refused(lambda: Delegate(program, "wide", graphs, changes=changes), BUILD, said=said)
        refused(lambda: Delegate(program, "wide", loud, changes=changes), CORE)
    said = "weight_offload_cuda_graph does not go with a cap on host memory"
    capped = {**graphs, CAP_OPTION: str(4 * PAGE)}
    refused(lambda: Delegate(program, "wide", capped, changes=changes), CORE, INTERNAL, said)
    other = {**changes, "built_with": {**changes["built_with"], "capability": "9.0"}}
    refused(lambda: Delegate(program, "wide", loud, changes=other, with_code=False), BUILD, said="capability 9.0")
    library().probe_refuse(b"cuda_create")
    # In the core's words, which in this case are none.
    assert refused(lambda: Delegate(program, "wide", loud, changes=changes), CORE).detail == Failure.NONE
    # The stand-in for the driver knows no contexts, as the process that tries registration finds.
    with drivers_wrapped_by("wrap_gpu"):
        tried = "cannot be registered with device 1: libcuda.so.1 has no function cuDevicePrimaryCtxRetain"
        refused(lambda: Delegate(program, "wide", loud, changes=changes), CORE, INTERNAL, tried)
    assert (made().drivers, made().sessions) == (0, 0)


@play
def through_executorch(program: Program) -> None:
    """The .pte itself, in ExecuTorch's runtime."""
    floor = str(program.whole.floor_bytes)
    native = NativeModule(str(program.path), [str(program.data_path)], floor, "executorch")
    for method in ("wide", "narrow"):
        native.load_method(method)
    row = inputs_of("narrow", 1)[1]
    for run in range(3):
        inputs = inputs_of("wide", run)
        assert equal(native.execute("wide", inputs), expected_of("wide", inputs))
        calls = torch.full((4,), FIRST_CALLS + run)
        assert equal(native.execute("narrow", (row,)), expected_of("narrow", (calls, row))[1:])
    native.close()
    assert (made().drivers, made().sessions) == (0, 0)


# -------------------------------------------------------------------------------------------------------------- running


def main(path: Path, arguments: Sequence[str]) -> None:
    program = Program(path)
    for changes in ({}, for_avx2(program), for_gpu(program), with_flat_order(program), with_zeros(program)):
        program.payload(changes)
    for count in (1, 3):
        program.payload(with_outputs(program, count))

    def clear() -> None:
        """What a process that was ended left behind: torch unpacks code, which is large."""
        for folder in Path(os.environ["TMPDIR"]).iterdir():
            shutil.rmtree(folder) if folder.is_dir() else folder.unlink()

    plays = Plays(PLAYS, lambda name: PLAYS[name](program), library, clear)
    library()
    # In a process of its own, too: threads that torch or ExecuTorch start would be missing in those that are forked.
    begun_s = time.monotonic()
    name = missed(plays, 0, "", 600)
    assert name == "survived", f"{name} goes wrong without a fault"
    tell_missed(plays, arguments, max(LEAST_S, PATIENCE * (time.monotonic() - begun_s)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    # A mutant may write without end: not into more than this.
    resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_FILE_BYTES, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    main(Path(sys.argv[1]), sys.argv[2:])
