from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.budget import format_bytes
from penstock.errors import BelowFloorError, BudgetError
from penstock.program import ConstantSpec, TensorSpec
from penstock.runtime.automatic_budget import AutomaticTerms, automatic_terms, reserve_bytes
from penstock.runtime.budget_choice import choose_new_budget
from penstock.runtime.driver import Memory
from penstock.weight import State
from tests.runtime.programs import CPU, a_method, a_program

TERMS = AutomaticTerms(free_bytes=1000, held_bytes=200, activation_bytes=31, state_bytes=42, reserve_bytes=53)
GPU = torch.device("cuda", 1)
MIB = 2**20


def automatic_budget(terms: AutomaticTerms, floor_bytes: int) -> int:
    choice = choose_new_budget("auto", automatic=lambda: terms, floor_bytes=floor_bytes, full_bytes=2**50)
    assert choice.source == "automatic" and choice.asked_bytes == choice.budget_bytes
    return choice.budget_bytes


def test_the_budget_is_the_sum_of_its_terms() -> None:
    assert automatic_budget(TERMS, 0) == automatic_budget(TERMS, 1074) == 1000 + 200 - 31 - 42 - 53 == 1074


def test_below_the_floor_every_term_is_named() -> None:
    with pytest.raises(BelowFloorError) as caught:
        automatic_budget(TERMS, 1075)
    assert (caught.value.budget_bytes, caught.value.floor_bytes) == (1074, 1075)
    text = str(caught.value)
    for part in ("free 1000 B", "weights 200 B", "activations 31 B", "state 42 B", "reserve 53 B", "1075 bytes", "1 B"):
        assert part in text


@pytest.mark.parametrize("floor_bytes", [0, 7])
def test_a_budget_is_never_negative(floor_bytes: int) -> None:
    """A device that lacks memory for the rest has none for weights; what must be freed counts both."""
    terms = AutomaticTerms(free_bytes=10, held_bytes=0, activation_bytes=60, state_bytes=0, reserve_bytes=40)
    with pytest.raises(BelowFloorError) as caught:
        automatic_budget(terms, floor_bytes)
    assert (caught.value.budget_bytes, caught.value.floor_bytes) == (0, floor_bytes)
    text = str(caught.value)
    assert "budget is 0 B" in text and f"{90 + floor_bytes} B more" in text
    for part in ("free 10 B", "activations 60 B", "state 0 B", "reserve 40 B"):
        assert part in text


@settings(derandomize=True)
@given(st.lists(st.integers(0, 2**40), min_size=6, max_size=6))
def test_what_it_says_must_be_freed_is_enough_and_no_more(amounts: list[int]) -> None:
    *parts, floor_bytes = amounts
    terms = AutomaticTerms(*parts)
    room = terms.free_bytes + terms.held_bytes - terms.activation_bytes - terms.state_bytes - terms.reserve_bytes
    lacking = floor_bytes - room
    if lacking > 0:
        with pytest.raises(BelowFloorError, match=re.escape(f"so {format_bytes(lacking)} more must be free")):
            automatic_budget(terms, floor_bytes)
        with pytest.raises(BelowFloorError):
            automatic_budget(replace(terms, free_bytes=terms.free_bytes + lacking - 1), floor_bytes)
        assert automatic_budget(replace(terms, free_bytes=terms.free_bytes + lacking), floor_bytes) == floor_bytes
    else:
        assert automatic_budget(terms, floor_bytes) == room >= floor_bytes


@pytest.mark.parametrize(
    ("device", "total_bytes", "reserve"),
    [
        (GPU, 0, 256 * MIB),
        (GPU, 50 * 256 * MIB, 256 * MIB),
        (GPU, 50 * 300 * MIB, 300 * MIB),
        (CPU, 20 * 256 * MIB, 256 * MIB),
        (CPU, 20 * 300 * MIB, 300 * MIB),
    ],
)
def test_the_reserve_is_a_share_and_never_less_than_a_minimum(
    device: torch.device, total_bytes: int, reserve: int
) -> None:
    assert reserve_bytes(device, total_bytes) == reserve


def test_the_terms_of_a_cpu() -> None:
    states = (State("a", "float32", (3,), (0,), "zeros"), State("b", "int8", (5,), (0,), "stored"))
    methods = (a_method(name="prefill", activation_bound_bytes=700), a_method(name="decode", activation_bound_bytes=70))
    program = a_program(methods, states=states)
    terms = automatic_terms(program, CPU, lambda: Memory(5000, 9000))
    assert terms == AutomaticTerms(5000, 0, 700, 17, 256 * MIB)
    # A module that plans again has its state, and will not hold what it holds now.
    again = automatic_terms(program, CPU, lambda: Memory(5000, 9000), held_bytes=300)
    assert again == AutomaticTerms(5000, 300, 700, 0, 256 * MIB)
    assert automatic_terms(program, CPU, lambda: Memory(5000, 9000), held_bytes=0).state_bytes == 0
    assert automatic_terms(program, CPU, lambda: Memory(5000, 9000), cuda_graph=True).activation_bytes == 1400


@pytest.mark.parametrize("held_bytes", [None, 300])
def test_on_a_gpu_torch_gives_back_what_it_does_not_use_before_the_driver_is_asked(
    monkeypatch: pytest.MonkeyPatch, held_bytes: int | None
) -> None:
    """At load and when a module plans again alike."""
    free_bytes = [1000]
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: free_bytes.append(1250))
    terms = automatic_terms(a_program(), GPU, lambda: Memory(free_bytes[-1], 9000), held_bytes=held_bytes)
    assert terms.free_bytes == 1250


@pytest.mark.parametrize(("device", "counted"), [(GPU, 12), (CPU, 12 + 5)])
def test_with_a_gpu_the_host_side_of_a_cache_takes_none_of_its_memory(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, counted: int
) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    states = (State("near", "float32", (3,), (0,), "zeros"), State("far", "int8", (5,), (0,), "zeros", host=True))
    program = a_program(states=states)
    assert (program.state_bytes, program.host_state_bytes) == (17, 5)
    assert automatic_terms(program, device, lambda: Memory(1, 1)).state_bytes == counted


def test_an_unbounded_size_needs_an_explicit_budget() -> None:
    inputs = (
        TensorSpec("tokens", "int64", ("2*s1 + 1", "s10"), ("s10", 1)),
        TensorSpec("mask", "bool", ("s10",), (1,)),
        ConstantSpec("flag", True),
    )
    symbols: dict[str, tuple[int, int | None]] = {"s1": (1, None), "s10": (1, 64)}
    bounded = a_method(name="decode")
    unbounded = a_method(inputs, name="prefill", symbols=symbols, activation_bound_bytes=None)
    with pytest.raises(BudgetError) as caught:
        automatic_terms(a_program((bounded, unbounded)), CPU, lambda: Memory(2**40, 2**40))
    text = str(caught.value)
    assert "'prefill'" in text and "s1 of input 'tokens'" in text and "pass a budget" in text
    assert "s10" not in text and "decode" not in text


def test_sizes_that_depend_on_data_need_one_too() -> None:
    program = a_program((a_method(activation_bound_bytes=None),))
    with pytest.raises(BudgetError, match="'forward'"):
        automatic_terms(program, CPU, lambda: Memory(2**40, 2**40))
