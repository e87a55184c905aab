"""Drives a native session over the soft driver as compiled code would, without torch, and checks every byte lent."""

from __future__ import annotations

import ctypes
import functools
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from penstock.errors import CaptureError, PenstockError, WeightsChangedError
from penstock.plan.plan import Plan, Traffic
from penstock.runtime.records import Numbers, lru_numbers, plan_numbers
from penstock.runtime.session import Stats
from penstock.schedule import Access, Schedule, Step
from penstock.weight import Weight
from tests.native.session import HostSource, acquire, copy_stream, done, link_stream, make_session
from tests.plan.planning import full_bytes, make_plan, placed_floor
from tests.runtime.soft import SoftDriver, hash_of

PAGE = 4096
INLINE = 0  # the stream that is the calling thread
MS = 1_000_000


def chain(*steps: str, method: str = "forward") -> Schedule:
    """chain("a", "b c") has two steps, the second reads two weights. "!p" pins p, "~t" gathers from t."""
    accesses: list[Access] = []
    emitted: list[Step] = []
    for index, names in enumerate(steps):
        first = len(accesses)
        accesses += [
            Access(first + k, name.lstrip("!~"), name[0] == "!", name[0] == "~") for k, name in enumerate(names.split())
        ]
        emitted.append(Step(f"k{index}", tuple(range(first, len(accesses)))))
    return Schedule(method, tuple(accesses), tuple(emitted))


# The same small programs are written again and again: each is planned once.
@functools.cache
def _floor_bytes(schedules: tuple[Schedule, ...], weights: tuple[Weight, ...]) -> int:
    return placed_floor(schedules, {weight.name: weight for weight in weights}, page_bytes=PAGE).floor_bytes


@functools.cache
def _plan(schedules: tuple[Schedule, ...], weights: tuple[Weight, ...], budget_bytes: int) -> Plan:
    by_name = {weight.name: weight for weight in weights}
    lowest = placed_floor(schedules, by_name, page_bytes=PAGE)
    if budget_bytes == lowest.floor_bytes:
        # Where everything that may stream does, as a whole: a planner may find something that moves less.
        return lowest.plan
    return make_plan(schedules, by_name, budget_bytes=budget_bytes, page_bytes=PAGE)


@dataclass(frozen=True)
class Model:
    """Schedules, and a weights file whose every weight has bytes of its own. Weights begin on pages."""

    schedules: tuple[Schedule, ...]
    weights: Mapping[str, Weight]
    offsets: Mapping[str, int]
    path: Path

    @cached_property
    def content(self) -> dict[str, bytes]:
        data = self.path.read_bytes()
        return {name: data[self.offsets[name] :][: weight.nbytes] for name, weight in self.weights.items()}

    @cached_property
    def hashes(self) -> dict[str, int]:
        return {name: hash_of(data) for name, data in self.content.items()}

    @cached_property
    def file_bytes(self) -> int:
        return self.path.stat().st_size

    @property
    def extents(self) -> list[tuple[int, int]]:
        """Where each weight lies in the file."""
        return [(self.offsets[name], weight.nbytes) for name, weight in self.weights.items()]

    @property
    def packed(self) -> Numbers | None:
        """Where weights are packed in the file: tests/runtime/packed_models.py."""
        return None

    @cached_property
    def floor_bytes(self) -> int:
        return _floor_bytes(self.schedules, tuple(self.weights.values()))

    @cached_property
    def full_bytes(self) -> int:
        return full_bytes(self.schedules, self.weights, page_bytes=PAGE)

    def plan(self, budget_bytes: int) -> Plan:
        return _plan(self.schedules, tuple(self.weights.values()), budget_bytes)

    def budgets(self, steps: int) -> list[int]:
        """From the floor to everything resident."""
        pages, last = self.floor_bytes // PAGE, self.full_bytes // PAGE
        return sorted({PAGE * (pages + (last - pages) * k // steps) for k in range(steps + 1)})

    def registered(self, chunks: int = 3) -> HostSource:
        """Chunks that end where weights begin, so that no copy spans two."""
        starts = sorted(offset for offset in set(self.offsets.values()) if 0 < offset < self.file_bytes)
        ends = starts[:: max(len(starts) // chunks, 1)] if chunks > 1 else []
        return HostSource(chunk_ends=(*ends, -(-self.file_bytes // PAGE) * PAGE))


def write_model(path: Path, schedules: Sequence[Schedule], sizes: Mapping[str, int], seed: int = 0) -> Model:
    rng = random.Random(seed)
    offsets: dict[str, int] = {}
    data = bytearray()
    for name, nbytes in sizes.items():
        data += bytes(-len(data) % PAGE)
        offsets[name] = len(data)
        data += rng.randbytes(nbytes)
    path.write_bytes(data or b"\0")
    weights = {name: Weight(name, "uint8", (nbytes,), (0,)) for name, nbytes in sizes.items()}
    return Model(tuple(schedules), weights, offsets, path)


def staged(buffer_bytes: int = 3000, buffers: int = 3, threads: int = 2) -> HostSource:
    return HostSource(staging_buffer_bytes=buffer_bytes, staging_buffers=buffers, staging_threads=threads)


class RunFailed(Exception):
    """The session refused an access or a step. The error is the session's own."""

    def __init__(self, error: PenstockError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass
class Captured:
    """A run of a method as a graph of the soft driver. Its kernels compare what they read, every time they run."""

    number: int
    method: int
    kernels: int
    launches: int = 0


class SessionHarness:
    """One session on one driver. `kernel_ns`: each kernel first sleeps a random time of at most this."""

    def __init__(
        self,
        model: Model,
        *,
        lru: bool = False,
        poison: bool = True,
        source: HostSource | None = None,
        driver: SoftDriver | None = None,
        seed: int = 1,
        kernel_ns: int = 0,
    ) -> None:
        self.model = model
        self.lru = lru
        self.kernel_ns = kernel_ns
        self.plan: Plan | None = None
        self._random = random.Random(seed)
        self._poison = poison
        self._own_driver = driver is None
        self.driver = SoftDriver(PAGE, 0, poison) if driver is None else driver
        self._hashes: list[tuple[str, str, ctypes.c_uint64]] = []
        self._graphs: list[Captured] = []
        self._capturing = False
        # What kernels of graphs have found, right or wrong.
        self._compared: list[tuple[str, str, bool]] = []
        self._streams: list[int] = []
        self._method = 0
        self._owner: int | None = None
        # What the plan says of the last run, and of all runs together.
        self.last = self.expected = Traffic(0, 0, 0, 0)
        self.session = make_session(
            self.driver,
            model.path,
            model.registered() if source is None else source,
            extents=model.extents,
            lru=lru,
            device_index=0,
            poison=poison,
            packed=model.packed,
        )

    def close(self) -> None:
        """The session first: what it leaves behind is then the driver's whole count."""
        self.session.close()
        for stream in self._streams:
            self.driver.destroy_stream(stream)
        self._streams.clear()
        alive = self.driver.counts().alive()
        assert not alive, alive
        if self._own_driver:
            self.driver.close()

    def __enter__(self) -> SessionHarness:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.session.close()

    def stream(self, *, late: bool = False) -> int:
        """`late`: what is launched there runs when somebody waits for it, after all that other streams can do."""
        self._streams.append(self.driver.create_stream())
        if late:
            self.driver.set_late(self._streams[-1], True)
        return self._streams[-1]

    @contextmanager
    def late_copies(self) -> Iterator[None]:
        """Copies are made when somebody waits for them."""
        with self._late(copy_stream(self.session)):
            yield

    @contextmanager
    def late_link(self) -> Iterator[None]:
        """Packed weights reach their slots when somebody waits for them."""
        with self._late(self.link_stream):
            yield

    @property
    def link_stream(self) -> int:
        return link_stream(self.session)

    @contextmanager
    def _late(self, stream: int) -> Iterator[None]:
        self.driver.set_late(stream, True)
        try:
            yield
        finally:
            # Of a session that was closed meanwhile the stream is gone.
            if self.session._handle is not None:
                self.driver.set_late(stream, False)

    def install(self, budget_bytes: int) -> Plan:
        plan = self.model.plan(budget_bytes)
        assert plan.device_bytes <= budget_bytes
        return self.install_plan(plan)

    def install_plan(self, plan: Plan) -> Plan:
        self._owner, self.plan = None, None
        self.session.install(plan_numbers(plan, self.model.weights))
        self.plan = plan
        return plan

    def install_lru(self, budget_bytes: int, granularity_bytes: int = PAGE) -> None:
        self.session.install(
            lru_numbers(
                self.model.schedules,
                self.model.weights,
                budget_bytes=budget_bytes,
                granularity_bytes=granularity_bytes,
            )
        )

    # What compiled code does.

    def acquire(self, number: int) -> int:
        address = ctypes.c_uint64()
        if acquire(self.session, number, ctypes.byref(address)):
            self._give_up()
        return address.value

    def done(self, step: int) -> None:
        done(self.session, step)

    def _give_up(self) -> None:
        if not self._capturing:
            self._owner = None
        error = self.session.abort()
        assert error is not None, "an access was refused without a reason"
        raise RunFailed(error)

    def read(self, address: int, name: str, stream: int, label: str = "", delay_ns: int | None = None) -> None:
        """A kernel that reads the whole weight."""
        if delay_ns is None:
            delay_ns = self._random.randrange(self.kernel_ns) if self.kernel_ns else 0
        nbytes = self.model.weights[name].nbytes
        if nbytes:
            out = self.driver.hash(stream, address, nbytes, delay_ns)
            self._hashes.append((name, label, out))
            if self._capturing:
                self.driver.call(stream, lambda: self._compare(name, label, out))

    def _compare(self, name: str, label: str, out: ctypes.c_uint64) -> None:
        self._compared.append((name, label, out.value == self.model.hashes[name]))
        out.value = 0

    def steps(self, method: int = 0, stream: int = INLINE, *, delay_ns: int | None = None) -> Iterator[int]:
        """Runs the schedule step by step, and stops after the launches of each, before its end is told."""
        schedule = self.model.schedules[method]
        addresses: dict[int, int] = {}
        for index, step in enumerate(schedule.steps):
            for access in schedule.accesses:
                if schedule.first_step[access.number] == index:
                    addresses[access.number] = self.acquire(access.number)
            for number in step.accesses:
                name = schedule.access_by_number[number].weight
                self.read(addresses[number], name, stream, f"method {method} step {index}", delay_ns)
            yield index
            self.done(index)

    def begin(self, method: int = 0, stream: int = INLINE) -> None:
        self._method = method
        try:
            self.session.begin(method, stream)
        except (CaptureError, WeightsChangedError):
            raise  # nothing was touched: what was copied ahead still is
        except PenstockError:
            if self.driver.failed_call() != "is_capturing":
                self._owner = None
            raise

    def end(self) -> None:
        try:
            self.session.end()
        except PenstockError:
            self._owner = None
            raise
        self._count()

    def _count(self) -> None:
        if self.plan is not None:
            planned = self.plan.methods[self._method]
            self.last = planned.warm if self._owner == self._method else planned.cold
            self.expected = _sum(self.expected, self.last)
        self._owner = self._method

    def run(self, method: int = 0, stream: int = INLINE, *, delay_ns: int | None = None, check: bool = True) -> None:
        """One run. With `check`, waits for it and compares its counters with the plan's (S7)."""
        self.begin(method, stream)
        for _ in self.steps(method, stream, delay_ns=delay_ns):
            pass
        self.end()
        if check:
            self.check()
            if self.plan is not None:
                self.check_counters()

    def capture(
        self,
        method: int = 0,
        stream: int | None = None,
        *,
        delay_ns: int | None = None,
        after_step: Callable[[int], None] = lambda step: None,
    ) -> Captured:
        """As torch does it: on a stream of its own, and nothing runs. `after_step` may launch more."""
        stream = stream or self.stream()
        kept, self._hashes = self._hashes, []
        self._capturing = True
        try:
            self.session.begin_capture(method, stream)
            for step in self.steps(method, stream, delay_ns=delay_ns):
                after_step(step)
            number = self.session.end_capture()
        finally:
            self._capturing = False
            hashes, self._hashes = self._hashes, kept
        made = Captured(number, method, len(hashes))
        self._graphs.append(made)
        return made

    def replay(self, captured: Captured, stream: int, *, order: int = 0, seed: int = 1, check: bool = True) -> None:
        self._method = captured.method
        try:
            self.session.begin_replay(captured.number, stream)
        except PenstockError:
            if self.driver.failed_call() != "is_capturing":
                self._owner = None
            raise
        self.driver.set_order(order, seed)
        self._before_launch(captured, stream)
        try:
            self.session.launch()
        except PenstockError:
            self.session.abort()
            self._owner = None
            raise
        captured.launches += 1
        self._launched(captured)
        try:
            self.session.end_replay()
        except PenstockError:
            self._owner = None
            raise
        self._count()
        if check:
            self.check()
            self.check_counters()

    def _before_launch(self, captured: Captured, stream: int) -> None:
        """For what a graph is to find in its inputs."""

    def _launched(self, captured: Captured) -> None:
        pass

    def check_graphs(self) -> int:
        """Of launches that are known to have ended; how many kernels there were."""
        wrong = [(name, label) for name, label, right in self._compared if not right]
        assert not wrong, f"kernels of graphs that read other bytes than the file's: {wrong}"
        count = len(self._compared)
        assert count == sum(captured.kernels * captured.launches for captured in self._graphs)
        self._compared.clear()
        for captured in self._graphs:
            captured.launches = 0
        return count

    def check_counters(self) -> None:
        """S7: of the last run, and of all."""
        last, total = self.session.stats()
        assert _traffic(last) == self.last
        assert _traffic(total) == self.expected

    def await_kernels(self, stream: int) -> None:
        """Waits for a stream that has not failed, without a call that the driver counts."""
        reached = threading.Event()
        self.driver.call(stream, reached.set)
        assert reached.wait(60), "the stream does not get there"

    def drain(self) -> None:
        for stream in self._streams:
            self.driver.synchronize_stream(stream)
        self.session.drain()

    def check(self) -> int:
        """Waits for everything; every kernel must have read the weight's own bytes. Returns how many there were."""
        self.drain()
        return self.check_hashes() + self.check_graphs()

    def check_hashes(self) -> int:
        """Of kernels that are known to have ended."""
        wrong = [(name, label) for name, label, out in self._hashes if out.value != self.model.hashes[name]]
        assert not wrong, f"kernels that read other bytes than the file's: {wrong}"
        count = len(self._hashes)
        self._hashes.clear()
        return count

    def check_memory(self, budget_bytes: int) -> None:
        """S4, by the driver's own count of physical bytes."""
        assert self.plan is not None
        counts = self.driver.counts()
        assert counts.block_bytes == self.plan.device_bytes
        assert counts.peak_block_bytes <= budget_bytes
        assert self.session.memory() == (counts.block_bytes, counts.peak_block_bytes)


def _traffic(stats: Stats) -> Traffic:
    return Traffic(stats.bytes_streamed, stats.copies, stats.bytes_hit, stats.bytes_in_place, stats.bytes_decoded)


def _sum(one: Traffic, other: Traffic) -> Traffic:
    return Traffic(*(mine + yours for mine, yours in zip(astuple(one), astuple(other), strict=True)))


@contextmanager
def slow_copies(driver: SoftDriver, max_ns: int, seed: int = 7) -> Iterator[None]:
    """Everything that streams do is late by up to `max_ns`; what the inline stream does is not."""
    driver.set_delays(seed, max_ns)
    try:
        yield
    finally:
        driver.set_delays(0, 0)


def models(folder: Path) -> dict[str, Model]:
    """Small programs that between them have every shape a schedule can have."""
    sizes: dict[str, int] = {f"w{i}": (1 + i % 3) * PAGE - (i % 2) * 100 for i in range(9)}
    names = list(sizes)
    tied = {**sizes, "tied": 3 * PAGE + 17}
    long_reads = Schedule(
        "forward",
        tuple(Access(10 + i, name) for i, name in enumerate(names)),
        tuple(Step(f"k{i}", (10 + i, 10 + max(i - 2, 0))[: 1 + (i > 1)]) for i in range(len(names))),
    )
    small = {**sizes, "s0": 8, "s1": 300, "none": 0, "p": 5000}
    prefill = chain(*names, "tied", method="prefill")
    decode = chain("tied", *reversed(names), "tied", method="decode")
    made: dict[str, Any] = {
        "chain": ((chain(*names),), sizes),
        "tied": ((chain("tied", *names, "tied"),), tied),
        "pairs": ((chain("w0 w1", "w2", "w3 w4", "w5 w0", "w6", "w7 w8"),), sizes),
        "long_reads": ((long_reads,), sizes),
        "small": ((chain("s0 w0", "none w1", "w2 !p", "w3 s1", "w4", "none", "w5"),), small),
        "methods": ((prefill, decode, chain("w1", "w3", "w5", "w7", method="third")), tied),
    }
    return {name: write_model(folder / f"{name}.ptd", schedules, of) for name, (schedules, of) in made.items()}
