"""Reads from a trace what its runs did, and where steps waited for copies. Pure; no torch."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.errors import PenstockError
from penstock.plan.plan import Plan
from penstock.report.data import Stall, TracedRun
from penstock.schedule import Schedule

# What copies bring: a stay of a method, since one weight may have several at once; without a plan, a weight.
_Cargo = tuple[str, int | str]


@dataclass(frozen=True)
class TraceEvent:
    """One copy (`index` into the plan's copies, or the number of a weight) or one step, as a trace's file has it."""

    lane: str
    run: int
    method: str
    index: int
    name: str
    nbytes: int
    begin_ns: int
    end_ns: int


def read_events(document: Mapping[str, object], where: str) -> list[TraceEvent]:
    try:
        rows = document["traceEvents"]
        assert isinstance(rows, list)
        return [
            TraceEvent(
                lane=row["cat"],
                run=row["args"]["run"],
                method=row["args"]["method"],
                index=row["args"]["index"],
                name=row["name"],
                nbytes=row["args"].get("bytes", 0),
                begin_ns=round(row["ts"] * 1e3),
                end_ns=round((row["ts"] + row["dur"]) * 1e3),
            )
            for row in rows
            if row["ph"] == "X"
        ]
    except (AssertionError, KeyError, TypeError) as error:
        raise PenstockError(f"{where} is not a trace of Module.trace: {error!r}") from error


def find_stalls(events: Sequence[TraceEvent], schedules: Mapping[str, Schedule], plan: Plan | None) -> list[Stall]:
    """In the order of the trace. A step stalls from the end of the step before it to the end of its last copy."""
    copies: dict[_Cargo, list[TraceEvent]] = defaultdict(list)
    for event in sorted((event for event in events if event.lane == "copy"), key=_end_ns):
        copies[_cargo(event, plan)].append(event)
    readings = {name: _readings(schedule, plan) for name, schedule in schedules.items()}
    stalls: list[Stall] = []
    before_ns = min((event.begin_ns for event in events), default=0)
    for step in _steps(events):
        made = [_last_by(copies[cargo], step.begin_ns) for cargo in readings[step.method][step.index]]
        last = max((copy for copy in made if copy is not None), key=_end_ns, default=None)
        if last is not None and last.end_ns > before_ns:
            stalls.append(
                Stall(
                    run=step.run,
                    method=step.method,
                    step=step.index,
                    kernel=step.name,
                    begin_ns=before_ns,
                    stall_ns=last.end_ns - before_ns,
                    weight=last.name,
                    copy_bytes=last.nbytes,
                    copy_ns=last.end_ns - last.begin_ns,
                )
            )
        before_ns = step.end_ns
    return stalls


def traced_runs(events: Sequence[TraceEvent], stalls: Sequence[Stall]) -> list[TracedRun]:
    """In the order of their numbers. A copy counts toward the run that issued it."""
    runs: dict[int, list[TraceEvent]] = defaultdict(list)
    for event in events:
        runs[event.run].append(event)
    stalled_ns: Counter[int] = Counter()
    for stall in stalls:
        stalled_ns[stall.run] += stall.stall_ns
    found: list[TracedRun] = []
    for number, own in sorted(runs.items()):
        steps, copies = _steps(own), [event for event in own if event.lane == "copy"]
        if not steps:
            continue  # it failed before its first step ended
        found.append(
            TracedRun(
                run=number,
                method=steps[0].method,
                begin_ns=steps[0].begin_ns,
                end_ns=steps[-1].end_ns,
                steps=len(steps),
                copies=len(copies),
                bytes_copied=sum(copy.nbytes for copy in copies),
                copy_ns=sum(copy.end_ns - copy.begin_ns for copy in copies),
                stall_ns=stalled_ns[number],
            )
        )
    return found


def _steps(events: Sequence[TraceEvent]) -> list[TraceEvent]:
    return sorted((event for event in events if event.lane == "compute"), key=lambda event: event.begin_ns)


def _end_ns(event: TraceEvent) -> int:
    return event.end_ns


def _last_by(copies: Sequence[TraceEvent], moment_ns: int) -> TraceEvent | None:
    """The last copy that had ended by then. `copies` are in the order of their ends."""
    count = bisect_right(copies, moment_ns, key=_end_ns)
    return copies[count - 1] if count else None


def _cargo(event: TraceEvent, plan: Plan | None) -> _Cargo:
    return ("", event.name) if plan is None else (event.method, plan.method(event.method).copies[event.index].stay)


def _readings(schedule: Schedule, plan: Plan | None) -> list[list[_Cargo]]:
    """For each step, what it reads that copies bring. Only the first step that reads an access can wait for it."""
    read: list[list[_Cargo]] = [[] for _ in schedule.steps]
    placements = None if plan is None else plan.method(schedule.method).placements
    for position, access in enumerate(schedule.accesses):
        step = schedule.first_step[access.number]
        if placements is None:
            read[step].append(("", access.weight))
            continue
        stay = placements[position].stay
        if stay is not None:
            read[step].append((schedule.method, stay))
    return read
