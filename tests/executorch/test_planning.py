"""Processes that make plans: how many there are, what they are given, and what becomes of them whatever ends."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock.errors import BelowFloorError, PenstockError
from penstock.executorch import planning
from penstock.executorch.plan_spacing import MOST_PARTS, ROUND_PERCENTS
from penstock.executorch.plan_table import MadeTable, make_plan_tables
from tests.executorch.test_plan_spacing import chain, decoder

ROOT = Path(__file__).parents[2]
PAGE_BYTES = 4096
MethodNumbers = tuple[int, ...]


def task() -> planning.Task:
    schedules, weights = decoder(1, 256, 1_000)
    return planning.Task(schedules, list(weights.values()), PAGE_BYTES, {}, "cpu")


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    monkeypatch.setattr(planning, "FEWEST_PAGES", 0)
    return lambda count: monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(count)))


def nobody() -> None:
    pass


def asks(*budgets: int) -> planning.Part[planning.PlannedBudget]:
    """A part that keeps all that it asks for."""
    kept = []
    for budget_bytes in budgets:
        plan = yield budget_bytes
        assert plan is not None
        kept.append(plan)
    return kept


def test_on_several_cores_the_same_plans_are_made(cores: Callable[[int], None]) -> None:
    """Each in a process of its own, also where several methods and placements have tables."""
    schedules, weights = decoder(1, 64, 500)
    schedules.append(chain("short", list(weights)[2:8]))

    def tables(count: int) -> list[MadeTable]:
        cores(count)
        return make_plan_tables(schedules, list(weights.values()), page_bytes=PAGE_BYTES, device="cpu")

    alone = tables(1)
    assert [table.row.methods for table in alone] == [(0, 1), (0,), (1,), (0, 1), (0,)]
    assert tables(3) == alone


def test_parts_are_served_together_and_plans_come_back_to_those_who_asked(cores: Callable[[int], None]) -> None:
    cores(2)
    count = 0

    def made() -> None:
        nonlocal count
        count += 1

    alone = task()
    full_bytes, floor_bytes = alone.planner((0,), "auto").full_bytes, alone.planner((0,), "auto").floor_bytes
    middle_bytes = (floor_bytes + full_bytes) // 2
    wanted = [(full_bytes, middle_bytes), (), (floor_bytes,), (full_bytes, middle_bytes + PAGE_BYTES, full_bytes)]
    with planning.planning(task(), made) as by:
        assert by.at_once == 2
        found = by.plans((0,), "auto", [asks(*budgets) for budgets in wanted])
    assert found == [[alone.planned((0,), "auto", each) for each in budgets] for budgets in wanted]
    assert count == sum(map(len, wanted))


def test_a_few_pages_are_planned_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    usual = task()
    pages = sum(weight.nbytes for weight in usual.weights) // PAGE_BYTES
    for more, count in ((0, 2), (1, 0)):
        monkeypatch.setattr(planning, "FEWEST_PAGES", pages + more)
        with planning.planning(usual, nobody) as by:
            assert len(by.workers) == count


def test_no_more_processes_than_parts(cores: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """And all of them have started before the first is waited for."""
    order: list[str] = []

    class Process(subprocess.Popen[bytes]):
        def __init__(self, *arguments: object, **options: object) -> None:
            order.append("started")
            super().__init__(["true"])

    monkeypatch.setattr(subprocess, "Popen", Process)
    monkeypatch.setattr(planning._Worker, "send", lambda worker, what: order.append("sent"))
    cores(64)
    with planning.planning(task(), nobody) as by:
        assert by.at_once == MOST_PARTS == len(ROUND_PERCENTS) + 1
    assert order == ["started"] * MOST_PARTS + ["sent"] * MOST_PARTS


# ------------------------------------------------------------------------------------------------ what it is started in


def test_what_a_process_prints_is_no_answer(
    cores: Callable[[int], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os\nprint('a line of somebody', flush=True)\nos.write(1, bytes(1000))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    cores(2)
    with planning.planning(task(), nobody) as by:
        assert by.plans((0,), "auto", [asks(1 << 20)])[0][0].device_bytes <= 1 << 20
        for worker in by.workers:
            worker.process.kill()
            worker.process.wait()
        with pytest.raises(PenstockError, match="ended with -9, and said a line of somebody"):
            by.plans((0,), "auto", [asks(1 << 20)])
    assert capfd.readouterr().out == ""


def test_one_that_dies_as_it_starts_says_why(
    cores: Callable[[int], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nos.write(2, b'no licence')\nos._exit(7)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    cores(2)
    with pytest.raises(PenstockError, match="a process that made plans ended with 7, and said no licence$"):
        with planning.planning(task(), nobody) as by:
            by.plans((0,), "auto", [asks(1 << 20)])


def damaged() -> None:
    raise ValueError("damaged on the way")


class Damaged:
    def __reduce__(self) -> tuple[object, ...]:
        return damaged, ()


@dataclass(frozen=True)
class Damaging(planning.Task):
    def planned(self, methods: MethodNumbers, placement: str, budget_bytes: int) -> planning.PlannedBudget:
        print("a plan of", budget_bytes, "bytes", flush=True)
        return Damaged()  # type: ignore[return-value]


def test_a_process_whose_answer_cannot_be_read_is_ended(cores: Callable[[int], None]) -> None:
    """It would wait for its next task, and whoever asked for its end."""
    cores(2)
    usual = task()
    damaging = Damaging(usual.schedules, usual.weights, usual.page_bytes, usual.begins, usual.device)
    with planning.planning(damaging, nobody) as by:
        with pytest.raises(PenstockError, match="ended with -9, and said a plan of 5 bytes$") as failed:
            by.plans((0,), "auto", [asks(5)])
        assert isinstance(failed.value.__cause__, ValueError)
        assert [worker.process.returncode for worker in by.workers] == [None, -9]


def unreadable() -> None:
    raise ValueError("nobody can read this task")


@dataclass(frozen=True)
class Unreadable(planning.Task):
    def __reduce__(self) -> tuple[object, ...]:
        return unreadable, ()


def test_a_process_is_ended_only_after_its_last_words(cores: Callable[[int], None]) -> None:
    """They come after it has let go of its connection."""
    cores(2)
    usual = task()
    with pytest.raises(PenstockError, match="(?s)ended with 1, and said Traceback.*nobody can read this task$"):
        with planning.planning(Unreadable(usual.schedules, usual.weights, PAGE_BYTES, {}, "cpu"), nobody) as by:
            by.plans((0,), "auto", [asks(1 << 20)])


SHADOWED = """
import os, sys
os.sched_getaffinity = lambda _: {0, 1}
from penstock.executorch import planning
from tests.executorch.test_planning import asks, nobody, task
assert sys.argv[1] in ("shadowed", "chosen")
if sys.argv[1] == "chosen":
    sys.path.insert(0, "")
with planning.planning(task(), nobody) as by:
    print(by.plans((0,), "auto", [asks(1 << 20)])[0][0].device_bytes)
"""


@pytest.mark.parametrize("how", ["shadowed", "chosen"])
def test_files_of_the_working_directory_are_imported_only_if_the_parent_would(tmp_path: Path, how: str) -> None:
    """The library's own `queue`, that is, unless somebody put the working directory first."""
    script, folder = tmp_path / "script.py", tmp_path / "folder"
    script.write_text(SHADOWED)
    folder.mkdir()
    # By `python -m` its folder would be first on the path.
    for name in ("queue", "random", "multiprocessing", "penstock"):
        (folder / f"{name}.py").write_text("raise RuntimeError('a file of the user')\n")
    done = subprocess.run(
        [sys.executable, str(script), how],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    if how == "shadowed":
        assert done.returncode == 0, done.stderr
        assert 0 < int(done.stdout) <= 1 << 20
    else:
        assert "PenstockError: a process that made plans ended with 1, and said Traceback" in done.stderr
        assert "RuntimeError: a file of the user" in done.stderr


# ----------------------------------------------------------------------------------------------------------- its errors


class NotSendable(PenstockError):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


@dataclass(frozen=True)
class Failing(planning.Task):
    """Fails as the placement says."""

    def planned(self, methods: MethodNumbers, placement: str, budget_bytes: int) -> planning.PlannedBudget:
        if placement == "lookup":
            raise KeyError("no such weight")
        if placement == "not sendable":
            raise NotSendable("one", "two")
        return super().planned(methods, placement, budget_bytes)


@pytest.mark.parametrize(
    ("placement", "kind", "said"),
    [
        ("lookup", KeyError, "no such weight"),
        ("not sendable", PenstockError, "NotSendable: one and two"),
        ("auto", BelowFloorError, "the budget is 1 bytes, but the floor is"),
    ],
)
def test_errors_keep_class_and_traceback(
    cores: Callable[[int], None], placement: str, kind: type[Exception], said: str
) -> None:
    cores(2)
    usual = task()
    failing = Failing(usual.schedules, usual.weights, usual.page_bytes, usual.begins, usual.device)
    with planning.planning(failing, nobody) as by:
        with pytest.raises(kind, match=said) as failed:
            by.plans((0,), placement, [asks(1)])
        assert type(failed.value) is kind
        # And the process goes on.
        assert by.plans((0,), "stream", [asks(1 << 20)])[0][0].device_bytes <= 1 << 20
    cause = str(failed.value.__cause__)
    assert "in a process that made plans:\nTraceback" in cause and "in planned" in cause
    if isinstance(failed.value, BelowFloorError):
        floor_bytes = usual.planner((0,), "auto").floor_bytes
        assert (failed.value.budget_bytes, failed.value.floor_bytes) == (1, floor_bytes)


# ----------------------------------------------------------------------------------------------------------- their ends


@dataclass(frozen=True)
class Held(planning.Task):
    """Says that a plan is being made, and makes it when it is given a byte: by two named pipes."""

    folder: str = ""

    def planned(self, methods: MethodNumbers, placement: str, budget_bytes: int) -> planning.PlannedBudget:
        os.write(os.open(f"{self.folder}/begun", os.O_WRONLY), f"{os.getpid()}\n".encode())
        os.read(os.open(f"{self.folder}/go on", os.O_RDONLY), 1)
        return super().planned(methods, placement, budget_bytes)


def held(folder: Path) -> Held:
    usual = task()
    return Held(usual.schedules, usual.weights, usual.page_bytes, usual.begins, usual.device, folder=str(folder))


@dataclass(frozen=True)
class Pipes:
    folder: Path
    begun: int
    go_on: int


@pytest.fixture
def pipes(tmp_path: Path) -> Iterator[Pipes]:
    """Open on this side for both ways, so that opening the other one waits for nobody."""
    paths = tmp_path / "begun", tmp_path / "go on"
    for path in paths:
        os.mkfifo(path)
    descriptors = [os.open(path, os.O_RDWR) for path in paths]
    yield Pipes(tmp_path, *descriptors)
    for descriptor in descriptors:
        os.close(descriptor)


def two_begun(pipes: Pipes, *alive: int) -> list[int]:
    """The processes that make plans, once both are in the middle of one."""
    ends = [os.pidfd_open(pid) for pid in alive]
    text = b""
    while text.count(b"\n") < 2:
        ready = select.select([pipes.begun, *ends], [], [])[0]
        assert ready == [pipes.begun], "it has ended"
        text += os.read(pipes.begun, 100)
    for descriptor in ends:
        os.close(descriptor)
    return [int(line) for line in text.split()]


ASKING = textwrap.dedent("""
    import os, pathlib, sys
    from penstock.executorch import planning
    from tests.executorch.test_planning import asks, held, nobody
    os.sched_getaffinity = lambda _: {0, 1}
    try:
        with planning.planning(held(pathlib.Path(sys.argv[1])), nobody) as by:
            by.plans((0,), "auto", [asks(1 << 20), asks(1 << 20)])
    except KeyboardInterrupt:
        left = [worker.process.returncode for worker in by.workers]
        print("interrupted", left, flush=True)
        sys.exit(3)
""")


def asking(pipes: Pipes) -> tuple[subprocess.Popen[str], list[int]]:
    """A process that asks for plans, and those that are making them: each is in the middle of one."""
    process = subprocess.Popen(
        [sys.executable, "-c", ASKING, str(pipes.folder)],
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return process, two_begun(pipes, process.pid)


def test_an_interrupt_ends_all_of_them(pipes: Pipes) -> None:
    process, pids = asking(pipes)
    descriptors = [os.pidfd_open(pid) for pid in pids]
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert (process.returncode, out) == (3, "interrupted [-9, -9]\n"), err
    assert err == ""
    # They had ended before whoever asked went on.
    assert select.select(descriptors, [], [], 0)[0] == descriptors
    for descriptor in descriptors:
        os.close(descriptor)


def test_none_outlives_a_parent_that_is_killed(pipes: Pipes) -> None:
    """It notices when it has its plan, and says nothing of it."""
    process, pids = asking(pipes)
    descriptors = [os.pidfd_open(pid) for pid in pids]
    process.kill()
    process.wait()
    assert not select.select(descriptors, [], [], 0)[0], "they are in the middle of a plan"
    os.write(pipes.go_on, b"12")
    left = descriptors
    while left:
        ended = select.select(left, [], [])[0]
        left = [each for each in left if each not in ended]
    for descriptor in descriptors:
        os.close(descriptor)
    _, err = process.communicate()
    assert err == ""


def test_one_that_is_killed_is_an_error_for_whoever_waits(
    cores: Callable[[int], None], pipes: Pipes, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores(2)
    with planning.planning(held(pipes.folder), nobody) as by:

        def kill_one(connections: object) -> object:
            """Both are in the middle of a plan when one of them is killed."""
            two_begun(pipes, *(worker.process.pid for worker in by.workers))
            os.kill(by.workers[0].process.pid, signal.SIGKILL)
            return wait(connections)

        wait: Callable[[object], object] = planning.wait  # type: ignore[assignment]
        monkeypatch.setattr(planning, "wait", kill_one)
        with pytest.raises(PenstockError, match="a process that made plans ended with -9, and said nothing$"):
            by.plans((0,), "auto", [asks(1 << 20), asks(1 << 20)])
        processes = [worker.process for worker in by.workers]
        assert processes[1].poll() is None, "it is still at work"
    assert [process.returncode for process in processes] == [-9, -9]
