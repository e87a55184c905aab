"""Runs one system in this process, at each of its configurations: `python -m bench.suite.worker JOB.json ROWS.jsonl`.

A row is written as soon as it is known, so that what was measured before a crash is kept.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.suite import measure
from bench.suite.model import ModelShape, inputs
from bench.suite.result import FAILED, MISSING, RAN, REPEATED, Memory, Outputs, Row, row_to_json
from bench.suite.systems import REFERENCE, RESIDENT, SYSTEMS
from bench.suite.systems.system import Facts, Setting, System, Unavailable
from penstock.export.peak import PeakMeter

# Kept from runs that follow each other without a wait: a copy that comes too late shows only there.
KEPT_OUTPUTS = 4


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    system = SYSTEMS[job["system"]]
    device = str(job["device"])
    meter = measure.DeviceMeter(device) if device.startswith("cuda") else None
    measured: dict[tuple[int, int], Row] = {}
    with Path(sys.argv[2]).open("w") as rows:
        for configuration in job["configurations"]:
            row = _row(system, job, configuration, meter, measured)
            rows.write(json.dumps(row_to_json(row)) + "\n")
            rows.flush()
            gc.collect()


def _row(
    system: System,
    job: dict[str, Any],
    configuration: dict[str, Any],
    meter: measure.DeviceMeter | None,
    measured: dict[tuple[int, int], Row],
) -> Row:
    setting = Setting(
        folder=Path(job["folder"]),
        device=str(job["device"]),
        shape=ModelShape(**job["shape"]),
        tokens=configuration["tokens"],
        weight_bytes=job["weight_bytes"],
        round_s=job["round_s"],
        budget_fraction=configuration["budget_fraction"],
        budget_bytes=configuration["budget_bytes"],
    )
    empty = Row(
        system=system.name,
        tokens=setting.tokens,
        status=FAILED,
        budget_fraction=setting.budget_fraction,
        for_comparison=configuration["for_comparison"],
    )
    try:
        if system.make is not None:
            system.make(setting)
        with torch.no_grad(), PeakMeter(setting.device) as host:
            row = _measure(system, setting, empty, meter, measured)
        return replace(
            row, host_peak_bytes=host.peaks.host_peak_bytes, host_mark_was_reset=host.peaks.host_mark_was_reset
        )
    except Unavailable as error:
        return replace(empty, status=MISSING, reason=str(error))
    except Exception as error:
        if isinstance(error, ImportError) and not system.ours:
            # There is a package of that name, but not one that works here.
            return replace(empty, status=MISSING, reason=f"not importable: {error}")
        # One configuration's failure is a row of the table; the next ones are still tried.
        traceback.print_exc()
        return replace(empty, budget_bytes=setting.budget_bytes, reason=f"{type(error).__name__}: {error}")


def _measure(
    system: System,
    setting: Setting,
    empty: Row,
    meter: measure.DeviceMeter | None,
    measured: dict[tuple[int, int], Row],
) -> Row:
    device = setting.device
    if meter is not None:
        meter.reset()
    x = inputs(setting.shape, setting.tokens, device)
    with ExitStack() as stack:
        watch = stack.enter_context(ExitStack())
        if meter is not None and not system.ours:
            # Not for ours: what they take they keep until they are closed, so that they are sampled between runs; and
            # a thread that talks to the driver would be in the way of a capture.
            watch.enter_context(meter)
        begin = time.perf_counter()
        opened = stack.enter_context(system.open(setting))
        load_s = time.perf_counter() - begin
        for _ in range(measure.WARM_UP_RUNS):
            opened.forward(x)
        measure.synchronize(device)
        facts = opened.facts()
        before = measured.get((setting.tokens, facts.budget_bytes)) if facts.budget_bytes is not None else None
        if before is not None:
            return replace(
                before,
                status=REPEATED,
                reason="the budget comes out the same as that of a row before",
                budget_fraction=empty.budget_fraction,
                for_comparison=empty.for_comparison,
            )
        # Read now: the outputs that are kept below are not the system's.
        watch.close()
        memory = _memory(facts, meter, device)
        kept = [opened.forward(x) for _ in range(KEPT_OUTPUTS)]
        measure.synchronize(device)
        kept.append(opened.forward(x))
        measure.synchronize(device)
        outputs = _compare(system, setting, kept)
        del kept
        back_to_back = measure.time_back_to_back(lambda: opened.forward(x), device, setting.round_s)
        synchronised = measure.time_synchronised(lambda: opened.forward(x), device, setting.round_s)
        host_alone, host_behind = None, None
        if system.asynchronous:
            host_alone, host_behind = measure.time_host(lambda: opened.forward(x), device, setting.round_s)
        facts = opened.facts()
        row = replace(
            empty,
            status=RAN,
            budget_bytes=facts.budget_bytes,
            floor_bytes=facts.floor_bytes,
            load_s=load_s,
            back_to_back=back_to_back,
            synchronised=synchronised,
            host_alone=host_alone,
            host_behind=host_behind,
            traffic=facts.traffic,
            memory=memory,
            outputs=outputs,
        )
    if row.budget_bytes is not None:
        measured[setting.tokens, row.budget_bytes] = row
    return row


def _memory(facts: Facts, meter: measure.DeviceMeter | None, device: str) -> Memory:
    if meter is None:
        return Memory(
            peak_bytes=facts.weights_peak_bytes,
            peak_source="unknown" if facts.weights_peak_bytes is None else "weights alone",
            driver_peak_bytes=None,
            torch_peak_bytes=None,
            weights_peak_bytes=facts.weights_peak_bytes,
        )
    driver_peak_bytes = meter.peak_bytes()
    return Memory(
        peak_bytes=driver_peak_bytes,
        peak_source="driver",
        driver_peak_bytes=driver_peak_bytes,
        torch_peak_bytes=torch.cuda.max_memory_allocated(device),
        weights_peak_bytes=facts.weights_peak_bytes,
    )


def _compare(system: System, setting: Setting, outputs: Sequence[Tensor]) -> Outputs:
    """The yardsticks' outputs are stored; the others' are compared with them."""
    kept = [output.detach().cpu() for output in outputs]
    for yardstick in (REFERENCE, RESIDENT):
        if system is yardstick:
            torch.save(kept[-1], _stored(setting, yardstick))
    reference = torch.load(_stored(setting, REFERENCE), map_location="cpu")
    norm = reference.double().norm()
    resident = torch.load(_stored(setting, RESIDENT), map_location="cpu") if system.ours else None
    return Outputs(
        relative_errors=tuple(float((output.double() - reference.double()).norm() / norm) for output in kept),
        equal_to_eager=all(torch.equal(output, reference) for output in kept),
        equal_to_resident=None if resident is None else all(torch.equal(output, resident) for output in kept),
    )


def _stored(setting: Setting, system: System) -> Path:
    return setting.folder / f"output-{system.name}-t{setting.tokens}.pt"


if __name__ == "__main__":
    main()
