from __future__ import annotations

import pytest
import torch

from penstock.errors import BelowFloorError, BudgetError
from penstock.program import ConstantSpec, TensorSpec
from penstock.runtime.automatic_budget import AutomaticTerms, automatic_budget, automatic_terms, reserve_bytes
from penstock.weight import State
from tests.runtime.programs import CPU, a_method, a_program

TERMS = AutomaticTerms(
    free_bytes=1000, allocator_unused_bytes=200, activation_bytes=31, state_bytes=42, reserve_bytes=53
)
GPU = torch.device("cuda", 1)
MIB = 2**20


def test_the_budget_is_the_sum_of_its_terms() -> None:
    assert TERMS.budget_bytes == 1000 + 200 - 31 - 42 - 53
    assert automatic_budget(TERMS, 1074) == 1074


def test_below_the_floor_every_term_is_named() -> None:
    with pytest.raises(BelowFloorError) as caught:
        automatic_budget(TERMS, 1075)
    assert (caught.value.budget_bytes, caught.value.floor_bytes) == (1074, 1075)
    text = str(caught.value)
    for part in ("free 1000 B", "torch 200 B", "activations 31 B", "state 42 B", "reserve 53 B", "1075 bytes, 1 more"):
        assert part in text


def test_a_negative_budget_is_below_every_floor() -> None:
    terms = AutomaticTerms(10, 0, 100, 0, 0)
    with pytest.raises(BelowFloorError, match="automatic budget is -90 B"):
        automatic_budget(terms, 0)


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
    terms = automatic_terms(a_program(methods, states=states), CPU, free_bytes=5000, total_bytes=9000)
    assert terms == AutomaticTerms(5000, 0, 700, 17, 256 * MIB)


def test_on_a_gpu_what_torch_holds_unused_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: {GPU: 900}[device])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: {GPU: 650}[device])
    assert automatic_terms(a_program(), GPU, free_bytes=1, total_bytes=1).allocator_unused_bytes == 250


@pytest.mark.parametrize(("device", "counted"), [(GPU, 12), (CPU, 12 + 5)])
def test_with_a_gpu_the_host_side_of_a_cache_takes_none_of_its_memory(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, counted: int
) -> None:
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    states = (State("near", "float32", (3,), (0,), "zeros"), State("far", "int8", (5,), (0,), "zeros", host=True))
    program = a_program(states=states)
    assert (program.state_bytes, program.host_state_bytes) == (17, 5)
    assert automatic_terms(program, device, free_bytes=1, total_bytes=1).state_bytes == counted


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
        automatic_terms(a_program((bounded, unbounded)), CPU, free_bytes=2**40, total_bytes=2**40)
    text = str(caught.value)
    assert "'prefill'" in text and "s1 of input 'tokens'" in text and "pass a budget" in text
    assert "s10" not in text and "decode" not in text


def test_sizes_that_depend_on_data_need_one_too() -> None:
    program = a_program((a_method(activation_bound_bytes=None),))
    with pytest.raises(BudgetError, match="'forward': it has sizes that depend on data"):
        automatic_terms(program, CPU, free_bytes=2**40, total_bytes=2**40)
