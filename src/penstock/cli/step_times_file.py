"""Measured times as a file: `penstock run --write-step-times` writes it, `penstock plan --step-times` reads it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from penstock.errors import PenstockError
from penstock.plan.calibration import Calibration
from penstock.plan.link import Link


def step_times_text(calibration: Calibration) -> str:
    return json.dumps(dataclasses.asdict(calibration), indent=1)


def read_step_times(path: Path) -> Calibration:
    try:
        table = json.loads(path.read_text())
        link = Link(float(table["link"]["bytes_per_s"]), float(table["link"]["copy_latency_s"]))
        # Reads in place are timed where somebody asked for it.
        step_s, direct_step_s = (
            {name: tuple(map(float, times)) for name, times in times_of.items()}
            for times_of in (table["step_s"], table.get("direct_step_s", {}))
        )
        return Calibration(link, step_s, direct_step_s)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PenstockError(
            f'{path} has no step times: {error!r}; needs {{"link": {{"bytes_per_s": .., "copy_latency_s": ..}}, '
            '"step_s": {method: [seconds, ..]}}, as `penstock run --write-step-times` writes it'
        ) from error
