"""How long planning takes, for programs of ten thousand accesses: process time of a new Planner and its first plan.

    python -m bench.planning [--repeats 3] [--calibrated]

No GPU is needed. Each figure is the best of the repeats. OMP_NUM_THREADS plays no part: planning is plain Python.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterable

from penstock.plan.calibration import Calibration, Link
from penstock.plan.planner import Planner
from penstock.schedule import Access, Schedule, Step
from penstock.weight import Weight

PAGE_BYTES = 2 * 2**20
ACCESSES = 10_000
PERCENTS = (25, 50, 90)
# One layer of a decoder shaped like Llama-3-8B, in bf16.
LAYER = {
    "input_norm": 4096 * 2,
    "q": 4096 * 4096 * 2,
    "k": 1024 * 4096 * 2,
    "v": 1024 * 4096 * 2,
    "o": 4096 * 4096 * 2,
    "post_norm": 4096 * 2,
    "gate": 14336 * 4096 * 2,
    "up": 14336 * 4096 * 2,
    "down": 4096 * 14336 * 2,
}

Program = tuple[list[Schedule], dict[str, Weight]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--calibrated", action="store_true", help="with a link of 55.4 GB/s and steps of 15 us")
    options = parser.parse_args()
    print(f"{'seconds':<34}{'floor':>8}" + "".join(f"{percent:>7}%" for percent in PERCENTS))
    for label, (schedules, weights) in programs().items():
        planner = Planner(schedules, weights, page_bytes=PAGE_BYTES)
        budgets = [planner.floor_bytes, *(planner.full_bytes * percent // 100 for percent in PERCENTS)]
        calibration = None
        if options.calibrated:
            times = {schedule.method: (15e-6,) * len(schedule.steps) for schedule in schedules}
            calibration = Calibration(Link(55.4e9, 4e-6), times)
        row = [
            min(_seconds(schedules, weights, budget, calibration) for _ in range(options.repeats)) for budget in budgets
        ]
        print(f"{label:<34}" + "".join(f"{seconds:8.2f}" for seconds in row))


def _seconds(
    schedules: list[Schedule], weights: dict[str, Weight], budget_bytes: int, calibration: Calibration | None
) -> float:
    # A schedule remembers what it was asked; a new one does not.
    fresh = [Schedule(schedule.method, schedule.accesses, schedule.steps) for schedule in schedules]
    begin = time.process_time()
    Planner(fresh, weights, page_bytes=PAGE_BYTES).plan(budget_bytes, calibration)
    return time.process_time() - begin


def programs() -> dict[str, Program]:
    draw = random.Random(1)
    layers = [f"{layer}.{name}" for layer in range(ACCESSES // len(LAYER) + 1) for name in LAYER][:ACCESSES]
    decoder = {name: LAYER[name.split(".")[1]] for name in layers}
    distinct = {f"w{index}": _size(draw) for index in range(ACCESSES)}
    few = {f"w{index}": draw.randint(1, 60 << 20) for index in range(ACCESSES // 5)}
    often = [name for name in few for _ in range(5)]
    draw.shuffle(often)
    shared = {f"w{index}": draw.randint(1, 60 << 20) for index in range(ACCESSES // 2)}
    half = len(shared) // 2
    return {
        "decoder of 1,112 layers": ([_chain(layers)], _weights(decoder)),
        "10,000 weights of any size": ([_chain(distinct)], _weights(distinct)),
        "2,000 weights, 5 times each": ([_chain(often)], _weights(few)),
        "two methods, 5,000 weights": (
            [_chain(shared, "prefill"), _chain([*shared][half:] + [*shared][:half], "decode")],
            _weights(shared),
        ),
        "decoder of 32 layers": ([_chain(layers[: 32 * 9])], _weights({name: decoder[name] for name in layers[:288]})),
    }


def _size(draw: random.Random) -> int:
    return draw.randint(1, 60 << 20) if draw.random() < 0.8 else draw.randint(1, 100_000)


def _weights(nbytes: dict[str, int]) -> dict[str, Weight]:
    return {name: Weight(name, "uint8", (size,), (0,)) for name, size in nbytes.items()}


def _chain(names: Iterable[str], method: str = "forward") -> Schedule:
    accesses = tuple(Access(number, name) for number, name in enumerate(names))
    return Schedule(method, accesses, tuple(Step(f"k{access.number}", (access.number,)) for access in accesses))


if __name__ == "__main__":
    main()
