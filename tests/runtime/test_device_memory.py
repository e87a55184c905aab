"""device_memory=: one total for weights, state and activations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import penstock
from penstock.errors import BelowFloorError, BudgetError
from penstock.plan.cache_share import WeightsRange
from penstock.plan.calibration import Calibration, Link
from penstock.runtime.automatic_budget import activation_bound_bytes
from penstock.runtime.device_memory import grant, weights_range
from tests.runtime.modules import SCRIPTS, play, same


def test_weights_get_what_state_and_activations_leave(
    decoder: Path, resident_bits: Callable[[str], list[list[Tensor]]]
) -> None:
    program = penstock.read_program(decoder)
    beside_bytes = program.state_bytes + activation_bound_bytes(program)
    assert program.state_bytes > 0
    with penstock.Module(decoder, "1GiB") as module:
        floor, full = module.floor_bytes, module.full_bytes
    for wanted in (floor, floor + 1, (floor + full) // 2, full):
        with penstock.Module(decoder, device_memory=wanted + beside_bytes) as module:
            assert module.budget_bytes == wanted
            assert "(what device_memory leaves)" in module.summary
            for _ in range(2):
                module.reset_state()
                assert same(play(module.run_method, SCRIPTS["decoder"]), resident_bits("decoder"))
            assert module.device_memory()[1] <= wanted
    with penstock.Module(decoder, device_memory="1GiB") as module:
        assert module.budget_bytes == full


def test_a_byte_less_than_the_smallest_total_is_refused_with_its_terms(decoder: Path) -> None:
    program = penstock.read_program(decoder)
    activations = activation_bound_bytes(program)
    with penstock.Module(decoder, "1GiB") as module:
        floor = module.floor_bytes
    least = floor + program.state_bytes + activations
    with pytest.raises(BelowFloorError) as caught:
        penstock.Module(decoder, device_memory=least - 1)
    assert (
        f"the smallest for this program is {least} bytes: at least {floor} for weights, {program.state_bytes} for "
        f"state and {activations} for activations"
    ) in str(caught.value)
    assert (caught.value.budget_bytes, caught.value.floor_bytes) == (floor - 1, floor)
    with pytest.raises(BelowFloorError) as caught:
        penstock.Module(decoder, device_memory=0)
    assert caught.value.budget_bytes == 0
    with penstock.Module(decoder, device_memory=least) as module:
        assert module.budget_bytes == floor


def test_a_placement_that_needs_less_is_named_with_the_total_that_it_needs(decoder: Path) -> None:
    program = penstock.read_program(decoder)
    with pytest.raises(BelowFloorError) as caught:
        penstock.Module(decoder, device_memory=0)
    with penstock.Module(decoder, "1GiB", placement="in-place") as module:
        least = module.floor_bytes + program.state_bytes + activation_bound_bytes(program)
    assert f'That is for placement="auto"; placement="in-place" needs {least} bytes' in str(caught.value)
    penstock.Module(decoder, device_memory=least, placement="in-place").close()
    # Nothing is named that the other options rule out.
    with pytest.raises(BelowFloorError) as caught:
        penstock.Module(decoder, 0, calibration="first-runs")
    assert "placement=" not in str(caught.value)


def test_one_of_budget_and_total(chain: Path) -> None:
    with pytest.raises(BudgetError, match="device_memory= does not go with budget=: .*; pass one"):
        penstock.Module(chain, "1MiB", device_memory="1GiB")
    with pytest.raises(BudgetError, match="device_memory= does not go with weight_offload_budget_mb="):
        penstock.Module(chain, weight_offload_budget_mb=1, device_memory=7)
    with pytest.raises(BudgetError, match="is not a number of bytes"):
        penstock.Module(chain, device_memory="much")


def test_activations_without_a_bound_are_refused(chain: Path) -> None:
    with pytest.raises(BudgetError, match="no automatic budget, and no device_memory, for method 'forward'"):
        penstock.Module(chain, device_memory="1GiB")


def test_a_later_budget_holds_over_it(decoder: Path) -> None:
    with penstock.Module(decoder, device_memory="1GiB") as module:
        module.set_budget(module.floor_bytes)
        assert module.budget_bytes == module.floor_bytes and "(given to set_budget)" in module.summary


def test_copies_that_steps_hide_cost_nothing(decoder: Path) -> None:
    """As many bytes as the link moves in the shortest method."""
    program = penstock.read_program(decoder)
    names = [method.name for method in program.methods]
    assert len(names) == 2
    times = Calibration(Link(bytes_per_s=1e6), {names[0]: (0.5, 0.25), names[1]: (2.0,)})
    assert weights_range(program, 10, 90, times) == WeightsRange(10, 90, hidden_bytes=750_000)
    assert weights_range(program, 10, 90, None) == WeightsRange(10, 90, hidden_bytes=0)
    # Pages are whole: all weights may take less than the floor.
    assert weights_range(program, 10, 9, None) == WeightsRange(10, 10)


def test_graphs_keep_activations_of_their_own(decoder: Path) -> None:
    program = penstock.read_program(decoder)
    once, twice = (grant("1GiB", program, torch.device("cpu"), cuda_graph=graph) for graph in (False, True))
    assert twice.activation_bytes == 2 * once.activation_bytes > 0
    weights = WeightsRange(0, 1)
    assert once.divided(weights).weights_bytes - twice.divided(weights).weights_bytes == once.activation_bytes
