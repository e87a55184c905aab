"""Registered host memory, with a stand-in for the driver: what is registered is unregistered, in time."""

from __future__ import annotations

import contextlib
import gc
from pathlib import Path

import pytest
import torch

from penstock.errors import RegistrationError
from penstock.kv import host_block

CUDA = torch.device("cuda", 0)


class Driver:
    def __init__(self) -> None:
        self.refuses = 0
        self.registered: dict[int, int] = {}
        self.synchronized = False
        # Of each that ended: whether the device had been waited for, and whether the memory was still there. Kept for
        # the test to look at, because Python drops what is raised while an object dies.
        self.ended: list[tuple[bool, bool]] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if self.refuses:
            return self.refuses
        assert flags == 0 and mapped(address, nbytes)
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.ended.append((self.synchronized, mapped(address, self.registered.pop(address))))
        return 0


def mapped(address: int, nbytes: int) -> bool:
    spans = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(low, 16) <= address and address + nbytes <= int(high, 16) for low, high in spans)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: setattr(found, "synchronized", True))
    return found


def test_registered_as_long_as_a_view_lives(driver: Driver) -> None:
    tensor = host_block.host_tensor((3, 1000), torch.bfloat16, CUDA)
    assert driver.registered == {tensor.data_ptr(): 6000}, "exact, not rounded up"
    assert tensor.shape == (3, 1000) and not tensor.any()
    view = tensor[1]
    del tensor
    gc.collect()
    assert len(driver.registered) == 1
    view.fill_(2)
    del view
    gc.collect()
    assert not driver.registered
    assert driver.ended == [(True, True)]


def test_a_refused_registration_is_an_error(driver: Driver) -> None:
    driver.refuses = 801
    with pytest.raises(RegistrationError, match="6000 bytes .* with cuda:0: cudaHostRegister returned 801"):
        host_block.host_tensor((3, 1000), torch.bfloat16, CUDA)
    gc.collect()
    assert not driver.registered and not driver.ended


def test_nothing_is_registered_where_nothing_is_read(driver: Driver) -> None:
    assert host_block.host_tensor((2, 0, 8), torch.float16, CUDA).shape == (2, 0, 8)
    assert host_block.host_tensor((2, 8), torch.float16, torch.device("cpu")).device.type == "cpu"
    assert host_block.host_tensor((2, 8), torch.float16, torch.device("meta")).device.type == "meta"
    assert not driver.registered
