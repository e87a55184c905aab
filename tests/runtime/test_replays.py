"""S9: runs as graphs of the soft driver, which runs their nodes in any order that the captured edges allow."""

from __future__ import annotations

import itertools
import random
from contextlib import nullcontext

import pytest

from penstock.errors import CaptureError, DriverCallError, PenstockError, ScheduleDivergedError
from tests.native.session import acquire, copy_stream, uninstall
from tests.runtime.rig import PAGE, Captured, Model, Rig, RunFailed, models, staged

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
    with Rig(model) as rig:
        stream = rig.stream()
        for budget_bytes in model.budgets(5):
            rig.install(budget_bytes)
            captured = [rig.capture(method) for method in range(len(model.schedules))]
            for method, graph in enumerate(captured):
                for seed in range(1, 4):
                    rig.replay(graph, stream, order=ORDERS[order], seed=seed)
                assert rig.plan is not None
                assert rig.last == rig.plan.methods[method].warm
                for seed in range(4, 11):
                    rig.replay(graph, stream, order=ORDERS[order], seed=seed, check=False)
                assert rig.check() == 7 * graph.kernels
                rig.check_counters()
            last, total = rig.session.stats()
            assert last.replays == 1 and last.stall_ns is None
            assert total.replays == total.runs
            rig.check_memory(budget_bytes)


@pytest.mark.parametrize("name", NAMES)
def test_anything_in_between_is_seen(made: dict[str, Model], name: str) -> None:
    """Runs that are no replays, other methods, other graphs of the same method, other streams, in any order."""
    model = made[name]
    choose = random.Random(name)
    with Rig(model, kernel_ns=200 * US) as rig:
        streams = [rig.stream(), rig.stream()]
        for budget_bytes in model.budgets(4):
            rig.install(budget_bytes)
            methods = range(len(model.schedules))
            # Twice, as for two shapes of the inputs.
            captured = [rig.capture(method) for method in (*methods, *methods)]
            rig.driver.set_delays(choose.randrange(1, 1 << 30), 50 * US)
            for _ in range(40):
                if choose.random() < 0.4:
                    rig.run(choose.choice(methods), choose.choice(streams), check=False)
                else:
                    graph = choose.choice(captured)
                    rig.replay(graph, choose.choice(streams), order=choose.randrange(4), check=False)
                if choose.random() < 0.2:
                    captured.append(rig.capture(choose.choice(methods)))
                if choose.random() < 0.2:
                    rig.check()
                    rig.check_counters()
            rig.driver.set_delays(0, 0)
            rig.check()
            rig.check_counters()


def test_a_capture_moves_nothing(made: dict[str, Model]) -> None:
    model = made["chain"]
    with Rig(model) as rig:
        rig.install(model.floor_bytes)
        stream = rig.stream()
        rig.run(stream=stream)
        before = rig.session.stats()[1]
        rig.capture()
        assert rig.session.stats()[1] == before
        # What the run before it copied ahead is still counted on.
        rig.run(stream=stream)
        assert rig.plan is not None and rig.last == rig.plan.methods[0].warm


def test_the_next_run_s_copies_need_not_end_with_the_graph(made: dict[str, Model]) -> None:
    """What a graph ends with is its own run: the copies made ahead go on behind it."""
    model = made["chain"]
    with Rig(model) as rig:
        plan = rig.install(model.floor_bytes)
        assert plan.methods[0].prologue
        stream = rig.stream()
        captured = rig.capture()
        rig.replay(captured, stream)
        with rig.late_copies():
            rig.replay(captured, stream, check=False)
            rig.await_kernels(stream)
            # The kernels have ended, and what is copied for the next run has not: nobody has waited for it.
            copied = rig.driver.create_event(False)
            rig.driver.record(copied, copy_stream(rig.session))
            assert rig.check_graphs() == captured.kernels and not rig.driver.is_complete(copied)
            rig.driver.destroy_event(copied)
        rig.check()


@pytest.mark.parametrize("order", list(ORDERS))
def test_late_copies_and_late_kernels(made: dict[str, Model], order: str) -> None:
    model = made["long_reads"]
    with Rig(model) as rig:
        streams = [rig.stream(late=True), rig.stream(late=True)]
        for budget_bytes in (model.floor_bytes, model.floor_bytes + 3 * PAGE):
            rig.install(budget_bytes)
            graph = rig.capture()
            for late in (rig.late_copies(), nullcontext()):
                with late:
                    for _, stream in zip(range(4), itertools.cycle(streams), strict=False):
                        rig.replay(graph, stream, order=ORDERS[order], check=False)
                    rig.run(stream=streams[0], check=False)
                    rig.replay(graph, streams[1], order=ORDERS[order], check=False)
                    rig.check()


def test_a_graph_of_another_plan_is_refused(made: dict[str, Model]) -> None:
    model = made["chain"]
    with Rig(model) as rig:
        rig.install(model.floor_bytes)
        stream = rig.stream()
        old = rig.capture()
        rig.replay(old, stream)
        rig.install(model.floor_bytes + PAGE)
        with pytest.raises(PenstockError, match="there is no capture 0; the present plan has 0"):
            rig.session.begin_replay(old.number, stream)
        rig.run(stream=stream)
        new = rig.capture()
        assert new.number != old.number
        rig.replay(new, stream)


def test_after_a_failed_run_the_ring_is_filled_again(made: dict[str, Model]) -> None:
    model = made["chain"]
    with Rig(model) as rig:
        plan = rig.install(model.floor_bytes)
        stream = rig.stream()
        captured = rig.capture()
        rig.replay(captured, stream)
        rig.begin(stream=stream)
        rig.acquire(0)
        with pytest.raises(RunFailed, match="diverges"):
            rig.acquire(7)
        rig.check_hashes()
        rig.replay(captured, stream)
        assert rig.last == plan.methods[0].cold != plan.methods[0].warm


def test_a_capture_that_fails_leaves_everything_as_it_was(made: dict[str, Model]) -> None:
    model = made["chain"]
    with Rig(model) as rig:
        plan = rig.install(model.floor_bytes)
        stream, side = rig.stream(), rig.stream()
        rig.run(stream=stream)
        rig.session.begin_capture(0, side)
        acquire(rig.session, 7, None)
        with pytest.raises(ScheduleDivergedError, match="expected access 0, got access 7"):
            rig.session.end_capture()
        rig.run(stream=stream)
        assert rig.last == plan.methods[0].warm
        rig.replay(rig.capture(), stream)
        assert rig.last == plan.methods[0].warm


def test_every_driver_call_of_a_capture_may_fail(made: dict[str, Model]) -> None:
    model = made["tied"]
    with Rig(model) as rig:
        plan = rig.install(model.floor_bytes)
        stream, side = rig.stream(), rig.stream()
        rig.run(stream=stream)
        failed = set()
        # The first time each call makes an event that stays, and so there is one call less the next time.
        for again in (False, True):
            for n in itertools.count(1):
                rig.driver.fail_at(n)
                try:
                    rig.capture(0, side)
                except (DriverCallError, RunFailed):
                    failed.add(rig.driver.failed_call())
                else:
                    break
                rig.driver.fail_at(0)
                if again or n % 5 == 0:
                    rig.run(stream=stream)
                    assert rig.last == plan.methods[0].warm
            rig.driver.fail_at(0)
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
        rig.replay(rig.capture(), stream)
        assert rig.last == plan.methods[0].warm


def test_every_driver_call_of_a_replay_may_fail(made: dict[str, Model]) -> None:
    """Also a cold one, which fills the ring first. The next run is right, and finds nothing in the ring."""
    model = made["methods"]
    with Rig(model) as rig:
        plan = rig.install(model.floor_bytes)
        stream = rig.stream()
        captured = rig.capture(0)
        failed = set()
        for cold in (False, True):
            for n in itertools.count(1):
                rig.run(1 if cold else 0, stream)
                rig.driver.fail_at(n)
                try:
                    rig.replay(captured, stream, check=False)
                except DriverCallError:
                    refused = rig.driver.failed_call() == "is_capturing"
                    failed.add(rig.driver.failed_call())
                else:
                    break
                finally:
                    rig.driver.fail_at(0)
                rig.check()
                rig.replay(captured, stream)
                assert rig.last == (plan.methods[0].warm if refused and not cold else plan.methods[0].cold)
            rig.check()
            rig.check_counters()
        assert failed == {"wait", "record", "copy_to_device", "fill", "is_capturing", "launch_graph"}


def test_staging_cannot_be_captured(made: dict[str, Model]) -> None:
    model = made["chain"]
    with Rig(model, source=staged()) as rig:
        rig.install(model.floor_bytes)
        with pytest.raises(CaptureError, match="staging buffers are filled by the host"):
            rig.capture()
        rig.run()


def test_the_least_recently_used_policy_cannot_be_captured(made: dict[str, Model]) -> None:
    model = made["chain"]
    with Rig(model, lru=True) as rig:
        rig.install_lru(model.full_bytes)
        with pytest.raises(CaptureError, match="decided while running"):
            rig.capture()
        rig.run()


def test_what_is_out_of_order_is_refused(made: dict[str, Model]) -> None:
    model = made["chain"]
    with Rig(model) as rig:
        rig.install(model.floor_bytes)
        stream = rig.stream()
        with pytest.raises(PenstockError, match="a capture was ended that was not begun"):
            rig.session.end_capture()
        with pytest.raises(PenstockError, match="a replay was ended that was not begun"):
            rig.session.end_replay()
        captured: Captured = rig.capture()
        rig.driver.begin_capture(stream)
        for refused in (
            lambda: rig.session.begin_replay(captured.number, stream),
            lambda: rig.session.begin_capture(0, stream),
        ):
            with pytest.raises(CaptureError, match="while the caller's stream is being captured"):
                refused()
        rig.driver.destroy_graph(rig.driver.end_capture(stream))
        with pytest.raises(PenstockError, match="a graph was launched outside of its replay"):
            rig.session.launch()
        rig.session.start_trace()
        with pytest.raises(PenstockError, match="replayed while a trace"):
            rig.session.begin_replay(captured.number, stream)
        with pytest.raises(PenstockError, match="captured while a trace"):
            rig.session.begin_capture(0, stream)
        rig.session.stop_trace()
        rig.session.begin_replay(captured.number, stream)
        with pytest.raises(PenstockError, match="while another one was not ended"):
            rig.session.begin(0, stream)
        with pytest.raises(PenstockError, match="cannot be changed while a run has not ended"):
            uninstall(rig.session)
        with pytest.raises(PenstockError, match="to be dropped while a run has not ended"):
            rig.session.drop_capture(captured.number)
        with pytest.raises(PenstockError, match="ended without its launch"):
            rig.session.end_replay()
        rig.replay(captured, stream)


def test_a_launch_that_fails_is_a_failed_run(made: dict[str, Model]) -> None:
    model = made["chain"]
    with Rig(model) as rig:
        plan = rig.install(model.floor_bytes)
        stream = rig.stream()
        captured = rig.capture()
        rig.replay(captured, stream)
        with pytest.raises(DriverCallError, match="there is no order 4"):
            rig.replay(captured, stream, order=4)
        rig.replay(captured, stream)
        assert rig.last == plan.methods[0].cold


def test_a_dropped_capture_is_gone(made: dict[str, Model]) -> None:
    model = made["chain"]
    with Rig(model) as rig:
        rig.install(model.floor_bytes)
        stream = rig.stream()
        first, second = rig.capture(), rig.capture()
        rig.replay(first, stream, check=False)
        rig.session.drop_capture(first.number)
        assert rig.driver.counts().graphs == 1
        with pytest.raises(PenstockError, match="there is no capture 0; the present plan has 1"):
            rig.session.begin_replay(first.number, stream)
        rig.replay(second, stream)
        rig.install(model.floor_bytes + PAGE)
        assert rig.driver.counts().graphs == 0
