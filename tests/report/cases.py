"""A report made by hand: three steps, two copies and a stall in each of three runs; its names can be hostile."""

from __future__ import annotations

import json
from typing import Any

from penstock.report.data import (
    CurvePoint,
    ExpertSlots,
    MeasuredPoint,
    ReportData,
    Stall,
    Summary,
    TracedRun,
    WeightResidency,
)

# Twice: a script also ends where a space follows the tag's name, whatever comes of the bracket.
HOSTILE = "</script><img src=x onerror=\"window.broken=1\"></script x><img src=x onerror='window.broken=1'>&amp;<!--"
MIB = 2**20
RUN_NS = 10_000_000
RUNS = 3


def a_trace(weight: str = "head.weight", kernel: str = "mm", method: str = "decode") -> dict[str, Any]:
    """As Module.trace writes it."""
    events: list[dict[str, Any]] = [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "penstock"}}]

    def span(tid: int, lane: str, name: str, begin_us: float, took_us: float, **arguments: Any) -> None:
        events.append(
            {
                "ph": "X",
                "pid": 1,
                "tid": tid,
                "cat": lane,
                "name": name,
                "ts": begin_us,
                "dur": took_us,
                "args": {**arguments, "method": method},
            }
        )

    for run in range(1, RUNS + 1):
        begin_us = run * RUN_NS / 1e3
        for index in range(3):
            # The last step waits for the second copy.
            at_us = begin_us + 3000.5 * index + (500 if index == 2 else 0)
            span(1, "compute", f"{kernel} {index}", at_us, 3000.25, run=run, index=index)
        span(2, "copy", "embed.weight", begin_us + 100, 1000, run=run, index=0, bytes=4 * MIB, GB_per_s=4.194)
        span(2, "copy", weight, begin_us + 1200.125, 5300.375, run=run, index=1, bytes=6 * MIB + 7, GB_per_s=1.187)
    return {"displayTimeUnit": "ns", "traceEvents": events}


def a_report(*, hostile: bool = False, **changes: Any) -> ReportData:
    name = HOSTILE if hostile else ""
    weight, kernel, method = f"head.weight{name}", f"mm{name}", f"decode{name}"
    stalls = tuple(
        Stall(run, method, 2, f"{kernel} 2", run * RUN_NS + 6_000_750, 499_750 - run, weight, 6 * MIB + 7, 5_300_375)
        for run in range(1, RUNS + 1)
    )
    fields: dict[str, Any] = dict(
        title=f"A report{name}",
        made_at="2026-01-31 12:00 UTC",
        summary=Summary(
            program=f"model.pt2{name}",
            device="cpu",
            torch="2.13.0",
            method=method,
            weight_bytes=30 * MIB + 11,
            state_bytes=MIB,
            floor_bytes=9 * MIB,
            budget_bytes=20 * MIB + 3,
            peak_bytes=20 * MIB,
            resident_bytes=14 * MIB,
            ring_bytes=6 * MIB,
            run_s=0.0102345,
            bytes_streamed=10 * MIB + 7,
            bytes_per_s=(10 * MIB + 7) / 0.0102345,
            copies=2,
            stall_ns=499_000,
            link_bytes_per_s=4.25e9,
            link_part=(10 * MIB + 7) / 0.0102345 / 4.25e9,
            bound_s=0.0090007,
            bound_part=0.0090007 / 0.0102345,
            identical=True,
        ),
        weights=(
            WeightResidency("embed.weight", "float32", (1024, 2048), 8 * MIB, 4 * MIB, 4 * MIB, "prefix+suffix"),
            WeightResidency("norm.weight", "float32", (2048,), 8192, 8192, 0, "resident"),
            WeightResidency(weight, "bfloat16", (3, 1048577), 6 * MIB + 7, 0, 6 * MIB + 7, "streamed"),
        ),
        experts=(ExpertSlots(tuple(f"{weight}.{part}" for part in ("up", "down")), 128, 26, 1_234_567, 98_765, 0.926),),
        runs=tuple(
            TracedRun(run, method, run * RUN_NS, run * RUN_NS + 9_501_250, 3, 2, 10 * MIB + 7, 6_300_375, 499_750 - run)
            for run in range(1, RUNS + 1)
        ),
        stalls=stalls,
        measured=(
            MeasuredPoint(9 * MIB, 0.0131, 20 * MIB, 4, 9 * MIB, 3_000_000, True),
            MeasuredPoint(20 * MIB + 3, 0.0102345, 10 * MIB + 7, 2, 20 * MIB, 499_000, True),
            MeasuredPoint(31 * MIB, 0.0091, 0, 0, 31 * MIB, 0, True),
        ),
        curve=tuple(
            CurvePoint(9 * MIB + k * 2 * MIB, 0.0125 - 0.0003 * k, max(0.009, 0.011 - 0.0004 * k), (22 - 2 * k) * MIB)
            for k in range(12)
        ),
        trace_json=json.dumps(a_trace(weight, kernel, method)),
    )
    return ReportData(**{**fields, **changes})
