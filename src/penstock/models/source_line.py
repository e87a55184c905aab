"""Where in a model's own code something went wrong."""

from __future__ import annotations

import traceback


def place(error: BaseException) -> str:
    """The line of the model's own code that failed."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/modeling_" in frame.filename]
    return f"{frames[-1].filename}, line {frames[-1].lineno} ({frames[-1].name}): " if frames else ""


def first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:300] if text else ''}"
