from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from penstock.errors import DeviceMemoryError, HostMemoryError, InputError, RegistrationError, StateInvalidError
from penstock.kv.mapped_tensor import bytes_at
from penstock.runtime import state as state_room
from penstock.runtime.state import StateStore
from penstock.torch_private.graph import storage_key
from penstock.weight import ITEM_BYTES, State
from tests.runtime.programs import CPU, a_method

CACHE = State("cache", "float32", (2, 3, 4), (0, 2, 1), "zeros")
COUNT = State("count", "int64", (), (), "stored")
TABLE = State("table", "bfloat16", (2, 3), (1, 0), "stored")
STATES = (CACHE, COUNT, TABLE)
TABLE_VALUE = torch.arange(6.0).reshape(2, 3).bfloat16()
# In the file the outermost dimension is the first of the dim order.
STORED = {"count": torch.tensor([41]).view(torch.uint8), "table": TABLE_VALUE.t().contiguous().view(torch.uint8)}
BOTH = a_method(states=("table", "cache"))


def a_store(
    states: tuple[State, ...] = STATES,
    stored: dict[str, torch.Tensor] = STORED,
    read: Callable[[str], torch.Tensor | bytes] | None = None,
) -> StateStore:
    return StateStore(states, CPU, stored, read or stored.__getitem__)


def test_first_values_are_zeros_or_what_is_stored() -> None:
    store = a_store()
    assert torch.equal(store.read("cache"), torch.zeros(2, 3, 4))
    assert torch.equal(store.read("count"), torch.tensor(41))
    assert torch.equal(store.read("table"), TABLE_VALUE)
    assert store.nbytes == 24 * 4 + 8 + 12
    assert store.names == ("cache", "count", "table")


def test_a_stored_value_has_the_last_word_over_zeros() -> None:
    stored = {**STORED, "cache": torch.ones(24).view(torch.uint8)}
    assert torch.equal(a_store(stored=stored).read("cache"), torch.ones(2, 3, 4))


def test_stored_values_may_be_read_as_bytes() -> None:
    store = a_store(read=lambda name: STORED[name].numpy().tobytes())
    assert torch.equal(store.read("table"), TABLE_VALUE)


def test_the_layout_is_that_of_the_dim_order() -> None:
    table, cache = a_store().tensors(BOTH)
    assert table.stride() == (1, 2) and table.shape == (2, 3)
    assert cache.stride() == (12, 1, 3) and cache.shape == (2, 3, 4)


def test_methods_share_one_allocation_and_runs_leave_their_mark() -> None:
    store = a_store()
    table, cache = store.tensors(BOTH)
    (again,) = store.tensors(a_method(name="decode", states=("cache",)))
    cache.add_(3)
    assert again.data_ptr() == cache.data_ptr()
    assert torch.equal(store.read("cache"), torch.full((2, 3, 4), 3.0))
    assert torch.equal(store.read("table"), TABLE_VALUE) and torch.equal(table, TABLE_VALUE)


def test_what_is_read_is_a_copy() -> None:
    store = a_store()
    store.read("cache").fill_(9)
    assert torch.equal(store.read("cache"), torch.zeros(2, 3, 4))


def test_write_keeps_the_allocation() -> None:
    store = a_store()
    before = [tensor.data_ptr() for tensor in store.tensors(BOTH)]
    value = torch.randn(4, 3, 2, requires_grad=True).permute(2, 1, 0)
    store.write("cache", value)
    assert torch.equal(store.read("cache"), value) and not store.read("cache").requires_grad
    assert [tensor.data_ptr() for tensor in store.tensors(BOTH)] == before


@pytest.mark.parametrize(
    ("value", "got"),
    [
        (torch.zeros(2, 4, 3), r"float32\[2, 4, 3\]"),
        (torch.zeros(3, 4), r"float32\[3, 4\]"),
        (torch.zeros(2, 3, 4, dtype=torch.float64), r"float64\[2, 3, 4\]"),
        (torch.zeros(2, 3, 4, device="meta"), "on meta, needs a dense one"),
        (torch.zeros(2, 3, 4).to_sparse(), "sparse_coo tensor"),
        ([[0.0]], "of type list"),
    ],
    ids=["shape", "rank", "dtype", "meta", "sparse", "list"],
)
def test_what_does_not_fit_is_not_written(value: torch.Tensor, got: str) -> None:
    store = a_store()
    with pytest.raises(InputError, match=f"state 'cache' was given .*{got}"):
        store.write("cache", value)
    assert torch.equal(store.read("cache"), torch.zeros(2, 3, 4)) and store._invalid is None


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    store = a_store()
    with pytest.raises(InputError, match="no state 'cash'; the program has cache, count, table"):
        store.read("cash")
    with pytest.raises(InputError, match="no state 'cash'"):
        store.write("cash", torch.zeros(1))


def test_reset_puts_first_values_back_in_place_and_reads_them_again() -> None:
    reads: list[str] = []

    def read(name: str) -> torch.Tensor:
        reads.append(name)
        return STORED[name]

    store = a_store(read=read)
    tensors = store.tensors(BOTH)
    for tensor in tensors:
        tensor.fill_(7)
    store.reset()
    assert torch.equal(tensors[0], TABLE_VALUE) and torch.equal(tensors[1], torch.zeros(2, 3, 4))
    assert reads == ["count", "table"] * 2  # no second copy is kept


def test_after_a_failed_run_only_reset_makes_state_usable() -> None:
    store = a_store()
    store.mark_invalid("run 3 of 'decode' failed: out of memory")
    assert store._invalid is not None
    for use in (
        lambda: store.tensors(BOTH),
        lambda: store.read("count"),
        lambda: store.write("cache", torch.zeros(2, 3, 4)),
    ):
        with pytest.raises(StateInvalidError, match="run 3 of 'decode' failed: out of memory; call reset_state"):
            use()
    assert store.tensors(a_method(name="stateless")) == []
    store.reset()
    assert store._invalid is None and torch.equal(store.tensors(BOTH)[0], TABLE_VALUE)


def test_a_reset_that_fails_leaves_state_unusable() -> None:
    broken = False

    def read(name: str) -> torch.Tensor:
        if broken:
            raise OSError("the disk is gone")
        return STORED[name]

    store = a_store(read=read)
    broken = True
    with pytest.raises(OSError, match="the disk is gone"):
        store.reset()
    with pytest.raises(StateInvalidError, match="did not finish"):
        store.read("cache")


def test_stored_bytes_of_another_length_are_refused() -> None:
    with pytest.raises(InputError, match="state 'count' has 7 stored bytes, needs 8"):
        a_store(read=lambda name: bytes(7))


@pytest.mark.parametrize("dtype", ITEM_BYTES)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_every_dtype_can_be_state(dtype: str, shape: tuple[int, ...]) -> None:
    order = tuple(reversed(range(len(shape))))
    states = tuple(State(name, dtype, shape, order, "zeros") for name in ("zeros", "stored"))
    content = bytes(i % 2 for i in range(states[0].nbytes))
    store = StateStore(states, CPU, {"stored"}, lambda name: content)
    zeros, stored = store.tensors(a_method(states=("zeros", "stored")))
    assert bytes(zeros.untyped_storage().tolist()) == bytes(len(content))
    assert bytes(stored.untyped_storage().tolist()) == content


def test_state_made_in_inference_mode_can_be_written_outside() -> None:
    with torch.inference_mode():
        store = a_store()
    for tensor in store.tensors(BOTH):
        tensor.add_(1)
    assert torch.equal(store.read("cache"), torch.ones(2, 3, 4))


def test_memory_that_is_refused_is_named() -> None:
    huge = State("huge", "float32", (2**40, 2**10), (0, 1), "zeros")
    with pytest.raises(DeviceMemoryError, match="state 'huge' needs 4096 TiB on cpu"):
        a_store(states=(huge,))


FAR = State("host_kv", "bfloat16", (2, 3), (1, 0), "zeros", host=True)
GPU = torch.device("cuda", 1)


def a_mapping(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, torch.device, int]]:
    """Stands in for registered memory and its device address: both on the CPU, over the same bytes. Returns what was
    asked for, with the storage that came of it."""
    calls: list[tuple[str, torch.device, int]] = []

    def host_tensor(shape: list[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        found = torch.zeros(shape, dtype=dtype)
        calls.append(("registered", device, storage_key(found)))
        return found

    def mapped_tensor(host: torch.Tensor, device: torch.device) -> torch.Tensor:
        found = bytes_at(host.data_ptr(), host.nbytes, CPU, host).view(host.dtype).view(host.shape)
        calls.append(("mapped", device, storage_key(found)))
        return found

    monkeypatch.setattr(state_room, "host_tensor", host_tensor)
    monkeypatch.setattr(state_room, "mapped_tensor", mapped_tensor)
    return calls


def test_with_a_gpu_a_host_state_is_registered_memory_at_its_mapped_address(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = a_mapping(monkeypatch)
    stored = {"host_kv": STORED["table"]}
    store = StateStore((FAR,), GPU, stored, stored.__getitem__)
    (seen,) = store.tensors(a_method(states=("host_kv",)))
    assert [call[:2] for call in calls] == [("registered", GPU), ("mapped", GPU)]
    assert storage_key(seen) == calls[1][2] != calls[0][2], "the program gets the tensor of the device"
    # Where the program writes is where everything else reads, and the other way round.
    assert torch.equal(seen, TABLE_VALUE) and seen.stride() == (1, 2) and seen.shape == (2, 3)
    seen[1, 2] = 77
    assert store.read("host_kv")[1, 2] == 77
    store.write("host_kv", TABLE_VALUE * 2)
    assert torch.equal(seen, TABLE_VALUE * 2)
    store.reset()
    assert torch.equal(seen, TABLE_VALUE)
    assert len(calls) == 2, "one allocation for its life"


def test_on_the_cpu_a_host_state_is_a_state_like_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = a_mapping(monkeypatch)
    store = a_store(states=(FAR,), stored={})
    (seen,) = store.tensors(a_method(states=("host_kv",)))
    seen.fill_(3)
    assert not calls and torch.equal(store.read("host_kv"), torch.full((2, 3), 3.0).bfloat16())


@pytest.mark.parametrize("error", [OSError("no memory"), OverflowError("too large"), RegistrationError("refused 2")])
def test_host_memory_that_is_not_to_be_had_names_the_state(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def refuses(*_: object) -> torch.Tensor:
        raise error

    monkeypatch.setattr(state_room, "host_tensor", refuses)
    with pytest.raises(HostMemoryError, match=rf"state 'host_kv' needs 12 B.* that cuda:1 can read.*: {error}"):
        StateStore((FAR,), GPU, {}, {}.__getitem__)
