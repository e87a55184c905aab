"""Tensors over memory that something else owns; on the CPU, where an address is an address too."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

from penstock.kv import mapped_tensor as mapped

CPU = torch.device("cpu")


def test_it_is_the_same_memory() -> None:
    host = torch.arange(6, dtype=torch.int16)
    seen = mapped.bytes_at(host.data_ptr(), host.nbytes, CPU, host).view(torch.int16)
    assert seen.tolist() == host.tolist() and seen.data_ptr() == host.data_ptr()
    seen[2] = -7
    host[5] = 90
    assert host.tolist() == seen.tolist() == [0, 1, -7, 3, 4, 90]


def test_the_owner_lives_as_long_as_a_view_does() -> None:
    class Owner:
        pass

    memory = torch.zeros(64, dtype=torch.uint8)
    owner = Owner()
    alive = weakref.ref(owner)
    views = [mapped.bytes_at(memory.data_ptr(), 64, CPU, owner) for _ in range(2)]
    views[0] = views[0].view(torch.float32).view(4, 4)[2:]
    del owner
    gc.collect()
    assert alive() is not None and len(mapped._held) == 2
    views.pop()
    gc.collect()
    assert alive() is not None and len(mapped._held) == 1
    views.pop()
    gc.collect()
    assert alive() is None and not mapped._held


class Driver:
    """Finds host memory a page further on, as a driver may that has no unified addresses."""

    current: int | None = None

    @contextlib.contextmanager
    def context(self, ordinal: int) -> Iterator[None]:
        self.current = ordinal
        yield
        self.current = None

    def device_address(self, address: int) -> int:
        assert self.current == 3
        return address + 4096


def test_the_address_is_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, torch.device]] = []
    at = mapped.bytes_at

    def on_the_cpu(address: int, nbytes: int, device: torch.device, owner: object) -> torch.Tensor:
        asked.append((address, nbytes, device))
        return at(address - 4096, nbytes, CPU, owner)

    monkeypatch.setattr(mapped, "_driver", Driver)
    monkeypatch.setattr(mapped, "bytes_at", on_the_cpu)
    host = torch.arange(6).bfloat16().view(2, 3)
    device = torch.device("cuda", 3)
    seen = mapped.mapped_tensor(host, device)
    assert asked == [(host.data_ptr() + 4096, 12, device)]
    assert seen.dtype == torch.bfloat16 and torch.equal(seen, host)
    pointer = host.data_ptr()
    del host
    gc.collect()
    assert seen.data_ptr() == pointer and seen.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_nothing_is_mapped_where_there_are_no_bytes() -> None:
    assert mapped.mapped_tensor(torch.zeros(2, 0, 8), CPU).shape == (2, 0, 8)
