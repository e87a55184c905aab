"""Calls of a module's driver made to fail in turn, on the soft driver. Every one of them, on a GPU:
tests/gpu/test_driver_faults_cuda.py. Every call of a session alone: test_driver_faults.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import penstock
from tests.runtime.module_lives import Life, Played, fail_in_turn
from tests.runtime.modules import CHAIN_WIDTH, EVERYTHING, SETUPS, floor_of, random_input

# Not every call: a life with its loads takes a tenth of a second. No multiple of how many calls a run or a step makes.
STRIDE = 13


@pytest.fixture
def played(chain: Path) -> Callable[[str], Played]:
    def of(setup: str) -> Played:
        x = random_input(3, CHAIN_WIDTH, seed=3)
        with penstock.Module(chain, EVERYTHING) as module:
            wanted, full_bytes = module(x), module.full_bytes
        options = SETUPS[setup]
        return Played(chain, "cpu", (x,), wanted, floor_of(chain, **options), full_bytes, options)

    return of


@pytest.mark.parametrize("setup", SETUPS)
def test_calls_of_a_module_fail_in_turn(setup: str, played: Callable[[str], Played]) -> None:
    seen = fail_in_turn(played(setup), STRIDE)
    assert seen >= {"record", "wait", "copy_to_device", "create_event", "destroy_event"}


def test_a_life_that_goes_wrong_is_noticed(played: Callable[[str], Played]) -> None:
    whole = played("registered")
    assert Life(whole, 1).live()
    wrong = {name: torch.zeros_like(value) for name, value in whole.wanted.items()}
    other = dataclasses.replace(whole, wanted=wrong)
    with pytest.raises(AssertionError):
        Life(other, 1).live()
