"""`make fuzz MINUTES=5 SEED=7`: every target for its share of the time. Any fault is printed with the way back to it.

python -m tests.fuzz --minutes 5 --seed 7 [--targets ptd,pt2] [--compiled FOLDER] [--lowered FOLDER]
python -m tests.fuzz --case "pt2 7:123"
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from pathlib import Path

from tests.fuzz.campaign import campaign
from tests.fuzz.targets import COMPILED_VARIABLE, LOWERED_VARIABLE, TARGETS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", default="")
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--compiled", type=Path, help="a folder with model.pt2 and .ptd of tests.runtime's chain")
    parser.add_argument("--lowered", type=Path, help="a folder with model.pte and .ptd of tests.executorch's chain")
    parser.add_argument("--case", help='one case again, in this process: "target seed"')
    options = parser.parse_args()
    seed = options.seed or str(random.SystemRandom().randrange(10**6))
    names = [options.case.split()[0]] if options.case else options.targets.split(",")
    unknown = sorted(set(names) - TARGETS.keys())
    if unknown:
        parser.error(f"there is no target {', '.join(unknown)}; there are {', '.join(TARGETS)}")
    with tempfile.TemporaryDirectory(prefix="penstock-fuzz-") as folder:
        _prepare(names, options.compiled, options.lowered, Path(folder))
        if options.case:
            print(TARGETS[names[0]](random.Random(options.case), Path(folder)))
            return 0
        return _run(names, seed, options.minutes)


def _prepare(names: list[str], compiled: Path | None, lowered: Path | None, folder: Path) -> None:
    """Compiles what is needed and was not given: about a minute."""
    if "pt2-load" in names:
        if compiled is None:
            from tests.runtime.modules import COMPILERS

            COMPILERS["chain"](folder)
        os.environ[COMPILED_VARIABLE] = str(compiled or folder)
    if "pte" in names:
        if lowered is None:
            from penstock.executorch.build import build
            from penstock.executorch.library import LIBRARY
            from tests.executorch.programs import lower

            lowered = folder / "lowered"
            lowered.mkdir()
            build(folder / LIBRARY)
            os.environ["PENSTOCK_EXECUTORCH_LIBRARY"] = str(folder / LIBRARY)
            lower("chain", lowered)
        os.environ[LOWERED_VARIABLE] = str(lowered)


def _run(names: list[str], seed: str, minutes: float) -> int:
    print(f"seed {seed}, {minutes:g} minutes, targets {', '.join(names)}", flush=True)
    print(
        f"{'target':<14} {'cases':>8} {'refused':>8} {'identical':>9} {'consistent':>10} {'faults':>6} {'seconds':>7}"
    )
    faults: list[tuple[str, str, str]] = []
    for name in names:
        end = time.monotonic() + minutes * 60 / len(names)
        found = campaign(name, seed, lambda _, end=end: time.monotonic() < end)  # type: ignore[misc]
        told = [found.outcomes[key] for key in ("refused", "identical", "consistent", "fault")]
        print(
            f"{name:<14} {found.cases:>8} {told[0]:>8} {told[1]:>9} {told[2]:>10} {told[3]:>6} {found.wall_s:>7.0f}",
            flush=True,
        )
        faults += [(name, case, detail) for case, detail in found.faults]
    for name, case, detail in faults:
        print(f'\npython -m tests.fuzz --case "{name} {case}"\n{detail}')
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
