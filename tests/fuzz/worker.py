"""A process that tries cases until it is told to stop, or dies of one. It takes lines of a target and a case's seed."""

from __future__ import annotations

import json
import random
import resource
import sys
import tempfile
import traceback
from pathlib import Path

# What one case may take beyond what the process has after its first ones: far above any file of ours, far below harm.
ROOM_BYTES = 1 << 30
WARM_UP_CASES = 20


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + ROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main() -> None:
    # All that takes long to import, before the first case is timed.
    import penstock.cli.main
    import penstock.export.wrapper
    import penstock.runtime.module  # noqa: F401
    from tests.fuzz.targets import TARGETS

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = sys.stdout
    sys.stdout = sys.stderr  # what a case prints is no answer
    with tempfile.TemporaryDirectory(prefix="penstock-fuzz-") as folder:
        print("ready", file=answers, flush=True)
        for count, line in enumerate(sys.stdin):
            if count == WARM_UP_CASES:
                _limit_memory()
            name, seed = line.split()
            try:
                answer = {"outcome": TARGETS[name](random.Random(f"{name} {seed}"), Path(folder)), "detail": ""}
            except Exception:
                answer = {"outcome": "fault", "detail": traceback.format_exc()[-3000:]}
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
