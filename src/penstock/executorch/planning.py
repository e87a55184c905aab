"""Plans for budgets, proved and in the form they are stored in, made on as many cores as there are. No torch.

Planning is Python, and a process does it on one core. So each core gets its own process, which answers one budget after
the other.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from typing import IO

from penstock.errors import PenstockError
from penstock.executorch.payload import StoredPlan
from penstock.executorch.plan_spacing import MOST_PARTS, Part, cost_bytes, one_by_one
from penstock.plan.check import check_plan
from penstock.plan.packed import Begins
from penstock.plan.planner import Planner
from penstock.runtime.records import plan_numbers
from penstock.schedule import Schedule
from penstock.weight import Weight

# A process takes half a second to start. With weights of fewer pages, all plans together take about as long.
FEWEST_PAGES = 32

# Sets the parent's path before anything is imported: `-m` and PYTHONPATH would put the working directory in front.
_CHILD = """import sys
sys.path[:] = sys.argv[2:]
from penstock.executorch.planning import answer_requests
answer_requests(int(sys.argv[1]))"""
_MOST_SAID_BYTES = 4000


@dataclass(frozen=True)
class PlannedBudget:
    """The result for one budget: the plan as it is stored in a file, and what a run with it costs."""

    stored: StoredPlan
    cost_bytes: float
    # Names of the weights that it reads in place in host memory, entirely or except for their prefix.
    direct: tuple[str, ...]

    @property
    def device_bytes(self) -> int:
        return self.stored.device_bytes


@dataclass(frozen=True)
class Task:
    """What plans of one program for a "cuda" or "cpu" device are made from. `begins`: for packed weights."""

    schedules: Sequence[Schedule]
    weights: Sequence[Weight]
    page_bytes: int
    begins: Begins
    device: str
    # Planners made so far: making one takes longer than a plan.
    _planners: dict[tuple[tuple[int, ...], str], Planner] = field(default_factory=dict)

    def planner(self, methods: tuple[int, ...], placement: str) -> Planner:
        if (methods, placement) not in self._planners:
            chosen = [self.schedules[number] for number in methods]
            self._planners[methods, placement] = Planner(
                chosen,
                self.read_by(methods),
                page_bytes=self.page_bytes,
                placement=placement,
                begins=self.packed_of(methods),
                # A process without Python has no kernel that reads a weight in two places; on the CPU the core has one.
                can_split=self.device == "cpu",
            )
        return self._planners[methods, placement]

    def read_by(self, methods: tuple[int, ...]) -> dict[str, Weight]:
        read = {access.weight for number in methods for access in self.schedules[number].accesses}
        return {weight.name: weight for weight in self.weights if weight.name in read}

    def packed_of(self, methods: tuple[int, ...]) -> Begins:
        named = self.read_by(methods)
        return {name: blocks for name, blocks in self.begins.items() if name in named}

    def planned(self, methods: tuple[int, ...], placement: str, budget_bytes: int) -> PlannedBudget:
        chosen = [self.schedules[number] for number in methods]
        plan = self.planner(methods, placement).plan(budget_bytes)
        # Whoever reads the file has no schedule, so the plan is proved here.
        named, packed = self.read_by(methods), self.packed_of(methods)
        check_plan(plan, chosen, named, budget_bytes=budget_bytes, packed=packed)
        is_copying = any(method.copies for method in plan.methods)
        numbers = bytes(plan_numbers(plan, (weight.name for weight in self.weights)))
        stored = StoredPlan(plan.device_bytes, numbers, is_copying)
        return PlannedBudget(stored, cost_bytes(plan, chosen), (*plan.direct_weights, *plan.split_weights))


@dataclass(frozen=True)
class Planning:
    """Makes plans in processes, or in this one if there are none."""

    task: Task
    workers: Sequence[_Worker]
    # Called after each plan.
    made: Callable[[], object]

    @property
    def at_once(self) -> int:
        return max(1, len(self.workers))

    def plans(
        self, methods: tuple[int, ...], placement: str, parts: Sequence[Part[PlannedBudget]]
    ) -> list[list[PlannedBudget]]:
        def planned(budget_bytes: int) -> PlannedBudget:
            found = self.task.planned(methods, placement, budget_bytes)
            self.made()
            return found

        if not self.workers:
            return one_by_one(planned)(parts)
        kept: dict[int, list[PlannedBudget]] = {}
        # Parts that can continue, each with the plan that it asked for.
        ready: list[tuple[int, PlannedBudget | None]] = [(number, None) for number in reversed(range(len(parts)))]
        idle = list(self.workers)
        busy: dict[Connection, tuple[_Worker, int]] = {}
        while ready or busy:
            if ready and idle:
                number, plan = ready.pop()
                try:
                    budget_bytes = parts[number].send(plan)
                except StopIteration as ended:
                    kept[number] = ended.value
                    continue
                worker = idle.pop()
                worker.send((methods, placement, budget_bytes))
                busy[worker.connection] = worker, number
                continue
            for connection in wait(busy):
                assert isinstance(connection, Connection)
                worker, number = busy.pop(connection)
                ready.append((number, worker.received()))
                idle.append(worker)
                self.made()
        return [kept[number] for number in range(len(parts))]


@contextmanager
def planning(task: Task, made: Callable[[], object]) -> Iterator[Planning]:
    """Whatever ends this, none of its processes outlives it."""
    cores = len(os.sched_getaffinity(0))
    if cores == 1 or sum(weight.nbytes for weight in task.weights) < FEWEST_PAGES * task.page_bytes:
        yield Planning(task, (), made)
        return
    with ExitStack() as held:
        workers = [held.enter_context(_worker()) for _ in range(min(cores, MOST_PARTS))]
        # Sending waits until the process is up; by then the others are, too.
        for worker in workers:
            worker.send(task)
        yield Planning(task, workers, made)


@dataclass(frozen=True)
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection
    # Output of the process, and of whatever it imports. Answers take the connection.
    said: IO[bytes]

    def send(self, what: object) -> None:
        try:
            self.connection.send(what)
        except OSError as error:
            raise self._ended() from error

    def received(self) -> PlannedBudget:
        try:
            found = self.connection.recv()
        except Exception as error:  # it is gone, or what came is no answer
            raise self._ended() from error
        if isinstance(found, _Failure):
            raise found.error from PenstockError(f"in a process that made plans:\n{found.traceback}")
        assert isinstance(found, PlannedBudget)
        return found

    def _ended(self) -> PenstockError:
        # A process that is already ending keeps its own exit status.
        self.process.kill()
        status = self.process.wait()
        length_bytes = self.said.seek(0, os.SEEK_END)
        self.said.seek(max(0, length_bytes - _MOST_SAID_BYTES))
        text = self.said.read().decode(errors="replace").strip()
        return PenstockError(f"a process that made plans ended with {status}, and said {text or 'nothing'}")


@contextmanager
def _worker() -> Iterator[_Worker]:
    ours, theirs = Pipe()
    with ours, tempfile.TemporaryFile() as said:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", _CHILD, str(theirs.fileno()), *map(str, sys.path)],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                # A session of its own: Ctrl-C goes to the parent, which then ends this process.
                start_new_session=True,
            )
        try:
            yield _Worker(process, ours, said)
        finally:
            process.kill()
            process.wait()


@dataclass(frozen=True)
class _Failure:
    error: Exception
    traceback: str


def answer_requests(descriptor: int) -> None:
    """Runs in a process of its own until nobody asks any more."""
    # The descriptor itself stays open, so the parent learns of the end only when the last output is written.
    with Connection(os.dup(descriptor)) as connection:
        try:
            task: Task = connection.recv()
            while True:
                connection.send(_answer(task, *connection.recv()))
        except (EOFError, ConnectionError):
            return  # the parent is gone


def _answer(task: Task, methods: tuple[int, ...], placement: str, budget_bytes: int) -> PlannedBudget | _Failure:
    try:
        return task.planned(methods, placement, budget_bytes)
    except Exception as error:
        return _Failure(_sendable(error), traceback.format_exc())


def _sendable(error: Exception) -> Exception:
    """The error itself, if it can be rebuilt in another process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return PenstockError(f"{type(error).__name__}: {error}")
    return error
