"""Times from traced runs, and a plan made from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

import penstock
from penstock.errors import PenstockError
from penstock.plan.calibration import Calibration, Link
from penstock.plan.plan import Block, Copy, MethodPlan, Piece, Placement, Plan, Range, Stay
from penstock.plan.planner import Planner
from penstock.runtime import plan_installer as installer_file
from penstock.runtime.calibration import calibration_of, check_calibration
from penstock.runtime.plan_installer import FIRST_RUNS
from penstock.runtime.policy import PlannedPolicy
from penstock.runtime.session import TraceSpan
from penstock.schedule import Access, Schedule, Step
from tests.runtime.modules import SCRIPTS, Watched, play, same
from tests.runtime.session_harness import SessionHarness, write_model
from tests.runtime.session_harness import chain as chain_of

PAGE = 4096
# Two steps; the weight of the second streams, in two copies.
SCHEDULE = Schedule("forward", (Access(0, "held"), Access(1, "moved")), (Step("first", (0,)), Step("second", (1,))))
PLAN = Plan(
    PAGE,
    (Block(PAGE, ring=False), Block(PAGE, ring=True), Block(PAGE, ring=True)),
    (Range(PAGE, (0,)), Range(2 * PAGE, (1, 2))),
    (Piece("held", 0, PAGE, 0, 0),),
    (
        MethodPlan(
            "forward",
            (Placement(0, "held", PAGE, 0, 0, None), Placement(1, "moved", 2 * PAGE, 1, 0, 0)),
            (Stay("moved", 2 * PAGE, (1,), 1),),
            (Copy(0, Piece("moved", 0, PAGE, 1, 0), 0, 1), Copy(0, Piece("moved", PAGE, PAGE, 1, PAGE), 0, 1)),
            2,
        ),
    ),
)


def step(run: int, index: int, begin_ns: int, end_ns: int) -> TraceSpan:
    return TraceSpan("compute", run, 0, index, 0, begin_ns, end_ns)


def copy(run: int, index: int, nbytes: int, begin_ns: int, end_ns: int) -> TraceSpan:
    return TraceSpan("copy", run, 0, index, nbytes, begin_ns, end_ns)


def test_a_step_counts_from_the_step_before_it_or_from_the_last_copy_it_waited_for() -> None:
    spans = [
        copy(1, 0, 1000, 0, 100),
        copy(1, 1, 2000, 100, 250),
        step(1, 0, 10, 60),
        step(1, 1, 250, 280),  # waited until 250: 30 by itself
        copy(2, 0, 1000, 290, 390),
        copy(2, 1, 2000, 390, 540),
        step(2, 0, 600, 650),
        step(2, 1, 660, 700),  # waited for nothing: 50 from the end of the first
        copy(3, 0, 1000, 700, 800),
        copy(3, 1, 2000, 800, 950),
        step(3, 0, 1000, 1050),
        step(3, 1, 1060, 1090),  # 40
    ]
    calibration = calibration_of(spans, [SCHEDULE], PLAN)
    assert calibration.step_s["forward"] == pytest.approx((50e-9, 40e-9))
    assert calibration.link.copy_latency_s == pytest.approx(50e-9)
    assert calibration.link.bytes_per_s == pytest.approx(2e10)
    assert calibration.resident_s("forward") == pytest.approx(90e-9)


def test_copies_of_one_size_give_a_mean() -> None:
    spans = [copy(1, 0, 1000, 0, 100), copy(1, 1, 1000, 100, 400), step(1, 0, 0, 10), step(1, 1, 400, 410)]
    link = calibration_of(spans, [SCHEDULE], PLAN).link
    assert (link.bytes_per_s, link.copy_latency_s) == (pytest.approx(5e9), 0.0)


def test_of_packed_weights_the_link_is_what_brings_them() -> None:
    """Two copies of a packed weight, one of which stays packed: their spans are those of decoding."""
    method = PLAN.methods[0]
    first, second = method.copies
    packed = (replace(first, packed_bytes=700), replace(second, packed_bytes=0))
    plan = replace(PLAN, methods=(replace(method, copies=packed),))
    spans = [
        TraceSpan("link", 1, 0, 0, 300, 0, 100),
        TraceSpan("link", 1, 0, 0, 400, 100, 200),
        copy(1, 0, PAGE, 90, 250),
        copy(1, 1, PAGE, 250, 350),
        step(1, 0, 0, 10),
        step(1, 1, 350, 360),
    ]
    calibration = calibration_of(spans, [SCHEDULE], plan)
    assert calibration.link.bytes_per_s == pytest.approx(700 / 200e-9)
    assert calibration.decoded_bytes_per_s == pytest.approx(PAGE / 100e-9)


def test_what_cannot_be_calibrated_by() -> None:
    with pytest.raises(PenstockError, match="nothing was copied"):
        calibration_of([step(1, 0, 0, 10), step(1, 1, 10, 20)], [SCHEDULE], PLAN)
    with pytest.raises(PenstockError, match="no run was completed"):
        calibration_of([copy(1, 0, 1000, 0, 100), step(1, 0, 0, 10)], [SCHEDULE], PLAN)
    link = Link(1e9)
    with pytest.raises(PenstockError, match="has 3 steps for method 'forward'; the program has 2"):
        check_calibration(Calibration(link, {"forward": (1.0, 1.0, 1.0)}), [SCHEDULE])
    with pytest.raises(PenstockError, match="'other'; the program has no such method"):
        check_calibration(Calibration(link, {"other": (1.0,)}), [SCHEDULE])
    with pytest.raises(PenstockError, match="no method"):
        check_calibration(Calibration(link, {}), [SCHEDULE])


def test_a_module_plans_again_from_its_own_runs(
    decoder: Path, resident_bits: Callable[[str], list[list[Tensor]]], caplog: pytest.LogCaptureFixture
) -> None:
    with penstock.Module(decoder, "1GiB") as module:
        budget = (module.floor_bytes + module.budget_bytes) // 2
    caplog.set_level("INFO", "penstock")
    with penstock.Module(decoder, budget) as module:
        assert module.calibration is None
        with module.calibrate():
            play(module.run_method, SCRIPTS["decoder"])
        calibration = module.calibration
        assert calibration is not None
        counts = {method.name: len(method.schedule.steps) for method in module.program.methods}
        assert {name: len(times) for name, times in calibration.step_s.items()} == counts
        assert all(time >= 0 for times in calibration.step_s.values() for time in times)
        assert "planned for a link of" in caplog.text
        # What was planned from times is a plan like any other: right results, and what moves is what it says.
        assert module.device_memory()[1] <= budget
        module.reset_state()
        assert same(play(Watched(module), SCRIPTS["decoder"]), resident_bits("decoder"))
        plan = module.plan
    with penstock.Module(decoder, budget, calibration=calibration) as again:
        assert again.plan == plan and again.calibration == calibration
        assert same(play(Watched(again), SCRIPTS["decoder"]), resident_bits("decoder"))


def test_what_is_newer_ends_a_calibration(decoder: Path, tmp_path: Path) -> None:
    """Leaving it says so, and nothing is planned from what it saw."""
    with penstock.Module(decoder, "1GiB") as module:
        budget = (module.floor_bytes + module.budget_bytes) // 2
    with penstock.Module(decoder, budget) as module:
        newer: dict[str, Callable[[], object]] = {
            r"set_budget\(\)": lambda: module.set_budget(budget),
            "the trace to": lambda: module.trace(tmp_path / "trace.json"),
            r"another calibrate\(\)": lambda: module.calibrate().__enter__(),
        }
        for name, start in newer.items():
            with pytest.raises(PenstockError, match=rf"calibrate\(\) recorded until {name} .*ended it"):
                with module.calibrate():
                    play(module.run_method, SCRIPTS["decoder"][:1])
                    start()
            assert module.calibration is None
        module.reset_state()
        with module.calibrate():
            play(module.run_method, SCRIPTS["decoder"])
        assert module.calibration is not None


def test_calibration_needs_a_plan_and_copies(chain: Path) -> None:
    with penstock.Module(chain, "1GiB", placement="lru") as module:
        with pytest.raises(PenstockError, match=r'calibrate\(\) does not go with placement="lru"'), module.calibrate():
            pass
    steps = len(penstock.read_program(chain).method("forward").schedule.steps)
    calibration = Calibration(Link(1e9), {"forward": (1e-3,) * steps})
    with pytest.raises(PenstockError, match='placement="lru" does not go with calibration='):
        penstock.Module(chain, "1GiB", placement="lru", calibration=calibration)
    with penstock.Module(chain, "1GiB") as module:
        before = module.plan
        with pytest.raises(PenstockError, match="nothing was copied"), module.calibrate():
            play(module.run_method, SCRIPTS["chain"])
        assert module.plan == before and module.calibration is None
        play(module.run_method, SCRIPTS["chain"])


def test_the_first_runs_are_measured_and_planned_by(
    decoder: Path, resident_bits: Callable[[str], list[list[Tensor]]], caplog: pytest.LogCaptureFixture
) -> None:
    with penstock.Module(decoder, "1GiB") as module:
        budget = (module.floor_bytes + module.budget_bytes) // 2
    with penstock.Module(decoder, budget, calibration="first-runs") as module:
        first = module.plan
        assert module.calibration is None
        caplog.set_level("INFO", "penstock")
        for _ in range(FIRST_RUNS):
            assert module.calibration is None
            module.reset_state()
            assert same(play(module.run_method, SCRIPTS["decoder"]), resident_bits("decoder"))
            if module.calibration is not None:
                break
        assert module.calibration is not None
        said = caplog.text
        caplog.clear()
        assert "the first runs showed a link of" in said and "planned for a link of" in said
        assert ("with another plan" in said) == (module.plan != first)
        for _ in range(2):
            module.reset_state()
            assert same(play(Watched(module), SCRIPTS["decoder"]), resident_bits("decoder"))
        assert caplog.text == ""


@pytest.mark.parametrize("is_faster", [True, False])
def test_the_first_runs_change_a_plan_by_what_plans_are_compared_by(
    is_faster: bool, decoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where experts have slots that is not what one run of each method takes: tokens are more than prompts."""
    with penstock.Module(decoder, "1GiB") as module:
        budget, floor = (module.floor_bytes + module.budget_bytes) // 2, module.floor_bytes
    with penstock.Module(decoder, floor) as module:
        other = module.plan
    with penstock.Module(decoder, budget, calibration="first-runs") as module:
        first = module.plan
        assert first != other
        new_s, old_s = (1.0, 2.0) if is_faster else (2.0, 1.0)
        monkeypatch.setattr(PlannedPolicy, "seconds", lambda *given: old_s if given[1] == first else new_s)
        monkeypatch.setattr(PlannedPolicy, "predicted_s", lambda *given: new_s if given[1] == first else old_s)
        monkeypatch.setattr(Planner, "plan", lambda *_: other)
        for _ in range(FIRST_RUNS):
            module.reset_state()
            play(module.run_method, SCRIPTS["decoder"])
        assert module.calibration is not None
        assert module.plan == (other if is_faster else first)


def test_first_runs_make_way(decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a trace, for calibrate(), and for another budget, under which they begin anew; and when there is no gain."""
    with penstock.Module(decoder, "1GiB", calibration="first-runs") as module:
        budget = (module.floor_bytes + module.budget_bytes) // 2
        for _ in range(2):  # everything is resident: there is nothing to measure
            module.reset_state()
            play(module.run_method, SCRIPTS["decoder"])
        assert module.calibration is None

    def run() -> None:
        for _ in range(FIRST_RUNS):
            module.reset_state()
            play(module.run_method, SCRIPTS["decoder"])

    with penstock.Module(decoder, budget, calibration="first-runs") as module:
        module.set_budget(budget + PAGE)
        run()
        assert module.calibration is not None
    with penstock.Module(decoder, budget, calibration="first-runs") as module:
        with module.trace(tmp_path / "trace.json"):
            run()
        run()
        assert module.calibration is None
    with penstock.Module(decoder, budget, calibration="first-runs") as module:
        with module.calibrate():
            run()
        given = module.calibration
        run()
        assert module.calibration is given is not None
    monkeypatch.setattr(installer_file, "WORTHWHILE_GAIN", 1.0)
    with penstock.Module(decoder, budget, calibration="first-runs") as module:
        before = module.plan
        run()
        assert module.calibration is not None and module.plan is before


def test_what_calibration_may_be(chain: Path) -> None:
    with pytest.raises(PenstockError, match="calibration is 'soon'; it must be a Calibration, \"first-runs\" or None"):
        penstock.Module(chain, "1GiB", calibration="soon")  # type: ignore[arg-type]
    with pytest.raises(PenstockError, match='placement="lru" does not go with calibration='):
        penstock.Module(chain, "1GiB", placement="lru", calibration="first-runs")


def test_the_link_is_measured_by_piece_size(tmp_path: Path) -> None:
    """The largest copy is also timed in pieces, of each size that fits it."""
    sizes = {f"w{i}": 5 << 20 for i in range(8)}
    model = write_model(tmp_path / "weights.ptd", [chain_of(*sizes)], sizes)
    with SessionHarness(model) as harness:
        plan = harness.install(model.floor_bytes)
        largest = max(copy.piece.nbytes for copy in plan.methods[0].copies)
        made, *by_size = harness.session.link()
        assert made.nbytes > 0 and made.ns > 0
        expected = [(largest // size, largest // size * size) for size in (256 << 10, 1 << 20, 4 << 20, 16 << 20)]
        assert [(sample.copies, sample.nbytes) for sample in by_size] == [each for each in expected if each[0]]
        assert len(by_size) > 1
        harness.run()
