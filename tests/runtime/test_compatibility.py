from __future__ import annotations

import platform
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.errors import (
    BudgetError,
    BuildMismatchError,
    DeviceError,
    IdentityError,
    MissingWeightError,
    PackageError,
    WeightMismatchError,
)
from penstock.program import program_to_json
from penstock.runtime.compatibility import check_build, read_offloaded, resolve_device
from penstock.runtime.weights_fit import check_weights
from penstock.weight import State, Weight
from penstock.weights import Entry, WeightsIndex
from tests.runtime.programs import CPU, a_program

HERE = {
    "torch": torch.__version__,
    "machine": platform.machine(),
    "cpu": torch.backends.cpu.get_cpu_capability(),
}
ON_H100 = {**HERE, "cuda": "12.8", "gpu": "NVIDIA H100", "capability": "9.0"}
FIRST_GPU = torch.device("cuda", 0)
MAJOR, MINOR = torch.__version__.split(".")[:2]


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: [(9, 0), (8, 9)][device.index])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: ["NVIDIA H200", "NVIDIA L4"][device.index])


# ------------------------------------------------------------------------------------------------------------- device


@pytest.mark.parametrize("device", [None, "cpu", "cpu:0", CPU])
def test_a_cpu_program_runs_on_the_cpu(device: Any) -> None:
    assert resolve_device(a_program(), device) == CPU


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("device", "index"), [(None, 1), ("cuda", 1), ("cuda:0", 0), ("cuda:1", 1), (torch.device("cuda", 0), 0)]
)
def test_a_cuda_program_runs_on_any_gpu_there_is(device: Any, index: int) -> None:
    assert resolve_device(a_program(device="cuda"), device) == torch.device("cuda", index)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(("compiled_for", "device"), [("cuda", "cpu"), ("cpu", "cuda:1"), ("cpu", "meta")])
def test_another_kind_of_device_is_refused(compiled_for: str, device: str) -> None:
    with pytest.raises(BuildMismatchError, match=f"compiled for {compiled_for}, and cannot run on {device}"):
        resolve_device(a_program(device=compiled_for), device)
    with pytest.raises(BuildMismatchError, match=f"compiled for {compiled_for}, and cannot run on {device}"):
        check_build(a_program(device=compiled_for, built_with=ON_H100), torch.device(device))


@pytest.mark.parametrize("device", ["gpu", "cuda:x", 1.5, "cpu:"])
def test_what_is_no_device_is_refused(device: Any) -> None:
    with pytest.raises(DeviceError, match="is not a device"):
        resolve_device(a_program(), device)


@pytest.mark.usefixtures("two_gpus")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(DeviceError, match="no device cuda:2; torch sees 2"):
        resolve_device(a_program(device="cuda"), "cuda:2")


def test_a_cuda_program_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BuildMismatchError, match=r"compiled for CUDA \(NVIDIA H100\); torch .* sees no GPU here"):
        resolve_device(a_program(device="cuda", built_with=ON_H100), None)


def test_a_kind_of_device_that_no_release_runs_is_refused() -> None:
    with pytest.raises(PackageError, match="compiled for 'xpu'"):
        resolve_device(a_program(device="xpu"), None)


# -------------------------------------------------------------------------------------------------------------- build


def test_the_same_build_is_accepted() -> None:
    check_build(a_program(built_with=HERE), CPU)
    check_build(a_program(built_with={**HERE, "torch": f"{MAJOR}.{MINOR}.99+cu999"}), CPU)


@pytest.mark.parametrize("version", [f"{MAJOR}.{MINOR}0.0", f"{MAJOR}.{int(MINOR) - 1}.1+cpu", f"1.{MINOR}.0"])
def test_another_torch_is_refused_with_both_versions(version: str) -> None:
    with pytest.raises(BuildMismatchError) as caught:
        check_build(a_program(built_with={**HERE, "torch": version}), CPU)
    assert f"torch {version}, this is torch {torch.__version__}" in str(caught.value)


def test_another_machine_is_refused() -> None:
    with pytest.raises(BuildMismatchError, match=f"compiled for riscv64, this machine is {platform.machine()}"):
        check_build(a_program(built_with={**HERE, "machine": "riscv64"}), CPU)


@pytest.mark.usefixtures("two_gpus")
def test_another_compute_capability_is_refused() -> None:
    program = a_program(device="cuda", built_with=ON_H100)
    check_build(program, FIRST_GPU)
    with pytest.raises(BuildMismatchError, match=r"capability 9.0 \(NVIDIA H100\); cuda:1 is NVIDIA L4 .* 8.9"):
        check_build(program, torch.device("cuda", 1))


def test_another_instruction_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    check_build(a_program(built_with={**HERE, "cpu": "AVX2"}), CPU)
    with pytest.raises(BuildMismatchError, match="AVX512 instructions, torch finds AVX2"):
        check_build(a_program(built_with={**HERE, "cpu": "AVX512"}), CPU)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    check_build(a_program(built_with={**HERE, "cpu": "AVX2"}), CPU)
    with pytest.raises(BuildMismatchError, match="SVE256"):
        check_build(a_program(built_with={**HERE, "cpu": "SVE256"}), CPU)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("key", ["torch", "machine", "cpu", "capability"])
def test_a_program_that_does_not_say_is_refused(key: str) -> None:
    silent = {k: v for k, v in ON_H100.items() if k != key}
    with pytest.raises(PackageError, match=f"does not say with which {key}"):
        check_build(a_program(device="cuda", built_with=silent), FIRST_GPU)


# ------------------------------------------------------------------------------------------------------------ weights

WEIGHTS = (
    Weight("conv", "float32", (4, 3, 1, 2), (0, 2, 3, 1)),
    Weight("embed", "bfloat16", (5, 2), (0, 1), ("head",)),
)
STATES = (State("count", "int64", (), (), "stored"), State("cache", "int8", (2, 3), (0, 1), "zeros"))
PROGRAM = a_program(weights=WEIGHTS, states=STATES)


def entry(name: str, dtype: str, shape: tuple[int, ...], dim_order: tuple[int, ...], kind: str = "weight") -> Entry:
    return Entry(name, dtype, shape, dim_order, kind, 4096, 100, None)


ENTRIES = {
    "conv": entry("conv", "float32", (4, 3, 1, 2), (0, 2, 3, 1)),
    "embed": entry("embed", "bfloat16", (5, 2), (0, 1)),
    "head": replace(entry("head", "bfloat16", (5, 2), (0, 1)), alias_of="embed"),
    "count": entry("count", "int64", (), (), "state"),
}


def an_index(entries: dict[str, Entry], identity: str | None = PROGRAM.identity) -> WeightsIndex:
    return WeightsIndex(Path("model.ptd"), 10000, identity, tuple(entries.values()))


def changed(**entries: Entry | None) -> dict[str, Entry]:
    return {name: found for name, found in {**ENTRIES, **entries}.items() if found is not None}


@pytest.mark.parametrize("identity", [PROGRAM.identity, None])
def test_a_file_in_which_everything_fits_is_accepted(identity: str | None) -> None:
    found = check_weights(PROGRAM, an_index(ENTRIES, identity))
    assert found == {name: ENTRIES[name] for name in ("conv", "embed", "count")}


def test_a_value_for_a_state_that_starts_as_zeros_is_found() -> None:
    cache = entry("cache", "int8", (2, 3), (0, 1), "state")
    assert check_weights(PROGRAM, an_index(changed(cache=cache)))["cache"] == cache


def test_the_order_of_a_dimension_of_size_one_does_not_matter() -> None:
    check_weights(PROGRAM, an_index(changed(conv=entry("conv", "float32", (4, 3, 1, 2), (0, 3, 1, 2))), None))


@pytest.mark.parametrize("identity", [PROGRAM.identity, "another", None])
def test_every_missing_weight_and_stored_state_is_named(identity: str | None) -> None:
    with pytest.raises(MissingWeightError, match="model.ptd lacks 2 of the 3 weights of the program: 'conv', 'count'"):
        check_weights(PROGRAM, an_index(changed(conv=None, count=None), identity))


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (
            entry("embed", "bfloat16", (5, 3), (0, 1)),
            "'embed' is bfloat16[5, 3], needs bfloat16[5, 2]",
        ),
        (entry("embed", "float16", (5, 2), (0, 1)), "'embed' is float16[5, 2], needs bfloat16[5, 2]"),
        (
            entry("embed", "bfloat16", (5, 2), (1, 0)),
            "'embed' is bfloat16[5, 2] with dim order [1, 0], needs bfloat16[5, 2]",
        ),
        (
            entry("conv", "float32", (4, 3, 1, 2), (0, 1, 2, 3)),
            "'conv' is float32[4, 3, 1, 2], needs float32[4, 3, 1, 2] with dim order [0, 2, 3, 1]",
        ),
        (
            entry("embed", "uint8", (20,), (0,), "blob"),
            "'embed' is 100 bytes without a dtype and a shape, needs bfloat16[5, 2]",
        ),
        (entry("count", "int32", (), (), "state"), "'count' is int32[], needs int64[]"),
        (entry("cache", "int8", (3, 2), (0, 1), "state"), "'cache' is int8[3, 2], needs int8[2, 3]"),
    ],
    ids=["shape", "dtype", "dim order", "plain dim order", "blob", "state", "optional state"],
)
@pytest.mark.parametrize("identity", ["another", None])
def test_what_does_not_fit_is_named_with_both_layouts(wrong: Entry, text: str, identity: str | None) -> None:
    with pytest.raises(WeightMismatchError) as caught:
        check_weights(PROGRAM, an_index(changed(**{wrong.name: wrong}), identity))
    assert str(caught.value) == f"model.ptd does not fit the program: {text}"


def test_all_mismatches_are_named_at_once() -> None:
    wrong = changed(conv=entry("conv", "float32", (1,), (0,)), embed=entry("embed", "int8", (5, 2), (0, 1)))
    with pytest.raises(WeightMismatchError, match=r"'conv' is float32\[1\], .*; 'embed' is int8"):
        check_weights(PROGRAM, an_index(wrong))


@pytest.mark.parametrize("identity", ["another", None])
def test_the_weights_of_another_model_are_told_by_their_names(identity: str | None) -> None:
    other = {"x": entry("x", "float32", (1,), (0,))}
    with pytest.raises(IdentityError, match="none of the 3 weights of the program, such as 'conv'"):
        check_weights(PROGRAM, an_index(other, identity))


def test_another_identity_is_refused_though_everything_fits() -> None:
    with pytest.raises(IdentityError, match=f"has identity another, the program needs {PROGRAM.identity}"):
        check_weights(PROGRAM, an_index(ENTRIES, "another"))


# ------------------------------------------------------------------------------------------------------------- budget


def a_package(path: Path, files: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def test_a_budget_for_a_program_without_offload_metadata_is_an_error(tmp_path: Path) -> None:
    path = a_package(tmp_path / "plain.pt2", {"plain/version": "1"})
    with pytest.raises(BudgetError, match=r"budget '8GiB' was given for .*plain.pt2, which has no offload metadata"):
        read_offloaded(path, budget="8GiB")
    with pytest.raises(PackageError, match="is not a weightless program"):
        read_offloaded(path, budget=None)


@pytest.mark.parametrize("budget", ["8GiB", 0, None])
def test_with_metadata_the_program_is_read(tmp_path: Path, budget: int | str | None) -> None:
    path = a_package(tmp_path / "model.pt2", {"model/extra/penstock.json": program_to_json(PROGRAM)})
    assert read_offloaded(path, budget=budget) == PROGRAM


@pytest.mark.parametrize("content", [None, b"", b"no archive"])
def test_with_a_budget_a_damaged_file_is_still_a_damaged_file(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "model.pt2"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PackageError):
        read_offloaded(path, budget="8GiB")
