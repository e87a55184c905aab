"""The least-recently-used policy over the soft driver, against a small model of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import DeviceMemoryError, PenstockError, ScheduleDivergedError
from penstock.plan.floor import floor_bytes
from tests.runtime.session_harness import (
    INLINE,
    MS,
    PAGE,
    Model,
    RunFailed,
    SessionHarness,
    chain,
    models,
    staged,
    write_model,
)
from tests.runtime.soft import SoftDriver

NAMES = ["chain", "tied", "pairs", "long_reads", "small", "methods"]


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    return models(tmp_path_factory.mktemp("lru"))


def floor_of(model: Model, granularity_bytes: int = PAGE) -> int:
    return floor_bytes(model.schedules, model.weights, granularity_bytes=granularity_bytes).floor_bytes


class Cache:
    """What the policy promises: least recently used out first, the next access copied ahead, what is read stays."""

    def __init__(self, model: Model, budget_bytes: int) -> None:
        self.model, self.budget_bytes = model, budget_bytes
        self.order: list[str] = []  # on the device, least recently used first
        self.fresh: set[str] = set()  # copied, not yet read
        self.readers: dict[str, int] = {}
        self.pinned = {a.weight for schedule in model.schedules for a in schedule.accesses if a.pinned}
        self.streamed = self.hit = self.copies = self.pool_calls = 0
        for name in model.weights:
            if name in self.pinned:
                assert self.place(name)

    def footprint(self, name: str) -> int:
        return -(-self.model.weights[name].nbytes // PAGE) * PAGE

    def place(self, name: str) -> bool:
        while sum(map(self.footprint, [*self.order, name])) > self.budget_bytes:
            out = [w for w in self.order if not self.readers.get(w) and w not in self.pinned]
            if not out:
                return False
            self.order.remove(out[0])
            self.fresh.discard(out[0])
            self.pool_calls += 1
        self.order.append(name)
        self.fresh.add(name)
        self.pool_calls += 1
        self.copies += 1
        self.streamed += self.model.weights[name].nbytes
        return True

    def run(self, method: int) -> tuple[int, int, int, int]:
        self.streamed = self.hit = self.copies = self.pool_calls = 0
        schedule = self.model.schedules[method]
        for index in range(len(schedule.steps)):
            for position, access in enumerate(schedule.accesses):
                if schedule.first_step[access.number] == index and self.model.weights[access.weight].nbytes:
                    self.access(access.weight)
                    follower = schedule.accesses[(position + 1) % len(schedule.accesses)].weight
                    if self.model.weights[follower].nbytes and follower not in self.order:
                        self.place(follower)
            for access in schedule.accesses:
                if schedule.last_step[access.number] == index and self.model.weights[access.weight].nbytes:
                    self.readers[access.weight] -= 1
        return self.streamed, self.hit, self.copies, self.pool_calls

    def access(self, name: str) -> None:
        assert name in self.order or self.place(name)
        if name not in self.fresh or name in self.pinned:
            self.hit += self.model.weights[name].nbytes
        self.fresh.discard(name)
        self.order.remove(name)
        self.order.append(name)
        self.readers[name] = self.readers.get(name, 0) + 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("poison", [True, False], ids=["poison", "plain"])
def test_counts_are_those_of_the_model(zoo: dict[str, Model], name: str, poison: bool) -> None:
    model = zoo[name]
    floor, full = floor_of(model), sum(-(-w.nbytes // PAGE) * PAGE for w in model.weights.values())
    for seed, budget in enumerate(range(floor, full + 1, max((full - floor) // 4 // PAGE * PAGE, PAGE)), 1):
        with SessionHarness(model, lru=True, poison=poison, seed=seed, kernel_ns=MS // 5) as harness:
            harness.install_lru(budget)
            harness.driver.set_delays(seed, MS // 20)
            cache = Cache(model, budget)
            streams = [harness.stream(), harness.stream(), INLINE]
            for run in range(6):
                method = run // 2 % len(model.schedules)
                harness.run(method, streams[run % 3], check=False)
                last, total = harness.session.stats()
                assert (last.bytes_streamed, last.bytes_hit, last.copies, last.pool_calls) == cache.run(method)
                assert total.runs == run + 1
            harness.check()
            held, peak = harness.session.memory()
            # Held is counted in the units that the budget is, the peak by the pool itself.
            assert harness.driver.counts().pool_bytes <= min(held, peak) and max(held, peak) <= budget


@pytest.mark.parametrize("seed", range(1, 7))
def test_at_the_floor_with_slow_kernels_ahead(zoo: dict[str, Model], seed: int) -> None:
    """A release that has not completed is waited for in stream order; it is no shortage."""
    model = zoo[NAMES[seed - 1]]
    budget = floor_of(model)
    with SoftDriver(PAGE, budget, poison=True) as driver, SessionHarness(model, lru=True, driver=driver) as harness:
        harness.install_lru(budget)
        streams = [harness.stream(late=True), harness.stream(late=True)]
        for run in range(6):
            harness.run(run % len(model.schedules), streams[run % 2], check=False)
        harness.check()
        assert harness.session.memory()[1] <= budget


def test_a_cycle_that_does_not_fit_misses_every_time(zoo: dict[str, Model]) -> None:
    model = zoo["chain"]
    weight_bytes = sum(weight.nbytes for weight in model.weights.values())
    with SessionHarness(model, lru=True) as harness:
        harness.install_lru(floor_of(model) + 2 * PAGE)
        for _ in range(4):
            harness.run()
        last, _ = harness.session.stats()
        assert (last.bytes_streamed, last.bytes_hit) == (weight_bytes, 0)


def test_everything_that_fits_is_copied_once(zoo: dict[str, Model]) -> None:
    model = zoo["chain"]
    with SessionHarness(model, lru=True) as harness:
        harness.install_lru(sum(-(-w.nbytes // PAGE) * PAGE for w in model.weights.values()))
        for _ in range(3):
            harness.run()
        last, total = harness.session.stats()
        assert (last.bytes_streamed, last.pool_calls) == (0, 0)
        assert total.bytes_streamed == sum(weight.nbytes for weight in model.weights.values())


def test_another_budget_never_holds_two_pools(zoo: dict[str, Model]) -> None:
    model = zoo["chain"]
    low, high = floor_of(model), floor_of(model) + 4 * PAGE
    with SoftDriver(PAGE, high, poison=True) as driver, SessionHarness(model, lru=True, driver=driver) as harness:
        stream = harness.stream(late=True)
        for budget in (high, low, high):
            harness.install_lru(budget)
            harness.run(stream=stream, check=False)
            assert driver.counts().pools == 1
        harness.check()


def test_what_does_not_fit_is_told_with_its_numbers(tmp_path: Path) -> None:
    model = write_model(tmp_path / "w", [chain("a b", "c")], {"a": 3 * PAGE, "b": 2 * PAGE, "c": PAGE})
    with SessionHarness(model, lru=True) as harness:
        harness.install_lru(4 * PAGE)
        harness.begin()
        harness.acquire(0)
        with pytest.raises(Exception, match=f"access 1 needs {2 * PAGE} bytes of a pool of {4 * PAGE}") as failed:
            harness.acquire(1)
        assert type(failed.value.error) is DeviceMemoryError  # type: ignore[attr-defined]
        harness.install_lru(5 * PAGE)
        harness.run()
        harness.check()


def test_another_access_than_the_recorded_one(zoo: dict[str, Model]) -> None:
    model = zoo["chain"]
    with SessionHarness(model, lru=True) as harness:
        harness.install_lru(floor_of(model))
        stream = harness.stream(late=True)
        for _ in range(2):
            harness.run(stream=stream)
            harness.begin(stream=stream)
            harness.read(harness.acquire(0), "w0", stream)
            with pytest.raises(RunFailed, match="position 1: expected access 1, got access 7") as failed:
                harness.acquire(7)
            assert type(failed.value.error) is ScheduleDivergedError
        # What was held is not trusted after a failure: everything is copied anew.
        harness.run(stream=stream)
        assert harness.session.stats()[0].bytes_streamed >= sum(weight.nbytes for weight in model.weights.values())


@pytest.mark.parametrize(("copy", "fill"), [(copy, fill) for copy in (1, 2, 3) for fill in range(1, copy + 1)])
def test_what_a_failed_copy_has_left_is_no_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copy: int, fill: int
) -> None:
    """Also where poison cannot be laid over it."""
    model = write_model(tmp_path / "w", [chain("a", "b", "c")], dict.fromkeys("abc", PAGE))
    with SessionHarness(model, lru=True) as harness:
        harness.install_lru(3 * PAGE)
        give_up = harness.session.abort

        def abort() -> PenstockError | None:
            harness.driver.fail_at(fill, call="fill")
            return give_up()

        harness.driver.fail_at(copy, call="copy_to_device")
        with monkeypatch.context() as patch, pytest.raises(RunFailed, match="a test asked for this failure"):
            patch.setattr(harness.session, "abort", abort)
            harness.run(check=False)
        assert harness.driver.failed_call() == "fill"
        harness.driver.fail_at(0)
        harness.run()
        assert harness.session.stats()[0].bytes_streamed == 3 * PAGE


def test_pinned_weights_that_do_not_fit(tmp_path: Path) -> None:
    model = write_model(tmp_path / "w", [chain("!a", "!b")], {"a": 3 * PAGE, "b": 2 * PAGE})
    with SessionHarness(model, lru=True) as harness:
        with pytest.raises(DeviceMemoryError, match="what must stay"):
            harness.install_lru(4 * PAGE)
        with pytest.raises(PenstockError, match="there are 0"):
            harness.begin()


@pytest.mark.parametrize("budget", [0, PAGE])
def test_weights_without_bytes_need_no_pool(tmp_path: Path, budget: int) -> None:
    model = write_model(tmp_path / "w", [chain("!a", "b", "a")], {"a": 0, "b": 0})
    with SessionHarness(model, lru=True) as harness:
        harness.install_lru(budget)
        harness.run()
        assert harness.session.memory() == (0, 0)


def test_staging_needs_an_order_and_this_policy_has_none(zoo: dict[str, Model]) -> None:
    with SessionHarness(zoo["chain"], lru=True, source=staged(8 * PAGE)) as harness:
        harness.install_lru(floor_of(zoo["chain"]))
        harness.begin()
        with pytest.raises(Exception, match="after the last extent of its order"):
            harness.acquire(0)
