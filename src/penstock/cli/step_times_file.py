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
        return Calibration(link, {name: tuple(map(float, times)) for name, times in table["step_s"].items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PenstockError(
            f'{path} has no step times: {error!r}; needs {{"link": {{"bytes_per_s": .., "copy_latency_s": ..}}, '
            '"step_s": {method: [seconds, ..]}}, as `penstock run --write-step-times` writes it'
        ) from error
