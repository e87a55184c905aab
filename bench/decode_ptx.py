"""Compiles csrc/packed/decode.cu to the PTX that the core carries: python -m bench.decode_ptx [--check]. Needs nvcc."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

CSRC = Path(__file__).parents[1] / "csrc"
SOURCE = CSRC / "packed/decode.cu"
TARGET = CSRC / "packed/decode_ptx.inc"
# The oldest GPUs that are supported, and the oldest PTX that has all that is used: what newer drivers can read, too.
ARCHITECTURE = "compute_75"
PTX_VERSION = "7.7"


def compiled() -> str:
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder) / "decode.ptx"
        command = ["nvcc", "-std=c++17", "-ptx", f"-arch={ARCHITECTURE}", f"-I{CSRC}", str(SOURCE), "-o", str(ptx)]
        subprocess.run(command, check=True)
        text = re.sub(r"//.*", "", ptx.read_text())
        text = re.sub(r"^\.version .*$", f".version {PTX_VERSION}", text, flags=re.MULTILINE)
        text = "\n".join(line.strip() for line in text.splitlines() if line.strip()) + "\n"
        ptx.write_text(text)
        # Refuses what that version of PTX does not have.
        subprocess.run(["ptxas", "-arch=sm_75", str(ptx), "-o", "/dev/null"], check=True)
    return text


def source(ptx: str) -> str:
    # In parts: compilers need not take one string literal of more than 64 KiB.
    lines = [f'R"ptx({part})ptx"' for part in re.findall(r"(?s).{1,8000}(?:\n|\Z)", ptx)]
    return "// Made from decode.cu by bench/decode_ptx.py.\n" + "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether the file is that of the source")
    given = parser.parse_args()
    made = source(compiled())
    if given.check:
        return 0 if TARGET.read_text() == made else 1
    TARGET.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
