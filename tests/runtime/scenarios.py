"""One scenario per wait: each makes the other side late on purpose, so that without the wait it goes wrong every time.

`python -m tests.runtime.scenarios NAME` plays one; what goes wrong without a wait may well end the process.
"""

from __future__ import annotations

import ctypes
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from penstock.errors import PenstockError, WeightsChangedError
from penstock.plan.check import check_plan
from penstock.plan.plan import Block, Copy, MethodPlan, Piece, Placement, Plan, Range, Stay
from tests.runtime.rig import INLINE, MS, PAGE, Model, Rig, RunFailed, chain, models, slow_copies, staged, write_model
from tests.runtime.soft import SoftDriver, SoftError, library

# Long against what the host needs to get ahead, even on a busy machine.
KERNEL_NS = 30 * MS
COPY_NS = 20 * MS

# Orders in which the soft driver runs the nodes of a graph.
COPIES_FIRST, KERNELS_FIRST = 0, 1

SCENARIOS: dict[str, Callable[[Path], None]] = {}


def scenario(body: Callable[[Path], None]) -> Callable[[Path], None]:
    SCENARIOS[body.__name__] = body
    return body


def _chain(folder: Path) -> Model:
    names = [f"w{i}" for i in range(6)]
    return write_model(folder / "weights.ptd", [chain(*names)], dict.fromkeys(names, 2 * PAGE))


def _memory(address: int, nbytes: int) -> bytes:
    return ctypes.string_at(address, nbytes)


# ---- the order of kernels and copies


@scenario
def copies_wait_for_readers(folder: Path) -> None:
    model = _chain(folder)
    with Rig(model) as rig:
        rig.install(model.floor_bytes)
        stream = rig.stream()
        for _ in range(2):
            rig.run(stream=stream, delay_ns=KERNEL_NS, check=False)
        assert rig.check() == 12


@scenario
def kernels_wait_for_copies(folder: Path) -> None:
    model = _chain(folder)
    with Rig(model) as rig:
        rig.install(model.floor_bytes)
        with slow_copies(rig.driver, COPY_NS):
            rig.run()


@scenario
def residents_are_in_place_before_a_run(folder: Path) -> None:
    model = _chain(folder)
    with Rig(model) as rig, slow_copies(rig.driver, COPY_NS):
        rig.install(model.full_bytes)
        rig.run()


@scenario
def the_link_is_measured(folder: Path) -> None:
    model = _chain(folder)
    with Rig(model) as rig:
        with slow_copies(rig.driver, COPY_NS):
            rig.install(model.floor_bytes)
        (sample,) = rig.session.link()
        assert sample.ns > 0
        rig.run()


@scenario
def runs_follow_one_another(folder: Path) -> None:
    model = _chain(folder)
    order: list[int] = []
    with Rig(model) as rig:
        rig.install(model.full_bytes)
        for run in range(3):
            stream = rig.stream()
            rig.begin(stream=stream)
            for _ in rig.steps(stream=stream, delay_ns=0):
                rig.driver.launch_sleep(stream, (2 - run) * 10 * MS)
                rig.driver.call(stream, lambda run=run: order.append(run))  # type: ignore[misc]
            rig.end()
        rig.check()
    assert order == sorted(order) and len(order) == 18


@scenario
def a_method_waits_for_the_last_one(folder: Path) -> None:
    model = models(folder)["methods"]
    with Rig(model) as rig:
        rig.install(model.floor_bytes)
        streams = [rig.stream(), rig.stream()]
        for run, method in enumerate((0, 1, 0, 2)):
            rig.run(method, streams[run % 2], delay_ns=KERNEL_NS // 2, check=False)
        assert rig.check() > 30


@scenario
def staging_follows_the_method(folder: Path) -> None:
    model = models(folder)["methods"]
    with Rig(model, source=staged()) as rig:
        rig.install(model.floor_bytes)
        for method in (0, 1, 0, 0, 2, 2):
            rig.run(method)


# ---- failed runs


@scenario
def a_failed_run_is_waited_for(folder: Path) -> None:
    model = _chain(folder)
    with Rig(model) as rig:
        rig.install(model.floor_bytes)
        stream = rig.stream()
        rig.begin(stream=stream)
        address = rig.acquire(0)
        out = rig.driver.hash(stream, address, model.weights["w0"].nbytes, 2 * KERNEL_NS)
        try:
            rig.acquire(999)
        except RunFailed:
            assert out.value == model.hashes["w0"], "the run was given up while its kernel was at work"
        rig.run(stream=stream)


@scenario
def copies_of_a_failed_run_have_ended(folder: Path) -> None:
    model = _chain(folder)
    with Rig(model) as rig:
        plan = rig.install(model.floor_bytes)
        rig.begin()
        addresses = {}
        for access in model.schedules[0].accesses:
            addresses[access.number] = rig.acquire(access.number)
            rig.done(access.number)
        rig.end()
        rig.session.begin(0, INLINE)
        assert rig.session.abort() is None
        method = plan.methods[0]
        entering = [method.stays[method.copies[index].stay] for index in method.entering]
        assert entering
        # The ring is invalid now, so that the next run copies what it starts from.
        with slow_copies(rig.driver, COPY_NS):
            rig.begin()
            try:
                rig.acquire(999)
            except RunFailed:
                for stay in entering:
                    held = _memory(addresses[stay.accesses[0]], model.weights[stay.weight].nbytes)
                    assert held == model.content[stay.weight], f"{stay.weight} was still on its way"
        rig.run()


@scenario
def a_run_that_could_not_begin_leaves_the_last_one_alone(folder: Path) -> None:
    model = models(folder)["methods"]
    with Rig(model) as rig:
        rig.install(model.floor_bytes)
        slow, other = rig.stream(), rig.stream()
        rig.run(0, slow, delay_ns=KERNEL_NS, check=False)
        rig.driver.fail_at(1, call="wait")
        try:
            rig.begin(1, other)
            raise AssertionError("the failed call went unnoticed")
        except PenstockError:
            pass
        rig.run(1, other, check=False)
        rig.check()


# ---- draining and closing


@scenario
def draining_waits_for_kernels(folder: Path) -> None:
    model = _chain(folder)
    with Rig(model) as rig:
        rig.install(model.full_bytes)
        stream = rig.stream()
        rig.begin(stream=stream)
        out = None
        for index in rig.steps(stream=stream, delay_ns=KERNEL_NS // 3):
            out = rig._hashes[index][2]
        rig.end()
        rig.session.drain()
        assert out is not None and out.value == model.hashes["w5"], "drained while a kernel was at work"
        rig.check()


@scenario
def draining_waits_for_copies(folder: Path) -> None:
    model = _chain(folder)
    with Rig(model) as rig:
        plan = rig.install(model.floor_bytes)
        addresses = {}
        with slow_copies(rig.driver, COPY_NS):
            rig.begin()
            for access in model.schedules[0].accesses:
                addresses[access.number] = rig.acquire(access.number)
                rig.done(access.number)
            rig.end()
            rig.session.drain()
            copy = plan.methods[0].copies[-1]
            last = plan.methods[0].stays[copy.stay]
            assert last.accesses[0] < copy.issue_before
            held = _memory(addresses[last.accesses[0]], model.weights[last.weight].nbytes)
            assert held == model.content[last.weight], f"drained while {last.weight} was on its way"


@scenario
def closing_waits_for_kernels(folder: Path) -> None:
    model = _chain(folder)
    for poison in (True, False):
        with Rig(model, poison=poison) as rig:
            rig.install(model.full_bytes)
            stream = rig.stream()
            rig.run(stream=stream, delay_ns=KERNEL_NS, check=False)
            rig.session.close()
            rig.driver.synchronize_stream(stream)
            assert all(out.value == model.hashes[name] for name, _, out in rig._hashes)


@scenario
def closing_waits_for_copies(folder: Path) -> None:
    model = _chain(folder)
    # With poison the closing session waits for its own writes, and so for everything before them.
    with Rig(model, poison=False) as rig:
        rig.install(model.floor_bytes)
        with slow_copies(rig.driver, COPY_NS):
            rig.run(check=False)
            rig.session.close()


@scenario
def closing_waits_for_poison(folder: Path) -> None:
    model = _chain(folder)
    with Rig(model, poison=True) as rig:
        rig.install(model.full_bytes)
        with slow_copies(rig.driver, COPY_NS):
            rig.session.close()


@scenario
def closing_in_a_run_waits_for_its_kernels(folder: Path) -> None:
    model = _chain(folder)
    with Rig(model) as rig:
        rig.install(model.floor_bytes)
        stream = rig.stream()
        rig.begin(stream=stream)
        out = rig.driver.hash(stream, rig.acquire(0), model.weights["w0"].nbytes, KERNEL_NS)
        rig.session.close()
        rig.driver.synchronize_stream(stream)
        assert out.value == model.hashes["w0"]


# ---- the least recently used


def _lru_floor(model: Model) -> int:
    from penstock.plan.floor import floor_bytes

    return floor_bytes(model.schedules, model.weights, granularity_bytes=PAGE).floor_bytes


@scenario
def lru_copies_wait_for_readers(folder: Path) -> None:
    model = _chain(folder)
    for poison in (True, False):
        with Rig(model, lru=True, poison=poison) as rig:
            rig.install_lru(_lru_floor(model))
            stream = rig.stream()
            for _ in range(2):
                rig.run(stream=stream, delay_ns=KERNEL_NS, check=False)
            assert rig.check() == 12


@scenario
def lru_kernels_wait_for_copies(folder: Path) -> None:
    model = _chain(folder)
    with Rig(model, lru=True) as rig:
        rig.install_lru(_lru_floor(model))
        with slow_copies(rig.driver, COPY_NS):
            rig.run()
            rig.check()


@scenario
def lru_waits_for_the_device_when_its_pool_refuses(folder: Path) -> None:
    """Releases that have completed make room in one piece; the soft pool needs none, so it is told to refuse."""
    model = _chain(folder)
    with Rig(model, lru=True) as rig:
        rig.install_lru(_lru_floor(model))
        stream = rig.stream()
        with slow_copies(rig.driver, COPY_NS):
            rig.begin(stream=stream)
            rig.driver.fail_at(2, call="pool_allocate")
            address = rig.acquire(0)  # the second allocation is that of the next access
            assert rig.driver.failed_call() == "pool_allocate"
            held = _memory(address, model.weights["w0"].nbytes)
            assert held == model.content["w0"], "asked again while copies were at work"
            rig.session.abort()
        rig.run(stream=stream)


@scenario
def lru_tells_at_load_what_could_not_be_copied(folder: Path) -> None:
    model = write_model(folder / "w.ptd", [chain("a", "b", "!p")], {"a": 2 * PAGE, "b": 2 * PAGE, "p": PAGE})
    with Rig(model, lru=True) as rig:
        with model.path.open("r+b") as file:
            file.truncate(4 * PAGE)
        try:
            rig.install_lru(8 * PAGE)
            raise AssertionError("a weight that is not in the file any more was loaded")
        except WeightsChangedError:
            pass


@scenario
def lru_closing_waits_for_kernels(folder: Path) -> None:
    model = _chain(folder)
    for poison in (True, False):
        with Rig(model, lru=True, poison=poison) as rig:
            rig.install_lru(model.file_bytes)
            stream = rig.stream()
            rig.run(stream=stream, delay_ns=KERNEL_NS, check=False)
            rig.session.close()
            rig.await_kernels(stream)
            rig.check_hashes()


@scenario
def lru_gives_its_pool_back_before_it_makes_another(folder: Path) -> None:
    model = _chain(folder)
    budget = _lru_floor(model)
    with SoftDriver(PAGE, budget, poison=True) as driver:
        with Rig(model, lru=True, driver=driver) as rig:
            rig.install_lru(budget)
            rig.run()
            with slow_copies(driver, COPY_NS):
                rig.install_lru(budget)
            rig.run()
            rig.check()


# ---- staging


@scenario
def buffers_wait_for_their_copies(folder: Path) -> None:
    model = _chain(folder)
    for source in (staged(PAGE, 1, 1), staged(PAGE, 3, 2)):
        with Rig(model, source=source) as rig:
            rig.install(model.floor_bytes)
            with slow_copies(rig.driver, COPY_NS // 2):
                rig.run()


class _Staging:
    """Staging by itself: one buffer of one page, a file of one page, and a stream that is late."""

    def __init__(self, folder: Path) -> None:
        self.content = bytes(range(256)) * (PAGE // 256)
        path = folder / "file"
        path.write_bytes(self.content)
        self.driver = SoftDriver(PAGE, 0, poison=True)
        self.stream = self.driver.create_stream()
        self.target = ctypes.create_string_buffer(PAGE)
        self._file, self._staging = ctypes.c_void_p(), ctypes.c_void_p()
        assert not library().penstock_host_file_open(str(path).encode(), ctypes.byref(self._file))
        driver, page_bytes = ctypes.c_void_p(self.driver.handle), ctypes.c_int64(PAGE)
        made = library().penstock_host_staging_create(driver, self._file, page_bytes, 1, 1, ctypes.byref(self._staging))
        assert not made
        self.driver.launch_sleep(self.stream, KERNEL_NS)

    def copy_next(self) -> int:
        extent = (ctypes.c_int64 * 2)(0, PAGE)
        one, none = ctypes.c_int64(1), ctypes.c_int64(0)
        assert not library().penstock_host_staging_follow(self._staging, extent, one, None, none)
        return int(library().penstock_host_staging_copy_next(self._staging, *self._where()))

    def copy_now(self) -> int:
        return int(library().penstock_host_staging_copy_now(self._staging, *self._where()))

    def _where(self) -> tuple[ctypes.c_int64, ctypes.c_int64, ctypes.c_uint64, ctypes.c_void_p]:
        to = ctypes.c_uint64(ctypes.addressof(self.target))
        return ctypes.c_int64(0), ctypes.c_int64(PAGE), to, ctypes.c_void_p(self.stream)

    def destroy(self) -> None:
        library().penstock_host_staging_destroy(self._staging)

    def finish(self) -> None:
        library().penstock_host_file_close(self._file)
        self.driver.destroy_stream(self.stream)
        assert not self.driver.counts().alive()
        self.driver.close()


@scenario
def a_copy_without_an_event_is_waited_for(folder: Path) -> None:
    """The buffer is not to be filled again, nor given back, while it is read."""
    staging = _Staging(folder)
    staging.driver.fail_at(1, call="record")
    assert staging.copy_next()
    assert staging.target.raw == staging.content
    staging.destroy()
    staging.finish()


@scenario
def a_copy_outside_an_order_has_been_made_when_it_returns(folder: Path) -> None:
    staging = _Staging(folder)
    assert not staging.copy_now()
    assert staging.target.raw == staging.content
    staging.destroy()
    staging.finish()


@scenario
def buffers_are_kept_until_a_wait_succeeds(folder: Path) -> None:
    staging = _Staging(folder)
    assert not staging.copy_next()
    staging.driver.fail_at(1, call="synchronize_event")
    staging.destroy()
    assert staging.target.raw == staging.content
    staging.finish()


def play(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        SCENARIOS[name](Path(folder))


# ---- graphs (S9)


@scenario
def graph_copies_wait_for_readers(folder: Path) -> None:
    model = _chain(folder)
    with Rig(model) as rig:
        rig.install(model.floor_bytes)
        captured, stream = rig.capture(), rig.stream()
        for _ in range(2):
            rig.replay(captured, stream, order=COPIES_FIRST)


@scenario
def graph_kernels_wait_for_copies(folder: Path) -> None:
    model = _chain(folder)
    with Rig(model) as rig:
        rig.install(model.floor_bytes)
        captured, stream = rig.capture(), rig.stream()
        for _ in range(2):
            rig.replay(captured, stream, order=KERNELS_FIRST)


def _there_and_back(folder: Path) -> Model:
    """Two methods: a run of the second leaves nothing in the ring that the first could take for its own."""
    names = [f"w{i}" for i in range(6)]
    schedules = [chain(*names), chain(*reversed(names), method="back")]
    return write_model(folder / "weights.ptd", schedules, dict.fromkeys(names, 4 * PAGE))


def _run_with_late_copies(rig: Rig, method: int, stream: int) -> None:
    """What it copies in its second half, all of it for its next run, comes late."""
    rig.begin(method, stream)
    for step in rig.steps(method, stream):
        if step == len(rig.model.schedules[method].steps) // 2:
            rig.driver.launch_sleep(rig.session.copy_stream, KERNEL_NS)
    rig.end()


@scenario
def graph_kernels_wait_for_copies_made_before_it(folder: Path) -> None:
    model = _there_and_back(folder)
    with Rig(model) as rig:
        plan = rig.install(model.floor_bytes)
        assert plan.methods[0].entering
        captured, stream = rig.capture(), rig.stream()
        _run_with_late_copies(rig, 0, stream)
        rig.replay(captured, stream, order=KERNELS_FIRST)


@scenario
def graph_copies_follow_those_made_before_it(folder: Path) -> None:
    """A weight with one copy in the graph and one before it: whoever waits for the last must have both."""
    model = _there_and_back(folder)
    with Rig(model) as rig:
        plan = model.plan(model.floor_bytes)
        method = plan.methods[0]
        ahead = method.copies[method.entering[0]]
        position = method.stays[ahead.stay].accesses[0]
        half = ahead.piece.nbytes // 2 // PAGE * PAGE
        second = replace(
            ahead.piece,
            nbytes=ahead.piece.nbytes - half,
            weight_offset_bytes=ahead.piece.weight_offset_bytes + half,
            range_offset_bytes=ahead.piece.range_offset_bytes + half,
        )
        copies = [
            replace(copy, piece=replace(copy.piece, nbytes=half)) if copy is ahead else copy for copy in method.copies
        ]
        copies.append(replace(ahead, piece=second, issue_before=position))
        copies.sort(key=lambda copy: copy.issue_before)
        halved = replace(method, copies=tuple(copies))
        rig.install_plan(replace(plan, methods=(halved, *plan.methods[1:])))
        assert any(copies[copy].piece.nbytes == half for copy in halved.entering)
        captured, stream = rig.capture(), rig.stream()
        _run_with_late_copies(rig, 0, stream)
        rig.replay(captured, stream, order=COPIES_FIRST)


@scenario
def a_graph_follows_copies_made_for_another_method(folder: Path) -> None:
    """A run has copied ahead for its next one; the graph of another method copies to the same page, and waits for no
    kernel before it does."""
    schedules = [chain("a", "r", method="ahead"), chain("r", "b", method="other")]
    model = write_model(folder / "weights.ptd", schedules, dict.fromkeys("abr", PAGE))
    ahead = MethodPlan(
        "ahead",
        (Placement(0, "a", PAGE, 0, 0, 0), Placement(1, "r", PAGE, 2, 0, None)),
        (Stay("a", PAGE, (0,), 0),),
        (Copy(0, Piece("a", 0, PAGE, 0, 0), 2, 0),),
        2,
    )
    other = MethodPlan(
        "other",
        (Placement(0, "r", PAGE, 2, 0, None), Placement(1, "b", PAGE, 1, 0, 0)),
        (Stay("b", PAGE, (1,), 1),),
        (Copy(0, Piece("b", 0, PAGE, 1, 0), 1, 1),),
        2,
    )
    ranges = (Range(PAGE, (0,)), Range(PAGE, (0,)), Range(PAGE, (1,)))
    blocks = (Block(PAGE, ring=True), Block(PAGE, ring=False))
    plan = Plan(PAGE, blocks, ranges, (Piece("r", 0, PAGE, 2, 0),), (ahead, other))
    check_plan(plan, schedules, model.weights)
    with Rig(model, poison=False) as rig:
        rig.install_plan(plan)
        captured, stream = rig.capture(1, delay_ns=2 * KERNEL_NS), rig.stream()
        _run_with_late_copies(rig, 0, stream)
        rig.replay(captured, stream, order=COPIES_FIRST)


@scenario
def copies_behind_a_graph_wait_for_its_readers(folder: Path) -> None:
    model = _chain(folder)
    with Rig(model) as rig:
        plan = rig.install(model.floor_bytes)
        assert plan.methods[0].entering
        stream = rig.stream()
        captured = rig.capture(delay_ns=KERNEL_NS)
        rig.run(stream=stream)
        for _ in range(2):
            rig.replay(captured, stream, order=KERNELS_FIRST, check=False)
        rig.check()


if __name__ == "__main__":
    try:
        for name in sys.argv[1:] or SCENARIOS:
            play(name)
    except (AssertionError, PenstockError, RunFailed, SoftError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
