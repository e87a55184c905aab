"""What a session may draw, and how often. An action leaves the module loaded and right, or closed: a load follows."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial

import penstock
from penstock import errors
from tests.harness import bits, leaves
from tests.runtime.soft import SoftHooks
from tests.soak.programs import load_options
from tests.soak.reference import FIRST_STATE, same
from tests.soak.sessions import Session
from tests.soak.subject import Subject, Wrong, require

# ---- runs


def runs(session: Session) -> None:
    subject = session.subject
    calls = session.calls(session.draw.choice((1, 1, 2, 3, 5, 10, 30, 60)))
    _run(session, f"run {calls}", lambda: subject.run(calls))


def _run(session: Session, operation: str, body: Callable[[], object]) -> None:
    module, plan = session.module, session.module.plan

    def run() -> None:
        body()
        module.stats()  # waits: what a driver call of these runs has to say is said here at the latest

    outcome = session.do(operation, run, _driver(session))
    # With "first-runs" it plans again by itself.
    session.finished_runs(outcome, replanned=module.plan is not plan)


def bad_calls(session: Session) -> None:
    """Refused before anything runs."""
    session.say("bad calls")
    method, arguments = session.kind.calls[0]
    session.refused(errors.InputError, lambda: session.module.run_method(method, *arguments, 1))
    session.refused(errors.PackageError, lambda: session.module.run_method("nobody", *arguments))
    session.subject.settle_state(session.subject.state)


# ---- another plan


def set_budget(session: Session) -> None:
    subject, module = session.subject, session.module
    budget, old_bytes, full_bytes = session.budget(), module.budget_bytes, module.full_bytes
    new_bytes = min(budget, full_bytes) if isinstance(budget, int) else full_bytes
    subject.most_bytes = max(subject.most_bytes, new_bytes)
    outcome = session.do(f"set_budget {budget}", lambda: module.set_budget(budget), _driver(session))
    cut_short = session.expect(outcome)
    allowed = {new_bytes} if outcome.finished else {old_bytes} if outcome.error else {old_bytes, new_bytes}
    require(module.budget_bytes in allowed, "the budget is", module.budget_bytes, "where it may be", allowed)
    subject.ring_is_unknown() if cut_short else subject.ring_is_new()
    session.world.tally["budget changes"] += 1
    subject.settle_state(subject.state)


def below_the_floor(session: Session) -> None:
    if session.module.floor_bytes == 0:
        return  # everything can be read in place
    session.say("set_budget below the floor")
    session.refused(errors.BelowFloorError, lambda: session.module.set_budget(session.module.floor_bytes - 1))


def calibrate(session: Session) -> None:
    module, subject = session.module, session.subject
    if module.plan is None:
        session.refused(errors.PenstockError, lambda: module.calibrate().__enter__())
        return
    calls = session.calls(session.draw.randint(1, 4)) + _one_of_each(session)

    def body() -> None:
        with module.calibrate():
            subject.run(calls)

    subject.run([])
    outcome = session.do(f"calibrate {calls}", body, _driver(session))
    # Refused where there is nothing to be planned better.
    session.finished_runs(outcome, errors.PenstockError, replanned=True)
    session.world.tally["calibrations"] += 1


def calibrate_direct(session: Session) -> None:
    module, subject = session.module, session.subject
    if module.calibration is None or session.options.get("placement") not in ("auto", "in-place"):
        return
    calls = _one_of_each(session)

    def body() -> None:
        with module.calibrate(in_place=True):
            subject.run(calls)

    subject.run([])
    outcome = session.do(f"calibrate_direct {calls}", body, _driver(session))
    # Refused where there is nothing to be planned better.
    session.finished_runs(outcome, errors.PenstockError, replanned=True)
    session.world.tally["calibrations"] += 1


def _one_of_each(session: Session) -> list[int]:
    """A call of every method."""
    numbers = {method: number for number, (method, _) in enumerate(session.kind.calls)}
    return list(numbers.values())


# ---- looking


def trace(session: Session) -> None:
    subject, module = session.subject, session.module
    calls, path = session.calls(session.draw.randint(1, 4)), session.folder / "trace.json"

    def body() -> None:
        with module.trace(path):
            subject.run(calls)

    subject.run([])
    outcome = session.do(f"trace {calls}", body, _driver(session))
    session.finished_runs(outcome)
    if outcome.finished:
        json.loads(path.read_text())
    session.world.tally["traces"] += 1
    module.trace(path).close()  # nothing is being recorded any more


def look(session: Session) -> None:
    session.say("look")
    module = session.module
    require(module.floor_bytes <= module.budget_bytes <= module.full_bytes, "budget", module.budget_bytes)
    floor, full = session.floor_and_full()
    require((module.floor_bytes, module.full_bytes) == (floor, full), "floor and full have changed")
    plan = module.plan_at(session.draw.randint(floor, full))
    require((plan is None) == (module.plan is None), "a plan at another budget")
    require(module.summary, "no summary")


# ---- state


def state(session: Session) -> None:
    subject, module, draw, names = session.subject, session.module, session.draw, session.reference.state_names
    if not names:
        session.refused(errors.PenstockError, lambda: module.read_state("nobody"))
        return
    before, at = subject.state, draw.randrange(len(names))
    values = session.reference.values_of(before)
    match draw.choice(("read", "write", "reset")):
        case "read":
            outcome = session.do(f"read_state {names[at]}", lambda: module.read_state(names[at]), _driver(session))
            if not session.expect(outcome):
                require(same([bits(outcome.value)], [bits(values[at])]), "read_state gave other bits")
            after = before
        case "write":
            changed = [*values]
            changed[at] = values[at].flip(0)
            after = session.reference.number_of(changed)
            outcome = session.do(
                f"write_state {names[at]}", lambda: module.write_state(names[at], changed[at]), _driver(session)
            )
        case _:
            after = FIRST_STATE
            outcome = session.do("reset_state", module.reset_state, _driver(session))
    cut_short = session.expect(outcome)
    session.world.tally["state accesses"] += 1
    subject.settle_state(*((before, after) if cut_short else (after,)), may_be_invalid=cut_short)


# ---- files


def touched(session: Session) -> None:
    """Another time of modification is an error at the next run; put back, it is none."""
    session.say("touch the weights")
    weights = session.path.with_suffix(".ptd")
    before = weights.stat()
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns + 10**9))
    _changed(session)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))


def truncated(session: Session) -> None:
    session.say("truncate the weights")
    weights = session.path.with_suffix(".ptd")
    content = weights.read_bytes()
    os.truncate(weights, session.draw.randrange(len(content)))
    _changed(session)
    session.close()
    weights.write_bytes(content)


def replaced(session: Session) -> None:
    """The module goes on with the file that it has open."""
    session.say("replace both files")
    for suffix in (".pt2", ".ptd"):
        path, new = session.path.with_suffix(suffix), session.path.with_suffix(".new")
        new.write_bytes(path.read_bytes())
        new.replace(path)
    session.world.tally["changes of files"] += 1
    runs(session)
    session.close()


def _changed(session: Session) -> None:
    method, arguments = session.kind.calls[0]
    session.world.tally["changes of files"] += 1
    session.refused(errors.WeightsChangedError, lambda: session.module.run_method(method, *arguments))
    session.subject.ring_is_unknown()
    session.subject.settle_state(session.subject.state, may_be_invalid=True)


# ---- threads


def two_threads(session: Session) -> None:
    """On one module: each call is right, or refused because of the other."""
    subject, module, kind = session.subject, session.module, session.kind
    if kind.has_state:
        return
    session.say("two threads on one module")
    counts = [0, 0]

    def body(at: int, calls: list[int]) -> None:
        for call in calls:
            method, arguments = kind.calls[call]
            try:
                found = [bits(leaf) for leaf in leaves(module.run_method(method, *arguments))]
            except errors.ConcurrentRunError:
                session.world.tally["error ConcurrentRunError"] += 1
                continue
            counts[at] += 1
            if not same(found, wanted[call]):
                raise Wrong(f"thread {at}, call {call} gave other bits")

    wanted = [session.reference.after(FIRST_STATE, call)[0] for call in range(len(kind.calls))]
    joins = [session.in_thread(partial(body, at, session.calls(15))) for at in range(2)]
    if session.draw.random() < 0.5:
        module.set_budget(session.budget())
    for join in joins:
        if (error := join().error) is not None:
            raise error
    session.world.tally["runs by two threads at once"] += sum(counts)
    session.world.tally["program runs"] += sum(counts)
    subject.run([])
    subject.joined(sum(counts))


def two_modules(session: Session) -> None:
    """Each in its own thread."""
    world, draw = session.world, session.draw
    kind = draw.choice(world.kinds)
    options = load_options(kind, world.device, draw)
    options.pop("calibration", None)
    calls, own = session.calls(10, kind), session.calls(20)
    session.say(f"two modules: {kind.name} {options} {calls} beside {own}")

    def body() -> Subject:
        module = penstock.Module(world.paths[kind.name], "1TiB", **options)
        module.set_budget(module.floor_bytes)
        subject = Subject(module, world.references[kind.name], None)
        subject.run(calls)
        return subject

    join = session.in_thread(body)
    _run(session, f"run {own}", lambda: session.subject.run(own))
    outcome = join()
    if outcome.error is not None:
        raise outcome.error
    other: Subject = outcome.value
    outcome.value = None
    world.tally["program runs"] += other.finish(cut_short=False)[0]
    other.module.close()


# ---- ends


def close(session: Session) -> None:
    session.close()


def dropped(session: Session) -> None:
    """Nobody closes it: it goes with its last reference."""
    session.say("drop")
    session.drop()


def closed_in_a_run(session: Session) -> None:
    """By another thread: close() waits for the run, or the run finds it closed."""
    session.say("close while another thread runs")
    module, kind = session.module, session.kind
    calls = session.calls(10)

    def body() -> None:
        for call in calls:
            method, arguments = kind.calls[call]
            module.run_method(method, *arguments)

    join = session.in_thread(body)
    session.close(faults=False)  # it would be the other thread that is told
    outcome = join()
    if outcome.error is not None:
        session.expect(outcome, errors.ClosedError, errors.ConcurrentRunError)


def closed_with_a_trace(session: Session) -> None:
    session.say("close with a trace open")
    path = session.folder / "open.json"
    path.unlink(missing_ok=True)
    session.module.trace(path)
    session.close(faults=False)  # close() tells of a trace that could not be read, and goes on
    json.loads(path.read_text())


def _driver(session: Session) -> SoftHooks | None:
    """Where calls can be made to fail."""
    return session.subject.driver if session.world.device == "cpu" else None


ACTIONS: tuple[tuple[int, Callable[[Session], None]], ...] = (
    (50, runs),
    (1, bad_calls),
    (12, set_budget),
    (2, below_the_floor),
    (4, calibrate),
    (2, calibrate_direct),
    (4, trace),
    (3, look),
    (8, state),
    (2, touched),
    (1, truncated),
    (1, replaced),
    (3, two_threads),
    (2, two_modules),
    (3, close),
    (1, dropped),
    (1, closed_in_a_run),
    (1, closed_with_a_trace),
)
