"""The benchmark suite on a machine without a GPU: one run of it from end to end, and what its figures are made of."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench.suite import measure
from bench.suite.__main__ import footprints
from bench.suite.children import Bench, Configuration
from bench.suite.model import load, on_meta, small, write_weights
from bench.suite.progress import Progress
from bench.suite.result import (
    FAILED,
    MISSING,
    RAN,
    Memory,
    Outputs,
    Row,
    Samples,
    Traffic,
    Yardsticks,
    compare,
    derive,
    row_from_json,
    row_to_json,
)
from bench.suite.systems import SYSTEMS
from bench.suite.systems.system import Setting, System
from bench.suite.table import markdown
from bench.suite.worker import _row
from safetensors.torch import load_file

import penstock
from tests.bench.finished import FRACTIONS, ROOT, Finished, suite

NEEDS_NO_GPU = {"eager", "resident", "planned", "calibrated", "lru", "packed", "packed-calibrated", "aotinductor"}
OURS = {name for name, system in SYSTEMS.items() if system.ours}


# ---- one run, from end to end


def test_every_system_ran_or_is_missing_with_a_reason(finished: Finished) -> None:
    status: dict[str, set[str]] = {}
    for row in finished.result["rows"]:
        status.setdefault(row["system"], set()).add(row["status"])
        assert (row["reason"] == "") == (row["status"] == "ran")
    assert status == {name: {"ran"} if name in NEEDS_NO_GPU else {"missing"} for name in SYSTEMS}
    reasons = {row["system"]: row["reason"] for row in finished.result["rows"]}
    assert "cuda_graph=True" in reasons["graph"]  # what the error of the load says
    assert reasons["uva"].startswith("needs CUDA, and the device is cpu")
    for name, system in SYSTEMS.items():
        line = next(line for line in finished.table.splitlines() if line.startswith(f"| {system.title} |"))
        assert " ".join(reasons[name].split()) in line


def test_bytes_streamed_are_the_plans(finished: Finished) -> None:
    path = finished.folder / "decoder-t1.pt2"
    program = penstock.read_program(path)
    weight_bytes = finished.result["model"]["weight_bytes"]
    assert weight_bytes == program.weight_bytes
    rows = finished.rows("planned")
    assert [row["budget_fraction"] for row in rows] == list(FRACTIONS)
    for row in rows:
        with penstock.Module(path, budget=row["budget_bytes"]) as module:
            assert module.plan is not None
            planned = module.plan.method("forward").warm
        assert row["traffic"]["bytes_streamed"] == row["traffic"]["planned_bytes"] == planned.bytes_streamed
        assert row["traffic"]["copies"] == planned.copies
        assert row["memory"]["weights_peak_bytes"] <= row["budget_bytes"]
    lowest, half, full = rows
    assert lowest["budget_bytes"] == lowest["floor_bytes"] > FRACTIONS[0] * weight_bytes
    assert half["budget_bytes"] == weight_bytes // 2
    assert 0 < half["traffic"]["bytes_streamed"] < weight_bytes
    assert full["traffic"]["bytes_streamed"] == 0
    # An order that cycles and does not fit misses every time.
    assert [row["traffic"]["bytes_streamed"] for row in finished.rows("lru")] == [weight_bytes, weight_bytes, 0]


def test_outputs_are_compared(finished: Finished) -> None:
    for name in NEEDS_NO_GPU:
        for row in finished.rows(name):
            outputs = row["outputs"]
            assert len(outputs["relative_errors"]) == 5
            assert max(outputs["relative_errors"]) < 0.05
            assert outputs["equal_to_resident"] is (True if name in OURS else None)
            # The compiled program rounds elsewhere than eager kernels: a sign that it is not compared with itself.
            assert outputs["equal_to_eager"] is (name == "eager")
    assert "WRONG" not in finished.table


def test_every_sample_and_what_follows_from_it(finished: Finished) -> None:
    result = finished.result
    link, weight_bytes = result["link"]["bytes_per_s"], result["model"]["weight_bytes"]
    assert link == max(result["link"]["by_piece"].values())
    (resident,) = finished.rows("resident")
    resident_s = statistics.median(resident["back_to_back"]["seconds"])
    for row in result["rows"]:
        if row["status"] != "ran":
            assert row["back_to_back"] is None
            continue
        back_to_back = row["back_to_back"]
        # On a busy machine a run may outlast its round.
        rounds, least_runs = (measure.SLOW_ROUNDS, 1) if back_to_back["runs_per_round"] == 1 else (measure.ROUNDS, 2)
        assert len(back_to_back["seconds"]) == rounds and back_to_back["runs_per_round"] >= least_runs
        assert 3 <= len(row["synchronised"]["seconds"]) <= 10
        assert len(row["host_alone"]["seconds"]) == len(row["host_behind"]["seconds"]) >= 3
        kinds = ("back_to_back", "synchronised", "host_alone", "host_behind")
        assert min(seconds for kind in kinds for seconds in row[kind]["seconds"]) > 0
        time_s = statistics.median(row["back_to_back"]["seconds"])
        budget = weight_bytes if row["budget_bytes"] is None else row["budget_bytes"]
        bound_s = max(resident_s, (weight_bytes - budget) / link)
        assert row["derived"]["bound_s"] == pytest.approx(bound_s)
        assert row["derived"]["percent_of_bound"] == pytest.approx(100 * bound_s / time_s)
        assert row["derived"]["bytes_per_s"] == pytest.approx(row["traffic"]["bytes_streamed"] / time_s)
        assert row["host_peak_bytes"] > weight_bytes


def test_what_the_result_was_made_with(finished: Finished) -> None:
    result = finished.result
    assert result["environment"]["torch"] == torch.__version__
    assert result["environment"]["penstock"] == penstock.__version__
    assert set(result["environment"]["packages"]) >= {"accelerate", "diffusers", "deepspeed", "mmgp"}
    assert "-m bench.suite" in result["command"] and "--small" in result["command"]
    assert result["date"][:2] == "20"
    plots = result["plots"]
    assert bool(plots["files"]) != bool(plots["missing"])
    assert all((finished.folder / name).exists() for name in plots["files"])
    assert (f"Plots were not made: {plots['missing']}" in finished.table) == bool(plots["missing"])


def test_planned_is_compared_at_the_peers_footprint(finished: Finished) -> None:
    (ours,) = finished.rows("planned", for_comparison=True)  # both peers hold all weights, and no more is known
    assert [(c["peer"], c["ours"]) for c in finished.result["comparisons"]] == [
        ("eager", "planned"),
        ("aotinductor", "planned"),
    ]
    for comparison in finished.result["comparisons"]:
        (peer,) = finished.rows(comparison["peer"])
        assert comparison["peer_peak_bytes"] == comparison["budget_bytes"] == finished.result["model"]["weight_bytes"]
        assert comparison["our_s"] == statistics.median(ours["back_to_back"]["seconds"])
        assert comparison["times_faster"] == statistics.median(peer["back_to_back"]["seconds"]) / comparison["our_s"]


def test_table_and_plots_are_made_again_from_the_result(finished: Finished, tmp_path: Path) -> None:
    shutil.copy(finished.folder / "result.json", tmp_path)
    subprocess.run([sys.executable, "-m", "bench.suite.report", str(tmp_path)], cwd=ROOT, check=True)
    assert (tmp_path / "table.md").read_text() == finished.table
    assert json.loads((tmp_path / "result.json").read_text()) == finished.result
    assert all((tmp_path / name).exists() for name in finished.result["plots"]["files"])


def test_a_resumed_run_measures_only_what_is_left(finished: Finished, tmp_path: Path) -> None:
    for path in finished.folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    progress = json.loads((tmp_path / "progress.json").read_text())
    (tmp_path / "progress.json").unlink()
    kept = [row for row in progress["rows"] if row["system"] != "lru" or row["budget_fraction"] != 0.5]
    (tmp_path / "progress.json").write_text(json.dumps(progress | {"rows": kept}))
    for name in ("result.json", "table.md"):
        (tmp_path / name).unlink()
    again = suite(tmp_path, "--tokens", "1", "--budgets", "0.1,0.5,1.0", "--systems", "lru", "--resume")
    before = {row["budget_fraction"]: row["back_to_back"] for row in finished.rows("lru")}
    after = {row["budget_fraction"]: row["back_to_back"] for row in again.rows("lru")}
    assert {fraction for fraction in after if after[fraction] == before[fraction]} == {0.1, 1.0}
    assert set(after) == set(FRACTIONS)
    assert again.rows("planned", for_comparison=True) == finished.rows("planned", for_comparison=True)
    assert again.result["not_asked_for"] == [name for name in SYSTEMS if not again.rows(name)]
    assert again.result["not_asked_for"][:2] == ["graph", "packed-graph"]
    assert f"Not asked for: {', '.join(again.result['not_asked_for'])}" in again.table


# ---- the model


def test_the_weights_file_is_seeded_and_read_back(tmp_path: Path) -> None:
    shape = small(1)
    first, second = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    write_weights(shape, first)
    write_weights(shape, second)
    assert first.read_bytes() == second.read_bytes()
    stored = load_file(first)
    loaded = load(shape, first, lambda tensor: tensor).state_dict()
    assert list(loaded) == list(on_meta(shape).state_dict()) and set(stored) == set(loaded)
    assert all(torch.equal(stored[name], loaded[name]) for name in stored)
    matrices = [tensor.float() for tensor in stored.values() if tensor.dim() == 2]
    assert all(0.5 < tensor.std() * math.sqrt(shape.hidden) < 2 for tensor in matrices)
    assert not torch.equal(stored["layers.0.gate.weight"], stored["layers.0.up.weight"])


# ---- rows


def row(
    system: str,
    time_s: float,
    *,
    budget: int | None = None,
    floor: int | None = None,
    peak: int | None = None,
    errors: Sequence[float] = (0.0,),
    for_comparison: bool = False,
) -> Row:
    return Row(
        system=system,
        tokens=1,
        status=RAN,
        budget_bytes=budget,
        floor_bytes=floor,
        for_comparison=for_comparison,
        back_to_back=Samples((time_s, time_s * 1.1, time_s * 0.9), 3),
        synchronised=Samples((time_s,), 1),
        traffic=Traffic(500, "counted"),
        memory=Memory(peak, "driver, sampled", peak, None, None),
        outputs=Outputs(tuple(errors), equal_to_eager=False, equal_to_resident=None),
    )


YARDSTICKS = Yardsticks(weight_bytes=1000, link_bytes_per_s=100.0, resident_s={1: 4.0})
PEERS = [name for name, system in SYSTEMS.items() if not system.ours]
TITLES = {name: system.title for name, system in SYSTEMS.items()}


def test_the_bound_is_the_larger_of_link_and_compute() -> None:
    assert derive(row("planned", 10.0, budget=200), YARDSTICKS).bound_s == 8.0
    assert derive(row("planned", 10.0, budget=200), YARDSTICKS).percent_of_bound == pytest.approx(80)
    assert derive(row("planned", 10.0, budget=900), YARDSTICKS).bound_s == 4.0
    assert derive(row("uva", 10.0, peak=300), YARDSTICKS).bound_s == 7.0
    assert derive(row("uva", 10.0), YARDSTICKS).bound_s is None
    assert derive(row("planned", 10.0, budget=200), YARDSTICKS).bytes_per_s == 50.0


def test_rows_survive_the_way_between_processes() -> None:
    there = row("planned", 2.0, budget=5, floor=3, peak=4, errors=(0.5, 0.25))
    assert row_from_json(json.loads(json.dumps(row_to_json(there)))) == there
    gone = Row("mmgp", 1, FAILED, "because")
    assert row_from_json(json.loads(json.dumps(row_to_json(gone)))) == gone


def test_a_wrong_peer_is_marked_and_not_hidden() -> None:
    peer = row("diffusers-block", 6.0, peak=300, errors=(0.0, 1.3))
    nan = row("uva", 6.0, peak=300, errors=(math.nan,))
    right = row("diffusers-leaf", 6.0, peak=300, errors=(0.01,))
    ours = row("planned", 3.0, budget=300, floor=100, peak=310, for_comparison=True)
    rows = [peer, nan, right, ours]
    text = markdown(rows, compare(rows, PEERS, ["planned"]), YARDSTICKS, TITLES)
    wrong = [line for line in text.splitlines() if "WRONG" in line]
    assert len(wrong) == 4  # each in the table and in the comparison
    assert not any(TITLES["diffusers-leaf"] in line for line in wrong)
    assert "relative error 1.3e+00" in text and "2.00 times faster" in text


def test_ours_not_identical_to_resident_is_wrong() -> None:
    ours = row("planned", 3.0, budget=300)
    assert ours.outputs is not None
    off = replace(ours, outputs=replace(ours.outputs, equal_to_resident=False))
    assert "**WRONG**, not bit-identical" in markdown([off], [], YARDSTICKS, TITLES)


def test_peers_are_met_at_their_peak_or_at_the_floor() -> None:
    peers = [row("uva", 9.0, peak=50), row("diffusers-leaf", 2.0, peak=80), row("accelerate-half", 8.0, peak=500)]
    planned = row("planned", 7.0, budget=250, floor=100)
    wanted = footprints([*peers, planned], SYSTEMS["planned"], [1])
    assert wanted == [Configuration(1, None, 100, True), Configuration(1, None, 500, True)]
    ours = [
        row("planned", 4.0 if budget == 100 else 1.0, budget=budget, floor=100, peak=budget, for_comparison=True)
        for budget in (100, 500)
    ]
    comparisons = compare([*peers, planned, *ours], PEERS, ["planned", "graph"])
    assert [(c.peer, c.ours, c.budget_bytes, c.times_faster) for c in comparisons] == [
        ("uva", "planned", 100, 2.25),
        ("diffusers-leaf", "planned", 100, 0.5),
        ("accelerate-half", "planned", 500, 8.0),
    ]
    assert "**2.00 times slower**" in markdown(peers, comparisons, YARDSTICKS, TITLES)


def test_what_is_beside_the_weights_counts_at_a_peers_footprint() -> None:
    def ours(system: str, budget: int, beside: int) -> Row:
        made = row(system, 1.0, budget=budget, floor=100)
        return replace(made, memory=Memory(budget + beside, "driver", budget + beside, None, budget))

    peer = row("accelerate-half", 8.0, peak=500)
    rows = [peer, ours("planned", 250, 40), ours("planned", 300, 60), ours("graph", 250, 90)]
    assert footprints(rows, SYSTEMS["planned"], [1]) == [Configuration(1, None, 440, True)]
    assert footprints(rows, SYSTEMS["graph"], [1]) == [Configuration(1, None, 410, True)]
    # Asked for more than all weights take, a module takes what they take.
    clamped = row("graph", 2.0, budget=405, floor=100, for_comparison=True)
    (comparison,) = compare([*rows, clamped], PEERS, ["planned", "graph"])
    assert (comparison.ours, comparison.budget_bytes, comparison.times_faster) == ("graph", 405, 4.0)


def test_without_rows_of_ours_there_is_nothing_to_compare_with() -> None:
    peer = row("uva", 9.0, peak=50)
    assert footprints([peer], SYSTEMS["planned"], [1]) == []
    assert compare([peer], PEERS, ["planned"]) == []


def test_one_reason_is_one_line_for_all_budgets() -> None:
    gone = [Row("graph", 1, MISSING, "no device", budget_fraction=fraction) for fraction in (0.1, 0.5)]
    other = Row("graph", 1, FAILED, "out of pages", budget_fraction=0.9)
    text = markdown([*gone, other], [], YARDSTICKS, TITLES)
    assert "| ours, graph | 10%, 50% | missing | no device |" in text
    assert "| ours, graph | 90% | failed | out of pages |" in text


# ---- systems and processes


def test_a_system_says_what_it_lacks() -> None:
    def missing(device: str, **options: Any) -> str:
        return System("x", "X", SYSTEMS["eager"].open, **options).missing(device)

    assert missing("cpu") == ""
    assert missing("cuda:0", needs_cuda="streams") == ""
    assert missing("cpu", needs_cuda="streams") == "needs CUDA, and the device is cpu: streams"
    assert missing("cuda:0", packages=("torch", "no_such_package")) == "not importable: no_such_package"


def test_a_run_that_reached_its_limit_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = Bench(tmp_path, "cpu", small(1), round_s=0.01, timeout_s=86_400, deadline_s=0)
    progress = Progress(tmp_path / "progress.json", bench, {"weight_bytes": 1, "environment": {}}, resume=False)
    progress.run(SYSTEMS["eager"], [Configuration(1), Configuration(2)])
    progress.run(SYSTEMS["planned"], [Configuration(1, budget_bytes=5, for_comparison=True)])
    assert [(r.system, r.tokens, r.status, r.for_comparison) for r in progress.rows] == [
        ("eager", 1, MISSING, False),
        ("eager", 2, MISSING, False),
        ("planned", 1, MISSING, True),
    ]
    assert "reached its limit" in capsys.readouterr().err


def test_slow_runs_are_timed_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of our own: on a busy machine two milliseconds may be twenty."""
    runs = 0

    def run() -> None:
        nonlocal runs
        runs += 1

    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: 0.002 * runs))
    slow = measure.time_back_to_back(run, "cpu", round_s=0.001)
    assert len(slow.seconds) == measure.SLOW_ROUNDS and slow.median_s == pytest.approx(0.002)
    assert runs == 1 + measure.SLOW_ROUNDS
    quick = measure.time_back_to_back(run, "cpu", round_s=0.02)
    assert len(quick.seconds) == measure.ROUNDS and quick.runs_per_round == 10 >= measure.LEAST_RUNS


def test_a_process_that_dies_leaves_rows_that_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    bench = Bench(tmp_path, "cpu", small(1), round_s=0.01, timeout_s=86_400)
    unknown = System("unheard-of", "X", SYSTEMS["eager"].open, shares_process=True)
    rows = bench.measure(unknown, [Configuration(1), Configuration(2)], weight_bytes=1)
    assert [(r.system, r.tokens, r.status) for r in rows] == [("unheard-of", 1, FAILED), ("unheard-of", 2, FAILED)]
    assert all("the process ended with code 1: KeyError: 'unheard-of'" in r.reason for r in rows)
    assert "KeyError: 'unheard-of'" in (tmp_path / "log.txt").read_text()


def test_what_a_system_makes_for_itself_is_made_first(tmp_path: Path) -> None:
    made: list[int] = []
    shape = small(1)
    write_weights(shape, tmp_path / "weights.safetensors")

    def make(setting: Setting) -> None:
        made.append(setting.tokens)
        raise ImportError("cannot import name 'x'")

    job = {
        "folder": str(tmp_path),
        "device": "cpu",
        "shape": dataclasses.asdict(shape),
        "weight_bytes": 1,
        "round_s": 0.01,
    }
    configuration = dataclasses.asdict(Configuration(7))
    row = _row(System("x", "X", SYSTEMS["eager"].open, make=make), job, configuration, None, {})
    assert made == [7]
    assert (row.status, row.reason) == (MISSING, "not importable: cannot import name 'x'")
