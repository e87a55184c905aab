"""Cases of one target, tried in a process of their own that is started anew whenever one ends or hangs it."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO

# A case takes milliseconds.
HANG_S = 60


@dataclass
class Figures:
    target: str
    outcomes: Counter[str] = field(default_factory=Counter)
    # Seed and what happened.
    faults: list[tuple[str, str]] = field(default_factory=list)
    wall_s: float = 0.0

    @property
    def cases(self) -> int:
        return sum(self.outcomes.values())


def campaign(target: str, seed: str, more: Callable[[int], bool]) -> Figures:
    """Cases `seed`:0, `seed`:1 and so on, as long as `more` of their count says so. Ten faults are enough."""
    figures, start, done = Figures(target), time.monotonic(), False
    while not done:
        with _worker() as (worker, log):
            while True:
                if not more(figures.cases) or len(figures.faults) >= 10:
                    done = True
                    break
                case = f"{seed}:{figures.cases}"
                answer = _try(worker, target, case)
                if answer is None:
                    log.seek(0)
                    said = log.read()[-2000:].decode(errors="replace")
                    answer = {"outcome": "fault", "detail": f"it hung, or ended with {worker.poll()}: {said}"}
                figures.outcomes[answer["outcome"]] += 1
                if answer["outcome"] == "fault":
                    figures.faults.append((case, answer["detail"]))
                if worker.poll() is not None:
                    break
    figures.wall_s = time.monotonic() - start
    return figures


@contextmanager
def _worker() -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    with tempfile.TemporaryFile() as log:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.fuzz.worker"]
        pipe = subprocess.PIPE
        worker = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, env=environment)
        try:
            assert worker.stdout is not None and worker.stdout.readline() == b"ready\n", "the worker does not start"
            yield worker, log
        finally:
            assert worker.stdin is not None
            worker.stdin.close()
            try:
                worker.wait(timeout=10)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()


def _try(worker: subprocess.Popen[bytes], target: str, case: str) -> dict[str, str] | None:
    """None where the process ended, or is ended for hanging."""
    assert worker.stdin is not None and worker.stdout is not None
    try:
        worker.stdin.write(f"{target} {case}\n".encode())
        worker.stdin.flush()
    except BrokenPipeError:
        worker.wait()
        return None
    ready, _, _ = select.select([worker.stdout], [], [], HANG_S)
    line = worker.stdout.readline() if ready else b""
    if not line:
        worker.kill()
        worker.wait()
        return None
    answer: dict[str, str] = json.loads(line)
    return answer
