"""How fast a whole weights file is packed and unpacked, and what that costs the CPU.

    python -m bench.packing FOLDER [--mib 1024] [--times 3] [--json OUT]

FOLDER on a tmpfs leaves the disk out. On a machine that does other work beside it, CPU seconds say more than the clock:
two CPUs that do nothing else take at least half of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.weight import State, Weight
from penstock.weights import layout_identity, write_ptd
from penstock.weights.packing import pack, unpack

WEIGHT_MIB = 64


def gaussian_file(path: Path, mib: int) -> None:
    weights = [
        Weight(f"w{number}", "bfloat16", (WEIGHT_MIB, 1 << 19), (0, 1)) for number in range(max(1, mib // WEIGHT_MIB))
    ]
    values = np.random.default_rng(0).standard_normal(WEIGHT_MIB << 19, dtype=np.float32) * np.float32(0.02)
    content = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()

    def chunks_of(_: Weight | State) -> Iterator[bytes]:
        yield content

    write_ptd(path, weights, chunks_of, identity=layout_identity(weights, ()))


@dataclass(frozen=True)
class Pass:
    """Once over a whole file."""

    what: str
    seconds: float
    user_cpu_s: float
    system_cpu_s: float


def measured(what: str, raw_bytes: int, work: Callable[[], object]) -> Pass:
    before, begin = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    work()
    seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF)
    user, system = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
    per_gb = 1e9 / raw_bytes
    print(
        f"{what}: {raw_bytes / seconds / 1e9:.2f} GB/s; CPU {user * per_gb:.2f} + {system * per_gb:.2f} s/GB, which is"
        f" {(user + system) / seconds:.2f} of {len(os.sched_getaffinity(0))} CPUs",
        flush=True,
    )
    return Pass(what, seconds, user, system)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--json", type=Path, help="where to store the figures")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        raw, packed, again = (Path(folder) / name for name in ("raw.ptd", "packed.ptd", "again.ptd"))
        gaussian_file(raw, given.mib)
        raw_bytes = raw.stat().st_size
        passes: list[Pass] = []
        for _ in range(max(1, given.times)):
            passes.append(measured("pack", raw_bytes, lambda: pack(raw, packed)))
            packed_bytes = packed.stat().st_size
            passes.append(measured("unpack", raw_bytes, lambda: unpack(packed, again)))
            packed.unlink()
            again.unlink()
    if given.json is not None:
        stored = {
            "raw_bytes": raw_bytes,
            "packed_bytes": packed_bytes,
            "cpus": len(os.sched_getaffinity(0)),
            "passes": [dataclasses.asdict(each) for each in passes],
        }
        given.json.write_text(json.dumps(stored, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
