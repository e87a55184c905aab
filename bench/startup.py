"""From Module() to the first result, in a fresh process that has imported torch and made its CUDA context.

    python -m bench.startup PROGRAM.pt2 --budget 8GiB [--cold] [--phases] [--repeat 3] [--json OUT]

The weights are in the page cache when the clock starts; with --cold they are dropped from it first, and what the kernel
counts as read from the disk says whether that worked. (A disk may have a cache of its own, which it does not say.) The
program is cached either way. With --phases one more start is made under a profiler, which slows it down.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.program import Method

_CHUNK_BYTES = 64 << 20
_IO = Path("/proc/self/io")
_SHOWN_PHASES = 8
# Of the file's bytes. Below this the page cache was not cold, whatever was asked of it.
_COLD_ABOVE = 0.9


@dataclass(frozen=True)
class Start:
    budget_bytes: int
    weight_bytes: int
    # Module(), and then the first call until its result can be read.
    load_s: float
    first_run_s: float
    # A call that finds everything in place.
    second_run_s: float
    # Read from the disk until the first result; None where the kernel does not count.
    disk_read_bytes: int | None
    # By function that Module() calls itself; empty unless they were asked for.
    phases_s: dict[str, float]

    @property
    def total_s(self) -> float:
        return self.load_s + self.first_run_s


def main() -> None:
    options = _parser().parse_args()
    if options.child:
        print(json.dumps(dataclasses.asdict(_start(options))))
        return
    weights = options.program.with_suffix(".ptd")
    starts = []
    for _ in range(options.repeat):
        _settle(options.program, weights, cold=options.cold)
        starts.append(_in_child(options))
    phases_s: dict[str, float] = {}
    if options.phases:
        _settle(options.program, weights, cold=options.cold)
        phases_s = _in_child(options, "--phases").phases_s
    file_bytes = weights.stat().st_size
    print(_report(options.program, file_bytes, options.cold, starts, phases_s))
    if options.json is not None:
        stored = {
            "program": options.program.name,
            "weights_file_bytes": file_bytes,
            "page_cache": "cold" if options.cold else "warm",
            "starts": [dataclasses.asdict(start) | {"total_s": start.total_s} for start in starts],
            "phases_s": phases_s,
        }
        options.json.write_text(json.dumps(stored, indent=1))


def _settle(program: Path, weights: Path, *, cold: bool) -> None:
    """Brings both files into the page cache, or the weights out of it."""
    with program.open("rb") as file:
        while file.read(_CHUNK_BYTES):
            pass
    with weights.open("rb", buffering=0) as file:
        if cold:
            os.sync()  # what is not yet on the disk cannot be dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        else:
            buffer = bytearray(_CHUNK_BYTES)
            while file.readinto(buffer):
                pass


def _in_child(options: argparse.Namespace, *more: str) -> Start:
    command = [sys.executable, "-m", "bench.startup", str(options.program), "--child", "--budget", options.budget]
    if options.device is not None:
        command += ["--device", options.device]
    done = subprocess.run([*command, *more], stdout=subprocess.PIPE, text=True, check=True)
    return Start(**json.loads(done.stdout.splitlines()[-1]))


def _start(options: argparse.Namespace) -> Start:
    import torch

    device = options.device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    torch.zeros(1, device=device)

    import penstock
    from bench.suite.measure import synchronize, wait_for_result

    method = penstock.read_program(options.program).methods[0]
    inputs = _inputs(method, device)
    synchronize(device)
    phases_s: dict[str, float] = {}
    disk_bytes = _disk_read_bytes()
    begin = time.perf_counter()
    with _profiled(phases_s) if options.phases else _unprofiled():
        module = penstock.Module(options.program, budget=options.budget, device=device)
    loaded = time.perf_counter()
    with torch.no_grad(), module:
        module.run_method(method.name, *inputs)
        wait_for_result(device)
        first = time.perf_counter()
        read_bytes = _disk_read_bytes()
        module.run_method(method.name, *inputs)
        wait_for_result(device)
        second = time.perf_counter()
        return Start(
            budget_bytes=module.budget_bytes,
            weight_bytes=module.weight_bytes,
            load_s=loaded - begin,
            first_run_s=first - loaded,
            second_run_s=second - first,
            disk_read_bytes=None if disk_bytes is None or read_bytes is None else read_bytes - disk_bytes,
            phases_s=phases_s,
        )


def _inputs(method: Method, device: str) -> list[Tensor]:
    import torch

    from penstock.program import TensorSpec

    made = []
    for spec in method.signature.inputs:
        if not isinstance(spec, TensorSpec) or not all(isinstance(size, int) for size in spec.shape):
            raise SystemExit(
                f"method {method.name!r}: input {spec.name!r} is no tensor of a fixed shape; it must be one"
            )
        shape = [int(size) for size in spec.shape]
        made.append(torch.ones(shape, dtype=getattr(torch, spec.dtype), device=device))
    return made


@contextmanager
def _unprofiled() -> Iterator[None]:
    yield


@contextmanager
def _profiled(phases_s: dict[str, float]) -> Iterator[None]:
    """Seconds of every function that Module.__init__ calls itself, those that it takes inside others included."""
    import cProfile
    import pstats

    from penstock import Module

    profile = cProfile.Profile()
    with profile:
        yield
    code = Module.__init__.__code__
    load = (code.co_filename, code.co_firstlineno, code.co_name)
    # pstats does not say of what kind its table is: by function, and in it by caller, the last being the seconds.
    for (file, _, name), (*_, callers) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        if load in callers:
            where = Path(file).stem if file != "~" else "builtin"
            phases_s[f"{where}.{name}"] = phases_s.get(f"{where}.{name}", 0.0) + callers[load][3]


def _disk_read_bytes() -> int | None:
    if not _IO.exists():
        return None
    fields = dict(line.split(": ") for line in _IO.read_text().splitlines())
    return int(fields["read_bytes"])


def _report(program: Path, file_bytes: int, cold: bool, starts: Sequence[Start], phases_s: dict[str, float]) -> str:
    def median(name: str) -> str:
        seconds = [getattr(start, name) for start in starts]
        return f"{statistics.median(seconds):.3f} s ({min(seconds):.3f} to {max(seconds):.3f})"

    first = starts[0]
    lines = [
        f"{program.name}: {first.weight_bytes} bytes of weights in a file of {file_bytes}, "
        f"budget {first.budget_bytes}, page cache {'cold' if cold else 'warm'}, {len(starts)} starts",
        f"Module(): {median('load_s')}",
        f"first result after it: {median('first_run_s')}",
        f"together: {median('total_s')}",
        f"second run: {median('second_run_s')}",
        f"read from the disk: {', '.join(_disk(start, file_bytes, cold) for start in starts)}",
    ]
    if phases_s:
        lines.append("of Module(), in one more start, under a profiler:")
        ordered = sorted(phases_s.items(), key=lambda item: -item[1])
        lines += [f"  {seconds:.3f} s {name}" for name, seconds in ordered[:_SHOWN_PHASES]]
    return "\n".join(lines)


def _disk(start: Start, file_bytes: int, cold: bool) -> str:
    if start.disk_read_bytes is None:
        return "not counted by this kernel"
    text = f"{start.disk_read_bytes} bytes"
    return f"{text} (**not cold**)" if cold and start.disk_read_bytes < _COLD_ABOVE * file_bytes else text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.startup", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("program", type=Path, metavar="PROGRAM.pt2")
    parser.add_argument("--budget", required=True, help="bytes, or with a unit, such as 8GiB")
    parser.add_argument("--cold", action="store_true", help="the weights are not in the page cache")
    parser.add_argument("--phases", action="store_true", help="also say what the load is made of")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--device")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main()
