"""Nothing stays behind over time: loads and closes, loads that are refused, loads that are interrupted anywhere.

`python -m tests.runtime.leaks 1000` gives the figures of docs/runtime.md, "What a process keeps".
"""

from __future__ import annotations

import gc
import shutil
import signal
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

import penstock
import penstock.runtime.session as session_file
from penstock import errors
from penstock.program import read_program
from penstock.torch_private.loader import LOADS_FOLDERS
from tests.runtime.fake_machine import limited
from tests.runtime.footprint import Footprint, footprint
from tests.runtime.modules import EVERYTHING, SCRIPTS, SETUPS, KeptDrivers, floor_of, play, rewrite_weights
from tests.soak.interrupts import Handler, Interrupter, Line

# The first loads import, start and allocate what then stays for all.
WARMING_LOADS = 3


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def as_before(temporary: Path, kept: KeptDrivers) -> Callable[[Callable[[], Any], int], Footprint]:
    """Does something some times, and asserts that the process is then as it was; gives what it was."""

    def check(body: Callable[[], Any], times: int) -> Footprint:
        for _ in range(WARMING_LOADS):
            body()
        kept.check()
        kept.destroy()
        kept.made.clear()
        gc.collect()  # what earlier tests have left goes now, and not while this one counts
        before = footprint(temporary)
        for _ in range(times):
            body()
        kept.check()
        kept.destroy()
        kept.made.clear()
        after = footprint(temporary)
        assert without_torch(after) == without_torch(before)
        # What is kept each time would be at least as many.
        assert after.anonymous_mappings - before.anonymous_mappings < times
        return before

    return check


def without_torch(found: Footprint) -> Footprint:
    """Memory is a trend, not a number. An older torch keeps every library that it unpacks and loads."""
    theirs = 0 if LOADS_FOLDERS else found.unpacked_mappings
    return replace(
        found,
        mappings=found.mappings - theirs,
        unpacked_mappings=found.unpacked_mappings - theirs,
        anonymous_mappings=0,
        anonymous_bytes=0,
    )


@pytest.mark.parametrize("setup", SETUPS)
def test_loads_and_closes(setup: str, chain: Path, as_before: Callable[[Callable[[], Any], int], Footprint]) -> None:
    budget = floor_of(chain, **SETUPS[setup])

    def load() -> None:
        with penstock.Module(chain, budget, **SETUPS[setup]) as module:
            play(module.run_method, SCRIPTS["chain"])

    before = as_before(load, 40)
    # 40 times the weights would be 27 MB; an older torch keeps 40 libraries, 3 MB.
    assert footprint().anonymous_bytes - before.anonymous_bytes < 8 << 20


def test_modules_that_are_dropped_and_not_closed(
    gate: Path, tmp_path: Path, as_before: Callable[[Callable[[], Any], int], Footprint]
) -> None:
    def drop() -> None:
        module = penstock.Module(gate, floor_of(gate))
        with module.trace(tmp_path / "trace.json"):
            play(module.run_method, SCRIPTS["gate"])
        with module.calibrate():
            play(module.run_method, SCRIPTS["gate"])

    as_before(drop, 10)


def refusals(path: Path, folder: Path, kept: KeptDrivers) -> dict[str, tuple[type[Exception], Callable[[], Any]]]:
    """Every way in which a load is refused, from before the first file is opened to after the last driver call."""
    program, weights = read_program(path), path.with_suffix(".ptd")
    copies = folder / "copies"
    copies.mkdir()
    first = program.weights[0].name

    def load(**options: Any) -> Callable[[], Any]:
        given: dict[str, Any] = {"budget": EVERYTHING, **options}
        return lambda: penstock.Module(path, **given)

    def failing(call: str, **options: Any) -> Callable[[], Any]:
        def body() -> Any:
            kept.fail_at(1, call)
            return load(**options)()

        return body

    missing = rewrite_weights(program, weights, copies / "missing.ptd", leave_out=first)
    stranger = rewrite_weights(program, weights, copies / "stranger.ptd", identity="0" * 32)
    damaged = copies / "damaged.ptd"
    shutil.copy(weights, damaged)
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    truncated = copies / "truncated.ptd"
    truncated.write_bytes(weights.read_bytes()[:5000])
    junk = copies / "junk.pt2"
    junk.write_bytes(b"junk" * 1000)
    return {
        "below the floor": (errors.BelowFloorError, load(budget=1)),
        "no budget at all": (errors.BudgetError, load(budget="much")),
        "an option of before": (errors.PenstockError, load(policy="lru")),
        "an unknown placement": (errors.PenstockError, load(placement="guess")),
        "no such device": (errors.DeviceError, load(device="nowhere")),
        "graphs on a CPU": (errors.CaptureError, load(cuda_graph=True)),
        "staging with lru": (errors.PenstockError, load(placement="lru", host_memory="1MiB")),
        "a weight is missing": (errors.WeightsFileError, load(weights=missing)),
        "weights of another program": (errors.IdentityError, load(weights=stranger)),
        "damaged weights": (errors.ChecksumError, load(weights=damaged, verify=True)),
        "truncated weights": (errors.WeightsFileError, load(weights=truncated)),
        "no program": (errors.PackageError, lambda: penstock.Module(junk, EVERYTHING)),
        "no page": (errors.DeviceMemoryError, failing("create_block")),
        "no range": (errors.DriverCallError, failing("reserve")),
        "no pool": (errors.DeviceMemoryError, failing("create_pool", placement="lru")),
        "no registration": (errors.RegistrationError, failing("register_host")),
        "no staging buffer": (errors.RegistrationError, failing("allocate_host", **SETUPS["staged"])),
        "no stream": (errors.DriverCallError, failing("create_stream")),
        "no copy": (errors.DriverCallError, failing("copy_to_device")),
    }


def test_loads_that_are_refused(
    chain: Path, tmp_path: Path, kept: KeptDrivers, as_before: Callable[[Callable[[], Any], int], Footprint]
) -> None:
    cases = refusals(chain, tmp_path, kept)

    def every_case() -> None:
        for name, (kind, load) in cases.items():
            try:
                load()
            except kind:
                continue
            raise AssertionError(f"{name} was not refused")

    as_before(every_case, 5)


def test_too_little_host_memory(
    chain: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    as_before: Callable[[Callable[[], Any], int], Footprint],
) -> None:
    monkeypatch.setattr(session_file, "HOST_ROOT", limited(tmp_path, 1000))

    def load() -> None:
        with pytest.raises(errors.HostMemoryError):
            penstock.Module(chain, EVERYTHING)

    as_before(load, 5)


@pytest.mark.parametrize("setup", SETUPS)
def test_loads_that_are_interrupted(
    setup: str, gate: Path, as_before: Callable[[Callable[[], Any], int], Footprint]
) -> None:
    """A real SIGINT at a random line of the load; the one after the last line finds a module that closes itself."""
    handler, draw, interrupted = Handler(), Random(7), 0
    interrupter = Interrupter(handler, Line())
    earlier = signal.getsignal(signal.SIGINT)
    handler.install()

    def load() -> None:
        nonlocal interrupted
        outcome = interrupter.run("load", lambda: penstock.Module(gate, EVERYTHING, **SETUPS[setup]), draw)
        assert outcome.error is None
        interrupted += outcome.interrupted
        if outcome.finished:
            outcome.value.close()

    try:
        as_before(load, 60)
    finally:
        signal.signal(signal.SIGINT, earlier)
    assert interrupted > 30
