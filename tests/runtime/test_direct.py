"""Weights that are read where they lie in host memory: what the session lends, what it refuses, what modules give."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.errors import BelowFloorError, DriverCallError, PenstockError, RuntimeFailure
from penstock.plan.plan import Plan
from penstock.plan.planner import Planner
from tests.harness import bits, compiled, offloaded
from tests.runtime.modules import SCRIPTS
from tests.runtime.session_harness import MS, PAGE, Model, SessionHarness, chain, staged, write_model
from tests.runtime.soft import DriverFailure, SoftDriver

LAYERS = "abcdef"


@pytest.fixture
def model(tmp_path: Path) -> Model:
    """A table that is gathered from first and projected onto last, one that is only gathered from, and layers."""
    sizes = {"table": 5 * PAGE + 100, "places": 3 * PAGE, **dict.fromkeys(LAYERS, 2 * PAGE + 8)}
    schedules = [chain("~table ~places", *LAYERS, "table"), chain("~table", *LAYERS[::-1], method="other")]
    return write_model(tmp_path / "weights", schedules, sizes)


def plan_of(model: Model, budget_bytes: int | None = None, placement: str = "auto") -> Plan:
    planner = Planner(model.schedules, model.weights, page_bytes=PAGE, placement=placement)
    return planner.plan(planner.floor_bytes if budget_bytes is None else budget_bytes)


# ---- the session


@pytest.mark.parametrize("placement", ["auto", "in-place"])
def test_kernels_read_the_file_itself_and_every_byte_is_right(model: Model, placement: str) -> None:
    with SessionHarness(model, kernel_ns=MS // 4) as harness:
        plan = harness.install_plan(plan_of(model, placement=placement))
        assert harness.session.memory()[1] == plan.device_bytes
        stream = harness.stream()
        for run in range(6):
            harness.run(run // 2 % 2, stream)
        direct = [placed.is_direct for placed in plan.methods[0].placements]
        assert direct == [True, True, *[placement == "in-place"] * 7]
        harness.begin()
        address = harness.acquire(0)
        assert ctypes.string_at(address, 5 * PAGE + 100) == model.content["table"]
        # No page of the device's: the mapping of the file.
        mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(model.path))]
        ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in mapped]
        assert any(begin <= address < end for begin, end in ranges)
        harness.session.abort()


def test_replays_read_it_too(model: Model) -> None:
    with SessionHarness(model) as harness:
        harness.install_plan(plan_of(model))
        graphs = [harness.capture(0), harness.capture(1)]
        stream = harness.stream()
        for run in range(6):
            harness.replay(graphs[run // 2 % 2], stream, order=run % 4, seed=run)
            if run % 3 == 2:
                harness.run(0, stream)


def test_staged_memory_has_nothing_to_read_in_place(model: Model) -> None:
    with SessionHarness(model, source=staged()) as harness:
        with pytest.raises(PenstockError, match="needs registered host memory"):
            harness.install_plan(plan_of(model))
        assert harness.session.memory()[0] == 0
        harness.install_plan(plan_of(model, placement="stream"))
        harness.run()


def test_a_call_that_fails_leaves_nothing(model: Model) -> None:
    with SessionHarness(model) as harness:
        harness.driver.fail_at(2, call="host_address")
        with pytest.raises(RuntimeFailure, match="host_address"):
            harness.install_plan(plan_of(model))
        harness.driver.fail_at(0)
        assert harness.session.memory()[0] == 0
        harness.install_plan(plan_of(model))
        harness.run()


def test_the_soft_driver_gives_addresses_of_registered_memory_alone() -> None:
    memory = ctypes.create_string_buffer(5 * PAGE)
    start = -(-ctypes.addressof(memory) // PAGE) * PAGE
    with SoftDriver(PAGE, 0, poison=False) as driver:
        for page in (0, 1, 3):
            driver.register_host(start + page * PAGE, PAGE)
        for offset, nbytes in ((0, 2 * PAGE), (10, 2 * PAGE - 10), (PAGE, PAGE), (3 * PAGE, PAGE)):
            assert driver.host_address(start + offset, nbytes) == start + offset
        for offset, nbytes, got in ((0, 2 * PAGE + 1, 2 * PAGE), (2 * PAGE, 1, 0), (3 * PAGE, PAGE + 1, PAGE)):
            with pytest.raises(DriverFailure, match=f"registered for {got} bytes only"):
                driver.host_address(start + offset, nbytes)
        for page in (0, 1, 3):
            driver.unregister_host(start + page * PAGE)


# ---- modules

VOCABULARY, WIDTH, EXPERTS = 600, 48, 20


class Routed(nn.Module):
    """A tied embedding, and layers of experts of which each token takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.router = nn.ModuleList(nn.Linear(WIDTH, EXPERTS) for _ in range(3))
        self.experts = nn.ParameterList(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH for _ in range(3))
        self.dense = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.table(tokens)
        for router, experts, dense in zip(self.router, self.experts, self.dense, strict=True):
            h = h + torch.bmm(h[:, None], experts[router(h).argmax(-1)])[:, 0]
            h = h + dense(h).relu()
        return h @ self.table.weight.t()


TOKENS = torch.tensor([3, 599, 0, 42])


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Routed()
    return compiled(tmp_path_factory.mktemp("routed"), offloaded(model, (TOKENS,))).program_path


def results(module: penstock.Module) -> list[Tensor]:
    return [bits(module((TOKENS * 7 + shift) % VOCABULARY)) for shift in (0, 1, 0, 5)]


@pytest.fixture(scope="module")
def resident(routed: Path) -> list[Tensor]:
    with penstock.Module(routed, "1TiB", placement="stream") as module:
        assert not any(method.copies for method in module.plan.methods)  # type: ignore[union-attr]
        return results(module)


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_tables_and_experts_are_read_in_place_and_the_floor_is_that_of_the_rest(
    routed: Path, resident: list[Tensor]
) -> None:
    with (
        penstock.Module(routed, "1TiB", placement="stream") as streamed,
        penstock.Module(routed, "1TiB") as auto,
    ):
        experts_bytes = EXPERTS * WIDTH * WIDTH * 4
        table_bytes = VOCABULARY * WIDTH * 4
        # The table still streams for the projection; in the other placement beside the experts.
        assert table_bytes <= auto.floor_bytes < table_bytes + experts_bytes / 4
        assert streamed.floor_bytes >= table_bytes + experts_bytes
        assert not auto.plan.direct_weights and same(results(auto), resident)  # type: ignore[union-attr]
        floor = auto.floor_bytes
    # A byte count without rounding to pages.
    assert penstock.read_program(routed).floor_bytes <= floor
    with penstock.Module(routed, floor) as module:
        assert module.plan is not None
        assert {"table.weight", "experts.0", "experts.1", "experts.2"} == set(module.plan.direct_weights)
        assert "read in place" in module.summary
        assert same(results(module), resident)
        assert module.device_memory()[1] <= floor
        # Of the experts, nothing is copied; of the table, all that its projection needs.
        assert module.last_run.bytes_streamed < module.weight_bytes - 3 * experts_bytes
    with pytest.raises(BelowFloorError, match=f"needs at least {floor} bytes"):
        penstock.Module(routed, floor - 1)


def test_a_budget_of_zero_will_do_where_everything_is_read_in_place(routed: Path, resident: list[Tensor]) -> None:
    with penstock.Module(routed, 0, placement="in-place") as module:
        assert module.floor_bytes == module.budget_bytes == 0
        assert same(results(module), resident)
        assert module.device_memory() == (0, 0)
        assert (module.stats().bytes_streamed, module.stats().bytes_hit, module.stats().copies) == (0, 0, 0)
        module.set_budget(100_000)
        assert same(results(module), resident)
        assert 0 < module.device_memory()[1] <= 100_000 and module.stats().copies == 0


def test_at_every_budget_the_results_are_the_same(routed: Path, resident: list[Tensor]) -> None:
    for placement in ("auto", "in-place"):
        with penstock.Module(routed, "1TiB", placement=placement) as module:
            floor, full = module.floor_bytes, module.budget_bytes
            for part in range(6):
                module.set_budget(floor + (full - floor) * part // 5)
                assert same(results(module), resident)
                assert module.device_memory()[0] <= module.budget_bytes


def test_where_nothing_can_be_read_in_place_it_streams_or_says_so(routed: Path, resident: list[Tensor]) -> None:
    capped: dict[str, Any] = {"host_memory": 16 * PAGE}
    for options in (capped, {"placement": "lru"}):
        with penstock.Module(routed, "400KiB", **options) as module:
            assert same(results(module), resident) and module.last_run.bytes_streamed > 0
    with pytest.raises(PenstockError, match='placement="in-place" does not go with a cap on host memory'):
        penstock.Module(routed, "400KiB", placement="in-place", **capped)
    with pytest.raises(PenstockError, match="placement is 'fast'"):
        penstock.Module(routed, "400KiB", placement="fast")


def test_reads_in_place_are_timed_and_the_faster_way_is_planned(routed: Path, resident: list[Tensor]) -> None:
    with penstock.Module(routed, "136KiB") as module:
        with (
            pytest.raises(PenstockError, match=r"compares with what calibrate\(\) measures: use that first"),
            module.calibrate(in_place=True),
        ):
            pass
        with module.calibrate():
            results(module)
        with module.calibrate(in_place=True):
            assert module.device_memory()[0] == 0 and same(results(module), resident)
        calibration = module.calibration
        assert calibration is not None
        steps = len(module.program.methods[0].schedule.steps)
        assert [len(times) for times in calibration.direct_step_s.values()] == [steps]
        assert same(results(module), resident)
        assert module.device_memory()[0] <= 136 * 1024
        chosen = module.plan
        with pytest.raises(ZeroDivisionError), module.calibrate(in_place=True):
            _ = 1 // 0
        # What was planned before is back, and what was known is still known.
        assert module.plan is chosen and module.calibration is calibration
        assert same(results(module), resident)
    # Where reads in place cost nothing, and where they take for ever.
    (method,) = calibration.direct_step_s
    for seconds, in_place in ((0.0, True), (10.0, False)):
        given = replace(calibration, direct_step_s={method: (seconds,) * steps})
        with penstock.Module(routed, "136KiB", calibration=given) as module:
            assert module.plan is not None
            dense = {f"dense.{layer}.weight" for layer in range(3)}
            assert (len(dense & set(module.plan.direct_weights)) > 0) == in_place
            assert same(results(module), resident)


def test_a_timing_whose_end_fails_does_not_leave_everything_in_place(
    routed: Path, resident: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record is gone and its spans could not be had: the plan before it must be back all the same."""
    with penstock.Module(routed, "136KiB") as module:
        with module.calibrate():
            results(module)
        chosen = module.plan

        def fail() -> NoReturn:
            monkeypatch.undo()
            raise DriverCallError("synchronize_event failed")

        with pytest.raises(DriverCallError), module.calibrate(in_place=True):
            results(module)
            monkeypatch.setattr(module._session, "stop_trace", fail)
        assert module.plan is chosen and module.device_memory()[0] > 0
        assert same(results(module), resident) and module.last_run.bytes_streamed > 0


def test_nothing_is_timed_in_place_where_nothing_is_read_there(routed: Path) -> None:
    with penstock.Module(routed, "400KiB", placement="stream") as module:
        with module.calibrate():
            module(TOKENS)
        plan = module.plan
        with (
            pytest.raises(PenstockError, match=r'calibrate\(in_place=True\) does not go with placement="stream"'),
            module.calibrate(in_place=True),
        ):
            pass
        assert module.plan is plan


def test_every_method_has_to_be_timed(decoder: Path) -> None:
    """A prefill that nobody timed would be read in place with the decoding step, at whatever that costs."""
    (prefill, prompt), (decode, token) = SCRIPTS["decoder"][0], SCRIPTS["decoder"][1]
    with penstock.Module(decoder, budget="240KiB") as module:
        with module.calibrate():
            module.run_method(prefill, *prompt)
            module.run_method(decode, *token)
        plan, known = module.plan, module.calibration
        assert known is not None
        with (
            pytest.raises(PenstockError, match=r"calibrate\(in_place=True\) did not time prefill: run every method"),
            module.calibrate(in_place=True),
        ):
            module.run_method(decode, *token)
        assert module.plan is plan and module.calibration is known
    half = replace(known, direct_step_s={"decode": known.step_s["decode"]})
    with pytest.raises(PenstockError, match=r"calibrate\(in_place=True\) did not time prefill"):
        penstock.Module(decoder, "240KiB", calibration=half)
