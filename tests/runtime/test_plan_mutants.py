"""Plans with a thing or two changed: each is refused, or runs right, cold, warm, and as graphs in hostile orders."""

from __future__ import annotations

import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import PenstockError
from penstock.plan.check import PlanError, check_plan
from penstock.plan.plan import Copy, MethodPlan, Plan
from penstock.runtime.records import plan_numbers
from penstock.schedule import Access, Schedule, Step
from tests.native.session import copy_stream
from tests.plan.test_check import inherited_wait
from tests.runtime.session_harness import PAGE, Model, SessionHarness, write_model

US = 1000
COPIES_FIRST, KERNELS_FIRST, AT_RANDOM = 0, 1, 2
MUTANTS = 600
PROGRAMS = 24


def random_schedule(choose: random.Random, names: Sequence[str], method: str) -> Schedule:
    """Most weights once and some twice; steps read one or two, and now and then what an earlier step fetched."""
    order = [*choose.sample(names, len(names)), *choose.sample(names, 2)]
    accesses = tuple(Access(number, name, pinned=choose.random() < 0.02) for number, name in enumerate(order))
    steps: list[Step] = []
    begin = 0
    while begin < len(accesses):
        end = min(begin + choose.choice((1, 1, 2)), len(accesses))
        numbers = list(range(begin, end))
        if begin and choose.random() < 0.2:
            numbers.append(choose.randrange(max(0, begin - 3), begin))
        steps.append(Step(f"k{len(steps)}", tuple(numbers)))
        begin = end
    return Schedule(method, accesses, tuple(steps))


def random_model(choose: random.Random, path: Path) -> Model:
    """One that streams at its floor."""
    while True:
        lengths = (PAGE, 2 * PAGE, 3 * PAGE, 4 * PAGE, 2 * PAGE - 100, PAGE + 700, 300)
        sizes = {f"w{index}": choose.choice(lengths) for index in range(choose.randint(7, 11))}
        schedules = [random_schedule(choose, list(sizes), f"m{index}") for index in range(choose.choice((1, 1, 2)))]
        model = write_model(path, schedules, sizes, seed=choose.randrange(1 << 20))
        if model.plan(model.floor_bytes).methods[0].copies:
            return model


@dataclass
class Mutator:
    """Changes one thing of a plan. What comes out may be the same plan, a sound one, or nonsense."""

    choose: random.Random

    def mutated(self, plan: Plan) -> tuple[str, Plan]:
        streams = [index for index, method in enumerate(plan.methods) if method.copies]
        of_plan = [self._block, self._mapping, self._fill, self._swapped_pages]
        of_method = [self._placement, self._copy, self._copy, self._copy, self._piece, self._stay, self._list]
        which = self.choose.randrange(len(of_plan) + (len(of_method) if streams else 0))
        if which < len(of_plan):
            return of_plan[which].__name__, of_plan[which](plan)
        change = of_method[which - len(of_plan)]
        index = self.choose.choice(streams)
        return change.__name__, replace(plan, methods=_put(plan.methods, index, change(plan.methods[index])))

    def _number(self, value: int | None, unit: int = 1) -> int:
        value = 0 if value is None else value
        other = value + self.choose.choice((-2, -1, 1, 2)) * self.choose.choice((1, unit))
        return self.choose.choice((other, other, other, self.choose.randrange(8), -1, value * 2))

    def _block(self, plan: Plan) -> Plan:
        index = self.choose.randrange(len(plan.blocks))
        block = plan.blocks[index]
        changed = self.choose.choice(
            (replace(block, nbytes=self._number(block.nbytes, PAGE)), replace(block, ring=not block.ring))
        )
        return replace(plan, blocks=_put(plan.blocks, index, changed))

    def _mapping(self, plan: Plan) -> Plan:
        index = self.choose.randrange(len(plan.ranges))
        blocks = list(plan.ranges[index].blocks)
        at = self.choose.randrange(len(blocks))
        blocks[at] = self.choose.choice((self._number(blocks[at]), self.choose.randrange(len(plan.blocks))))
        return replace(plan, ranges=_put(plan.ranges, index, replace(plan.ranges[index], blocks=tuple(blocks))))

    def _swapped_pages(self, plan: Plan) -> Plan:
        """Two pages change places: in one range, or in all."""
        ring = [index for index, block in enumerate(plan.blocks) if block.ring]
        if len(ring) < 2:
            return plan
        one, other = self.choose.sample(ring, 2)
        swap = {one: other, other: one}
        chosen = self.choose.choice((None, self.choose.randrange(len(plan.ranges))))
        ranges = tuple(
            replace(area, blocks=tuple(swap.get(block, block) for block in area.blocks))
            if chosen in (None, index)
            else area
            for index, area in enumerate(plan.ranges)
        )
        return replace(plan, ranges=ranges)

    def _fill(self, plan: Plan) -> Plan:
        if not plan.fills:
            return plan
        index = self.choose.randrange(len(plan.fills))
        if self.choose.random() < 0.2:
            return replace(plan, fills=(*plan.fills[:index], *plan.fills[index + 1 :]))
        return replace(plan, fills=_put(plan.fills, index, self._any_number(plan.fills[index], _PIECE)))

    def _placement(self, method: MethodPlan) -> MethodPlan:
        index = self.choose.randrange(len(method.placements))
        changed = self._any_number(method.placements[index], ("range_index", "range_offset_bytes", "stay", "nbytes"))
        return replace(method, placements=_put(method.placements, index, changed))

    def _copy(self, method: MethodPlan) -> MethodPlan:
        """When it is issued, and for what it waits. It stays in the order of issue more often than not."""
        index = self.choose.randrange(len(method.copies))
        copy = method.copies[index]
        changed = self.choose.choice(
            (
                replace(copy, wait_step=None),
                replace(copy, wait_step=self.choose.randrange(method.step_count)),
                replace(copy, wait_step=self._number(copy.wait_step)),
                replace(copy, issue_before=self.choose.randint(0, len(method.placements))),
                replace(copy, issue_before=self._number(copy.issue_before)),
                replace(copy, stay=self._number(copy.stay)),
            )
        )
        copies: tuple[Copy, ...] = _put(method.copies, index, changed)
        if self.choose.random() < 0.8:
            copies = tuple(sorted(copies, key=lambda copy: copy.issue_before))
        return replace(method, copies=copies)

    def _piece(self, method: MethodPlan) -> MethodPlan:
        index = self.choose.randrange(len(method.copies))
        copy = method.copies[index]
        return replace(
            method, copies=_put(method.copies, index, replace(copy, piece=self._any_number(copy.piece, _PIECE)))
        )

    def _stay(self, method: MethodPlan) -> MethodPlan:
        index = self.choose.randrange(len(method.stays))
        stay = method.stays[index]
        accesses = list(stay.accesses)
        self.choose.shuffle(accesses)
        changed = self.choose.choice(
            (
                replace(stay, accesses=tuple(accesses)),
                replace(stay, accesses=stay.accesses[1:]),
                replace(stay, last_step=self._number(stay.last_step)),
                replace(stay, nbytes=self._number(stay.nbytes, PAGE)),
            )
        )
        return replace(method, stays=_put(method.stays, index, changed))

    def _list(self, method: MethodPlan) -> MethodPlan:
        """A copy dropped, made twice, split at a page or anywhere, or two of them in each other's place."""
        index = self.choose.randrange(len(method.copies))
        copy = method.copies[index]
        before, after = method.copies[:index], method.copies[index + 1 :]
        kind = self.choose.randrange(4)
        if kind == 0:
            return replace(method, copies=before + after)
        if kind == 1:
            return replace(method, copies=(*before, copy, copy, *after))
        if kind == 2:
            at = self.choose.choice((PAGE, 1 + self.choose.randrange(copy.piece.nbytes)))
            head = replace(copy.piece, nbytes=at)
            tail = replace(
                copy.piece,
                weight_offset_bytes=copy.piece.weight_offset_bytes + at,
                range_offset_bytes=copy.piece.range_offset_bytes + at,
                nbytes=copy.piece.nbytes - at,
            )
            return replace(method, copies=(*before, replace(copy, piece=head), replace(copy, piece=tail), *after))
        copies = list(method.copies)
        other = self.choose.randrange(len(copies))
        copies[index], copies[other] = (
            replace(copies[other], issue_before=copy.issue_before),
            replace(copy, issue_before=copies[other].issue_before),
        )
        return replace(method, copies=tuple(copies))

    def _any_number(self, record: Any, names: Sequence[str]) -> Any:
        name = self.choose.choice(names)
        return replace(record, **{name: self._number(getattr(record, name), PAGE)})


_PIECE = ("weight_offset_bytes", "nbytes", "range_index", "range_offset_bytes")


def _put(items: tuple[Any, ...], index: int, item: Any) -> tuple[Any, ...]:
    return (*items[:index], item, *items[index + 1 :])


def run_hostile(model: Model, plan: Plan, seed: int) -> None:
    """Cold and warm runs and replays of all methods in turn, with late copies and late kernels; every byte is looked
    at. What the plan says of its traffic is not: a mutant may be sound and say something else."""
    choose = random.Random(seed)
    with SessionHarness(model, seed=seed) as harness:
        harness.session.install(plan_numbers(plan, model.weights))
        streams = [harness.stream(), harness.stream()]
        methods = range(len(model.schedules))
        graphs = [harness.capture(method) for method in methods]
        late_kernels = [harness.capture(method, delay_ns=300 * US) for method in methods]
        turns: list[Callable[[], None]] = []
        for method in methods:
            for _ in range(2):
                turns.append(lambda m=method: harness.run(m, streams[0], delay_ns=300 * US, check=False))  # type: ignore[misc]
            for order in (COPIES_FIRST, KERNELS_FIRST, AT_RANDOM):
                graph = choose.choice((graphs, late_kernels))[method]
                turns.append(
                    lambda g=graph, o=order: harness.replay(g, streams[1], order=o, seed=seed, check=False)  # type: ignore[misc]
                )
            turns.append(lambda m=method: harness.run(m, streams[1], check=False))  # type: ignore[misc]
        for turn in [*turns, *choose.sample(turns, len(turns))]:
            turn()
            if choose.random() < 0.3:
                # A busy link.
                harness.driver.launch_sleep(copy_stream(harness.session), 500 * US)
        harness.check()


def play_mutants(folder: Path, seed: int, programs: int, mutants: int) -> Counter[str]:
    """What became of them: refused by the check, refused by the core, or right."""
    choose = random.Random(seed)
    found: Counter[str] = Counter()
    for program in range(programs):
        model = random_model(choose, folder / f"{seed}.{program}.ptd")
        budget = choose.choice([model.floor_bytes, model.floor_bytes, *model.budgets(4)[:-1]])
        plan = model.plan(budget)
        check_plan(plan, model.schedules, model.weights, budget_bytes=budget)
        run_hostile(model, plan, seed)
        for number in range(mutants // programs):
            kinds, mutant = [], plan
            mutator = Mutator(choose)
            try:
                for _ in range(choose.choice((1, 1, 2))):
                    kind, mutant = mutator.mutated(mutant)
                    kinds.append(kind)
            except (IndexError, ValueError, AssertionError):
                continue  # the first change left nothing that a second could be made to
            found["all"] += 1
            try:
                check_plan(mutant, model.schedules, model.weights, budget_bytes=budget)
            except PlanError:
                found["refused by the check"] += 1
                refuse_or_survive(model, mutant)
                continue
            found["accepted"] += 1
            found["accepted unchanged"] += mutant == plan
            try:
                run_hostile(model, mutant, number)
            except (PenstockError, AssertionError) as error:
                pytest.fail(f"seed {seed}, program {program}, mutant {number} {kinds}: {error}\n{mutant}")
    return found


def refuse_or_survive(model: Model, plan: Plan) -> None:
    """What the check refuses never goes this far. If it did, the core would install it, or say what is wrong."""
    try:
        numbers = plan_numbers(plan, model.weights)
    except (KeyError, IndexError, TypeError, ValueError):
        return
    with SessionHarness(model) as harness:
        try:
            harness.session.install(numbers)
        except PenstockError:
            return


def test_each_mutant_is_refused_or_runs_right(tmp_path: Path) -> None:
    found = play_mutants(tmp_path, 1, PROGRAMS, MUTANTS)
    assert found["all"] > MUTANTS * 0.9
    assert found["refused by the check"] > found["all"] // 2
    # Some changes make another sound plan: those went through all runs.
    assert found["accepted"] - found["accepted unchanged"] > found["all"] // 50


def test_an_inherited_wait_is_wrong_in_replays(tmp_path: Path) -> None:
    """Why a copy must carry its own wait: right in runs, and in a replay another weight's bytes."""
    schedule, weights, plan = inherited_wait()
    model = write_model(tmp_path / "w.ptd", [schedule], {name: weight.nbytes for name, weight in weights.items()})
    link_is_free, landed = threading.Event(), threading.Event()
    with SessionHarness(model, poison=False) as harness:
        harness.install_plan(plan)
        stream, steps = harness.stream(), harness.steps

        def meet() -> None:
            link_is_free.set()
            landed.wait(60)

        def hold() -> None:
            link_is_free.wait(60)

        def steps_with_a_busy_link(*args: Any, **options: Any) -> Iterator[int]:
            for index in steps(*args, **options):
                if index == 2:  # w3 is copied, and not read yet
                    harness.driver.call(capturing, meet)
                yield index

        for _ in range(3):
            harness.run(stream=stream)
        capturing = harness.stream()
        harness.steps = steps_with_a_busy_link  # type: ignore[method-assign]
        captured = harness.capture(stream=capturing)
        harness.driver.call(copy_stream(harness.session), hold)
        harness.replay(captured, stream, order=COPIES_FIRST, check=False)
        harness.driver.call(copy_stream(harness.session), landed.set)
        with pytest.raises(AssertionError, match=r"kernels of graphs that read other bytes.*w3"):
            harness.check()
        harness._compared.clear()


if __name__ == "__main__":
    import tempfile

    # python -m tests.runtime.test_plan_mutants SEED PROGRAMS MUTANTS
    with tempfile.TemporaryDirectory() as place:
        seed, programs, mutants = map(int, sys.argv[1:])
        print(dict(play_mutants(Path(place), seed, programs, mutants)))
