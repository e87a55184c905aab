"""Packed weights on a GPU: the same bits as with the file that is not packed, at every budget and however it runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from bench.decoding import KINDS, Decoder, cases, differs

import penstock
from penstock import errors
from tests.gpu import memcheck, programs
from tests.gpu.device_kernels import DeviceKernels
from tests.gpu.test_runtime_cuda import generate, same
from tests.runtime.test_packed_dtypes import compiled
from tests.weights.packed_cases import earlier_code

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FRACTIONS = (0.0, 0.2, 0.5, 0.7, 0.9, 1.0)


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = os.environ.get("PENSTOCK_GPU_PROGRAMS")
    return programs.compile_all(Path(folder) if folder else tmp_path_factory.mktemp("gpu_programs"))["decoder"]


@pytest.fixture(scope="session")
def packed(program: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("packed") / "packed.ptd"
    penstock.pack(program.with_suffix(".ptd"), target, program=program)
    return target


@pytest.fixture(scope="session")
def expected(program: Path) -> list[torch.Tensor]:
    with penstock.Module(program, budget="64GiB") as module:
        return generate(module)


@pytest.mark.parametrize(
    ("host_memory", "cuda_graph"), [("registered", False), ("registered", True), ("1GiB", False)], ids=str
)
@pytest.mark.parametrize("poison", ["0", "1"])
def test_every_budget_gives_the_same_bits(
    program: Path,
    packed: Path,
    expected: list[torch.Tensor],
    host_memory: str,
    cuda_graph: bool,
    poison: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PENSTOCK_POISON", poison)
    options = {"weights": packed, "host_memory": host_memory, "cuda_graph": cuda_graph}
    with penstock.Module(program, budget="64GiB", **options) as module:
        floor, full = module.floor_bytes, module.full_bytes
        stored = streamed = 0
        for fraction in FRACTIONS:
            module.set_budget(int(floor + (full - floor) * fraction))
            for _ in range(3):
                assert same(generate(module), expected), (fraction, module.plan and module.plan.stores)
            plan = module.plan
            assert plan is not None
            last, planned = module.last_run, plan.method("decode").warm
            assert (last.bytes_streamed, last.bytes_decoded, last.copies) == (
                planned.bytes_streamed,
                planned.bytes_decoded,
                planned.copies,
            )
            assert module.device_memory()[0] <= module.budget_bytes
            stored += len(plan.stores)
            streamed += planned.bytes_streamed
        assert stored and streamed
        with pytest.raises(errors.BelowFloorError):
            module.set_budget(floor - 1)


def test_a_calibrated_plan_gives_the_same_bits(program: Path, packed: Path, expected: list[torch.Tensor]) -> None:
    with penstock.Module(program, budget="64GiB", weights=packed) as module:
        module.set_budget((module.floor_bytes + module.full_bytes) // 2)
        generate(module)
        with module.calibrate():
            for _ in range(4):
                generate(module)
        assert same(generate(module), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_make_the_same_bits(kind: int) -> None:
    """Every bit pattern, tensors that pack badly, and sizes beside tiles and blocks."""
    decoder = Decoder()
    assert [name for name, tensor in cases(KINDS[kind][0]) if differs(decoder, kind, tensor)] == []


def test_damage_leads_no_kernel_outside() -> None:
    """What is written beside the output shows here; what is read beside the blocks, in tests/gpu/memcheck.py."""
    memcheck.decode_damaged(DeviceKernels())


def test_weights_of_every_dtype_give_the_same_bits(tmp_path: Path) -> None:
    """Also those of a file that was written before there was a code of three levels."""
    program, raw, x = compiled(tmp_path, "cuda")
    with earlier_code():
        penstock.pack(raw, tmp_path / "earlier.ptd")
    with penstock.Module(program, weights=raw, budget="64MiB") as module:
        expected = module(x)
    for weights in (program.with_suffix(".ptd"), tmp_path / "earlier.ptd"):
        with penstock.Module(program, weights=weights, budget="64MiB") as module:
            for budget_bytes in (module.floor_bytes, (module.floor_bytes + module.full_bytes) // 2, module.full_bytes):
                module.set_budget(budget_bytes)
                for _ in range(2):
                    assert torch.equal(module(x), expected)
