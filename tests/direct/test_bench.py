"""bench.split_linear without a GPU: which cases, the numbers in a line, and a process that hangs or dies."""

from __future__ import annotations

import os
import selectors
import sys
from typing import Any

import bench.split_linear
import pytest
from bench.split_linear import WAYS, Case, Result, cases, line_of, run_all

# Answers each case with its ratio in milliseconds; dies at 13% and hangs at 50%.
CHILD = """
import json, os, signal, sys
for line in sys.stdin:
    case = json.loads(line)
    if case["ratio_percent"] == 13:
        os._exit(7)
    if case["ratio_percent"] == 50:
        os.write(1, b"hangs")
        signal.pause()
    print(json.dumps({"head_rows": 16, "seconds": case["ratio_percent"] / 1000, "failure": None}), flush=True)
"""


class Hurried(selectors.DefaultSelector):
    """The time is up when the child has said that it hangs, and not before, however slow the machine is."""

    hangs = False

    def select(self, timeout: float | None = None) -> Any:
        return [] if Hurried.hangs else super().select(None)


def test_cases_that_fail_are_named_and_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = os.read

    def read(descriptor: int, size: int) -> bytes:
        found = genuine(descriptor, size)
        Hurried.hangs = found.endswith(b"hangs")
        return found

    monkeypatch.setattr(bench.split_linear.os, "read", read)
    monkeypatch.setattr(bench.split_linear.selectors, "DefaultSelector", Hurried)
    wanted = [Case(64, 64, 1, ratio, "split") for ratio in (1, 13, 2, 50, 3)]
    said: list[Result] = []
    results = run_all(wanted, 0.5, 60, [sys.executable, "-c", CHILD], said.append)
    assert results == said and [result.case for result in results] == wanted
    assert [result.seconds for result in results] == [0.001, None, 0.002, None, 0.003]
    assert results[1].failure == "the process ended with 7"
    assert results[3].failure == "no answer within 0.5 s"


def test_a_process_that_never_starts_ends_the_case_not_the_run() -> None:
    wanted = [Case(64, 64, 1, ratio, "split") for ratio in (1, 2)]
    results = run_all(wanted, 60, 60, [sys.executable, "-c", "raise SystemExit(3)"], lambda result: None)
    assert [result.failure for result in results] == ["the process ended with 3"] * 2


def test_which_cases() -> None:
    every = list(cases([(7168, 7168)], (1, 64, 512), (0, 10, 100), WAYS, ((4, 256), (2, 128))))
    assert len(every) == len(set(every))
    resident = {"split", "split_mma_sync", "split_small", "copy_then_compute"}
    assert {case.way for case in every if case.ratio_percent == 0} == resident
    assert {case.tokens for case in every if case.way == "split_no_multicast"} == {512}
    assert {case.ratio_percent for case in every if case.way == "hbm_alone"} == {10}
    assert {case.way for case in every} == set(WAYS)
    assert {(case.way, case.ratio_percent) for case in every if case.host_ctas == 2} == {("split", 10), ("split", 100)}


def test_lines() -> None:
    """1000 rows on the host of 2000, 2000 bytes each: 2 MB over the link are 38.9 us at best."""
    line = line_of(Result(Case(2000, 1000, 8, 50, "split"), 1000, 50e-6))
    assert (
        "50.0 us" in line
        and "host    40.0 GB/s" in line
        and "total    80.0 GB/s" in line
        and "78% of the bound" in line
    )
    alone = Result(Case(2000, 1000, 8, 50, "hbm_alone"), 1000, 50e-6)
    assert alone.host_bytes == 0 and "host       - GB/s" in line_of(alone)
    assert "FAILED: why" in line_of(Result(Case(2000, 1000, 8, 50, "split"), 2000, None, "why"))
