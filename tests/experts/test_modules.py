"""Compiled programs with experts in slots, on the CPU: the same bits whatever lies in slots, and counts that a second
cache agrees with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
import penstock.runtime.module as module_file
from penstock.errors import PenstockError
from penstock.plan import menu
from penstock.plan.experts import Slots
from penstock.report.collect import collect
from penstock.report.data import MeasuredPoint
from penstock.report.page import report_html
from penstock.runtime.driver import Driver
from tests.experts.reference import ReferenceTable
from tests.experts.routed import Routed, Shape, compiled, routed, routing
from tests.experts.tokens import ALL_BYTES, PROMPT, SHAPE, TOKENS, decoded, inputs
from tests.native.driver import WrappedDriver, wrap
from tests.runtime.module_lives import Played, fail_in_turn


@pytest.mark.parametrize("part", [0.0, 0.1, 0.3, 0.6, 0.95])
def test_two_hundred_tokens_have_the_same_bits_and_the_counts_of_a_second_cache(
    path: Path, wanted: torch.Tensor, part: float
) -> None:
    with penstock.Module(path, "1TiB") as module:
        floor_bytes = module.floor_bytes
    with penstock.Module(path, max(floor_bytes, int(ALL_BYTES * part))) as module:
        plan = module.plan
        assert plan is not None
        tables = [ReferenceTable(bank.experts, bank.slots) for bank in plan.banks]
        layers = [int(bank.members[0].weight.split(".")[1]) for bank in plan.banks]
        x, ids = inputs(TOKENS)
        for token in range(TOKENS):
            got = module.run_method("decode", x[token : token + 1], ids[token].unsqueeze(1))
            assert torch.equal(got[0], wanted[token])
            counts = [table.take(ids[token, layer].tolist()) for table, layer in zip(tables, layers, strict=True)]
            last = module.last_run
            assert (last.expert_hits, last.expert_misses) == tuple(map(sum, zip((0, 0), *counts, strict=True)))
            assert last.expert_bytes == last.expert_misses * SHAPE.expert_bytes
        total = module.stats()
        assert total.expert_hits == sum(table.hits for table in tables)
        assert total.expert_misses == sum(table.misses for table in tables)
        assert module.device_memory()[1] <= module.budget_bytes
        assert bool(plan.banks) == (part >= 0.1)


def test_a_prompt_is_read_in_groups_and_leaves_its_experts_in_the_slots(
    path: Path, model: Routed, wanted: torch.Tensor
) -> None:
    x, ids = inputs(PROMPT, seed=3)
    model.form = "grouped"
    with torch.no_grad():
        expected = model(x, ids.transpose(0, 1).contiguous())
    with penstock.Module(path, "1TiB") as module:
        bits = module.run_method("prefill", x, ids.transpose(0, 1).contiguous())
    torch.testing.assert_close(bits, expected)
    with penstock.Module(path, int(ALL_BYTES * 0.6)) as module:
        assert module.plan is not None
        tables = {
            int(bank.members[0].weight.split(".")[1]): ReferenceTable(bank.experts, bank.slots)
            for bank in module.plan.banks
        }
        assert tables
        for round_number in range(3):
            got = module.run_method("prefill", x, ids.transpose(0, 1).contiguous())
            assert torch.equal(got, bits)
            counts = [
                table.group(torch.bincount(ids[:, layer].flatten(), minlength=SHAPE.experts).tolist())
                for layer, table in tables.items()
            ]
            last = module.last_run
            assert (last.expert_hits, last.expert_misses) == tuple(map(sum, zip(*counts, strict=True)))
            # The second time finds in slots what the first has put there.
            assert (last.expert_hits > 0) == (round_number > 0)
        steps, step_ids = inputs(TOKENS)
        for token in range(20):
            got = module.run_method("decode", steps[token : token + 1], step_ids[token].unsqueeze(1))
            assert torch.equal(got[0], wanted[token])
            counts = [table.take(step_ids[token, layer].tolist()) for layer, table in tables.items()]
            last = module.last_run
            assert (last.expert_hits, last.expert_misses) == tuple(map(sum, zip(*counts, strict=True)))


def test_every_call_of_a_life_with_experts_fails_once(tmp_path: Path) -> None:
    """The right error, and the right bits afterwards: a table that was left with half of a fill would show."""
    few = Shape(layers=2)
    model = routed(few)
    path = compiled(model, tmp_path / "model.pt2")
    x = torch.randn(1, few.hidden, generator=torch.Generator().manual_seed(2))
    ids = routing(few, 1, stay=0.5, seed=2)[0].unsqueeze(1)
    with penstock.Module(path, "1TiB") as module:
        wanted, full_bytes = module(x, ids), module.full_bytes
        floor_bytes = module.floor_bytes
    budget = floor_bytes + (full_bytes - floor_bytes) // 3
    with penstock.Module(path, budget) as module:
        assert module.plan is not None and module.plan.banks
    seen = fail_in_turn(Played(path, "cpu", (x, ids), wanted, budget, full_bytes, {}))
    assert seen >= {"prepare_experts", "choose_experts", "move_experts", "fill", "copy_to_host"}


def test_a_failed_run_empties_the_slots(path: Path, wanted: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    drivers: list[WrappedDriver] = []
    genuine = module_file.open_soft_driver

    def opened(*given: Any, **named: Any) -> Driver:
        driver = genuine(*given, **named)
        assert driver.handle is not None
        driver.handle = wrap(driver.handle)
        drivers.append(WrappedDriver(driver.handle))
        return driver

    monkeypatch.setattr(module_file, "open_soft_driver", opened)
    x, ids = inputs(TOKENS)
    with penstock.Module(path, int(ALL_BYTES * 0.6)) as module:
        for token in range(10):
            module.run_method("decode", x[token : token + 1], ids[token].unsqueeze(1))
        again = module.run_method("decode", x[9:10], ids[9].unsqueeze(1))
        assert torch.equal(again[0], wanted[9])
        assert module.last_run.expert_misses == 0
        counted = module.stats().expert_hits
        drivers[0].fail_at(2, call="move_experts")
        with pytest.raises(PenstockError, match="a test asked for this failure"):
            module.run_method("decode", x[9:10], ids[9].unsqueeze(1))
        got = module.run_method("decode", x[9:10], ids[9].unsqueeze(1))
        assert torch.equal(got[0], wanted[9])
        assert module.last_run.expert_hits == 0
        # What was counted before stays counted.
        assert module.stats().expert_hits >= counted


def test_a_change_of_budget_begins_with_empty_slots_and_keeps_what_was_counted(
    path: Path, wanted: torch.Tensor
) -> None:
    with penstock.Module(path, int(ALL_BYTES * 0.3)) as module:
        for part in (0.3, 0.6, 0.2, 1.5, 0.4):
            module.set_budget(int(ALL_BYTES * part))
            before = module.stats()
            assert torch.equal(decoded(module, 25), wanted[:25])
            after = module.stats()
            uses = after.expert_hits + after.expert_misses - before.expert_hits - before.expert_misses
            banks = len(module.plan.banks) if module.plan else 0
            assert uses == 25 * banks * SHAPE.top


def test_placements_that_read_experts_whole_give_the_same_bits(path: Path, wanted: torch.Tensor) -> None:
    for options in ({"placement": "stream"}, {"placement": "lru"}, {"host_memory": 16 * 4096}):
        with penstock.Module(path, int(ALL_BYTES * 0.6), **options) as module:  # type: ignore[arg-type]
            assert torch.equal(decoded(module, 30), wanted[:30]), options
            assert module.stats().expert_misses == 0


def test_a_bank_that_fits_lies_on_the_device_whole(
    path: Path, wanted: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it would where what was measured says that one layer needs all of its experts."""
    first = ("layers.0.gate_up", "layers.0.down")

    def one_whole(banks: Any, spare_bytes: int, page_bytes: int, hit_rates: Any) -> Slots:
        assert banks[0].names == first
        return Slots({banks[1].names[0]: 3}, first)

    monkeypatch.setattr(menu, "allocate_slots", one_whole)
    with penstock.Module(path, int(ALL_BYTES * 0.8)) as module:
        assert module.plan is not None and len(module.plan.banks) == 1
        assert not set(first) & set(module.plan.direct_weights)
        assert torch.equal(decoded(module, 20), wanted[:20])
        # The last layer is held as any table is, in what is left.
        assert module.last_run.bytes_in_place == 0 and module.last_run.expert_misses > 0


def test_a_report_has_the_hit_rate_of_every_layer(path: Path, tmp_path: Path) -> None:
    with penstock.Module(path, int(ALL_BYTES * 0.5)) as module:
        decoded(module, 40)
        with module.trace(tmp_path / "trace.json"):
            decoded(module, 2)
        run = module.last_run
        point = MeasuredPoint(module.budget_bytes, 0.01, run.bytes_streamed, run.copies, 1, run.stall_ns, True)
        data = collect(module, tmp_path / "trace.json", [point], method="decode")
        uses = module.expert_uses()
    assert [(one.weights, one.slots, one.hit_rate) for one in data.experts] == [
        (use.weights, use.slots, use.hit_rate) for use in uses
    ]
    kinds = {weight.name: weight for weight in data.weights}
    assert kinds["layers.0.down"].kind == "slots"
    assert kinds["layers.0.down"].resident_bytes == uses[0].slots * SHAPE.inner * SHAPE.hidden * 4
    page = report_html(data)
    assert all(f"{use.weights[0]}</th>" in page for use in uses)
