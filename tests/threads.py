"""Threads of this process that are at work."""

from __future__ import annotations

import time
from pathlib import Path

# What is left after that will stay.
_PATIENCE_S = 20.0
_POLL_S = 0.002
# Of the flags in /proc/PID/stat, from the kernel's sched.h.
_EXITING = 0x4


def thread_count() -> int:
    """Without those that are ending: whoever has joined a thread may still find it listed, until the kernel is done."""
    return sum(not _flags(task) & _EXITING for task in Path("/proc/self/task").iterdir())


def threads_come_to(count: int) -> bool:
    """Whether there are so many, once those are gone that had ended: a machine may be busy with other things."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while thread_count() != count:
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_POLL_S)
    return True


def _flags(task: Path) -> int:
    try:
        text = (task / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return _EXITING
    # Behind the name, which may hold anything but ends with the last bracket: state, four ids, a terminal, its group.
    return int(text[text.rindex(")") + 2 :].split()[6])
