"""The CUDA text, compiled for Hopper and newer where a compiler is present: no warning, no spill, no other target."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from penstock.direct.architecture import Architecture, architecture_of, mma_sync_on
from penstock.direct.failures import KernelCompileError, KernelDeviceError
from penstock.direct.kernel_build import SOURCE, Variant
from penstock.direct.nvrtc import Nvrtc, cubin_of, load_nvrtc, nvrtc_candidates
from penstock.direct.source import Source, read_source
from tests.direct.emulation import KERNELS

# The smallest and the largest; the fullest use of registers with both dtypes.
HOPPER, MMA_SYNC = architecture_of(9, 0), mma_sync_on(9, 0)
ARCHITECTURES = [HOPPER, MMA_SYNC, architecture_of(10, 0), architecture_of(12, 0)]
VARIANTS = [
    variant
    for architecture in ARCHITECTURES
    for variant in (Variant(architecture, 8, 1, True, False), Variant(architecture, 256, 2, False, True))
]


def named(variant: Variant) -> str:
    return f"{variant.architecture.target}-{variant.architecture.instructions}-{variant.tile_tokens}"


def check_report(report: str) -> None:
    """What ptxas says of the kernel."""
    assert report.count("Compiling entry function") == 1
    assert re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill", report) == [("0",) * 3]
    # C7508: registers are not moved; C7510: products wait for one another.
    assert "warning" not in report.lower() and "C75" not in report


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("variant", VARIANTS, ids=named)
def test_nvcc(tmp_path: Path, variant: Variant) -> None:
    built = run_nvcc(tmp_path, variant)
    assert built.returncode == 0, built.stderr
    check_report(built.stdout + built.stderr)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_nvcc_refuses_other_targets(tmp_path: Path) -> None:
    """wgmma where it is not, and mma.sync where the rest of the kernel is not."""
    for target, instructions, told in (
        ("sm_90", "wgmma", "needs sm_90a"),
        ("sm_89", "mma_sync", "needs sm_90 or newer"),
    ):
        architecture = Architecture(target, instructions, clusters=True)  # type: ignore[arg-type]
        built = run_nvcc(tmp_path, Variant(architecture, 8, 1, True, False))
        assert built.returncode and told in built.stderr


def run_nvcc(folder: Path, variant: Variant) -> subprocess.CompletedProcess[str]:
    target = variant.architecture.target
    command = ["nvcc", f"-gencode=arch={target.replace('sm', 'compute')},code={target}", "-std=c++17", "-cubin"]
    command += ["-Xptxas", "-v", *variant.options, str(KERNELS / SOURCE), "-o", str(folder / "kernel.cubin")]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    try:
        return load_nvrtc(None)
    except KernelCompileError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("variant", VARIANTS, ids=named)
def test_nvrtc(nvrtc: Nvrtc, variant: Variant) -> None:
    """Without any header of the toolkit."""
    options = (*variant.options, "--ptxas-options=-v")
    cubin, log = nvrtc.compile(read_source(SOURCE), variant.architecture.target, options)
    assert cubin.startswith(b"\x7fELF")
    check_report(log)


def test_nvrtc_refuses_other_targets(nvrtc: Nvrtc) -> None:
    with pytest.raises(KernelCompileError, match="needs sm_90a"):
        nvrtc.compile(read_source(SOURCE), "sm_90", VARIANTS[0].options)


class CountingNvrtc:
    """Stands in for NVRTC where only the keeping of what it made is of interest."""

    def __init__(self) -> None:
        self.compiled: list[tuple[str, ...]] = []

    def compile(self, source: Source, architecture: str, options: tuple[str, ...]) -> tuple[bytes, str]:
        self.compiled.append((source.text, architecture, *options))
        return "|".join(self.compiled[-1]).encode(), ""


def test_compiled_code_is_kept() -> None:
    """As long as the process lives; anything that could change it makes another."""
    compiler = CountingNvrtc()
    source, changed = Source("a.cu", "text", (("h", "1"),)), Source("a.cu", "text", (("h", "2"),))

    def get(source: Source, architecture: str = "sm_90a", options: tuple[str, ...] = ()) -> bytes:
        return cubin_of(compiler, source, architecture, options)  # type: ignore[arg-type]

    assert get(source) == get(source) and len(compiler.compiled) == 1
    get(changed), get(source, "sm_91a"), get(source, options=("-DX",))
    assert len(compiler.compiled) == 4


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
    ("major", "minor", "wanted"),
    [
        (9, 0, Architecture("sm_90a", "wgmma", clusters=True)),
        (10, 0, Architecture("sm_100a", "mma_sync", clusters=True)),
        (10, 3, Architecture("sm_103a", "mma_sync", clusters=True)),
        (11, 0, Architecture("sm_110a", "mma_sync", clusters=True)),
        (12, 0, Architecture("sm_120a", "mma_sync", clusters=False)),
        (12, 1, Architecture("sm_121a", "mma_sync", clusters=False)),
    ],
)
def test_architectures(major: int, minor: int, wanted: Architecture) -> None:
    assert architecture_of(major, minor) == wanted
    assert mma_sync_on(9, 0) == Architecture("sm_90a", "mma_sync", clusters=True)


@pytest.mark.parametrize(("major", "minor"), [(7, 5), (8, 0), (8, 9)])
def test_older_gpus_are_refused(major: int, minor: int) -> None:
    with pytest.raises(
        KernelDeviceError, match=rf"capability 9\.0 and newer, and this GPU has {major}\.{minor}: older"
    ):
        architecture_of(major, minor)


def test_defines() -> None:
    """What of an architecture reaches the text."""
    told = {target: Variant(target, 8, 1, True, False).options[-2:] for target in ARCHITECTURES}
    assert list(told.values()) == [
        ("-DMMA_SYNC=0", "-DCLUSTERS=1"),
        *[("-DMMA_SYNC=1", "-DCLUSTERS=1")] * 2,
        ("-DMMA_SYNC=1", "-DCLUSTERS=0"),
    ]
