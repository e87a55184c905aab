from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock.errors import BelowFloorError, BudgetError
from penstock.runtime.automatic_budget import AutomaticTerms
from penstock.runtime.budget_choice import BudgetChoice, choose_budget, choose_new_budget

FLOOR = 3 * 2**20 + 1
FULL = 10 * 2**20


def never() -> AutomaticTerms:
    raise AssertionError("the automatic budget was computed")


def found(nbytes: int) -> Callable[[], AutomaticTerms]:
    """Terms of which so much is left for weights."""
    return lambda: AutomaticTerms(nbytes + 6, 0, 1, 2, 3)


def choose(**given: Any) -> BudgetChoice:
    defaults: dict[str, Any] = dict(budget=None, weight_offload_budget_mb=None, baked_bytes=None, automatic=never)
    return choose_budget(**{**defaults, "floor_bytes": FLOOR, "full_bytes": FULL, **given})


@pytest.mark.parametrize(
    ("given", "asked_bytes", "source"),
    [
        (dict(budget=5 * 2**20), 5 * 2**20, "load"),
        (dict(budget="5MiB", baked_bytes=6 * 2**20), 5 * 2**20, "load"),
        (dict(weight_offload_budget_mb=4, baked_bytes=6 * 2**20), 4 * 2**20, "load"),
        (dict(baked_bytes=6 * 2**20), 6 * 2**20, "baked"),
        (dict(automatic=found(7 * 2**20)), 7 * 2**20, "automatic"),
        (dict(budget="auto", automatic=found(7 * 2**20), baked_bytes=6 * 2**20), 7 * 2**20, "automatic"),
        (dict(budget=FLOOR), FLOOR, "load"),
        (dict(budget=FULL), FULL, "load"),
    ],
)
def test_load_comes_before_baked_before_automatic(given: dict[str, Any], asked_bytes: int, source: str) -> None:
    choice = choose(**given)
    assert choice == BudgetChoice(asked_bytes, asked_bytes, source)  # type: ignore[arg-type]
    assert not choice.clamp_sentence


@pytest.mark.parametrize(
    ("given", "origin"),
    [
        (dict(budget=FLOOR - 1), "given at load"),
        (dict(budget=0), "given at load"),
        (dict(budget="0"), "given at load"),
        (dict(weight_offload_budget_mb=0), "given at load"),
        (dict(weight_offload_budget_mb=3), "given at load"),
        (dict(baked_bytes=FLOOR - 1), "baked at export"),
    ],
)
def test_one_byte_below_the_floor_is_refused_with_the_exact_minimum(given: dict[str, Any], origin: str) -> None:
    with pytest.raises(BelowFloorError) as caught:
        choose(**given)
    assert caught.value.floor_bytes == FLOOR and caught.value.budget_bytes < FLOOR
    assert f"at least {FLOOR} bytes" in str(caught.value) and f"({origin})" in str(caught.value)


def test_the_remedies_it_names_are_accepted() -> None:
    with pytest.raises(BelowFloorError, match=f"give {FLOOR}, or weight_offload_budget_mb=4, or more"):
        choose(budget=1)
    assert choose(weight_offload_budget_mb=4).budget_bytes == 4 * 2**20
    assert choose(budget=FLOOR).budget_bytes == FLOOR


@pytest.mark.parametrize(
    "given", [dict(budget="1TiB"), dict(weight_offload_budget_mb=2**20), dict(baked_bytes=2**40)], ids=str
)
def test_more_than_all_weights_take_is_clamped_and_said(given: dict[str, Any]) -> None:
    choice = choose(**given)
    assert choice.budget_bytes == FULL and choice.asked_bytes == 2**40
    assert "1 TiB" in choice.clamp_sentence and "10 MiB" in choice.clamp_sentence
    origin = "baked at export" if "baked_bytes" in given else "given at load"
    assert f"({origin})" in choice.clamp_sentence


def test_the_clamp_never_goes_below_the_floor() -> None:
    assert choose(budget=2**40, full_bytes=FLOOR - 5).budget_bytes == FLOOR


@pytest.mark.parametrize(
    "given",
    [dict(budget=v) for v in (True, -1, "", "AUTO", "8 bananas", "nan", float("nan"), 1.5, "-1", b"5")]
    + [dict(weight_offload_budget_mb=v) for v in (True, -1, "5", 1.5, float("nan"), "auto")],
    ids=str,
)
def test_junk_is_refused_by_name(given: dict[str, Any]) -> None:
    with pytest.raises(BudgetError, match="valid") as caught:
        choose(**given)
    assert not isinstance(caught.value, BelowFloorError)


def change(budget: Any, automatic: Any = never) -> BudgetChoice:
    return choose_new_budget(budget, automatic=automatic, floor_bytes=FLOOR, full_bytes=FULL)


def test_a_loaded_module_takes_what_it_is_given() -> None:
    assert change(FLOOR) == BudgetChoice(FLOOR, FLOOR, "change")
    assert change("5MiB") == BudgetChoice(5 * 2**20, 5 * 2**20, "change")
    assert change("1TiB").budget_bytes == FULL and change("1TiB").clamp_sentence
    assert change("auto", found(7 * 2**20)) == BudgetChoice(7 * 2**20, 7 * 2**20, "automatic")


def test_none_is_no_budget_for_a_loaded_module() -> None:
    """At load it means the baked or an automatic one; here nobody could tell which."""
    with pytest.raises(BudgetError, match='None.*"auto"'):
        change(None)


@pytest.mark.parametrize("budget", [FLOOR - 1, 0, "1KiB"])
def test_a_change_below_the_floor_names_a_remedy_that_set_budget_has(budget: int | str) -> None:
    with pytest.raises(BelowFloorError, match="set_budget") as caught:
        change(budget)
    assert caught.value.floor_bytes == FLOOR
    assert str(FLOOR) in str(caught.value) and "weight_offload_budget_mb" not in str(caught.value)
