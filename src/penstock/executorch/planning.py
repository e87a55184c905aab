"""Plans for budgets, proved and as they are stored; on as many cores as there are. No torch.

Planning is Python, and a process does it on one core. So each further core has a process of its own, which answers one
budget after the other: `python -m penstock.executorch.planning`.
"""

from __future__ import annotations

import os
import pickle
import queue
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Any

from penstock.errors import PenstockError
from penstock.executorch.payload import StoredPlan
from penstock.executorch.plan_spacing import cost_bytes
from penstock.plan.check import check_plan
from penstock.plan.packed import Begins
from penstock.plan.planner import Planner
from penstock.runtime.records import plan_numbers
from penstock.schedule import Schedule
from penstock.weight import Weight

# A process takes a quarter of a second to start. With fewer accesses all plans together take about as long.
FEWEST_ACCESSES = 100


@dataclass(frozen=True)
class PlannedBudget:
    """What came of a budget: a plan as it stands in a file, and what a run with it costs."""

    stored: StoredPlan
    cost_bytes: float
    # Names of weights that it reads where they lie in host memory, as a whole or but for their prefix.
    direct: tuple[str, ...]

    @property
    def device_bytes(self) -> int:
        return self.stored.device_bytes


@dataclass(frozen=True)
class Task:
    """What plans of one program for a "cuda" or "cpu" device are made from. `begins`: of packed weights."""

    schedules: Sequence[Schedule]
    weights: Sequence[Weight]
    page_bytes: int
    begins: Begins
    device: str
    # Those that were asked for: making one takes longer than a plan.
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
        # Whoever reads the file knows no schedule: what a plan is trusted for is shown here.
        named, packed = self.read_by(methods), self.packed_of(methods)
        check_plan(plan, chosen, named, budget_bytes=budget_bytes, packed=packed)
        is_copying = any(method.copies for method in plan.methods)
        numbers = bytes(plan_numbers(plan, (weight.name for weight in self.weights)))
        stored = StoredPlan(plan.device_bytes, numbers, is_copying)
        return PlannedBudget(stored, cost_bytes(plan, chosen), (*plan.direct_weights, *plan.split_weights))


PlanBudget = Callable[[tuple[int, ...], str, int], PlannedBudget]


@contextmanager
def planning(task: Task) -> Iterator[tuple[PlanBudget, int]]:
    """A function that plans for a budget, and how many calls of it there may be at a time."""
    cores = len(os.sched_getaffinity(0))
    if cores == 1 or sum(len(schedule.accesses) for schedule in task.schedules) < FEWEST_ACCESSES:
        yield task.planned, 1
        return
    with _Workers(task, cores) as workers:
        yield workers.planned, cores


class _Workers:
    """Whatever ends this, none of its processes outlives it."""

    def __init__(self, task: Task, count: int) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        self._task, self._count = pickle.dumps(task), count

    def __enter__(self) -> _Workers:
        try:
            for _ in range(self._count):
                command = [sys.executable, "-m", "penstock.executorch.planning"]
                environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
                pipe = subprocess.PIPE
                # A session of its own: Ctrl-C is for whoever asked, who then ends this.
                process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, start_new_session=True)
                self._processes.append(process)
                _pipe(process.stdin).write(self._task)
                self._idle.put(process)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()

    def planned(self, methods: tuple[int, ...], placement: str, budget_bytes: int) -> PlannedBudget:
        process = self._idle.get()
        try:
            pickle.dump((methods, placement, budget_bytes), _pipe(process.stdin))
            _pipe(process.stdin).flush()
            found = pickle.load(_pipe(process.stdout))
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            raise PenstockError(f"a process that made plans ended with {process.wait()}") from error
        finally:
            self._idle.put(process)
        if not isinstance(found, PlannedBudget):
            raise PenstockError(f"no plan for {budget_bytes} bytes was made: {found}")
        return found


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


def main(requests: IO[bytes], answers: IO[bytes]) -> None:
    """In a process: until nobody asks any more."""
    task: Task = pickle.load(requests)
    while True:
        try:
            request = pickle.load(requests)
        except EOFError:
            return
        try:
            answer: Any = task.planned(*request)
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
