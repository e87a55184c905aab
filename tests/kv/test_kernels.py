"""The Triton kernels without a GPU: what they compute, interpreted; and that they compile for one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest

import penstock

pytest.importorskip("triton", reason="the kernels are written in triton")
FOLDER = Path(__file__).parent
KERNELS = [str(Path(penstock.__file__).parent / "kv" / name) for name in ("kernels.py", "movement.py")]


def counts_loops() -> bool:
    """The interpreter of triton 3.6 takes int() of arrays with one element, which numpy 2.4 refuses."""
    try:
        int(np.array([1]))
    except TypeError:
        return tuple(map(int, version("triton").split(".")[:2])) >= (3, 7)
    return True


@pytest.mark.slow
@pytest.mark.skipif(
    not counts_loops(), reason=f"triton {version('triton')} does not interpret with numpy {np.__version__}"
)
def test_interpreted_kernels_compute_what_the_reference_does() -> None:
    plugins = [word for name in ("cacheprovider", "hypothesispytest", "xdist") for word in ("-p", f"no:{name}")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugins, str(FOLDER / "kernel_cases.py")],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    counted = re.search(r"(\d+) passed", done.stdout)
    assert counted is not None and int(counted[1]) == 21
    assert "skipped" not in done.stdout


def test_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    """In a process of its own too: compiling needs kernels that are not interpreted, and a cache that is not kept."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(FOLDER / "compiled_kernels.py"), *KERNELS],
        env={**env, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"^(\w+) with \d ones: wide copies (\d+)$", done.stdout, re.MULTILINE)
    names = ("attend_parts", "merge_parts", "append_tokens", "stage_slots")
    assert sorted(name for name, _ in found) == sorted(names * 2)
    # Towards the host loads are 16 bytes wide and asynchronous, or the link idles.
    assert all(int(copies) > 0 for name, copies in found if name == "attend_parts")
