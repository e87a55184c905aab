"""A cache on two sides, as one state: position by position, wherever the sides meet."""

from __future__ import annotations

import pytest
import torch

from penstock.errors import InputError
from penstock.kv.split import Split
from penstock.runtime.split_state import SplitState
from penstock.runtime.state import StateStore
from penstock.weight import State
from tests.runtime.programs import CPU, a_method

# As exported: one block near. Two sequences, one head of two numbers.
NEAR = State("kv", "float32", (2, 2, 1, 64, 2), (0, 1, 2, 3, 4), "zeros")
FAR = State("host_kv", "float32", (2, 2, 1, 86, 2), (0, 1, 2, 3, 4), "zeros", host=True, near="kv")
OTHER = State("ids", "int64", (2, 3), (0, 1), "zeros")
WHOLE = torch.arange(2 * 2 * 150 * 2.0).view(2, 2, 1, 150, 2)
POSITION_BYTES = 2 * 2 * 2 * 4
NEARS = (0, 64, 128, 150)


def a_store(near: int, stored: dict[str, torch.Tensor] | None = None) -> StateStore:
    split = SplitState(NEAR, FAR, Split(near, 150 - near))
    found = stored or {}
    return StateStore((NEAR, FAR, OTHER), CPU, found, found.__getitem__, [split])


@pytest.mark.parametrize("near", NEARS)
def test_the_code_gets_two_inputs_of_their_real_sizes(near: int) -> None:
    store = a_store(near)
    device_kv, host_kv, _ = store.tensors(a_method(states=("kv", "host_kv", "ids")))
    assert (device_kv.shape[3], host_kv.shape[3]) == (near, 150 - near)
    assert device_kv.untyped_storage().nbytes() == near * POSITION_BYTES
    assert host_kv.untyped_storage().nbytes() == (150 - near) * POSITION_BYTES
    assert store.device_bytes == near * POSITION_BYTES + OTHER.nbytes
    assert store.nbytes == 150 * POSITION_BYTES + OTHER.nbytes
    store.write("kv", WHOLE)
    assert torch.equal(device_kv, WHOLE[:, :, :, :near]) and torch.equal(host_kv, WHOLE[:, :, :, near:])


@pytest.mark.parametrize("before", NEARS)
@pytest.mark.parametrize("after", NEARS)
def test_a_value_moves_between_splits(before: int, after: int) -> None:
    first, second = a_store(before), a_store(after)
    first.write("kv", WHOLE)
    found = first.read("kv")
    found_again = first.read("kv")
    second.write("kv", found)
    found.fill_(0)  # a copy
    assert torch.equal(second.read("kv"), WHOLE) and torch.equal(found_again, WHOLE)
    second.reset()
    assert not second.read("kv").any()


@pytest.mark.parametrize("near", NEARS)
def test_rows_are_sequences(near: int) -> None:
    store = a_store(near)
    store.write("kv", WHOLE)
    store.select_rows(torch.tensor([1, 1]))
    assert torch.equal(store.read("kv"), WHOLE[:, [1, 1]])


@pytest.mark.parametrize("near", NEARS)
@pytest.mark.parametrize("names", [("kv", "host_kv"), ("host_kv",)])
def test_stored_values_are_those_of_the_export(near: int, names: tuple[str, ...]) -> None:
    parts = {"kv": WHOLE[:, :, :, :64].contiguous(), "host_kv": WHOLE[:, :, :, 64:].contiguous()}
    stored = {name: parts[name].view(torch.uint8).reshape(-1) for name in names}
    wanted = torch.cat([parts[name] if name in names else torch.zeros_like(parts[name]) for name in parts], dim=3)
    assert torch.equal(a_store(near, stored).read("kv"), wanted)


def test_it_has_one_name() -> None:
    store = a_store(64)
    assert store.names == ("kv", "ids")
    with pytest.raises(InputError, match="no state 'host_kv'; the program has kv, ids; it is the host's part of 'kv'"):
        store.read("host_kv")
    with pytest.raises(InputError, match=r"float32\[2, 2, 1, 64, 2\].*needs float32\[2, 2, 1, 150, 2\]"):
        store.write("kv", WHOLE[:, :, :, :64])
