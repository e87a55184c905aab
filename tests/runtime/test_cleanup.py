"""What gives something back never throws, whatever was thrown inside it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.runtime.builds import COMPILER, HEADERS, SOURCES

PROGRAM = """
#include <new>
#include "driver/cleanup.h"
int main() {
  int tried = 0;
  penstock::quietly([&] { tried++; throw std::bad_alloc(); });
  penstock::sync_with_retry([&] { tried++; throw std::bad_alloc(); });
  penstock::sync_with_retry([&] { tried++; throw penstock::CoreError(penstock::Failure::driver, "once"); });
  return tried;
}
"""


def test_nothing_is_thrown_and_a_wait_is_tried_twice(tmp_path: Path) -> None:
    (tmp_path / "main.cpp").write_text(PROGRAM)
    program = tmp_path / "main"
    includes = [f"-I{SOURCES}", f"-I{HEADERS}"]
    command = [COMPILER, "-std=c++17", *includes, str(tmp_path / "main.cpp"), "-o", str(program)]
    subprocess.run(command, check=True)
    assert subprocess.run([str(program)]).returncode == 5
