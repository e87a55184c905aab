"""S9: runs as graphs of the soft driver, which runs their nodes in any order that the captured edges allow."""

from __future__ import annotations

import itertools
import random
from contextlib import nullcontext

import pytest

from penstock.errors import CaptureError, DriverCallError, PenstockError, ScheduleDivergedError
from tests.native.session import acquire, copy_stream, uninstall
from tests.runtime.session_harness import PAGE, Captured, Model, RunFailed, SessionHarness, models, staged

US = 1000
ORDERS = {"copies first": 0, "kernels first": 1, "at random": 2, "threads": 3}
NAMES = ["chain", "tied", "pairs", "long_reads", "small", "methods"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    return models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("order", list(ORDERS))
@pytest.mark.parametrize("name", NAMES)
def test_replays_read_what_runs_read(made: dict[str, Model], name: str, order: str) -> None:
    """At every kind of budget, the first replay and the tenth, checked one by one and back to back, with poison."""
    model = made[name]
    with SessionHarness(model) as harness:
        stream = harness.stream()
        for budget_bytes in model.budgets(5):
            harness.install(budget_bytes)
            captured = [harness.capture(method) for method in range(len(model.schedules))]
            for method, graph in enumerate(captured):
                for seed in range(1, 4):
                    harness.replay(graph, stream, order=ORDERS[order], seed=seed)
                assert harness.plan is not None
                assert harness.last == harness.plan.methods[method].warm
                for seed in range(4, 11):
                    harness.replay(graph, stream, order=ORDERS[order], seed=seed, check=False)
                assert harness.check() == 7 * graph.kernels
                harness.check_counters()
            last, total = harness.session.stats()
            assert last.replays == 1 and last.stall_ns is None
            assert total.replays == total.runs
            harness.check_memory(budget_bytes)


@pytest.mark.parametrize("name", NAMES)
def test_anything_in_between_is_seen(made: dict[str, Model], name: str) -> None:
    """Runs that are no replays, other methods, other graphs of the same method, other streams, in any order."""
    model = made[name]
    choose = random.Random(name)
    with SessionHarness(model, kernel_ns=200 * US) as harness:
        streams = [harness.stream(), harness.stream()]
        for budget_bytes in model.budgets(4):
            harness.install(budget_bytes)
            methods = range(len(model.schedules))
            # Twice, as for two shapes of the inputs.
            captured = [harness.capture(method) for method in (*methods, *methods)]
            harness.driver.set_delays(choose.randrange(1, 1 << 30), 50 * US)
            for _ in range(40):
                if choose.random() < 0.4:
                    harness.run(choose.choice(methods), choose.choice(streams), check=False)
                else:
                    graph = choose.choice(captured)
                    harness.replay(graph, choose.choice(streams), order=choose.randrange(4), check=False)
                if choose.random() < 0.2:
                    captured.append(harness.capture(choose.choice(methods)))
                if choose.random() < 0.2:
                    harness.check()
                    harness.check_counters()
            harness.driver.set_delays(0, 0)
            harness.check()
            harness.check_counters()


def test_a_capture_moves_nothing(made: dict[str, Model]) -> None:
    model = made["chain"]
    with SessionHarness(model) as harness:
        harness.install(model.floor_bytes)
        stream = harness.stream()
        harness.run(stream=stream)
        before = harness.session.stats()[1]
        harness.capture()
        assert harness.session.stats()[1] == before
        # What the run before it copied ahead is still counted on.
        harness.run(stream=stream)
        assert harness.plan is not None and harness.last == harness.plan.methods[0].warm


def test_the_next_run_s_copies_need_not_end_with_the_graph(made: dict[str, Model]) -> None:
    """What a graph ends with is its own run: the copies made ahead go on behind it."""
    model = made["chain"]
    with SessionHarness(model) as harness:
        plan = harness.install(model.floor_bytes)
        assert plan.methods[0].prologue
        stream = harness.stream()
        captured = harness.capture()
        harness.replay(captured, stream)
        with harness.late_copies():
            harness.replay(captured, stream, check=False)
            harness.await_kernels(stream)
            # The kernels have ended, and what is copied for the next run has not: nobody has waited for it.
            copied = harness.driver.create_event(False)
            harness.driver.record(copied, copy_stream(harness.session))
            assert harness.check_graphs() == captured.kernels and not harness.driver.is_complete(copied)
            harness.driver.destroy_event(copied)
        harness.check()


@pytest.mark.parametrize("order", list(ORDERS))
def test_late_copies_and_late_kernels(made: dict[str, Model], order: str) -> None:
    model = made["long_reads"]
    with SessionHarness(model) as harness:
        streams = [harness.stream(late=True), harness.stream(late=True)]
        for budget_bytes in (model.floor_bytes, model.floor_bytes + 3 * PAGE):
            harness.install(budget_bytes)
            graph = harness.capture()
            for late in (harness.late_copies(), nullcontext()):
                with late:
                    for _, stream in zip(range(4), itertools.cycle(streams), strict=False):
                        harness.replay(graph, stream, order=ORDERS[order], check=False)
                    harness.run(stream=streams[0], check=False)
                    harness.replay(graph, streams[1], order=ORDERS[order], check=False)
                    harness.check()


def test_a_graph_of_another_plan_is_refused(made: dict[str, Model]) -> None:
    model = made["chain"]
    with SessionHarness(model) as harness:
        harness.install(model.floor_bytes)
        stream = harness.stream()
        old = harness.capture()
        harness.replay(old, stream)
        harness.install(model.floor_bytes + PAGE)
        with pytest.raises(PenstockError, match="there is no capture 0; the present plan has 0"):
            harness.session.begin_replay(old.number, stream)
        harness.run(stream=stream)
        new = harness.capture()
        assert new.number != old.number
        harness.replay(new, stream)


def test_after_a_failed_run_the_ring_is_filled_again(made: dict[str, Model]) -> None:
    model = made["chain"]
    with SessionHarness(model) as harness:
        plan = harness.install(model.floor_bytes)
        stream = harness.stream()
        captured = harness.capture()
        harness.replay(captured, stream)
        harness.begin(stream=stream)
        harness.acquire(0)
        with pytest.raises(RunFailed, match="diverges"):
            harness.acquire(7)
        harness.check_hashes()
        harness.replay(captured, stream)
        assert harness.last == plan.methods[0].cold != plan.methods[0].warm


def test_a_capture_that_fails_leaves_everything_as_it_was(made: dict[str, Model]) -> None:
    model = made["chain"]
    with SessionHarness(model) as harness:
        plan = harness.install(model.floor_bytes)
        stream, side = harness.stream(), harness.stream()
        harness.run(stream=stream)
        harness.session.begin_capture(0, side)
        acquire(harness.session, 7, None)
        with pytest.raises(ScheduleDivergedError, match="expected access 0, got access 7"):
            harness.session.end_capture()
        harness.run(stream=stream)
        assert harness.last == plan.methods[0].warm
        harness.replay(harness.capture(), stream)
        assert harness.last == plan.methods[0].warm


def test_every_driver_call_of_a_capture_may_fail(made: dict[str, Model]) -> None:
    model = made["tied"]
    with SessionHarness(model) as harness:
        plan = harness.install(model.floor_bytes)
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
        assert failed == {
            "is_capturing",
            "begin_capture",
            "end_capture",
            "create_event",
            "record",
            "wait",
            "copy_to_device",
            "fill",
            "record_external",
            "wait_external",
        }
        harness.replay(harness.capture(), stream)
        assert harness.last == plan.methods[0].warm


def test_every_driver_call_of_a_replay_may_fail(made: dict[str, Model]) -> None:
    """Also a cold one, which fills the ring first. The next run is right, and finds nothing in the ring."""
    model = made["methods"]
    with SessionHarness(model) as harness:
        plan = harness.install(model.floor_bytes)
        stream = harness.stream()
        captured = harness.capture(0)
        failed = set()
        for cold in (False, True):
            for n in itertools.count(1):
                harness.run(1 if cold else 0, stream)
                harness.driver.fail_at(n)
                try:
                    harness.replay(captured, stream, check=False)
                except DriverCallError:
                    refused = harness.driver.failed_call() == "is_capturing"
                    failed.add(harness.driver.failed_call())
                else:
                    break
                finally:
                    harness.driver.fail_at(0)
                harness.check()
                harness.replay(captured, stream)
                assert harness.last == (plan.methods[0].warm if refused and not cold else plan.methods[0].cold)
            harness.check()
            harness.check_counters()
        assert failed == {"wait", "record", "copy_to_device", "fill", "is_capturing", "launch_graph"}


def test_staging_cannot_be_captured(made: dict[str, Model]) -> None:
    model = made["chain"]
    with SessionHarness(model, source=staged()) as harness:
        harness.install(model.floor_bytes)
        with pytest.raises(CaptureError, match="staging buffers are filled by the host"):
            harness.capture()
        harness.run()


def test_the_least_recently_used_policy_cannot_be_captured(made: dict[str, Model]) -> None:
    model = made["chain"]
    with SessionHarness(model, lru=True) as harness:
        harness.install_lru(model.full_bytes)
        with pytest.raises(CaptureError, match="decided while running"):
            harness.capture()
        harness.run()


def test_what_is_out_of_order_is_refused(made: dict[str, Model]) -> None:
    model = made["chain"]
    with SessionHarness(model) as harness:
        harness.install(model.floor_bytes)
        stream = harness.stream()
        with pytest.raises(PenstockError, match="a capture was ended that was not begun"):
            harness.session.end_capture()
        with pytest.raises(PenstockError, match="a replay was ended that was not begun"):
            harness.session.end_replay()
        captured: Captured = harness.capture()
        harness.driver.begin_capture(stream)
        for refused in (
            lambda: harness.session.begin_replay(captured.number, stream),
            lambda: harness.session.begin_capture(0, stream),
        ):
            with pytest.raises(CaptureError, match="while the caller's stream is being captured"):
                refused()
        harness.driver.destroy_graph(harness.driver.end_capture(stream))
        with pytest.raises(PenstockError, match="a graph was launched outside of its replay"):
            harness.session.launch()
        harness.session.start_trace()
        with pytest.raises(PenstockError, match="replayed while a trace"):
            harness.session.begin_replay(captured.number, stream)
        with pytest.raises(PenstockError, match="captured while a trace"):
            harness.session.begin_capture(0, stream)
        harness.session.stop_trace()
        harness.session.begin_replay(captured.number, stream)
        with pytest.raises(PenstockError, match="while another one was not ended"):
            harness.session.begin(0, stream)
        with pytest.raises(PenstockError, match="cannot be changed while a run has not ended"):
            uninstall(harness.session)
        with pytest.raises(PenstockError, match="to be dropped while a run has not ended"):
            harness.session.drop_capture(captured.number)
        with pytest.raises(PenstockError, match="ended without its launch"):
            harness.session.end_replay()
        harness.replay(captured, stream)


def test_a_launch_that_fails_is_a_failed_run(made: dict[str, Model]) -> None:
    model = made["chain"]
    with SessionHarness(model) as harness:
        plan = harness.install(model.floor_bytes)
        stream = harness.stream()
        captured = harness.capture()
        harness.replay(captured, stream)
        with pytest.raises(DriverCallError, match="there is no order 4"):
            harness.replay(captured, stream, order=4)
        harness.replay(captured, stream)
        assert harness.last == plan.methods[0].cold


def test_a_dropped_capture_is_gone(made: dict[str, Model]) -> None:
    model = made["chain"]
    with SessionHarness(model) as harness:
        harness.install(model.floor_bytes)
        stream = harness.stream()
        first, second = harness.capture(), harness.capture()
        harness.replay(first, stream, check=False)
        harness.session.drop_capture(first.number)
        assert harness.driver.counts().graphs == 1
        with pytest.raises(PenstockError, match="there is no capture 0; the present plan has 1"):
            harness.session.begin_replay(first.number, stream)
        harness.replay(second, stream)
        harness.install(model.floor_bytes + PAGE)
        assert harness.driver.counts().graphs == 0
