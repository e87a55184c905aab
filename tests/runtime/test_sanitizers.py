"""The core built with ThreadSanitizer and with AddressSanitizer: sessions under stress, and not one report."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.runtime.builds import COMPILER, build_core, play

# By sanitizer: its runtime, and the fault that shows that the check can fail.
SANITIZERS = {"thread": ("libtsan.so", "race"), "address": ("libasan.so", "overrun")}


def found(library: str) -> Path | None:
    """Where the compiler keeps a library; a name without a folder means that it has none."""
    path = Path(subprocess.check_output([COMPILER, f"-print-file-name={library}"], text=True).strip())
    return path if path.is_absolute() else None


def environment(runtime: Path) -> dict[str, str]:
    # Without the C++ library behind it, the runtime finds no __cxa_throw to watch: Python itself has none.
    standard = found("libstdc++.so")
    assert standard is not None
    return {
        "LD_PRELOAD": f"{runtime} {standard}",
        "TSAN_OPTIONS": "exitcode=66",
        # Python leaks on purpose; what the core leaks, the driver's own counts tell.
        "ASAN_OPTIONS": "detect_leaks=0:exitcode=66",
    }


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_nothing_is_reported(sanitizer: str, tmp_path: Path) -> None:
    library, fault = SANITIZERS[sanitizer]
    if shutil.which(COMPILER) is None:
        pytest.skip(f"there is no compiler {COMPILER}")
    runtime = found(library)
    if runtime is None:
        pytest.skip(f"{COMPILER} has no {library}: it cannot build with -fsanitize={sanitizer}")
    core = build_core(tmp_path, ["-O0", "-g1", "-fno-omit-frame-pointer", f"-fsanitize={sanitizer}"])
    # Where addresses are laid out at random, ThreadSanitizer may find its own in use.
    prefix = ["setarch", "-R"] if sanitizer == "thread" and _may_fix_addresses() else []

    broken = play(core, "tests.runtime.session_stress", fault, environment=environment(runtime), prefix=prefix)
    assert broken.returncode == 66 and f"{sanitizer.capitalize()}Sanitizer" in broken.stderr, broken.stderr

    whole = play(core, "tests.runtime.session_stress", "stress", environment=environment(runtime), prefix=prefix)
    assert (whole.returncode, whole.stdout) == (0, "done\n"), whole.stderr
    assert "Sanitizer" not in whole.stderr, whole.stderr


def _may_fix_addresses() -> bool:
    """Containers often may not."""
    return shutil.which("setarch") is not None and subprocess.run(["setarch", "-R", "true"]).returncode == 0
