"""Slots by what was asked for: learned when another plan is made, whatever makes it, and from tokens alone."""

from __future__ import annotations

import random
from pathlib import Path

import torch

import penstock
from penstock.plan.calibration import Calibration, Link
from penstock.plan.experts import HitRates, taken_together
from penstock.runtime.expert_rates import measured_hit_rates
from tests.experts.tokens import ALL_BYTES, PROMPT, SHAPE, TOKENS, decoded, inputs

HALF = ALL_BYTES // 2
FIRST_WEIGHTS = [f"layers.{layer}.gate_up" for layer in range(SHAPE.layers)]


def skewed(module: penstock.Module, tokens: int) -> None:
    """Of the second layer only three experts are asked for, of the others all."""
    x, _ = inputs(TOKENS)
    draw = random.Random(5)
    for token in range(tokens):
        rows = [draw.sample(range(3 if layer == 1 else SHAPE.experts), 2) for layer in range(SHAPE.layers)]
        module.run_method("decode", x[token : token + 1], torch.tensor(rows).unsqueeze(1))


def slots(module: penstock.Module) -> list[int]:
    assert module.plan is not None
    found = {bank.members[0].weight: bank.slots for bank in module.plan.banks}
    return [found[name] for name in FIRST_WEIGHTS]


def rates_of(module: penstock.Module) -> dict[str, HitRates]:
    program = module.program
    schedules = [method.schedule for method in program.methods]
    together = taken_together(schedules, {weight.name: weight for weight in program.weights})
    return measured_hit_rates(module._session, module.plan, {}, together)


def prompted(module: penstock.Module, count: int) -> None:
    x, ids = inputs(PROMPT, seed=3)
    for _ in range(count):
        module.run_method("prefill", x, ids.transpose(0, 1).contiguous())


def test_slots_go_where_what_was_asked_for_says(path: Path, wanted: torch.Tensor) -> None:
    """After a change of budget the layer of which three experts are asked for has fewer slots."""
    with penstock.Module(path, HALF) as module:
        assert max(slots(module)) - min(slots(module)) <= 1
        skewed(module, TOKENS)
        uses = {use.weights[0]: use for use in module.expert_uses()}
        many, few, _ = (uses[name].hit_rate for name in FIRST_WEIGHTS)
        assert few is not None and many is not None and few > 0.95 > many
        assert sum(use.hits for use in uses.values()) == module.stats().expert_hits
        assert all(use.calls == TOKENS for use in uses.values())
        module.set_budget(HALF)
        assert 3 <= slots(module)[1] < min(slots(module)[0], slots(module)[2])
        assert torch.equal(decoded(module, 20), wanted[:20])
        assert all(use.calls == 20 for use in module.expert_uses())


def test_prompts_say_nothing_of_tokens(path: Path) -> None:
    """However many there were: what decides is what was logged, and they are not."""
    with penstock.Module(path, HALF) as module:
        before = slots(module)
        prompted(module, 80)
        skewed(module, 10)
        assert all(use.calls == 90 for use in module.expert_uses())
        assert rates_of(module) == {}
        module.set_budget(HALF)
        assert slots(module) == before
        skewed(module, 62)
        assert rates_of(module) == {}
        skewed(module, 1)
        rates = rates_of(module)
        assert rates[FIRST_WEIGHTS[1]].at(4) > 0.9 > rates[FIRST_WEIGHTS[0]].at(4)


def test_timing_reads_in_place_forgets_nothing(path: Path, wanted: torch.Tensor) -> None:
    """For which another plan takes the place of the one that has logged."""
    steps = {method.name: (1e-5,) * len(method.schedule.steps) for method in penstock.read_program(path).methods}
    with penstock.Module(path, HALF, calibration=Calibration(Link(25e9), steps)) as module:
        assert max(slots(module)) - min(slots(module)) <= 1
        skewed(module, TOKENS)
        with module.calibrate(in_place=True):
            decoded(module, 3)
            prompted(module, 3)
        module.set_budget(HALF)
        assert 3 <= slots(module)[1] < min(slots(module)[0], slots(module)[2])
        assert torch.equal(decoded(module, 20), wanted[:20])
