"""Each failure has its class and names its cause; after any of them nothing is left behind, and the next load works."""

from __future__ import annotations

import dataclasses
import gc
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import penstock
import penstock.runtime.method_runner
import penstock.runtime.module as module_file
import penstock.runtime.session as session_file
from penstock import errors
from penstock.program import Method, Program, read_program
from penstock.runtime.module import POISON_VARIABLE
from tests.runtime.fake_machine import limited
from tests.runtime.modules import (
    CHAIN_WIDTH,
    EVERYTHING,
    PAGE,
    SCRIPTS,
    SETUPS,
    KeptDrivers,
    Watched,
    at_the_floor,
    floor_of,
    hooks,
    play,
    random_input,
    rewrite_weights,
    same,
)
from tests.runtime.soft import Failure

ResidentBits = Callable[[str], list[list[Tensor]]]
X = random_input(3, CHAIN_WIDTH, seed=3)


@pytest.fixture
def works(chain: Path, resident_bits: ResidentBits, kept: KeptDrivers) -> Callable[[], None]:
    """After a failure: nothing is alive in any driver, and the same program loads and runs."""

    def check() -> None:
        kept.check()
        kept.capacity_bytes = 0
        with at_the_floor(chain) as module:
            assert same(play(Watched(module), SCRIPTS["chain"]), resident_bits("chain"))

    return check


@pytest.fixture
def copied(chain: Path, tmp_path: Path) -> Path:
    """Files of the test's own, to be damaged."""
    for suffix in (".pt2", ".ptd"):
        shutil.copy(chain.with_suffix(suffix), tmp_path / f"copy{suffix}")
    return tmp_path / "copy.pt2"


def altered(monkeypatch: pytest.MonkeyPatch, change: Callable[[Program], Program]) -> None:
    """Programs are read as if this had been written into them."""
    read = module_file.read_offloaded
    monkeypatch.setattr(module_file, "read_offloaded", lambda path, budget: change(read(path, budget=budget)))


# ---- device and host memory at load


@pytest.mark.parametrize("setup", SETUPS)
def test_below_the_floor(setup: str, chain: Path, works: Callable[[], None], kept: KeptDrivers) -> None:
    with pytest.raises(errors.BelowFloorError) as below:
        penstock.Module(chain, 1, **SETUPS[setup])
    assert str(below.value.floor_bytes) in str(below.value)
    assert kept.last.counts().peak_block_bytes == 0
    works()


def test_a_page_cannot_be_created(chain: Path, works: Callable[[], None], kept: KeptDrivers) -> None:
    floor = floor_of(chain)
    with penstock.Module(chain, floor) as module:
        needed_bytes = module.plan.device_bytes
    kept.capacity_bytes = needed_bytes - PAGE
    with pytest.raises(errors.DeviceMemoryError, match="create_block"):
        penstock.Module(chain, floor)
    assert 0 < kept.last.counts().peak_block_bytes <= needed_bytes - PAGE
    works()


@pytest.mark.parametrize("call", ["create_pool", "pool_allocate"])
def test_a_pool_cannot_be_created(call: str, chain: Path, works: Callable[[], None], kept: KeptDrivers) -> None:
    kept.fail_at(1, call)
    with pytest.raises(errors.DeviceMemoryError, match=call):
        penstock.Module(chain, EVERYTHING, placement="lru")
    works()


def test_a_pool_larger_than_the_device(chain: Path, works: Callable[[], None], kept: KeptDrivers) -> None:
    kept.capacity_bytes = PAGE
    with pytest.raises(errors.DeviceMemoryError, match="pool"):
        penstock.Module(chain, EVERYTHING, placement="lru")
    works()


@pytest.mark.parametrize("placement", ["auto", "lru"])
def test_registration_fails(placement: str, chain: Path, works: Callable[[], None], kept: KeptDrivers) -> None:
    kept.fail_at(1, "register_host")
    with pytest.raises(errors.RegistrationError) as refused:
        penstock.Module(chain, EVERYTHING, placement=placement)
    assert "a test asked for this failure" in str(refused.value) and 'host_memory="1GiB"' in str(refused.value)
    works()


def test_staging_buffers_cannot_be_pinned(chain: Path, works: Callable[[], None], kept: KeptDrivers) -> None:
    kept.fail_at(2, "allocate_host")
    with pytest.raises(errors.RegistrationError, match="a test asked for this failure"):
        penstock.Module(chain, EVERYTHING, **SETUPS["staged"])
    works()


@pytest.mark.parametrize("setup", SETUPS)
def test_the_host_has_too_little_memory(
    setup: str, chain: Path, works: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(session_file, "HOST_ROOT", limited(tmp_path, 1000))
        with pytest.raises(errors.HostMemoryError, match=r"\d+ bytes .* 1000 are available by .*memory\.max"):
            penstock.Module(chain, EVERYTHING, **SETUPS[setup])
    works()


def test_the_soft_device_counts_as_host_memory(chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages are the host's: file and budget must fit together."""
    budget = floor_of(chain)
    needed = chain.with_suffix(".ptd").stat().st_size + budget
    monkeypatch.setattr(session_file, "HOST_ROOT", limited(tmp_path, needed - 1))
    with pytest.raises(errors.HostMemoryError, match=f"{needed} bytes"):
        penstock.Module(chain, budget)
    limited(tmp_path, needed)
    with penstock.Module(chain, budget) as module:
        Watched(module)("forward", X)


@pytest.mark.parametrize("call", ["reserve", "map", "create_stream", "create_event", "copy_to_device"])
def test_any_driver_call_of_a_load_may_fail(
    call: str, chain: Path, works: Callable[[], None], kept: KeptDrivers
) -> None:
    floor = floor_of(chain)
    for n in [1] if call == "create_stream" else [1, 5]:
        kept.fail_at(n, call)
        with pytest.raises(errors.RuntimeFailure, match=f"{call} failed: a test asked for this failure"):
            penstock.Module(chain, floor)
        kept.check()
    works()


def test_a_lost_device_is_named_as_such(chain: Path, works: Callable[[], None], kept: KeptDrivers) -> None:
    kept.fail_at(1, "create_block", Failure.STICKY)
    with pytest.raises(errors.StickyDeviceError, match="the device context is lost, and only a new process"):
        penstock.Module(chain, EVERYTHING)
    works()


def test_the_compiled_code_cannot_be_loaded(
    chain: Path, works: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last thing of a load: everything before it is given back."""

    def refuse(*arguments: object) -> None:
        raise RuntimeError("no such symbol")

    with monkeypatch.context() as patch:
        patch.setattr(penstock.runtime.method_runner, "CompiledMethod", refuse)
        with pytest.raises(errors.PackageError, match="method 'forward' cannot be loaded: no such symbol"):
            penstock.Module(chain, EVERYTHING)
    works()


# ---- the weights file


def test_a_weight_is_missing(chain: Path, tmp_path: Path, works: Callable[[], None]) -> None:
    short = rewrite_weights(
        read_program(chain), chain.with_suffix(".ptd"), tmp_path / "short.ptd", leave_out="middle.2.weight"
    )
    with pytest.raises(errors.MissingWeightError, match="lacks 1 of the .* weights .*: 'middle.2.weight'"):
        penstock.Module(chain, weights=short)
    works()


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"shape": (CHAIN_WIDTH // 2, 2 * CHAIN_WIDTH)}, f"float32[{CHAIN_WIDTH // 2}, {2 * CHAIN_WIDTH}]"),
        ({"dtype": "int32"}, f"int32[{CHAIN_WIDTH}, {CHAIN_WIDTH}]"),
    ],
    ids=["shape", "dtype"],
)
def test_a_weight_disagrees(
    change: dict[str, Any], found: str, chain: Path, tmp_path: Path, works: Callable[[], None]
) -> None:
    name = "middle.2.weight"
    wrong = rewrite_weights(
        read_program(chain), chain.with_suffix(".ptd"), tmp_path / "wrong.ptd", change={"name": name, **change}
    )
    with pytest.raises(errors.WeightMismatchError) as refused:
        penstock.Module(chain, weights=wrong)
    assert f"'{name}' is {found}, needs float32[{CHAIN_WIDTH}, {CHAIN_WIDTH}]" in str(refused.value)
    works()


def test_there_is_no_weights_file(copied: Path, works: Callable[[], None], kept: KeptDrivers) -> None:
    copied.with_suffix(".ptd").unlink()
    with pytest.raises(errors.WeightsFileError, match=r"copy.ptd does not exist"):
        penstock.Module(copied)
    with pytest.raises(errors.PackageError, match="none.pt2 does not exist"):
        penstock.Module(copied.with_name("none.pt2"))
    assert not kept.made
    works()


def test_checksums_are_compared_on_request(copied: Path, works: Callable[[], None], kept: KeptDrivers) -> None:
    with penstock.Module(copied, verify=True) as module:
        Watched(module)("forward", X)
    weights = copied.with_suffix(".ptd")
    content = bytearray(weights.read_bytes())
    entry = penstock.weights.read_index(weights)["middle.3.weight"]
    content[entry.offset_bytes + 17] ^= 1
    weights.write_bytes(content)
    with pytest.raises(errors.ChecksumError, match=r"middle\.3\.weight"):
        penstock.Module(copied, verify=True)
    with penstock.Module(copied) as module:
        Watched(module)("forward", X)
    works()


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("harm", ["touched", "truncated", "longer"])
def test_the_weights_file_changes_after_the_load(
    harm: str, setup: str, copied: Path, works: Callable[[], None], kept: KeptDrivers
) -> None:
    weights = copied.with_suffix(".ptd")
    with at_the_floor(copied, **SETUPS[setup]) as module:
        Watched(module)("forward", X)
        status = weights.stat()
        if harm == "touched":
            os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
        else:
            with weights.open("r+b") as file:
                file.truncate(0 if harm == "truncated" else status.st_size + 1)
        for _ in range(2):
            with pytest.raises(errors.WeightsChangedError, match=r"copy.ptd"):
                module(X)
        assert module.stats().runs == 1
    if harm != "truncated":
        with weights.open("r+b") as file:
            file.truncate(status.st_size)
        with penstock.Module(copied) as module:
            Watched(module)("forward", X)
    works()


# ---- the program


@pytest.mark.parametrize(
    ("built", "message"),
    [
        ({"torch": "1.2.3"}, "compiled with torch 1.2.3, this is torch"),
        ({"machine": "vax"}, "compiled for vax, this machine is"),
    ],
)
def test_another_torch_or_machine(
    built: dict[str, str], message: str, chain: Path, kept: KeptDrivers, works: Callable[[], None]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        altered(patch, lambda program: dataclasses.replace(program, built_with={**program.built_with, **built}))
        with pytest.raises(errors.BuildMismatchError, match=message):
            penstock.Module(chain)
    assert not kept.made
    works()


def test_another_device(chain: Path, kept: KeptDrivers, works: Callable[[], None]) -> None:
    with pytest.raises(errors.BuildMismatchError, match="compiled for cpu, and cannot run on cuda"):
        penstock.Module(chain, device="cuda")
    with pytest.raises(errors.DeviceError, match="'abacus' is not a device"):
        penstock.Module(chain, device="abacus")
    with penstock.Module(chain, device="cpu") as module:
        assert module.device == torch.device("cpu")
    works()


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"placement": "fifo"}, errors.PenstockError, "placement is 'fifo'; it must be one of 'auto', .* 'lru'"),
        ({"host_memory": "mapped"}, errors.HostMemoryError, "host_memory is 'mapped'; .*\"registered\", or a cap"),
        (
            {"host_memory": 100},
            errors.HostMemoryError,
            "a cap of 100 bytes of host memory is too small: staging needs at least",
        ),
        ({"host_memory": "-1"}, errors.HostMemoryError, "host_memory is '-1'; .* is negative"),
    ],
)
def test_options_that_do_not_exist(
    options: dict[str, Any], kind: type[Exception], message: str, chain: Path, works: Callable[[], None]
) -> None:
    with pytest.raises(kind, match=message):
        penstock.Module(chain, **options)
    works()


def test_poison_is_0_or_1(chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(POISON_VARIABLE, "yes")
    with pytest.raises(errors.PenstockError, match="PENSTOCK_POISON is 'yes'; it must be 0 or 1"):
        penstock.Module(chain)


# ---- runs


def renumbered(method: Method, position: int) -> Method:
    """As if the compiled code had been recorded with another access at this position."""
    old = method.schedule.accesses[position].number
    accesses = tuple(
        dataclasses.replace(access, number=999) if access.number == old else access
        for access in method.schedule.accesses
    )
    steps = tuple(
        dataclasses.replace(step, accesses=tuple(999 if number == old else number for number in step.accesses))
        for step in method.schedule.steps
    )
    schedule = dataclasses.replace(method.schedule, accesses=accesses, steps=steps)
    return dataclasses.replace(method, schedule=schedule)


@pytest.mark.parametrize("position", [0, 3, -1])
@pytest.mark.parametrize("setup", SETUPS)
def test_the_schedule_diverges(
    setup: str,
    position: int,
    decoder: Path,
    resident_bits: ResidentBits,
    works: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def change(program: Program) -> Program:
        decode = next(method for method in program.methods if method.name == "decode")
        methods = tuple(renumbered(m, position) if m is decode else m for m in program.methods)
        return dataclasses.replace(program, methods=methods)

    prefill, decode = SCRIPTS["decoder"][:2]
    first = resident_bits("decoder")[:1]
    with monkeypatch.context() as patch:
        altered(patch, change)
        with at_the_floor(decoder, **SETUPS[setup]) as module:
            assert same(play(module.run_method, [prefill]), first)
            accesses = read_program(decoder).method("decode").schedule.accesses
            at = position % len(accesses)
            expected = f"position {at}: expected access 999, got access {accesses[at].number}"
            with pytest.raises(errors.ScheduleDivergedError, match=expected):
                play(module.run_method, [decode])
            with pytest.raises(errors.StateInvalidError, match=f"method 'decode' failed: .*{expected}"):
                play(module.run_method, [prefill])
            assert module.stats().runs == 1
            module.reset_state()
            assert same(play(Watched(module), [prefill]), first)
    works()


def test_steps_that_are_missing_are_a_divergence(chain: Path, works: Callable[[], None]) -> None:
    def change(program: Program) -> Program:
        (method,) = program.methods
        *most, last = method.schedule.steps
        steps = (*most, last, dataclasses.replace(last, kernel="one more"))
        schedule = dataclasses.replace(method.schedule, steps=steps)
        return dataclasses.replace(program, methods=(dataclasses.replace(method, schedule=schedule),))

    with pytest.MonkeyPatch.context() as patch:
        altered(patch, change)
        with at_the_floor(chain) as module:
            count = len(module.program.methods[0].schedule.steps)
            with pytest.raises(errors.ScheduleDivergedError, match=rf"and {count} steps, got \d+ and {count - 1}"):
                module(X)
            assert module.stats().runs == 0
    works()


@pytest.mark.parametrize("setup", SETUPS)
def test_called_while_a_graph_is_captured(
    setup: str, chain: Path, resident_bits: ResidentBits, works: Callable[[], None]
) -> None:
    with at_the_floor(chain, **SETUPS[setup]) as module:
        run = Watched(module)
        play(run, SCRIPTS["chain"])
        before = module.stats(), module.device_memory(), module.last_run
        hooks(module).set_capturing(None, True)
        for _ in range(2):
            with pytest.raises(errors.CaptureError, match="captured into a graph"):
                module(X)
        hooks(module).set_capturing(None, False)
        assert (module.stats(), module.device_memory(), module.last_run) == before
        # What was in place still is: the next run is a warm one.
        assert same(play(run, SCRIPTS["chain"]), resident_bits("chain"))
    works()


@pytest.mark.parametrize("call", ["copy_to_device", "wait", "record"])
@pytest.mark.parametrize("setup", ["registered", "staged"])
def test_a_driver_call_fails_in_a_run(
    setup: str, call: str, chain: Path, resident_bits: ResidentBits, works: Callable[[], None]
) -> None:
    with at_the_floor(chain, **SETUPS[setup]) as module:
        run = Watched(module)
        for n in (1, 3, 5):
            play(run, SCRIPTS["chain"])
            hooks(module).fail_at(n, call=call)
            with pytest.raises(errors.DriverCallError, match=f"{call} failed: a test asked for this failure"):
                module(X)
            run.run_failed()
            assert same(play(run, SCRIPTS["chain"]), resident_bits("chain"))
    works()


@pytest.mark.parametrize("call", ["copy_to_device", "wait", "record", "pool_release"])
def test_a_driver_call_fails_in_a_run_under_lru(
    call: str, chain: Path, resident_bits: ResidentBits, works: Callable[[], None]
) -> None:
    with at_the_floor(chain, placement="lru") as module:
        play(module.run_method, SCRIPTS["chain"])
        hooks(module).fail_at(2, call=call)
        with pytest.raises(errors.DriverCallError, match=f"{call} failed: a test asked for this failure"):
            module(X)
        hooks(module).fail_at(0)
        assert same(play(Watched(module), SCRIPTS["chain"]), resident_bits("chain"))
    works()


def test_compiled_code_fails_for_its_own_reasons(
    chain: Path, works: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with at_the_floor(chain) as module:

        def fail(inputs: object) -> None:
            raise RuntimeError("a kernel gave up")

        with monkeypatch.context() as patch:
            patch.setattr(module._runners["forward"], "compiled", fail)
            with pytest.raises(errors.RuntimeFailure, match="'forward' failed inside its compiled code: a kernel"):
                module(X)
        Watched(module)("forward", X)
    works()


# ---- after the end


def test_used_after_close(chain: Path, works: Callable[[], None], tmp_path: Path) -> None:
    module = at_the_floor(chain)
    module(X)
    module.close()
    module.close()
    uses: list[Callable[[], object]] = [
        lambda: module(X),
        lambda: module.run_method("forward", X),
        lambda: module.run_method("none such"),
        lambda: module.last_run,
        module.stats,
        module.device_memory,
        lambda: module.link_bytes_per_s,
        lambda: module.set_budget(EVERYTHING),
        lambda: module.read_state("any"),
        lambda: module.write_state("any", X),
        module.reset_state,
        lambda: module.trace(tmp_path / "trace.json"),
    ]
    for use in uses:
        with pytest.raises(errors.ClosedError, match=r"model.pt2 was closed"):
            use()
    works()


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize(
    "call", ["synchronize_stream", "synchronize_event", "destroy_event", "destroy_stream", "unmap", "pool_release"]
)
def test_closing_never_raises(call: str, setup: str, chain: Path, works: Callable[[], None]) -> None:
    module = at_the_floor(chain, **SETUPS[setup])
    module(X)
    hooks(module).fail_at(1, call=call)
    module.close()
    works()


def test_a_module_that_is_dropped_is_closed(chain: Path, works: Callable[[], None]) -> None:
    module = at_the_floor(chain)
    module(X)
    del module
    works()


def test_an_error_leaves_the_with_statement_and_closes(chain: Path, works: Callable[[], None]) -> None:
    with pytest.raises(ZeroDivisionError):
        with at_the_floor(chain) as module:
            module(X)
            raise ZeroDivisionError
    works()


FORK = """
import os, sys, torch, penstock
from penstock.errors import ForkedError

path, parent = sys.argv[1], os.getpid()
x = torch.ones(3, 160)
modules = [penstock.Module(path, **o) for o in ({}, {"host_memory": "1MiB"}, {"placement": "lru"})]
expected = [module(x)["sum"] for module in modules]
child = os.fork()
if not child:
    for module in modules:
        for use in (lambda: module(x), module.stats, lambda: module.set_budget("1GiB"), module.reset_state):
            try:
                use()
                os._exit(1)
            except ForkedError as error:
                if str(parent) not in str(error) or str(os.getpid()) not in str(error):
                    os._exit(2)
    modules[0].close()
    modules[0].close()
    with penstock.Module(path) as own:
        if not torch.equal(own(x)["sum"], expected[0]):
            os._exit(3)
    # The others go when the interpreter does.
    sys.exit(0)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
assert all(torch.equal(module(x)["sum"], before) for module, before in zip(modules, expected))
for module in modules:
    module.close()
print("fine")
"""


def test_used_after_fork(chain: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORK, str(chain)],
        # A child cannot use OpenMP once its parent has: its threads are not there.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr


# ---- nothing is left behind


def _runs_on(task: Path) -> bool:
    """A thread that has been joined stays in the list for a moment, but by then it is exiting (PF_EXITING)."""
    try:
        flags = int((task / "stat").read_text().rpartition(")")[2].split()[6])
    except (FileNotFoundError, ProcessLookupError):
        return False
    return not flags & 0x4


def _open_things() -> dict[str, int]:
    proc = Path("/proc/self")
    return {
        "descriptors": len(list((proc / "fd").iterdir())),
        "threads": sum(map(_runs_on, (proc / "task").iterdir())),
        # Compiled code aside, which the C library never unmaps when it has symbols that must be unique in a process.
        "mappings": sum(not line.endswith(".so (deleted)") for line in (proc / "maps").read_text().splitlines()),
    }


@pytest.mark.parametrize("setup", SETUPS)
def test_fifty_modules_one_after_another_leave_nothing_behind(setup: str, chain: Path) -> None:
    budget = floor_of(chain, **SETUPS[setup])

    def cycle() -> None:
        with penstock.Module(chain, budget, **SETUPS[setup]) as module:
            module(X)

    cycle()
    cycle()
    gc.collect()
    before = _open_things()
    for _ in range(50):
        cycle()
    after = _open_things()
    assert after["descriptors"] <= before["descriptors"]
    assert after["threads"] <= before["threads"]
    # The allocator of the process comes and goes with a few of its own.
    assert after["mappings"] < before["mappings"] + 25
