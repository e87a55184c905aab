"""Drives a session as compiled code with experts would, without torch: rows are taken by an index that tests choose.

Every row that comes out is compared with the weights file when it has come out, on the stream that took it; calls, hits
and misses of every bank are those of a cache that is written apart from the core's (tests/experts/reference.py).
"""

from __future__ import annotations

import ctypes
import functools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from penstock.errors import DriverCallError
from penstock.plan.check import check_plan
from penstock.plan.experts import Slots, find_banks, with_slots
from penstock.plan.plan import Plan
from penstock.plan.planner import Planner
from penstock.schedule import Access, Schedule, Step
from penstock.weight import Weight
from tests.experts.reference import ReferenceTable
from tests.native.session import take_rows
from tests.runtime.session_harness import INLINE, PAGE, Captured, Model, RunFailed, SessionHarness

EXPERTS = 16
# Of the two weights of a layer: pages and experts do not end together.
ROW_BYTES = (1040, 528)
POISON = 0xFF


def schedule_of(method: str, reads: Sequence[tuple[str, int | None]]) -> Schedule:
    """Weights, each with the index that its rows are taken by, or None. One step for each."""
    accesses = tuple(
        Access(number, name, gathered=routing is not None, routing=routing)
        for number, (name, routing) in enumerate(reads)
    )
    return Schedule(method, accesses, tuple(Step(f"k{number}", (number,)) for number in range(len(accesses))))


@functools.cache
def _base_plan(schedules: tuple[Schedule, ...], weights: tuple[Weight, ...], spare_bytes: int) -> Plan:
    """Experts are read where they lie, and have no slots yet."""
    by_name = {weight.name: weight for weight in weights}
    planner = Planner(schedules, by_name, page_bytes=PAGE, placement="auto")
    return planner.plan(planner.floor_bytes) if not spare_bytes else _without_banks(planner, spare_bytes)


def _without_banks(planner: Planner, spare_bytes: int) -> Plan:
    """Slots are for tests to give: what the planner would give them is left to prefixes of what streams."""
    plan = planner.plan(planner.floor_bytes + spare_bytes)
    assert not plan.banks
    return plan


@dataclass(frozen=True)
class ExpertModel(Model):
    def with_slots(self, *slots: int, names: Sequence[str] = (), spare_bytes: int = 0) -> Plan:
        """At the floor, and so many slots for each bank, in the order of the first method; by name of their weight."""
        banks = find_banks(self.schedules, self.weights, set(self.weights))
        base = _base_plan(self.schedules, tuple(self.weights.values()), spare_bytes)
        given = dict(zip(names or [bank.names[0] for bank in banks], slots, strict=True))
        plan = with_slots(base, self.schedules, self.weights, banks, Slots({n: s for n, s in given.items() if s}))
        check_plan(plan, self.schedules, self.weights)
        return plan


def write_experts(
    path: Path, schedules: Sequence[Schedule], shapes: Mapping[str, tuple[int, ...]], seed: int = 0
) -> ExpertModel:
    """Every expert has bytes of its own."""
    draw = random.Random(seed)
    offsets: dict[str, int] = {}
    data = bytearray()
    weights = {name: Weight(name, "uint8", shape, tuple(range(len(shape)))) for name, shape in shapes.items()}
    for name, weight in weights.items():
        data += bytes(-len(data) % PAGE)
        offsets[name] = len(data)
        data += draw.randbytes(weight.nbytes)
    path.write_bytes(data)
    return ExpertModel(tuple(schedules), weights, offsets, path)


def layers(folder: Path, *, experts: int = EXPERTS, count: int = 2, plain_pages: int = 2) -> ExpertModel:
    """Two methods: one after the other, and back; the second takes the last layer's experts twice, by two indices.

    Plain weights between them stream."""
    there: list[tuple[str, int | None]] = []
    for layer in range(count):
        there += [(f"w{layer}", None), (f"gate{layer}", layer), (f"v{layer}", None), (f"down{layer}", layer)]
    back: list[tuple[str, int | None]] = [(f"gate{count - 1}", 70), (f"down{count - 1}", 70)]
    for layer in reversed(range(count)):
        back += [(f"v{layer}", None), (f"down{layer}", layer), (f"gate{layer}", layer), (f"w{layer}", None)]
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(count):
        shapes |= {f"w{layer}": (plain_pages * PAGE,), f"v{layer}": (plain_pages * PAGE - 100,)}
        shapes |= {f"gate{layer}": (experts, ROW_BYTES[0]), f"down{layer}": (experts, ROW_BYTES[1])}
    schedules = [schedule_of("there", there), schedule_of("back", back)]
    return write_experts(folder / "weights.ptd", schedules, shapes)


@dataclass
class Rows:
    """What one call of take_rows reads and writes: both live as long as a kernel may."""

    name: str
    label: str
    index: Any
    out: Any


@dataclass
class Routed:
    """Of a graph: the index of each routing, and by whose index it chooses from which bank, in order."""

    index: dict[int, Any] = field(default_factory=dict)
    chooses: list[tuple[int, int]] = field(default_factory=list)


Ask = Callable[[int], Sequence[int]]


class ExpertHarness(SessionHarness):
    """`ask`: by routing, what the next run's index holds. By default some experts, more often those of the last run."""

    model: ExpertModel

    def __init__(self, model: ExpertModel, *, rows: int = 3, **options: Any) -> None:
        self.tables: list[ReferenceTable] = []
        self._failed_owner: int | None = None
        self.rows = rows
        self.ask: Ask = self._drawn
        self._draw = random.Random(options.get("seed", 1))
        self._asked: dict[int, Sequence[int]] = {}
        self._last_asked: dict[int, list[int]] = {}
        self._routed: dict[int, Routed] = {}  # by the number of a graph
        self._capturing_routed = Routed()
        self._rows: list[Rows] = []
        self._wrong: list[str] = []
        self._taken = self._due = 0
        self._run_counts: dict[int, list[int]] = {}  # by bank: hits and misses of the last run
        self._counted = [0, 0, 0]  # hits, misses, and bytes of these, of plans that are gone
        super().__init__(model, **options)

    # A run that failed has no owner: the tables are empty then.

    @property
    def _owner(self) -> int | None:  # type: ignore[override]
        return self._failed_owner

    @_owner.setter
    def _owner(self, owner: int | None) -> None:
        self._failed_owner = owner
        if owner is None:
            self._run_counts = {}
            for table in self.tables:
                table.empty()

    def _drawn(self, routing: int) -> Sequence[int]:
        """As tokens that follow one another do: duplicates, negative numbers, and experts of the last run."""
        experts = next(
            self.model.weights[access.weight].shape[0]
            for schedule in self.model.schedules
            for access in schedule.accesses
            if access.routing == routing
        )
        last = self._last_asked.get(routing, [])
        found = [
            self._draw.choice(last)
            if last and self._draw.random() < 0.5
            else min(int(self._draw.expovariate(4 / experts)), experts - 1)
            for _ in range(self.rows)
        ]
        self._last_asked[routing] = found
        return [one - experts if self._draw.random() < 0.2 else one for one in found]

    def install_plan(self, plan: Plan) -> Plan:
        before, tables = self.plan, self.tables
        super().install_plan(plan)
        for bank, table in zip(before.banks if before is not None else (), tables, strict=True):
            self._counted[0] += table.hits
            self._counted[1] += table.misses
            self._counted[2] += table.misses * bank.row_bytes
        self.tables = [ReferenceTable(bank.experts, bank.slots) for bank in plan.banks]
        return plan

    # What compiled code does.

    def begin(self, method: int = 0, stream: int = INLINE) -> None:
        super().begin(method, stream)
        self._asked, self._run_counts = {}, {}

    def steps(self, method: int = 0, stream: int = INLINE, *, delay_ns: int | None = None) -> Iterator[int]:
        schedule = self.model.schedules[method]
        self._method = method
        for index, access in enumerate(schedule.accesses):
            label = f"method {method} step {index}"
            address = self.acquire(access.number)
            if self._bank(index) is None:
                self.read(address, access.weight, stream, label, delay_ns)
            else:
                self.take(access, stream, label)
            yield index
            self.done(index)

    def _bank(self, position: int) -> int | None:
        assert self.plan is not None
        placed = self.plan.methods[self._method].placements[position]
        return placed.bank if placed.has_slots else None

    def index_of(self, routing: int) -> Any:
        """The index of this run: the same for all weights of a bank."""
        if self._capturing:
            held = self._capturing_routed.index
            if routing not in held:
                held[routing] = _numbers(self.ask(routing))
            return held[routing]
        if routing not in self._asked:
            self._asked[routing] = self.ask(routing)
        return _numbers(self._asked[routing])

    def take(self, access: Access, stream: int, label: str = "") -> None:
        assert access.routing is not None and self.plan is not None
        weight, index = self.model.weights[access.weight], self.index_of(access.routing)
        placed = self.plan.methods[self._method].placements[self._position(access.number)]
        out = (ctypes.c_ubyte * (len(index) * weight.row_bytes))()
        ctypes.memset(out, POISON, len(out))
        rows = Rows(access.weight, label, index, out)
        self._rows.append(rows)
        refused = take_rows(self.session, access.number, index, out)
        # A choice that was launched is made, whatever comes of the move behind it.
        if placed.chooses and (not refused or self.driver.failed_call() == "move_experts"):
            assert placed.bank is not None
            if self._capturing:
                self._capturing_routed.chooses.append((placed.bank, access.routing))
            else:
                self._choose(placed.bank, list(index))
        if refused:
            self._give_up()
        self._due += not self._capturing
        self.driver.call(stream, lambda: self._look_at(rows))

    def _position(self, number: int) -> int:
        accesses = self.model.schedules[self._method].accesses
        return next(at for at, access in enumerate(accesses) if access.number == number)

    def _choose(self, bank: int, index: Sequence[int]) -> None:
        table = self.tables[bank]
        counts = self._run_counts.setdefault(bank, [0, 0])
        hits, misses = table.take(one % table.experts for one in index)
        counts[0] += hits
        counts[1] += misses

    def _look_at(self, rows: Rows) -> None:
        """On the stream, behind the kernel: what it has read is in `out`, and goes."""
        weight, content = self.model.weights[rows.name], self.model.content[rows.name]
        size = weight.row_bytes
        wanted = b"".join(content[(one % weight.shape[0]) * size :][:size] for one in rows.index)
        if bytes(rows.out) != wanted:
            self._wrong.append(f"{rows.label}: rows {list(rows.index)} of {rows.name}")
        ctypes.memset(rows.out, POISON, len(rows.out))
        self._taken += 1

    # Graphs: an index is written in the order of the stream, as an input is.

    def capture(self, method: int = 0, stream: int | None = None, **options: Any) -> Captured:
        self._capturing_routed = Routed()
        made = super().capture(method, stream, **options)
        self._routed[made.number] = self._capturing_routed
        return made

    def _before_launch(self, captured: Captured, stream: int) -> None:
        routed = self._routed[captured.number]
        self._asked, self._run_counts = {}, {}
        for routing, index in routed.index.items():
            asked = _numbers(self.ask(routing))
            assert len(asked) == len(index), "a graph takes as many rows every time"
            self._asked[routing] = list(asked)
            self._rows.append(Rows("", "", asked, index))
            copy = functools.partial(ctypes.memmove, index, asked, ctypes.sizeof(index))
            self.driver.call(stream, copy)

    def _launched(self, captured: Captured) -> None:
        takes = [
            access
            for position, access in enumerate(self.model.schedules[captured.method].accesses)
            if self._bank(position) is not None
        ]
        self._due += len(takes)
        for bank, routing in self._routed[captured.number].chooses:
            self._choose(bank, self._asked[routing])

    # What was counted.

    def check_hashes(self) -> int:
        assert not self._wrong, f"rows that are other bytes than the file's: {self._wrong}"
        return super().check_hashes()

    def check(self) -> int:
        found = super().check() + self._taken
        assert self._taken == self._due, f"{self._taken} of {self._due} calls for rows have come to their end"
        self._taken = self._due = 0
        # What a graph reads and writes is kept as long as it.
        self._rows = [rows for rows in self._rows if any(rows.index is one for one in self._graph_indices())]
        self.check_experts()
        return found

    def _graph_indices(self) -> list[Any]:
        return [index for routed in self._routed.values() for index in routed.index.values()]

    def check_experts(self) -> None:
        assert self.plan is not None
        counted = self.session.expert_counts()
        assert counted == [(table.taken, table.hits, table.misses) for table in self.tables]
        total = self.session.stats()[1]
        misses_bytes = sum(t.misses * b.row_bytes for t, b in zip(self.tables, self.plan.banks, strict=True))
        assert total.expert_hits == self._counted[0] + sum(table.hits for table in self.tables)
        assert total.expert_misses == self._counted[1] + sum(table.misses for table in self.tables)
        assert total.expert_bytes == self._counted[2] + misses_bytes

    def check_counters(self) -> None:
        super().check_counters()
        assert self.plan is not None
        last = self.session.stats()[0]
        assert last.expert_hits == sum(hits for hits, _ in self._run_counts.values())
        assert last.expert_misses == sum(misses for _, misses in self._run_counts.values())
        assert last.expert_bytes == sum(
            misses * self.plan.banks[bank].row_bytes for bank, (_, misses) in self._run_counts.items()
        )

    def give_up(self) -> None:
        """A run that the program itself gives up, wherever it is."""
        self.session.abort()
        self._owner = None

    def fails(self, run: Callable[[], object], call: str, n: int = 1) -> None:
        """A driver call of it fails; what had been taken by then was right."""
        self.driver.fail_at(n, call=call)
        try:
            run()
            raise AssertionError(f"a failed {call} went unnoticed")
        except (DriverCallError, RunFailed):
            if self.driver.failed_call() != call:
                raise
        finally:
            self.driver.fail_at(0)


def _numbers(values: Sequence[int]) -> Any:
    return (ctypes.c_int64 * len(values))(*values)


def with_first(plan: Plan, **changes: Any) -> Plan:
    """The first bank, changed."""
    return replace(plan, banks=(replace(plan.banks[0], **changes), *plan.banks[1:]))
