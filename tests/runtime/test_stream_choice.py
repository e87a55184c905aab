"""Which stream a GPU gets (csrc/cuda/stream_choice): against a made-up libcuda."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.runtime.builds import COMPILER, SOURCES


def test_the_fastest_is_chosen_and_each_failing_call_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    files = [Path(__file__).with_name("stream_choice.cpp"), SOURCES / "cuda/stream_choice.cpp"]
    program = tmp_path / "choice"
    subprocess.run(
        [COMPILER, "-std=c++17", "-pthread", f"-I{SOURCES}", *map(str, files), "-o", str(program)], check=True
    )
    ran = subprocess.run([str(program)], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    # Four events and a module, and for two streams, twice, 64 turns of three calls each and five more.
    assert int(ran.stdout) == 6 + 4 * (64 * 3 + 5)
