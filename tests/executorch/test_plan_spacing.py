"""For which budgets a .pte holds plans: whoever takes the next smaller one is hardly slower."""

from __future__ import annotations

import bisect
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from penstock.errors import PenstockError
from penstock.executorch import planning
from penstock.executorch.plan_spacing import ROUND_PERCENTS, Spacing, cost_bytes, spaced_plans
from penstock.executorch.plan_table import PACKED, RARE, USUAL, MadeTable, make_plan_tables
from penstock.plan.menu import Menu
from penstock.plan.nominal import nominal
from penstock.plan.packed import BLOCK_BYTES, Begins
from penstock.plan.plan import Plan
from penstock.plan.planner import Planner
from penstock.plan.simulator import predicted_s
from penstock.plan.tuning import COPY_OVERHEAD_BYTES
from penstock.schedule import Access, Schedule, Step
from penstock.weight import Weight

MIB = 2**20
# What the planner's own choices differ by from one page to the next: the fastest plan need not stream the least.
NOISE = 1.02


def chain(method: str, names: Sequence[str], gathered: frozenset[str] = frozenset()) -> Schedule:
    accesses = tuple(Access(number, name, gathered=name in gathered) for number, name in enumerate(names))
    return Schedule(method, accesses, tuple(Step("kernel", (number,)) for number in range(len(names))))


def sized(sizes: dict[str, int]) -> dict[str, Weight]:
    return {name: Weight(name, "uint8", (nbytes,), (0,)) for name, nbytes in sizes.items()}


def decoder(layers: int, hidden: int, vocabulary: int) -> tuple[list[Schedule], dict[str, Weight]]:
    """Of Llama's shape: attention with groups of heads, a gated feed-forward."""
    sizes = {"embedding": vocabulary * hidden}
    for layer in range(layers):
        for name, columns in {"q": hidden, "k": hidden // 4, "v": hidden // 4, "o": hidden, "norm": 1}.items():
            sizes[f"{layer}.{name}"] = hidden * columns
        for name in ("gate", "up", "down"):
            sizes[f"{layer}.{name}"] = hidden * hidden * 7 // 2
    sizes["head"] = vocabulary * hidden
    return [chain("forward", list(sizes), frozenset({"embedding"}))], sized(sizes)


def uneven(methods: int) -> tuple[list[Schedule], dict[str, Weight]]:
    draw = random.Random(5)
    weights = sized({f"w{index}": draw.randint(1, 9 * MIB) for index in range(16)})
    names = list(weights)
    # The first is read twice, so that what streams falls faster than the budget grows.
    orders = [[*names, names[0]], names[::2], names[4:10]]
    return [chain(f"m{index}", order) for index, order in enumerate(orders[:methods])], weights


@dataclass(frozen=True)
class Made:
    plan: Plan
    device_bytes: int
    cost_bytes: float


class Table:
    """Plans of one program by what they hold, as the delegate looks them up."""

    def __init__(
        self,
        schedules: list[Schedule],
        weights: dict[str, Weight],
        page_bytes: int,
        spacing: Spacing,
        begins: Begins | None = None,
    ) -> None:
        self.planner = Planner(schedules, weights, page_bytes=page_bytes, placement="auto", begins=begins)
        self.schedules, self.weights, self.page_bytes = schedules, weights, page_bytes
        self.weight_bytes = sum(weight.nbytes for weight in weights.values())
        self.made: list[int] = []
        found = spaced_plans(
            self._plan_at,
            self.planner.floor_bytes,
            self.planner.full_bytes,
            self.weight_bytes,
            spacing,
            page_bytes=page_bytes,
        )
        self.plans = sorted((one.plan for one in found), key=lambda plan: plan.device_bytes)

    def _plan_at(self, budget_bytes: int) -> Made:
        self.made.append(budget_bytes)
        plan = self.planner.plan(budget_bytes)
        return Made(plan, plan.device_bytes, self.cost_bytes(plan))

    def taken(self, budget_bytes: int) -> Plan:
        return self.plans[bisect.bisect_right([plan.device_bytes for plan in self.plans], budget_bytes) - 1]

    def cost_bytes(self, plan: Plan) -> float:
        return cost_bytes(plan, self.schedules)

    def check(self, budget_bytes: int, spacing: Spacing) -> None:
        more_bytes = max(COPY_OVERHEAD_BYTES, spacing.part_of_weights * self.weight_bytes, self.page_bytes)
        stored, own = (self.cost_bytes(plan) for plan in (self.taken(budget_bytes), self.planner.plan(budget_bytes)))
        assert stored <= max(spacing.times * own, own + more_bytes) * NOISE, budget_bytes


@pytest.mark.parametrize("spacing", [USUAL, RARE])
@pytest.mark.parametrize("methods", [1, 3])
def test_every_budget_streams_little_more_than_its_own_plan(spacing: Spacing, methods: int) -> None:
    page_bytes = 2 * MIB
    table = Table(*uneven(methods), page_bytes, spacing)
    for budget_bytes in range(table.planner.floor_bytes, table.planner.full_bytes + page_bytes, page_bytes):
        table.check(budget_bytes, spacing)
        # One byte less than the next page is the same budget.
        assert table.taken(budget_bytes + page_bytes - 1) is table.taken(budget_bytes)


def test_on_several_cores_the_same_plans_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in a process of its own, also where several methods and placements have tables."""
    schedules, weights = decoder(3, 256, 1_000)
    schedules.append(chain("short", list(weights)[2:12]))

    def tables(cores: int) -> list[MadeTable]:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
        return make_plan_tables(schedules, list(weights.values()), page_bytes=4096, device="cpu")

    monkeypatch.setattr(planning, "FEWEST_ACCESSES", 1)
    alone = tables(1)
    assert [table.row.methods for table in alone] == [(0, 1), (0,), (1,), (0, 1), (0,)]
    assert tables(3) == alone


def test_a_process_that_ends_is_an_error_and_none_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    schedules, weights = decoder(1, 256, 1_000)
    task = planning.Task(schedules, list(weights.values()), 4096, {}, "cpu")
    with planning._Workers(task, 2) as workers:
        assert workers.planned((0,), "auto", 1 << 20).device_bytes <= 1 << 20
        with pytest.raises(PenstockError, match="no plan for 1 bytes was made: BelowFloorError: "):
            workers.planned((0,), "auto", 1)
        for process in workers._processes:
            process.kill()
        with pytest.raises(PenstockError, match="a process that made plans ended with -9"):
            workers.planned((0,), "auto", 1 << 20)
    assert all(process.returncode == -9 for process in workers._processes)


@pytest.fixture(scope="module")
def llama() -> Table:
    return Table(*decoder(8, 2048, 8_000), 2 * MIB, USUAL)


# Between the budgets that are planned exactly the next smaller plan is taken.
BETWEEN = (13.7, 17.1, 22.9, 28, 37.2, 44.4, 57, 66.6, 72, 84.2, 88, 93)


@pytest.mark.parametrize(
    ("percent", "least"), [*((percent, 0.98) for percent in (10, 25, 50, 75, 90)), *((each, 0.965) for each in BETWEEN)]
)
def test_the_plan_in_the_file_is_as_fast_as_one_for_the_budget(llama: Table, percent: float, least: float) -> None:
    """By the planner's own times, on each of the machines that stand for all where nothing was measured."""
    budget_bytes = int(llama.weight_bytes * percent / 100)
    stored, own = llama.taken(budget_bytes), llama.planner.plan(budget_bytes)
    machines = nominal(Menu(tuple(llama.schedules), llama.weights, llama.page_bytes, lambda access: access.gathered))
    seconds = [sum(predicted_s(plan, llama.schedules, one) for one in machines) for plan in (stored, own)]
    assert seconds[1] / seconds[0] >= least


def test_a_decoder_has_few_plans_and_all_that_it_needs(llama: Table) -> None:
    table, page_bytes = llama, llama.page_bytes
    floor_bytes, full_bytes = table.planner.floor_bytes, table.planner.full_bytes
    assert {floor_bytes, full_bytes} <= set(table.made) and len(table.made) == len(set(table.made))
    for percent in (10, 25, 50, 75, 90):
        budget_bytes = max(floor_bytes, table.weight_bytes * percent // 100)
        assert table.cost_bytes(table.taken(budget_bytes)) == table.cost_bytes(table.planner.plan(budget_bytes))
    # Where everything but the table that is gathered from is resident nothing streams: one plan serves all.
    idle = [plan for plan in table.plans if not table.cost_bytes(plan)]
    assert len(idle) == 2 and idle[-1].device_bytes == full_bytes
    budgets = [plan.device_bytes for plan in table.plans if plan not in idle]
    assert budgets[-1] - budgets[-2] == page_bytes < (budgets[1] - budgets[0]) / 2
    assert len(table.plans) <= 110


def test_packed_weights_have_plans_of_their_own() -> None:
    schedules, weights = decoder(3, 2048, 8_000)
    # Blocks of two thirds of what they hold.
    sizes = {name: -(-one.nbytes // BLOCK_BYTES) for name, one in weights.items() if name != "embedding"}
    begins = {name: [block * BLOCK_BYTES * 2 // 3 // 16 * 16 for block in range(n + 1)] for name, n in sizes.items()}
    table = Table(schedules, weights, 2 * MIB, PACKED, begins)
    raw = Planner(schedules, weights, page_bytes=2 * MIB, placement="auto")
    for percent in (25, 50, 75, 90):
        budget_bytes = table.weight_bytes * percent // 100
        stored, own = table.taken(budget_bytes), table.planner.plan(budget_bytes)
        assert table.cost_bytes(stored) == table.cost_bytes(own)
        assert stored.methods[0].warm.bytes_streamed < raw.plan(budget_bytes).methods[0].warm.bytes_streamed
    # Where nothing streams any more a larger budget still decodes less: one plan does not serve all.
    idle = [plan for plan in table.plans if not plan.takes_link]
    assert len({plan.methods[0].warm.bytes_decoded for plan in idle}) > 4
    page_bytes = table.page_bytes
    for budget_bytes in range(table.planner.floor_bytes, table.planner.full_bytes + page_bytes, 5 * page_bytes):
        table.check(budget_bytes, PACKED)


def test_a_tiny_program_has_its_ends_and_round_parts() -> None:
    weights = sized({f"w{index}": 13_000 for index in range(30)})
    table = Table([chain("forward", list(weights))], weights, 4096, USUAL)
    assert len(table.made) <= len(ROUND_PERCENTS) + 2
    assert (table.plans[0].device_bytes, table.plans[-1].device_bytes) == (
        table.planner.floor_bytes,
        table.planner.full_bytes,
    )


def test_marks_and_amounts_are_each_others_inverse() -> None:
    spacing, weight_bytes = Spacing(times=1.04, part_of_weights=1 / 2000), 3 << 30
    for nbytes in (0, 1000, 5 * MIB, 100 * MIB, 2 << 30):
        assert spacing.amount(spacing.mark(nbytes, weight_bytes), weight_bytes) == pytest.approx(nbytes)
    marks = [spacing.mark(nbytes, weight_bytes) for nbytes in (weight_bytes, weight_bytes / 1.04)]
    assert marks[0] - marks[1] == pytest.approx(1)
    assert spacing.mark(weight_bytes // 2000, weight_bytes) == pytest.approx(1)
