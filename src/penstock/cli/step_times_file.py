"""Measured times as a file: `penstock run --write-step-times` writes it, `penstock plan --step-times` reads it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from penstock.errors import PenstockError
from penstock.plan.calibration import Calibration, Link
from penstock.regular_file import open_regular

# A hundred thousand steps take 2 MB.
_MOST_BYTES = 256 << 20
# Limits far beyond anything measured, so that no sum is infinite.
_MOST_S = 1e9
_MOST_BYTES_PER_S = 1e18


def step_times_text(calibration: Calibration) -> str:
    return json.dumps(dataclasses.asdict(calibration), indent=1)


def read_step_times(path: Path) -> Calibration:
    with open_regular(path, PenstockError) as file:
        raw = file.read(_MOST_BYTES + 1)
    try:
        if len(raw) > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES} bytes")
        table = json.loads(raw)
        link = Link(
            _number(table["link"]["bytes_per_s"], 1.0, _MOST_BYTES_PER_S),
            _number(table["link"]["copy_latency_s"], 0.0, _MOST_S),
        )
        # Reads in place are timed only on request.
        step_s, direct_step_s = (
            {name: tuple(_number(time, 0.0, _MOST_S) for time in times) for name, times in times_of.items()}
            for times_of in (table["step_s"], table.get("direct_step_s", {}))
        )
        return Calibration(link, step_s, direct_step_s)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        what = "it is not text" if isinstance(error, UnicodeDecodeError) else f"{error!r:.200}"
        raise PenstockError(
            f'{path} has no step times: {what}; needs {{"link": {{"bytes_per_s": .., "copy_latency_s": ..}}, '
            '"step_s": {method: [seconds, ..]}}, as `penstock run --write-step-times` writes it'
        ) from error


def _number(value: Any, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{value!r:.80} is not a number")
    if not least <= value <= most:  # nan lies in no range
        raise ValueError(f"{value!r:.80} is not within {least:g} and {most:g}")
    return float(value)
