"""The parent: starts workers, each for some sessions, until the time is up; a worker that dies is a fault."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
SESSIONS_EACH = 40
# Of a worker whose time is up, or that hangs: far more than any session takes.
PATIENCE_S = 300.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="how long, compiling included")
    parser.add_argument("--seed", type=int, default=None, help="drawn and printed unless given")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--session", type=int, default=None, help="only this one, as drawn from the seed")
    parser.add_argument("--programs", type=Path, default=None, help="where compiled programs are, or go")
    parser.add_argument("--max-sessions", type=int, default=None, help="end earlier, after so many")
    arguments = parser.parse_args()
    begin_s = time.monotonic()
    seed = random.SystemRandom().randrange(1 << 31) if arguments.seed is None else arguments.seed
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    os.environ.update(environment)
    sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
    from tests.soak.programs import compile_missing
    from tests.soak.tally import Tally

    programs = arguments.programs or ROOT / "build" / "soak" / f"{arguments.device}-{_digest()}"
    print(f"seed {seed}; programs in {programs}", flush=True)
    programs.mkdir(parents=True, exist_ok=True)
    compile_missing(arguments.device, programs)
    print(f"compiled after {time.monotonic() - begin_s:.0f} s", flush=True)
    tally, first, faults = Tally(), arguments.session or 0, 0
    end_s = begin_s + 60 * arguments.minutes
    last = arguments.session + 1 if arguments.session is not None else arguments.max_sessions or 1 << 60
    with tempfile.TemporaryDirectory(prefix="penstock-soak-") as scratch:
        while first < last and (time.monotonic() < end_s or arguments.session is not None):
            count = min(SESSIONS_EACH, last - first)
            left_s = max(1.0, end_s - time.monotonic()) if arguments.session is None else PATIENCE_S
            done = _work(
                [
                    *("--seed", str(seed), "--device", arguments.device, "--programs", str(programs)),
                    *("--scratch", scratch, "--first", str(first), "--count", str(count), "--seconds", f"{left_s:.1f}"),
                ],
                Path(scratch),
                left_s + PATIENCE_S,
                tally,
            )
            if done.fault:
                faults += 1
                tally["faults found"] += 1
                print(f"\nFAULT with --seed {seed} --session {done.session}:\n{done.fault}", flush=True)
                if faults >= 5:
                    print("five faults are enough", flush=True)
                    break
            first = done.session + 1
    print(f"\nseed {seed}, {arguments.device}, {time.monotonic() - begin_s:.0f} s\n{tally.table()}", flush=True)
    return 1 if faults or tally["leaks"] else 0


def _digest() -> str:
    """Programs are compiled anew when anything that compiles them has changed."""
    import torch

    digest = hashlib.blake2b(torch.__version__.encode(), digest_size=6)
    for source in sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "tests" / "soak").glob("programs.py")]):
        digest.update(source.read_bytes())
    return digest.hexdigest()


class Done:
    """The last session of a worker, and what was wrong with it."""

    def __init__(self, session: int, fault: str) -> None:
        self.session, self.fault = session, fault


def _work(arguments: list[str], scratch: Path, timeout_s: float, tally: dict[str, int]) -> Done:
    from tests.soak.worker import LOG, RESULT

    for name in (LOG, RESULT):
        (scratch / name).unlink(missing_ok=True)
    with (scratch / "output").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-m", "tests.soak.worker", *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
        )
        try:
            status: int | str = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.send_signal(6)  # faulthandler says where every thread is
            process.wait()
            status = f"it hung; killed after {timeout_s:.0f} s"
        except BaseException:
            process.kill()
            raise
    result = json.loads((scratch / RESULT).read_text()) if (scratch / RESULT).exists() else {}
    for name, count in result.get("tally", {}).items():
        tally[name] = tally.get(name, 0) + count
    log = (scratch / LOG).read_text() if (scratch / LOG).exists() else ""
    session = int(result.get("session", log.split(maxsplit=2)[1] if log else -1))
    if status == 0:
        return Done(session, "")
    said = (scratch / "output").read_text()[-6000:]
    return Done(session, f"status {status}\nactions:\n{log}\noutput:\n{said}")


if __name__ == "__main__":
    sys.exit(main())
