"""The codec of packed blocks, built with AddressSanitizer: damaged blocks, and not one report."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.runtime.builds import COMPILER, build_core, play
from tests.runtime.test_sanitizers import environment, found

pytestmark = pytest.mark.slow


def test_no_damage_leads_outside(tmp_path: Path) -> None:
    if shutil.which(COMPILER) is None:
        pytest.skip(f"there is no compiler {COMPILER}")
    runtime = found("libasan.so")
    if runtime is None:
        pytest.skip(f"{COMPILER} has no libasan.so")
    core = build_core(tmp_path, ["-O1", "-g1", "-fno-omit-frame-pointer", "-fsanitize=address"])
    broken = play(core, "tests.weights.block_stress", "overrun", environment=environment(runtime))
    assert broken.returncode == 66 and "AddressSanitizer" in broken.stderr, broken.stderr
    whole = play(core, "tests.weights.block_stress", "stress", environment=environment(runtime))
    assert (whole.returncode, whole.stdout) == (0, "done\n"), whole.stderr
