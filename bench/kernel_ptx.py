"""Compiles the core's kernels to the PTX that it carries: python -m bench.kernel_ptx [--check]. Needs nvcc."""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

CSRC = Path(__file__).parents[1] / "csrc"
# Each beside what is made of it.
SOURCES = (CSRC / "packed/decode.cu", CSRC / "experts/experts.cu")
# The oldest GPUs that are supported, and the oldest PTX that has all that is used: what newer drivers can read, too.
ARCHITECTURE = "compute_75"
PTX_VERSION = "7.7"


def target(source: Path) -> Path:
    return source.with_name(f"{source.stem}_ptx.inc")


def compiled(source: Path) -> str:
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder) / "kernels.ptx"
        command = ["nvcc", "-std=c++17", "-ptx", f"-arch={ARCHITECTURE}", f"-I{CSRC}", str(source), "-o", str(ptx)]
        subprocess.run(command, check=True)
        text = re.sub(r"//.*", "", ptx.read_text())
        text = re.sub(r"^\.version .*$", f".version {PTX_VERSION}", text, flags=re.MULTILINE)
        # A hint to newer assemblers, and nothing else.
        text = re.sub(r'^\s*\.pragma "used_bytes_mask.*$', "", text, flags=re.MULTILINE)
        text = "\n".join(line.strip() for line in text.splitlines() if line.strip()) + "\n"
        ptx.write_text(text)
        # Refuses what that version of PTX does not have.
        subprocess.run(["ptxas", "-arch=sm_75", str(ptx), "-o", "/dev/null"], check=True)
    return text


def fingerprint(source: Path) -> str:
    """Of the source and what it includes of ours, without comments: where there is no nvcc, it tells whether the PTX is
    that of the sources."""
    waiting = [source]
    texts: dict[Path, str] = {}
    while waiting:
        path = waiting.pop()
        if path not in texts:
            texts[path] = re.sub(r"\s*//.*|^\s+", "", path.read_text(), flags=re.MULTILINE)
            waiting += [CSRC / name for name in re.findall(r'#include "(.*)"', texts[path])]
    whole = "".join(texts[path] for path in sorted(texts))
    return hashlib.sha256(f"{ARCHITECTURE} {PTX_VERSION}\n{whole}".encode()).hexdigest()


def head_of(source: Path) -> str:
    return f"// Made from {source.name} by bench/kernel_ptx.py. SHA-256 of the sources: {fingerprint(source)}\n"


def text_of(source: Path) -> str:
    ptx = compiled(source)
    # In parts: compilers need not take one string literal of more than 64 KiB.
    lines = [f'R"ptx({part})ptx"' for part in re.findall(r"(?s).{1,8000}(?:\n|\Z)", ptx)]
    return head_of(source) + "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether the files are those of their sources")
    given = parser.parse_args()
    made = {target(source): text_of(source) for source in SOURCES}
    if given.check:
        return 0 if all(path.read_text() == text for path, text in made.items()) else 1
    for path, text in made.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
