"""The plan that is shown is the planner's, and its times the simulator's; what is not known is said."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.curve_picture import MissingPackageError
from penstock.cli.step_times_file import step_times_text
from penstock.plan.calibration import Calibration, Link
from penstock.plan.planner import Planner
from penstock.plan.simulator import simulate
from penstock.program import read_program
from tests.cli.conftest import Cli, write_metadata
from tests.cli.test_inspect import PAGE, two_methods

LINK = 1e9


def planner(path: Path, placement: str = "auto") -> Planner:
    """As a module makes it."""
    read = read_program(path)
    schedules, weights = [m.schedule for m in read.methods], {w.name: w for w in read.weights}
    return Planner(schedules, weights, page_bytes=PAGE, placement=placement)


@pytest.fixture
def budget(program: Path) -> int:
    ours = planner(program)
    return (ours.floor_bytes + ours.full_bytes) // 2


@pytest.fixture
def times(program: Path, tmp_path: Path) -> Path:
    steps = len(read_program(program).methods[0].schedule.steps)
    calibration = Calibration(Link(2e9, 1e-6), {"forward": tuple(1e-7 * (k + 1) for k in range(steps))})
    (tmp_path / "times.json").write_text(step_times_text(calibration))
    return tmp_path / "times.json"


@pytest.mark.parametrize(
    ("part", "placings"), [(0, {"streamed"}), (50, {"prefix+suffix"}), (80, {"resident", "prefix+suffix"})]
)
def test_placements_and_bytes_are_the_planners(cli: Cli, program: Path, part: int, placings: set[str]) -> None:
    ours = planner(program)
    budget = ours.floor_bytes + (ours.full_bytes - ours.floor_bytes) * part // 100
    told = cli("plan", program, "--budget", budget, "--json").document
    plan = planner(program).plan(budget)
    assert told["device_bytes"] == plan.device_bytes <= budget
    assert told["methods"][0]["bytes_streamed"] == plan.methods[0].warm.bytes_streamed > 0
    assert told["methods"][0]["copies"] == plan.methods[0].warm.copies
    held: dict[str, int] = {}
    for piece in plan.fills:
        held[piece.weight] = held.get(piece.weight, 0) + piece.nbytes
    rows: list[dict[str, Any]] = [row for row in told["placements"] if row["kind"] != "in place"]
    assert {row["name"] for row in told["placements"]} - {row["name"] for row in rows} == set(plan.direct_weights)
    assert {row["name"]: row["resident_bytes"] for row in rows if row["resident_bytes"]} == held
    for row in rows:
        assert row["resident_bytes"] + row["streamed_bytes"] == row["nbytes"]
        placing = {(True, False): "resident", (True, True): "prefix+suffix", (False, True): "streamed"}
        assert row["kind"] == placing[row["resident_bytes"] > 0, row["streamed_bytes"] > 0]
    assert plan.direct_weights == ("table.weight",) and {row["kind"] for row in rows} >= placings


def test_time_and_bound(cli: Cli, program: Path, budget: int, times: Path) -> None:
    (method,) = cli("plan", program, "--budget", budget, "--step-times", times, "--json").document["methods"]
    read = read_program(program)
    measured = json.loads(times.read_text())
    link, step_s = Link(**measured["link"]), measured["step_s"]["forward"]
    plan = planner(program).plan(budget, Calibration(link, {"forward": tuple(step_s)}))
    timing = simulate(plan.methods[0], read.methods[0].schedule, step_s=step_s, link=link)
    assert (method["predicted_s"], method["cold_s"]) == (timing.run_s, timing.cold_run_s)
    assert method["resident_s"] == sum(step_s)
    table_bytes = read.weights[0].nbytes  # read in place, so it need not cross the link
    assert method["in_place_bytes"] == table_bytes
    assert method["bound_s"] > sum(step_s), "it is the link that bounds"
    assert method["bound_s"] == max(sum(step_s), (read.weight_bytes - table_bytes - budget) / link.bytes_per_s)


def test_without_step_times_only_the_links_share_is_told(cli: Cli, program: Path, budget: int) -> None:
    told = cli("plan", program, "--budget", budget, "--link", "1GB/s", "--json").document
    (method,) = told["methods"]
    assert told["step_times"] == "unknown" and method["resident_s"] == 0
    assert method["predicted_s"] >= method["bytes_streamed"] / LINK * (1 - 1e-9)
    assert "link's share only" in "".join(told["notes"])
    shown = cli("plan", program, "--budget", budget, "--link", "1GB/s").stdout
    assert "link's share only" in " ".join(shown.split())


def test_without_a_link_no_time_is_told(cli: Cli, program: Path, budget: int) -> None:
    told = cli("plan", program, "--budget", budget, "--json").document
    assert told["methods"][0]["predicted_s"] is None and told["methods"][0]["bound_s"] is None
    assert "--link" in "".join(told["notes"])


def test_estimated_step_times(cli: Cli, program: Path, budget: int) -> None:
    options = ("--budget", budget, "--link", "1GB/s", "--compute-bandwidth", "2GB/s", "--json")
    told = cli("plan", program, *options).document
    assert told["step_times"] == "estimated" and "estimated" in "".join(told["notes"])
    table, *layers = read_program(program).weights
    assert table.name == "table.weight", "only rows of it are read, which is taken for nothing"
    assert told["methods"][0]["resident_s"] == pytest.approx(sum(weight.nbytes for weight in layers) / 2e9)


def test_a_gpu_that_is_not_here(cli: Cli, program: Path) -> None:
    read = read_program(program)
    told = cli("plan", program, "--gpu-memory", "24GiB", "--link", "25GB/s", "--json").document
    gpu = told["gpu"]
    total = 24 << 30
    activations = read.methods[0].activation_bound_bytes
    assert gpu["left_bytes"] == total - activations - read.state_bytes - total // 50
    assert told["asked_bytes"] == gpu["left_bytes"] > told["budget_bytes"] == told["full_bytes"]
    assert told["page_bytes"] == 2 << 20 and gpu["enough"] is True
    # Too small a GPU for what is asked, and too small a GPU for anything.
    small = cli("plan", program, "--gpu-memory", "257MiB", "--budget", "100MiB", "--json").document
    assert small["gpu"]["enough"] is False
    # A budget is cut to what all weights take before it is asked whether it fits.
    fits = cli("plan", program, "--gpu-memory", "300MiB", "--budget", "100GiB", "--json").document
    assert fits["gpu"]["enough"] is True and fits["budget_bytes"] == fits["full_bytes"] < fits["gpu"]["left_bytes"]
    nothing = cli("plan", program, "--gpu-memory", "1MiB", "--json").document["error"]
    assert nothing["class"] == "BelowFloorError" and not re.search(r"-\d", nothing["message"]), "no negative amount"
    refused = cli("plan", program, "--gpu-memory", "257MiB", "--json")
    assert refused.code == 10 and refused.document["error"]["class"] == "BelowFloorError"


def test_below_the_floor(cli: Cli, program: Path) -> None:
    floor = planner(program).floor_bytes
    assert cli("plan", program, "--budget", floor).code == 0
    assert cli("plan", program, "--budget", floor - 1).code == 10
    streamed = planner(program, "stream").floor_bytes
    assert streamed > floor
    assert cli("plan", program, "--budget", streamed, "--placement", "stream").code == 0
    assert cli("plan", program, "--budget", streamed - 1, "--placement", "stream").code == 10


def test_a_placement_that_needs_less_is_named_and_can_be_planned(cli: Cli, program: Path) -> None:
    least = planner(program, "in-place").floor_bytes
    refused = cli("plan", program, "--budget", planner(program).floor_bytes - 1, "--json").document["error"]
    assert f'That is for placement="auto"; placement="in-place" needs {least} bytes' in refused["message"]
    told = cli("plan", program, "--budget", least, "--placement", "in-place", "--link", "1GB/s", "--json").document
    (method,) = told["methods"]
    assert {row["kind"] for row in told["placements"]} == {"in place"} and not method["bytes_streamed"]
    read = read_program(program)
    assert method["in_place_bytes"] + method["multiplied_in_place_bytes"] == read.weight_bytes
    assert method["predicted_s"] >= method["multiplied_in_place_bytes"] / LINK * (1 - 1e-9)
    assert "as fast as the link copies" in "".join(told["notes"])


@pytest.mark.parametrize("command", ["plan", "run"])
def test_placements_of_before_are_refused_by_their_new_names(cli: Cli, program: Path, command: str) -> None:
    for before, now in (("streamed", "stream"), ("direct", "in-place"), ("planned", "auto")):
        refused = cli(command, program, "--placement", before, "--json")
        assert refused.code == 2
        assert f"what was placement='{before}' is now \"{now}\"" in refused.document["error"]["message"]
    unknown = cli(command, program, "--placement", "fast", "--json")
    assert unknown.code == 2 and "what was" not in unknown.stderr


def test_the_curve(cli: Cli, program: Path, times: Path, tmp_path: Path) -> None:
    out = tmp_path / "curve.html"
    told = cli("plan", program, "--step-times", times, "--curve", out, "--points", 5, "--json").document
    rows, ours = told["curve"], planner(program)
    assert [rows[0]["budget_bytes"], rows[-1]["budget_bytes"]] == [ours.floor_bytes, ours.full_bytes]
    assert len(rows) == 5 and sorted(row["budget_bytes"] for row in rows) == [row["budget_bytes"] for row in rows]
    assert rows[-1]["streamed_bytes"] == 0 and rows[0]["streamed_bytes"] > 0
    for row in rows:
        assert row["predicted_s"] >= row["bound_s"]
    alone = cli("plan", program, "--step-times", times, "--budget", rows[2]["budget_bytes"], "--json").document
    assert alone["methods"][0]["predicted_s"] == rows[2]["predicted_s"]
    page = out.read_text()
    assert all(str(row["budget_bytes"]) in page for row in rows) and not list(tmp_path.glob(".*"))


def test_a_png_without_matplotlib_names_the_extra(
    cli: Cli, program: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    refused = cli("plan", program, "--link", "1GB/s", "--curve", tmp_path / "c.png", "--json")
    assert refused.document["error"]["class"] == MissingPackageError.__name__
    assert "penstock[plot]" in refused.stderr and not list(tmp_path.iterdir())


def test_a_png(cli: Cli, program: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert cli("plan", program, "--link", "1GB/s", "--curve", tmp_path / "c.png", "--points", 3).code == 0
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_methods(cli: Cli, tmp_path: Path) -> None:
    path = write_metadata(tmp_path / "hand.pt2", two_methods())
    options = ("--link", "1GB/s", "--curve", tmp_path / "c.html", "--points", 3, "--json")
    both, one = cli("plan", path, *options).document, cli("plan", path, "--method", "decode", *options).document
    assert [m["method"] for m in both["methods"]] == ["prefill", "decode"]
    assert [m["method"] for m in one["methods"]] == ["decode"]
    assert both["budget_source"] == "floor" and both["curve"][0]["streamed_bytes"] > one["curve"][0]["streamed_bytes"]


def with_linear(program: Path, folder: Path) -> Path:
    """The same program as if every product could be split; its code is not needed here."""
    read = read_program(program)
    (method,) = read.methods
    accesses = tuple(dataclasses.replace(one, linear=not one.gathered) for one in method.schedule.accesses)
    changed = dataclasses.replace(method, schedule=dataclasses.replace(method.schedule, accesses=accesses))
    return write_metadata(folder / "linear.pt2", dataclasses.replace(read, methods=(changed,)))


def test_inspect_tells_what_may_be_split(cli: Cli, program: Path, tmp_path: Path) -> None:
    path = with_linear(program, tmp_path)
    _, *layers = read_program(path).weights
    told = cli("inspect", path, "--json").document
    assert {row["name"] for row in told["weights"] if row["linear"]} == {weight.name for weight in layers}
    assert "may lie on both sides of the link" in cli("inspect", path).stdout
    assert "may lie on both sides of the link" not in cli("inspect", program).stdout


def test_split_weights(cli: Cli, program: Path, tmp_path: Path) -> None:
    path = with_linear(program, tmp_path)
    table, *layers = read_program(path).weights
    layer_bytes = sum(weight.nbytes for weight in layers)
    budget = layer_bytes // 2 // PAGE * PAGE
    told = cli("plan", path, "--placement", "split", "--budget", budget, "--link", "1GB/s", "--json").document
    plan = planner(path, "split").plan(budget)
    assert told["device_bytes"] == plan.device_bytes <= budget and told["floor_bytes"] == 0
    rows = {row["name"]: row for row in told["placements"]}
    assert {name for name, row in rows.items() if row["kind"] == "split"} == set(plan.split_weights) != set()
    heads = {one.weight: one.prefix_bytes for one in plan.methods[0].placements if one.prefix_bytes is not None}
    for name, row in rows.items():
        assert row["resident_bytes"] + row["in_place_bytes"] == row["nbytes"] and row["streamed_bytes"] == 0
        assert row["resident_bytes"] == heads.get(name, 0)
    assert rows[table.name]["kind"] == "in place"
    (method,) = told["methods"]
    # The table is gathered from; all else that is in host memory crosses the link, and takes as long as that.
    assert (method["in_place_bytes"], method["bytes_streamed"]) == (table.nbytes, 0)
    assert method["multiplied_in_place_bytes"] == layer_bytes - sum(heads.values())
    assert method["predicted_s"] == pytest.approx(method["multiplied_in_place_bytes"] / LINK)
    assert method["bound_s"] == pytest.approx((layer_bytes - budget) / LINK)
    assert "as fast as the link" in "".join(told["notes"])
    shown = cli("plan", path, "--placement", "split", "--budget", budget).stdout
    assert "split" in shown and "in place" in shown


def test_a_step_of_a_split_weight_takes_as_long_as_the_slower_side(cli: Cli, program: Path, tmp_path: Path) -> None:
    path = with_linear(program, tmp_path)
    budget, rate = 4 * PAGE, 1.1e9
    options = ("--budget", budget, "--link", "1GB/s", "--compute-bandwidth", "1.1GB/s", "--json")
    (method,) = cli("plan", path, "--placement", "split", *options).document["methods"]
    _, *layers = planner(path, "split").plan(budget).methods[0].placements
    rests = {one.in_place_bytes for one in layers}
    assert len(rests) == 2 and min(rests) / LINK < layers[0].nbytes / rate < max(rests) / LINK
    slower_s = sum(max(one.nbytes / rate, one.in_place_bytes / LINK) for one in layers)
    assert method["predicted_s"] == pytest.approx(slower_s)
    # Of these only the table is left out of the bound, though four layers have no head either.
    table, *weights = read_program(path).weights
    assert method["in_place_bytes"] == table.nbytes
    assert method["bound_s"] == pytest.approx((sum(weight.nbytes for weight in weights) - budget) / LINK)


def test_where_nothing_can_be_split_the_mode_is_refused(cli: Cli, program: Path) -> None:
    refused = cli("plan", program, "--placement", "split", "--budget", "1GB")
    assert refused.code == 2 and "exported with --split-linear" in " ".join(refused.stderr.split())


@pytest.mark.parametrize(
    "options",
    [
        ("--budget", "1GB", "--gpu-memory", "8 parsecs"),
        ("--budget", "1GB", "--link", "25GB/s", "--copy-latency-us", "nan"),
        ("--budget", "1GB", "--link", "25GB/s", "--copy-latency-us", "inf"),
        ("--budget", "1GB", "--link", "25GB/s", "--copy-latency-us", "-1"),
        ("--budget", "1GB", "--points", "9" * 5000),
        ("--budget", "1GB", "--points", "5"),
        ("--budget", "1GB", "--link", "25GB"),
        ("--budget", "1GB", "--link", "0GB/s"),
        ("--budget", "1GB", "--copy-latency-us", "3"),
        ("--budget", "1GB", "--method", "nope"),
        ("--budget", "1GB", "--step-times", "a", "--compute-bandwidth", "1GB/s"),
        ("--curve", "c.gif"),
        ("--curve", "c.html"),
        (),
    ],
    ids=str,
)
def test_usage(cli: Cli, program: Path, options: tuple[str, ...]) -> None:
    assert cli("plan", program, *options).code == 2


@pytest.mark.parametrize("budget", ["8 parsecs", "nan", "-1", "", "9" * 5000, "1\udcff"], ids=ascii)
def test_a_malformed_budget_has_the_code_of_budgets(cli: Cli, program: Path, budget: str) -> None:
    told = cli("plan", program, "--budget", budget, "--json")
    assert told.code == 10 and told.document["error"]["class"] == "BudgetError"
    assert "--budget" in told.document["error"]["message"]


SOUND = {"bytes_per_s": 1e9, "copy_latency_s": 0.0}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"PK\x03\x04\xff",
        b"[" * 100_000,
        json.dumps({"link": SOUND, "step_s": {"forward": [float("nan")]}}).encode(),
        json.dumps({"link": SOUND, "step_s": {"forward": [float("inf")]}}).encode(),
        json.dumps({"link": SOUND, "step_s": {"forward": [-1]}}).encode(),
        json.dumps({"link": SOUND, "step_s": {"forward": [10**400]}}).encode(),
        json.dumps({"link": SOUND, "step_s": {"forward": "12345"}}).encode(),
        json.dumps({"link": {**SOUND, "bytes_per_s": 0}, "step_s": {}}).encode(),
        json.dumps({"link": 5, "step_s": {}}).encode(),
        json.dumps({"link": SOUND, "step_s": [1]}).encode(),
    ],
    ids=lambda content: repr(content[-40:]),
)
def test_step_times_that_are_none(cli: Cli, program: Path, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "times.json").write_bytes(content)
    told = cli("plan", program, "--budget", "1GB", "--step-times", tmp_path / "times.json", "--json")
    assert told.code == 1 and told.document["error"]["class"] == "PenstockError"
    assert "times.json" in told.document["error"]["message"]
    assert "\\x" not in told.document["error"]["message"], "bytes of the file say nothing"


def test_a_png_takes_any_name_as_its_title(cli: Cli, program: Path, tmp_path: Path) -> None:
    """matplotlib reads what stands between two dollars as mathematics."""
    pytest.importorskip("matplotlib")
    odd = shutil.copy(program, tmp_path / "$\\frac{$.pt2")
    told = cli("plan", odd, "--link", "25GB/s", "--curve", tmp_path / "c.png", "--points", "2")
    assert told.code == 0 and (tmp_path / "c.png").stat().st_size > 0


def test_step_times_of_another_program(cli: Cli, program: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    for content in ('{"link": {"bytes_per_s": 1, "copy_latency_s": 0}, "step_s": {"forward": [1]}}', "{}", "no json"):
        other.write_text(content)
        told = cli("plan", program, "--budget", "1GB", "--step-times", other)
        assert told.code == 1 and "other.json" in told.stderr and "Traceback" not in told.stderr
