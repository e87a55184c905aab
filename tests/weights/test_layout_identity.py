"""The identity follows the layout of a program's weights and states, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.weight import State, Weight
from penstock.weights import layout_identity

WEIGHTS = (
    Weight("a", "float32", (2, 3), (0, 1), ("a.tied", "a.again")),
    Weight("b", "int8", (4,), (0,)),
)
STATES = (State("s", "float16", (5, 1), (0, 1), "zeros"), State("t", "int64", (), (), "stored"))


def test_it_is_128_bits_in_hexadecimal_and_stays_the_same() -> None:
    # Recorded: files written by one version must fit programs compiled by the next.
    assert layout_identity(WEIGHTS, STATES) == "4f999a28dfc9802441af97dfc4e567d6"


def test_the_order_of_first_access_does_not_count() -> None:
    swapped = replace(WEIGHTS[0], aliases=("a.again", "a.tied"))
    assert layout_identity((WEIGHTS[1], swapped), STATES[::-1]) == layout_identity(WEIGHTS, STATES)


@pytest.mark.parametrize(
    "change",
    [
        {"name": "c"},
        {"aliases": ("a.tied",)},
        {"dtype": "int32"},
        {"shape": (3, 2)},
        {"dim_order": (1, 0)},
    ],
)
def test_every_part_of_a_weight_counts(change: dict[str, Any]) -> None:
    changed = (replace(WEIGHTS[0], **change), WEIGHTS[1])
    assert layout_identity(changed, STATES) != layout_identity(WEIGHTS, STATES)


@pytest.mark.parametrize(
    "change",
    [{"name": "u"}, {"dtype": "bfloat16"}, {"shape": (1, 5)}, {"dim_order": (1, 0)}],
)
def test_every_part_of_a_state_counts(change: dict[str, Any]) -> None:
    changed = (replace(STATES[0], **change), STATES[1])
    assert layout_identity(WEIGHTS, changed) != layout_identity(WEIGHTS, STATES)


def test_a_weight_is_not_a_state() -> None:
    weight, state = Weight("x", "int8", (2,), (0,)), State("x", "int8", (2,), (0,), "stored")
    assert layout_identity([weight], []) != layout_identity([], [state])


def test_first_values_of_states_do_not_count() -> None:
    """Whether a state starts as zeros is a value: a file with another start belongs to the same program."""
    state = State("s", "float32", (5,), (0,), init="zeros")
    assert layout_identity([], [state]) == layout_identity([], [replace(state, init="stored")])
