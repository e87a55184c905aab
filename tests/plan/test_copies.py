"""Few and large copies: none below 256 KB that could be avoided, and what they cost beside their bytes."""

from __future__ import annotations

import math
import random

import pytest

from penstock.plan.calibration import Calibration, Link, lower_bound_s
from penstock.plan.check import check_plan
from penstock.plan.plan import Plan
from penstock.plan.planner import Planner
from penstock.plan.simulator import simulate
from penstock.schedule import Schedule
from penstock.weight import Weight
from tests.plan.test_floor import chain, weights_of

PAGE = 2 * 2**20
SMALL = 256 * 2**10
PERCENTS = (10, 25, 50, 75, 90)
# In bf16, as in Llama-3-8B.
LAYER = {
    "input_norm": 8192,
    "q": 4096 * 4096 * 2,
    "k": 1024 * 4096 * 2,
    "v": 1024 * 4096 * 2,
    "o": 4096 * 4096 * 2,
    "post_norm": 8192,
    "gate": 14336 * 4096 * 2,
    "up": 14336 * 4096 * 2,
    "down": 4096 * 14336 * 2,
}


def decoder(layers: int, more_bytes: tuple[int, ...] = (0,)) -> tuple[Schedule, dict[str, Weight]]:
    """A decoder without its vocabulary. `more_bytes` are added in turn to the large weights."""
    draw = random.Random(3)
    sizes = {
        f"{name}{layer}": size + (draw.choice(more_bytes) if size > SMALL else 0)
        for layer in range(layers)
        for name, size in LAYER.items()
    }
    return chain(*sizes), weights_of(**sizes)


def small_copies(plan: Plan) -> list[tuple[str, int]]:
    pieces = [copy.piece for method in plan.methods for copy in method.copies]
    return [(piece.weight, piece.nbytes) for piece in pieces if piece.nbytes < SMALL]


@pytest.mark.parametrize("more_bytes", [(0,), (0, 512, 65_536, 300_000), (512,)])
@pytest.mark.parametrize("calibrated", [False, True])
def test_no_copy_of_a_decoder_is_small(more_bytes: tuple[int, ...], calibrated: bool) -> None:
    """The last page of a weight may hold next to nothing: it never travels alone. Norms are packed and resident."""
    schedule, weights = decoder(10, more_bytes)
    planner = Planner([schedule], weights, page_bytes=PAGE)
    calibration = Calibration(LINK, {"forward": (STEP_S,) * len(schedule.steps)}) if calibrated else None
    for percent in PERCENTS:
        budget_bytes = planner.full_bytes * percent // 100
        plan = planner.plan(budget_bytes, calibration)
        check_plan(plan, [schedule], weights, budget_bytes=budget_bytes)
        assert plan.methods[0].copies and small_copies(plan) == []
        norms = [name for name in weights if "norm" in name]
        packed = {piece.weight: piece.range_index for piece in plan.fills if piece.weight in norms}
        assert len(packed) == len(norms) and len(set(packed.values())) == 1


def test_no_copy_of_weights_of_any_size_is_small_above_the_floor() -> None:
    draw = random.Random(11)
    for _ in range(12):
        sizes = {f"w{index}": draw.randint(1, 12 << 20) for index in range(draw.randint(30, 80))}
        schedule, weights = chain(*sizes), weights_of(**sizes)
        planner = Planner([schedule], weights, page_bytes=PAGE)
        for percent in (40, 50, 75, 90):
            budget_bytes = planner.full_bytes * percent // 100
            plan = planner.plan(budget_bytes)
            check_plan(plan, [schedule], weights, budget_bytes=budget_bytes)
            assert plan.methods[0].copies and small_copies(plan) == []


# ---- one token: steps of 15 us, all of them short beside their copies

LINK = Link(55.4e9, copy_latency_s=4e-6)
STEP_S = 15e-6


def least_ratio(streamed_bytes: int, link: Link) -> float:
    """Below this times the bound no plan comes, if steps are so long that the link must not wait for any of them.

    While a stay is read, the next copy must be under way, and to other pages: two copies following one another have no
    more than the ring together. So a ring of K bytes takes two copies for every K bytes that are streamed, and K bytes
    more are streamed than if there were none. The best K is where both cost the same.
    """
    return 1 + 2 * math.sqrt(2 * link.copy_latency_s * link.bytes_per_s / streamed_bytes)


@pytest.mark.parametrize("layers", [16, 32])
@pytest.mark.parametrize("calibrated", [False, True])
def test_one_token_takes_hardly_longer_than_the_bound(layers: int, calibrated: bool) -> None:
    schedule, weights = decoder(layers)
    planner = Planner([schedule], weights, page_bytes=PAGE)
    times = (STEP_S,) * len(schedule.steps)
    calibration = Calibration(LINK, {"forward": times}) if calibrated else None
    weight_bytes = sum(weight.nbytes for weight in weights.values())
    for percent in PERCENTS:
        budget_bytes = weight_bytes * percent // 100
        plan = planner.plan(budget_bytes, calibration)
        timing = simulate(plan.methods[0], schedule, step_s=times, link=LINK)
        bound_s = lower_bound_s(
            weight_bytes=weight_bytes,
            budget_bytes=budget_bytes,
            resident_s=sum(times),
            link_bytes_per_s=LINK.bytes_per_s,
        )
        ratio, least = timing.run_s / bound_s, least_ratio(weight_bytes - budget_bytes, LINK)
        assert timing.settled and least * 0.9999 <= ratio
        # With latencies of 4 us nothing can be had for 1.03 (32 layers) or 1.05 (16) where a tenth streams.
        assert ratio <= max(1.03 if layers == 32 else 1.05, least + 0.01)
        if calibrated:
            assert ratio <= least + 0.01


def test_where_little_streams_few_weights_do_and_hardly_a_copy_is_in_parts() -> None:
    schedule, weights = decoder(32)
    planner = Planner([schedule], weights, page_bytes=PAGE)
    (method,) = planner.plan(planner.full_bytes * 9 // 10).methods
    assert len(method.stays) <= 32 * 7 and len(method.copies) <= 1.05 * len(method.stays)
