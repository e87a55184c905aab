"""Calls the command line in a process of its own, where from_pretrained is a stand-in.

Usage: python -m tests.cli.chat_driver READY CALL ARGUMENTS... At the call of forward with the number CALL, a byte is
written to the descriptor READY, and forward waits until a signal has arrived: so it arrives in the middle of an answer.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import penstock
from penstock.cli.main import main
from tests.cli.checkpoints import Scripted, scripted


def wait_for_a_signal(model: Scripted, ready: int, number: int) -> None:
    forward = model.forward
    arrived, wakeup = os.pipe()
    os.set_blocking(wakeup, False)

    def waiting(*arguments: Any, **options: Any) -> Any:
        if len(model.calls) == number:
            # Python writes a byte there as soon as a signal is there, before its handler is called.
            earlier = signal.set_wakeup_fd(wakeup)
            os.write(ready, b".")
            os.read(arrived, 1)
            signal.set_wakeup_fd(earlier)
        return forward(*arguments, **options)

    model.forward = waiting


def run(ready: int, number: int, arguments: list[str]) -> int:
    def from_pretrained(folder: Path, budget: str | None = None, **options: Any) -> Scripted:
        model = scripted(folder)
        wait_for_a_signal(model, ready, number)
        return model

    penstock.from_pretrained = from_pretrained
    return main(arguments)


if __name__ == "__main__":
    # Whoever started the tests in the background had its children ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(run(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
