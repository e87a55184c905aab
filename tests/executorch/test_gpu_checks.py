"""Whether a program for a GPU runs on the one that is there, asked before anything is made on it.

There is none here: a library that answers as a driver does takes its place, and the program is one for the CPU whose
description says otherwise.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.executorch.payload import (
    HEADER_BYTES,
    PAYLOAD_MAGIC,
    StoredPlan,
    pack_payload,
    payload_bytes,
    read_payload,
)
from tests.executorch.test_options import INVALID_ARGUMENT, Probe, probe

__all__ = ["probe"]

INCOMPATIBLE = 0x30

DRIVER = """
#include <cstring>
extern "C" {
int cuInit(unsigned) { return 0; }
int cuDeviceGetCount(int* count) { return *count = 2, 0; }
int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, 0; }
int cuDeviceGetName(char* name, int, int) { return std::strcpy(name, "Sample GPU"), 0; }
int cuDeviceGetAttribute(int* value, int attribute, int) { return *value = attribute == 75 ? 8 : 6, 0; }
}
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.cpp").write_text(DRIVER)
    compiler = os.environ.get("CXX", "g++")
    command = [compiler, "-shared", "-fPIC", str(folder / "driver.cpp"), "-o", str(folder / "libcuda.so.1")]
    subprocess.run(command, check=True, capture_output=True)
    return {"LD_LIBRARY_PATH": str(folder)}


@pytest.fixture(scope="module")
def for_cuda(lowered: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its description changed, and the rest of the file where it was: the code, which is not read here, is shorter by
    as much as the description is longer."""
    raw = bytearray(lowered("chain").read_bytes())
    start = raw.index(PAYLOAD_MAGIC)
    end = start + payload_bytes(raw[start : start + HEADER_BYTES])
    payload = read_payload(bytes(raw[start:end]))
    built = {**payload.description.built_with, "capability": "9.0", "gpu": "H"}
    plans = [StoredPlan(0, payload.plans)]
    changed = replace(payload.description, device="cuda", built_with=built)
    longer = len(pack_payload(changed, plans, payload.code)) - (end - start)
    raw[start:end] = pack_payload(changed, plans, payload.code[: len(payload.code) - longer])
    path = tmp_path_factory.mktemp("cuda") / "model.pte"
    path.write_bytes(raw)
    return path


def asked(probe: Probe, path: Path, data: Path, environment: dict[str, str], index: int | None) -> tuple[int, str]:
    options = [] if index is None else [("int", "weight_offload_device", str(index))]
    return probe(*options, path=path, data=data, environment=environment)


def test_the_compute_capability_is_checked(
    probe: Probe, for_cuda: Path, lowered: Callable[[str], Path], driver: dict[str, str]
) -> None:
    data = lowered("chain").with_suffix(".ptd")
    status, log = asked(probe, for_cuda, data, driver, 1)
    assert status == INCOMPATIBLE
    assert "compiled for compute capability 9.0 (H); cuda:1 is Sample GPU of compute capability 8.6" in log
    status, log = asked(probe, for_cuda, data, driver, 2)
    assert status == INVALID_ARGUMENT
    assert "there is no device cuda:2; the driver sees 2" in log


def test_no_driver_and_no_gpu_are_named(probe: Probe, for_cuda: Path, lowered: Callable[[str], Path]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    data = lowered("chain").with_suffix(".ptd")
    status, log = asked(probe, for_cuda, data, {}, 0)
    assert status == INCOMPATIBLE
    assert "no CUDA driver on this machine" in log
    status, log = asked(probe, for_cuda, data, {}, None)
    assert status == INCOMPATIBLE
    assert "sees no GPU here" in log
