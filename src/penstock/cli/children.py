"""A Python child process that may crash or hang without harm: returns its answer, or says how it ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

# A process that waits in the kernel outlives even SIGKILL.
_KILL_GRACE_S = 5.0


class ChildFailure(Exception):
    """How the child ended, for people."""


def ask_child(code: str, *arguments: str, timeout_s: float) -> dict[str, Any]:
    """Runs `code`, whose last line of output is a JSON object."""
    root = str(Path(__file__).parents[2])
    inherited = os.environ.get("PYTHONPATH")
    child = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "PYTHONPATH": root if not inherited else root + os.pathsep + inherited},
        start_new_session=True,
    )
    try:
        output, errors = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _kill(child)
        raise ChildFailure(f"no answer within {timeout_s:g} s") from None
    except BaseException:
        _kill(child)
        raise
    lines = (output.strip() or errors.strip() or "it said nothing").splitlines()
    if child.returncode < 0:
        raise ChildFailure(f"the process that tried was ended by {signal.Signals(-child.returncode).name}: {lines[-1]}")
    if child.returncode:
        last = (errors.strip() or "it said nothing").splitlines()[-1]
        raise ChildFailure(last)
    try:
        found: dict[str, Any] = json.loads(lines[-1])
    except ValueError as error:
        raise ChildFailure(f"the process that tried said {lines[-1]!r:.200}") from error
    return found


def _kill(child: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):  # an interrupt may have ended it already
        os.killpg(child.pid, signal.SIGKILL)
    try:
        child.communicate(timeout=_KILL_GRACE_S)
    except subprocess.TimeoutExpired:
        print(f"penstock: process {child.pid} cannot be killed: it waits in the kernel", file=sys.stderr)
