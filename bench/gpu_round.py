"""What only a GPU can show, one step after the other: its tests, and the benchmarks behind the figures in docs.

    python -m bench.gpu_round --out FOLDER [--steps tests-alone,suite-16] [--limit 560] [--list]

Each step is a process of its own, with a time limit of its own: tests leave a table in JUnit's XML, benchmarks their
JSON, and each its output as text. A step that fails or takes too long does not hold up those after it; one for which
--limit leaves no time is named as not run. Exits with 1 unless every step ran and passed. Memory that a GPU has is
read by some tests: nothing else may run on it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

FIGURES = (".json", ".md", ".svg", ".xml")


@dataclass(frozen=True)
class Step:
    name: str
    limit_s: float
    # Of `python -m`. FOLDER is its own, where it may leave gigabytes beside its figures.
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Ended:
    name: str
    result: Literal["passed", "failed", "too long", "not run"]
    seconds: float
    last_line: str


def _tests(name: str, limit_s: int, *arguments: str) -> Step:
    return Step(name, limit_s, ("pytest", "-q", "--junitxml=FOLDER/tests.xml", *arguments))


def _files(*names: str) -> list[str]:
    return [f"tests/gpu/test_{name}_cuda.py" for name in names]


def _bench(name: str, limit_s: int, arguments: str) -> Step:
    return Step(name, limit_s, tuple(f"bench.{arguments}".split(" ")))


# Those first that tell the most. The limits are for an H200 with 16 cores, with room to spare.
STEPS = (
    _tests("tests-alone", 420, *_files("runtime", "split", "direct", "interrupts")),
    # Each file compiles programs of its own, which takes most of the time: once, not in every worker.
    _tests(
        "tests-together", 300, "-n", "4", "--dist", "loadfile", *_files("experts", "graphs", "packed", "split_linear")
    ),
    _tests("tests-cache", 240, *_files("kv", "kv_compiled")),
    _tests("tests-executorch", 240, *_files("executorch")),
    _tests("tests-models", 400, "-n", "8", *_files("models", "export")),
    _tests("tests-driver-faults", 300, *_files("driver_faults")),
    _bench(
        "suite-16", 400, "suite --out FOLDER --layers 16 --systems planned,calibrated,graph,lru,mmgp --limit 380"
    ),
    _bench("suite-32", 400, "suite --out FOLDER --layers 32 --systems planned,calibrated,graph --limit 380"),
    _bench(
        "experts-int4", 300,
        "experts --out FOLDER --whole --layers 48 --int4 --prompt 512 --budgets 4,8,16,24"
        " --stay 0.6,0.3 --tokens 150",
    ),
    _bench(
        "experts-bf16", 240,
        "experts --out FOLDER --whole --layers 12 --prompt 512 --budgets 4,8 --stay 0.6 --tokens 150",
    ),
    _bench("experts-bound", 180, "experts --out FOLDER"),
    _bench("weights-and-cache", 300, "weights_and_cache --out FOLDER"),
    _bench("weights-and-cache-512", 300, "weights_and_cache --out FOLDER --batch 512 --positions 512"),
    _bench(
        "weights-and-cache-totals", 400,
        "weights_and_cache --out FOLDER --layers 24 --positions 8192 --totals 16GiB,24GiB,48GiB"
        " --ways planned",
    ),
    _bench("decode-loop", 240, "decode_loop --out FOLDER"),
    _bench("executorch-run", 240, "executorch_run --out FOLDER --fractions 0.1,0.25,0.5,0.75,0.9"),
    _bench(
        "suite-packed", 400,
        "suite --out FOLDER --layers 16 --budgets 0.1,0.25,0.5,0.6,0.75,1.0"
        " --systems packed,packed-calibrated,packed-graph --limit 380",
    ),
    _bench(
        "generation", 400,
        "generation --shape llama3-8b --work FOLDER --out FOLDER --fractions 0.401 0.535 0.802"
        " --systems packed device_map",
    ),
)  # fmt: skip


def placed(step: Step, folder: Path) -> list[str]:
    """What follows `python`."""
    return ["-m", *(each.replace("FOLDER", str(folder)) for each in step.arguments)]


def run(step: Step, out: Path, work: Path) -> Ended:
    folder, log = work / step.name, out / f"{step.name}.txt"
    folder.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    with log.open("wb") as output:
        # In a group of its own, so that what it started ends with it.
        process = subprocess.Popen(
            [sys.executable, *placed(step, folder)], stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        code = None
        try:
            code = process.wait(step.limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if code is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    seconds = time.monotonic() - begin
    for figures in sorted(path for path in folder.iterdir() if path.suffix in FIGURES):
        shutil.copyfile(figures, out / f"{step.name}-{figures.name}")
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    result: Literal["passed", "failed", "too long"] = "too long" if code is None else "failed" if code else "passed"
    return Ended(step.name, result, seconds, lines[-1] if lines else "")


def run_all(steps: Sequence[Step], out: Path, work: Path, limit_s: float) -> list[Ended]:
    begin = time.monotonic()
    ended: list[Ended] = []
    for step in steps:
        left_s = limit_s - (time.monotonic() - begin)
        one = Ended(step.name, "not run", 0, f"{left_s:.0f} s were left, and it may take {step.limit_s:.0f}")
        if left_s >= step.limit_s:
            one = run(step, out, work)
        ended.append(one)
        print(f"{one.name:26} {one.result:9} {one.seconds:6.0f} s  {one.last_line[:120]}", flush=True)
        # Whatever comes after it.
        (out / "round.json").write_text(json.dumps([asdict(each) for each in ended], indent=1))
    return ended


def _steps(text: str) -> list[Step]:
    named = {step.name: step for step in STEPS}
    names = text.split(",")
    unknown = [name for name in names if name not in named]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)} unknown; there are {', '.join(named)}")
    return [named[name] for name in names]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="for figures, tables of tests and output; without it nothing runs")
    parser.add_argument("--work", type=Path, help="for programs and weights, gigabytes of them; by default in --out")
    parser.add_argument("--steps", type=_steps, default=list(STEPS), help="comma-separated; by default all")
    parser.add_argument("--limit", type=float, default=float("inf"), metavar="S", help="seconds for all of them")
    parser.add_argument("--list", action="store_true", help="print the steps, and run none")
    given = parser.parse_args(arguments)
    if given.list:
        for step in given.steps:
            print(f"{step.name:26} {step.limit_s:4.0f} s  python {' '.join(placed(step, Path('FOLDER')))}")
        return 0
    if given.out is None:
        parser.error("--out is where the figures go: name a folder")
    work = given.work or given.out / "work"
    for folder in (given.out, work):
        folder.mkdir(parents=True, exist_ok=True)
    ended = run_all(given.steps, given.out.resolve(), work.resolve(), given.limit)
    return int(any(one.result != "passed" for one in ended))


if __name__ == "__main__":
    sys.exit(main())
