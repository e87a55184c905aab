"""Packed weights over the soft driver: random models at every kind of budget, as runs and as graphs; and every driver
call made to fail in turn."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from penstock.errors import DriverCallError
from penstock.plan.packed import BLOCK_BYTES
from penstock.plan.plan import Plan
from tests.native.session import HostSource
from tests.runtime.packed_models import PackedModel, random_packed, write_packed
from tests.runtime.session_harness import INLINE, MS, PAGE, RunFailed, SessionHarness, chain, staged
from tests.runtime.test_driver_faults import Life, live_and_fail

FAST_SEEDS = 2
SEEDS = [pytest.param(seed, marks=[pytest.mark.slow] if seed >= FAST_SEEDS else []) for seed in range(12)]
STORED_BYTES = 50_000
ORDERS = range(4)  # copies first, kernels first, at random, on several threads
SOURCES: dict[str, HostSource | None] = {
    "registered": None,
    "staged": staged(60_000, 3, 2),
    "one buffer": staged(30_000, 1, 1),
}


@pytest.fixture(scope="module", params=SEEDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PackedModel:
    path = tmp_path_factory.mktemp("packed") / "weights.ptd"
    return random_packed(random.Random(f"packed {request.param}"), path)


def plans(model: PackedModel) -> Iterator[tuple[int, Plan]]:
    """With their budgets: the planner's, and some with parts that stay packed beside parts that stream."""
    for budget_bytes in model.budgets(4):
        yield budget_bytes, model.plan(budget_bytes)
    streamed_bytes = sum(begins[-1] for begins in model.begins.values())
    for slots, part in ((2, 0.0), (2, 0.2), (3, 0.5), (5, 0.9)):
        plan = model.divided(slots=slots, stored_bytes=int(streamed_bytes * part), spare_bytes=slots * PAGE)
        yield plan.device_bytes, plan


def test_the_plans_are_of_every_kind(model: PackedModel) -> None:
    """Without this the others would say nothing of slots, of what stays packed, or of both at once."""
    made = [plan for _, plan in plans(model)]
    assert any(plan.stores and plan.methods[0].warm.bytes_streamed for plan in made)
    assert any(plan.slots and not plan.stores for plan in made)
    assert any(plan.slots and plan.fills for plan in made)
    assert any(not plan.slots and plan.fills for plan in made)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("poison", [True, False], ids=["poison", "plain"])
def test_every_budget_from_the_floor_up(model: PackedModel, source: str, poison: bool) -> None:
    methods = range(len(model.schedules))
    for seed, (budget_bytes, plan) in enumerate(plans(model), 1):
        with SessionHarness(model, source=SOURCES[source], poison=poison, seed=seed, kernel_ns=MS // 50) as harness:
            harness.install_plan(plan)
            harness.check_memory(budget_bytes)
            harness.driver.set_delays(seed, MS // 50)
            streams = [harness.stream(), INLINE, harness.stream(late=True)]
            for run, method in enumerate((*methods, *methods, 0, 0)):
                harness.run(method, streams[run % 3])
            for run in range(4):
                harness.run(run % len(methods), streams[run % 3], check=False)
            harness.check()
            harness.check_counters()
            harness.check_memory(budget_bytes)


def test_replays_read_what_runs_read(model: PackedModel) -> None:
    choose = random.Random(7)
    methods = range(len(model.schedules))
    for budget_bytes, plan in plans(model):
        with SessionHarness(model, kernel_ns=MS // 20) as harness:
            harness.install_plan(plan)
            graphs = [harness.capture(method) for method in (*methods, *methods)]
            streams = [harness.stream(), harness.stream(late=True)]
            for order, graph in itertools.product(ORDERS, graphs):
                harness.replay(graph, streams[0], order=order, seed=order + 1)
            for late in (harness.late_copies, harness.late_link):
                with late():
                    for _ in range(8):
                        if choose.random() < 0.4:
                            harness.run(choose.choice(methods), choose.choice(streams), check=False)
                        else:
                            order = choose.choice(ORDERS)
                            harness.replay(choose.choice(graphs), choose.choice(streams), order=order, check=False)
                    harness.check()
                    harness.check_counters()
            harness.check_memory(budget_bytes)


def test_another_budget_between_runs(model: PackedModel) -> None:
    """Back and forth on one session, with the last run of the plan that goes still under way."""
    made = list(plans(model))
    order = [*made, *reversed(made)]
    random.Random(3).shuffle(order)
    with SessionHarness(model, kernel_ns=MS // 10) as harness:
        stream = harness.stream()
        for _, plan in order:
            harness.install_plan(plan)
            graph = harness.capture()
            for _ in range(2):
                harness.run(stream=stream, check=False)
                harness.replay(graph, stream, check=False)
            harness.check_memory(max(budget_bytes for budget_bytes, _ in made))
        harness.check()
        harness.check_counters()


# ---- faults


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> PackedModel:
    path = tmp_path_factory.mktemp("faults") / "weights.ptd"
    order = ["a", "b", "plain", "c", "d", "e"]
    schedules = [chain(*order), chain(*reversed(order), method="back")]
    return write_packed(path, schedules, dict.fromkeys("abcde", BLOCK_BYTES + 1000), unpacked={"plain": PAGE})


@dataclass
class PackedLife(Life):
    """First with a part that stays packed and one that streams, then with everything decoded on the host."""

    @property
    def most_bytes(self) -> int:
        return max(plan.device_bytes for plan in self._plans)

    @property
    def _plans(self) -> tuple[Plan, Plan]:
        assert isinstance(self.model, PackedModel)
        plan = self.model.divided(stored_bytes=STORED_BYTES)
        assert plan.stores and plan.methods[0].warm.bytes_streamed
        return plan, self.model.plan(self.model.full_bytes)

    def _install(self, harness: SessionHarness, budget_bytes: int) -> None:
        first, second = self._plans
        plan = harness.install_plan(first if budget_bytes == self.model.floor_bytes else second)
        assert self.driver.counts().block_bytes == plan.device_bytes


@pytest.mark.parametrize("setup", ["packed", "packed staged"])
@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 67])
def test_every_driver_call_fails_in_turn(small: PackedModel, setup: str, step: int) -> None:
    """Each of them, which takes minutes; in every run some."""
    seen: set[str] = set()
    n = 1
    while failed := live_and_fail(small, setup, n, kind=PackedLife):
        seen.add(failed)
        n += step
    assert n > 1000
    if step > 1:
        return
    packed = {"decode", "create_stream", "create_event", "record", "wait", "copy_to_device", "fill"}
    assert seen >= packed | {"synchronize_stream", "destroy_stream", "destroy_event"}


@pytest.mark.slow
@pytest.mark.parametrize("call", ["synchronize_stream", "decode", "copy_to_device"])
def test_a_call_that_fails_does_not_let_go_of_what_is_in_use(small: PackedModel, call: str) -> None:
    n = 1
    while live_and_fail(
        small, "packed", n, call=call, kind=PackedLife, kernel_ns=MS // 2, copy_ns=MS // 8, poison=bool(n % 2)
    ):
        n += 2
    assert n > 3


def test_every_driver_call_of_a_capture_may_fail(small: PackedModel) -> None:
    plan = small.divided(stored_bytes=STORED_BYTES)
    with SessionHarness(small) as harness:
        harness.install_plan(plan)
        stream, side = harness.stream(), harness.stream()
        harness.run(stream=stream)
        failed = set()
        # The first time each call makes an event that stays, and so there is one call less the next time.
        for again in (False, True):
            for n in itertools.count(1):
                harness.driver.fail_at(n)
                try:
                    harness.capture(0, side)
                except (DriverCallError, RunFailed):
                    failed.add(harness.driver.failed_call())
                else:
                    break
                harness.driver.fail_at(0)
                if again or n % 5 == 0:
                    harness.run(stream=stream)
                    assert harness.last == plan.methods[0].warm
            harness.driver.fail_at(0)
        assert failed >= {"decode", "create_event", "record", "wait", "copy_to_device", "fill"}
        assert failed >= {"record_external", "wait_external"}
        graph = harness.capture(0, side)
        for order in ORDERS:
            harness.replay(graph, stream, order=order)


def test_every_driver_call_of_a_replay_may_fail(small: PackedModel) -> None:
    plan = small.divided(stored_bytes=STORED_BYTES)
    with SessionHarness(small) as harness:
        harness.install_plan(plan)
        stream = harness.stream()
        graph = harness.capture()
        failed = set()
        for cold in (False, True):
            for n in itertools.count(1):
                harness.run(1 if cold else 0, stream)
                harness.driver.fail_at(n)
                try:
                    harness.replay(graph, stream, check=False)
                except DriverCallError:
                    failed.add(harness.driver.failed_call())
                else:
                    break
                finally:
                    harness.driver.fail_at(0)
                harness.check()
                harness.replay(graph, stream)
        assert failed >= {"decode", "copy_to_device", "wait", "record", "fill", "launch_graph"}
