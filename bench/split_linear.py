"""The split linear beside cuBLAS over host memory and copy-then-compute, from nothing to all of the weight on the host.

    python -m bench.split_linear --out split_linear.json [--sizes 7168x7168,14336x4096] [--tokens 1,8,64,512,2048]
                                 [--ratios 0,1,2,3,10,25,50,75,100] [--ways split,cublas_uva] [--limits 2x128,4x256]

One process measures, case after case; one that hangs or dies is named, and a new one goes on with the next. Columns:
GB/s of the host's part and of the whole weight, and the bound (the longest of link, HBM and arithmetic) over the time.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from penstock.direct.launch_shape import Limits

DEFAULT_LIMITS = Limits()
LINK_BYTES_PER_S = 51.4e9
HBM_BYTES_PER_S = 4.0e12
FLOP_PER_S = 660e12
# split_*: the kernel; limits off, multicast off, the split moved off the tiles' borders, each launch overlapping with
# the one before it, the matrix instructions of GPUs newer than Hopper, and all that a GPU of 12.x gets (those
# instructions, 99 KiB of shared memory, no clusters).
# *_alone: only that part of the weight, by the kernel. The others are torch.
WAYS = (
    "split",
    "split_unlimited",
    "split_no_multicast",
    "split_unaligned",
    "split_overlapped",
    "split_mma_sync",
    "split_small",
    "hbm_alone",
    "host_alone",
    "cublas_uva",
    "copy_then_compute",
)


@dataclass(frozen=True)
class Case:
    rows: int
    depth: int
    tokens: int
    ratio_percent: int
    way: str
    # Congestion control, of the ways that have it.
    host_ctas: int = DEFAULT_LIMITS.host_ctas
    inflight_kib: int = DEFAULT_LIMITS.host_inflight_bytes >> 10

    @property
    def worth_running(self) -> bool:
        """Not what equals another case or says nothing."""
        if self.ratio_percent == 0:
            return self.way in ("split", "split_mma_sync", "split_small", "copy_then_compute")
        if self.way == "hbm_alone":
            return self.ratio_percent < 100
        if self.way == "split_no_multicast":
            return self.tokens > 256
        return self.way != "split_unaligned" or self.ratio_percent < 100


@dataclass(frozen=True)
class Result:
    case: Case
    head_rows: int
    # None where `failure` says why.
    seconds: float | None
    failure: str | None = None

    @property
    def host_bytes(self) -> int:
        return (self.case.rows - self.head_rows) * self.case.depth * 2 if self.case.way != "hbm_alone" else 0

    @property
    def hbm_bytes(self) -> int:
        return self.head_rows * self.case.depth * 2 if self.case.way != "host_alone" else 0

    @property
    def bound_s(self) -> float:
        flop = (self.host_bytes + self.hbm_bytes) * self.case.tokens
        return max(self.host_bytes / LINK_BYTES_PER_S, self.hbm_bytes / HBM_BYTES_PER_S, flop / FLOP_PER_S)


def cases(
    sizes: Sequence[tuple[int, int]],
    tokens: Sequence[int],
    ratios: Sequence[int],
    ways: Sequence[str],
    limits: Sequence[tuple[int, int]],
) -> Iterator[Case]:
    """`limits`: pairs of host CTAs and KiB in flight; those after the first only for the way "split"."""
    for (rows, depth), count, ratio, way in product(sizes, tokens, ratios, ways):
        for number, (host_ctas, inflight_kib) in enumerate(limits):
            case = Case(rows, depth, count, ratio, way, host_ctas, inflight_kib)
            if case.worth_running and (number == 0 or (way == "split" and ratio)):
                yield case


def run_all(
    wanted: Sequence[Case], limit_s: float, start_limit_s: float, command: Sequence[str], say: Callable[[Result], None]
) -> list[Result]:
    """Every case gets a result. `command` reads cases, one JSON a line, and answers each with a line."""
    results: list[Result] = []
    while len(results) < len(wanted):
        left = wanted[len(results) :]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write("".join(json.dumps(asdict(case)) + "\n" for case in left).encode())
        child.stdin.close()
        answers = iter(left)
        try:
            for line in _lines(child.stdout.fileno(), limit_s, start_limit_s):
                told = json.loads(line)
                results.append(Result(next(answers), told["head_rows"], told["seconds"], told["failure"]))
                say(results[-1])
            failure = f"the process ended with {child.wait()}"
        except TimeoutError as error:
            failure = str(error)
            child.kill()
            child.wait()
        child.stdout.close()
        if (stuck := next(answers, None)) is not None:
            results.append(Result(stuck, stuck.rows, None, failure))
            say(results[-1])
    return results


def _lines(descriptor: int, limit_s: float, start_limit_s: float) -> Iterator[bytes]:
    """Until the end; raises when a line takes longer than allowed, the first one counted from the start."""
    pending, allowed_s = b"", start_limit_s
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while True:
            if not selector.select(allowed_s):
                raise TimeoutError(f"no answer within {allowed_s:g} s")
            read = os.read(descriptor, 1 << 16)
            if not read:
                return
            *whole, pending = (pending + read).split(b"\n")
            for line in whole:
                allowed_s = limit_s
                yield line


def line_of(result: Result) -> str:
    case = result.case
    named = f"{case.rows}x{case.depth} T={case.tokens:<5d} {case.ratio_percent:3d}% {case.way:18s}"
    if (case.host_ctas, case.inflight_kib) != (DEFAULT_LIMITS.host_ctas, DEFAULT_LIMITS.host_inflight_bytes >> 10):
        named += f" {case.host_ctas} CTAs {case.inflight_kib} KiB"
    if result.seconds is None:
        return f"{named} FAILED: {result.failure}"
    host = f"{result.host_bytes / result.seconds / 1e9:7.1f}" if result.host_bytes else "      -"
    total = (result.host_bytes + result.hbm_bytes) / result.seconds / 1e9
    share = result.bound_s / result.seconds
    return (
        f"{named} {result.seconds * 1e6:9.1f} us  host {host} GB/s  total {total:7.1f} GB/s  {share:5.0%} of the bound"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sizes", default="7168x7168,14336x4096")
    parser.add_argument("--tokens", default="1,8,64,512,2048")
    parser.add_argument("--ratios", default="0,1,2,3,10,25,50,75,100")
    parser.add_argument("--ways", default=",".join(WAYS))
    default = f"{DEFAULT_LIMITS.host_ctas}x{DEFAULT_LIMITS.host_inflight_bytes >> 10}"
    parser.add_argument("--limits", default=default, help="host CTAs x KiB in flight; several, with commas")
    parser.add_argument("--case-limit-s", type=float, default=30)
    parser.add_argument("--start-limit-s", type=float, default=120)
    options = parser.parse_args()
    sizes, limits = (
        [(int(one), int(other)) for one, other in (pair.split("x") for pair in text.split(","))]
        for text in (options.sizes, options.limits)
    )
    ways = options.ways.split(",")
    if unknown := set(ways) - set(WAYS):
        parser.error(f"{', '.join(sorted(unknown))}: not a way. Must be some of {', '.join(WAYS)}")
    tokens, ratios = ([int(part) for part in text.split(",")] for text in (options.tokens, options.ratios))
    wanted = list(cases(sizes, tokens, ratios, ways, limits))
    command = [sys.executable, "-m", "bench.split_linear_worker"]
    results = run_all(
        wanted, options.case_limit_s, options.start_limit_s, command, lambda r: print(line_of(r), flush=True)
    )
    told = [asdict(result) | {"bound_s": result.bound_s, "host_bytes": result.host_bytes} for result in results]
    options.out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
