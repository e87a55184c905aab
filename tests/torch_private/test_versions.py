"""Which torch is refused, and what the refusal says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import penstock
from penstock.errors import CompileError, UntestedTorchError
from penstock.torch_private.versions import OVERRIDE, TESTED, check_torch_version, is_tested

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "version",
    ["2.11.0", "2.11.0+cu130", "2.12.0+cpu", "2.12.1", "2.13.0+cpu", "2.13.0+cu130", "2.13.4+rocm7.1", "2.13"],
)
def test_releases_of_tested_versions_pass(version: str) -> None:
    assert is_tested(version)
    check_torch_version(version)


@pytest.mark.parametrize(
    "version",
    [
        *("2.10.0", "2.14.0", "2.15.0+cpu", "3.0.0", "2.1.0", "2.111.0", "12.11.0"),
        *("2.14.0.dev20260601+cpu", "2.13.0.dev20260301", "2.13.0.dev20260301+cu130"),
        *("2.13.0rc1", "2.13.0a0+git1234567", "2.11.0a0+nv26.01", "", "unknown", "2.13.0 ", "2.13.0\n"),
    ],
)
def test_anything_else_is_refused_by_name(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(OVERRIDE, raising=False)
    assert not is_tested(version)
    with pytest.raises(UntestedTorchError) as caught:
        check_torch_version(version)
    message = str(caught.value)
    assert f"torch is {version}, which Penstock was not tested with" in message
    assert "needs a release of torch 2.11, 2.12, 2.13" in message
    assert "PENSTOCK_UNTESTED_TORCH=1" in message
    assert isinstance(caught.value, CompileError)


def test_the_override_is_0_or_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OVERRIDE, "1")
    check_torch_version("2.14.0.dev20260601+cpu")
    monkeypatch.setenv(OVERRIDE, "0")
    with pytest.raises(UntestedTorchError, match="was not tested with"):
        check_torch_version("2.14.0")
    for value in ("yes", "", "2"):
        monkeypatch.setenv(OVERRIDE, value)
        with pytest.raises(UntestedTorchError, match=f"{OVERRIDE} is '{value}'; it must be 0 or 1"):
            check_torch_version("2.14.0")
        check_torch_version("2.13.0")  # not asked for


def test_this_torch_was_tested() -> None:
    assert is_tested(str(torch.__version__))


def test_compile_refuses_before_anything_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(OVERRIDE, raising=False)
    monkeypatch.setattr(torch, "__version__", "2.14.0.dev20260601+cpu")
    with pytest.raises(UntestedTorchError, match=r"torch is 2\.14\.0\.dev20260601\+cpu"):
        penstock.compile("no program", tmp_path / "model.pt2")  # type: ignore[arg-type]
    monkeypatch.setenv(OVERRIDE, "1")
    with pytest.raises(penstock.errors.NotAProgramError):
        penstock.compile("no program", tmp_path / "model.pt2")  # type: ignore[arg-type]


def imported_without_clone(version: str, **env: str) -> str:
    """What importing the compiler's side says where one of its private functions is gone."""
    code = (
        "import torch, torch._inductor.lowering as lowering\n"
        f"torch.__version__ = {version!r}\n"
        "del lowering.clone\n"
        "import penstock\n"
        "penstock.compile\n"
    )
    clean = {name: value for name, value in os.environ.items() if name != OVERRIDE}
    env = {**clean, "PYTHONPATH": str(ROOT / "src"), **env}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    return done.stderr


@pytest.mark.slow
def test_a_moved_interface_is_told_as_an_untested_version() -> None:
    assert "UntestedTorchError: torch is 2.14.0, which" in imported_without_clone("2.14.0")
    for told in (imported_without_clone("2.13.0"), imported_without_clone("2.14.0", PENSTOCK_UNTESTED_TORCH="1")):
        assert "ImportError: cannot import name 'clone'" in told and "UntestedTorchError" not in told


def test_the_package_asks_for_what_was_tested() -> None:
    bounds = re.search(r'"torch>=(\d+\.\d+),<(\d+)\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    assert bounds is not None
    assert bounds[1] == TESTED[0]
    assert f"{bounds[2]}.{int(bounds[3]) - 1}" == TESTED[-1]
    page = (ROOT / "docs/troubleshooting.md").read_text()
    assert f"Releases of torch {', '.join(TESTED[:-1])} and {TESTED[-1]} were" in " ".join(page.split())
