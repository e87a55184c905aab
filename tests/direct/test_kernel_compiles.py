"""The CUDA text, compiled for Hopper where a compiler is present: no warning, no spill, no other target."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from penstock.direct import nvrtc as nvrtc_module
from penstock.direct.driver_calls import DeviceLimits
from penstock.direct.failures import KernelCompileError, KernelDeviceError
from penstock.direct.kernel_build import ARCHITECTURE, SOURCE, Variant, check_device
from penstock.direct.nvrtc import Nvrtc, cubin_of, load_nvrtc, nvrtc_candidates
from penstock.direct.source import Source, read_source
from tests.direct.emulation import KERNELS

# The smallest and the largest; the fullest use of registers with both dtypes.
VARIANTS = [Variant(8, 1, True, False, False), Variant(256, 2, False, True, False)]


def check_report(report: str) -> None:
    """What ptxas says of each kernel."""
    assert report.count("Compiling entry function") == 2
    assert (
        re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill", report) == [("0",) * 3] * 2
    )
    # C7508: registers are not moved; C7510: products wait for one another.
    assert "warning" not in report.lower() and "C75" not in report


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("variant", VARIANTS)
def test_nvcc(tmp_path: Path, variant: Variant) -> None:
    command = [
        "nvcc",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-std=c++17",
        "-cubin",
        "-Xptxas",
        "-v",
        *variant.options,
    ]
    command += [str(KERNELS / SOURCE), "-o", str(tmp_path / "kernel.cubin")]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    check_report(built.stdout + built.stderr)


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    try:
        return load_nvrtc(None)
    except KernelCompileError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("variant", VARIANTS)
def test_nvrtc(nvrtc: Nvrtc, variant: Variant) -> None:
    """Without any header of the toolkit."""
    cubin, log = nvrtc.compile(read_source(SOURCE), ARCHITECTURE, (*variant.options, "--ptxas-options=-v"))
    assert cubin.startswith(b"\x7fELF")
    check_report(log)


def test_nvrtc_refuses_other_targets(nvrtc: Nvrtc) -> None:
    with pytest.raises(KernelCompileError, match="needs sm_90a"):
        nvrtc.compile(read_source(SOURCE), "sm_90", VARIANTS[0].options)


class CountingNvrtc:
    """Stands in for NVRTC where only the keeping of what it made is of interest."""

    version = (13, 0)

    def __init__(self) -> None:
        self.compiled: list[tuple[str, ...]] = []

    def compile(self, source: Source, architecture: str, options: tuple[str, ...]) -> tuple[bytes, str]:
        self.compiled.append((source.text, architecture, *options))
        return "|".join(self.compiled[-1]).encode(), ""


def test_compiled_code_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In memory, and on disk where a folder was named; anything that could change it makes another."""
    compiler = CountingNvrtc()
    source, changed = Source("a.cu", "text", (("h", "1"),)), Source("a.cu", "text", (("h", "2"),))

    def get(
        source: Source, architecture: str = "sm_90a", options: tuple[str, ...] = (), cache: Path | None = None
    ) -> bytes:
        return cubin_of(compiler, source, architecture, options, cache)  # type: ignore[arg-type]

    monkeypatch.setattr(nvrtc_module, "_in_memory", {})
    assert get(source) == get(source) and len(compiler.compiled) == 1
    get(changed), get(source, "sm_91a"), get(source, options=("-DX",))
    assert len(compiler.compiled) == 4
    monkeypatch.setattr(nvrtc_module, "_in_memory", {})
    kept = get(source, cache=tmp_path)
    assert len(compiler.compiled) == 5 and [path.suffix for path in tmp_path.iterdir()] == [".cubin"]
    monkeypatch.setattr(nvrtc_module, "_in_memory", {})
    assert get(source, cache=tmp_path) == kept and len(compiler.compiled) == 5
    monkeypatch.setattr(nvrtc_module, "_in_memory", {})
    compiler.version = (13, 1)
    get(source, cache=tmp_path)
    assert len(compiler.compiled) == 6


def test_wheels_are_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both layouts of torch's wheels, the matching version first, helper libraries never."""
    for name in ("cuda_nvrtc/lib/libnvrtc.so.12", "cu13/lib/libnvrtc.so.13", "cu13/lib/libnvrtc-builtins.so.13.0"):
        path = tmp_path / "nvidia" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    monkeypatch.syspath_prepend(tmp_path)
    for major in (12, 13):
        mine = [path.name for path in nvrtc_candidates(major) if tmp_path in path.parents]
        assert mine == [f"libnvrtc.so.{major}", f"libnvrtc.so.{25 - major}"]


@pytest.mark.parametrize(
    ("major", "minor", "told"), [(8, 0, "8.0: older"), (10, 0, "10.0: newer"), (12, 0, "12.0: newer")]
)
def test_other_gpus_are_refused(major: int, minor: int, told: str) -> None:
    with pytest.raises(KernelDeviceError, match=f"compute capability 9.0 .sm_90a. and this GPU has {told}"):
        check_device(DeviceLimits(100, major, minor, 232_448))
    check_device(DeviceLimits(132, 9, 0, 232_448))
