"""Some sessions in one process.

The log is of the present session and is written before each action, so that it is there when the process is not. The
result is written after each session.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
import time
import traceback
from pathlib import Path

import torch

from tests.soak.actions import ACTIONS
from tests.soak.interrupts import Timer
from tests.soak.sessions import session_of
from tests.soak.world import World

LOG, RESULT = "session.log", "result.json"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--programs", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--first", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    arguments = parser.parse_args()
    faulthandler.enable()
    torch.set_num_threads(1)
    end_s = time.monotonic() + arguments.seconds
    log = os.open(arguments.scratch / LOG, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    world = World(
        arguments.device,
        arguments.programs,
        arguments.scratch,
        Timer(),
        lambda text: os.write(log, f"  {text}\n".encode()) and None,
    )
    with world:
        for number in range(arguments.first, arguments.first + arguments.count):
            os.ftruncate(log, 0)
            os.lseek(log, 0, os.SEEK_SET)
            os.write(log, f"session {number}\n".encode())
            wrong = ""
            try:
                session_of(world, arguments.seed, number).play(ACTIONS)
            except BaseException:
                wrong = traceback.format_exc()
            partial = arguments.scratch / f"{RESULT}.partial"
            partial.write_text(json.dumps({"session": number, "tally": world.tally}))
            partial.replace(arguments.scratch / RESULT)
            if wrong:
                print(wrong, flush=True)
                # What is left of a session that went wrong may not be able to close.
                os._exit(3)
            if time.monotonic() >= end_s:
                break
    return 0


if __name__ == "__main__":
    sys.exit(main())
