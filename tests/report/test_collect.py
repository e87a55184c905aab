"""What is collected from a module is what the module, its plan and its trace say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.errors import PenstockError
from penstock.report.collect import collect
from penstock.report.data import MeasuredPoint, ReportData
from penstock.report.page import write_report
from tests.harness import compiled, offloaded
from tests.report.pages import Parsed
from tests.runtime.modules import PROMPT, decode, play, prefill

SCRIPT = [prefill(), *(decode(11 * k, PROMPT + k) for k in range(3))]


def a_module(path: Path, part: float, **options: Any) -> penstock.Module:
    """`part` of the way from the floor to everything, and no whole number of pages: the peak is less."""
    with penstock.Module(path, "1TiB", **options) as module:
        floor_bytes, full_bytes = module.floor_bytes, module.budget_bytes
    budget_bytes = floor_bytes + int((full_bytes - floor_bytes) * part) | 1
    return penstock.Module(path, budget_bytes, **options)


def a_point(module: penstock.Module, **changes: Any) -> MeasuredPoint:
    last, peak_bytes = module.last_run, module.device_memory()[1]
    found: dict[str, Any] = dict(
        budget_bytes=module.budget_bytes,
        run_s=0.25,
        bytes_streamed=last.bytes_streamed,
        copies=last.copies,
        peak_bytes=peak_bytes,
        stall_ns=last.stall_ns,
        identical=True,
    )
    return MeasuredPoint(**{**found, **changes})


def collected(module: penstock.Module, trace: Path, **options: Any) -> ReportData:
    play(module.run_method, SCRIPT)
    with module.trace(trace):
        play(module.run_method, SCRIPT)
    return collect(module, trace, [a_point(module)], method="decode", **options)


def test_it_is_what_the_module_and_its_plan_say(decoder: Path, tmp_path: Path) -> None:
    with a_module(decoder, 0.5) as module:
        data = collected(module, tmp_path / "trace.json", curve_points=5)
        plan, program, last = module.plan, module.program, module.last_run
        assert plan is not None
        summary = data.summary
        assert (summary.floor_bytes, summary.budget_bytes) == (module.floor_bytes, module.budget_bytes)
        assert (summary.weight_bytes, summary.state_bytes) == (module.weight_bytes, module.state_bytes)
        assert summary.peak_bytes == module.device_memory()[1] < module.budget_bytes
        assert (summary.resident_bytes, summary.ring_bytes) == (plan.resident_bytes, plan.ring_bytes)
        assert (summary.bytes_streamed, summary.copies) == (last.bytes_streamed, last.copies)
        assert summary.bytes_per_s == last.bytes_streamed / 0.25
        assert summary.link_bytes_per_s is not None and summary.link_part is not None
        assert summary.link_part * summary.link_bytes_per_s == pytest.approx(summary.bytes_per_s)
        assert summary.link_bytes_per_s >= max(sample.bytes_per_s for sample in module.link if sample.ns)
    # Every weight, in the order of the program; prefixes and rests are whole weights.
    assert [weight.name for weight in data.weights] == [weight.name for weight in program.weights]
    warm = plan.method("decode").warm
    assert sum(weight.streamed_bytes for weight in data.weights) == warm.bytes_streamed > 0
    assert sum(weight.resident_bytes for weight in data.weights) == sum(piece.nbytes for piece in plan.fills)
    kinds = {weight.kind for weight in data.weights}
    assert "resident" in kinds and kinds & {"prefix+suffix", "streamed"}
    # An embedding is gathered from where it lies, and is neither filled nor copied.
    in_place = [weight.name for weight in data.weights if weight.kind == "in place"]
    assert in_place == list(plan.direct_weights) == ["embed.weight"]
    for weight in data.weights:
        if weight.kind == "resident":
            assert (weight.resident_bytes, weight.streamed_bytes) == (weight.nbytes, 0)
        if weight.kind == "prefix+suffix":
            assert 0 < weight.resident_bytes < weight.nbytes
            assert weight.resident_bytes + weight.streamed_bytes == weight.nbytes
    # The runs are the trace's.
    assert [run.method for run in data.runs] == ["prefill", "decode", "decode", "decode"]
    assert data.runs[-1].bytes_copied == warm.bytes_streamed and data.runs[-1].copies == warm.copies
    assert data.runs[-1].steps == len(program.method("decode").schedule.steps)
    assert json.loads(data.trace_json) == json.loads((tmp_path / "trace.json").read_text())


def test_the_curve_goes_from_the_floor_to_everything(decoder: Path, tmp_path: Path) -> None:
    with a_module(decoder, 0.3) as module:
        data = collected(module, tmp_path / "trace.json", curve_points=4)
        floor_bytes = module.floor_bytes
        for point in data.curve:
            # What the module streams once it has that budget.
            module.set_budget(point.budget_bytes)
            assert module.plan is not None
            assert point.streamed_bytes == module.plan.method("decode").warm.bytes_streamed
    budgets = [point.budget_bytes for point in data.curve]
    assert budgets[0] == floor_bytes and budgets == sorted(budgets) and len(set(budgets)) == 4
    assert data.curve[0].streamed_bytes > data.curve[-1].streamed_bytes == 0
    for point in data.curve:
        assert point.predicted_s >= point.bound_s * (1 - 1e-9) > 0


def test_without_copies_there_is_no_link_and_no_curve(decoder: Path, tmp_path: Path) -> None:
    with a_module(decoder, 1.0) as module:
        data = collected(module, tmp_path / "trace.json")
    assert (data.summary.bytes_streamed, data.summary.link_part, data.curve, data.stalls) == (0, None, (), ())
    assert {weight.kind for weight in data.weights} == {"resident"}
    # Nothing is faster than the same run: the bound is the run itself.
    assert data.summary.bound_s == data.summary.run_s == 0.25


class Mixed(nn.Module):
    """Products that can be split, and others that stream."""

    def __init__(self) -> None:
        super().__init__()
        self.high = nn.Sequential(*(nn.Linear(96, 96, bias=False) for _ in range(8)))
        self.low = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(2))).bfloat16()

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.high(x), self.low(y)


def test_split_weights_are_called_so(tmp_path: Path) -> None:
    args = (torch.randn(3, 96), torch.randn(3, 256).bfloat16())
    path = compiled(tmp_path, offloaded(Mixed(), args), split_linear=True).program_path
    found = []
    # At the floor the others stream; above it there are heads.
    for part in (0.0, 0.7):
        with a_module(path, part, placement="split") as module:
            module(*args)
            with module.trace(tmp_path / "trace.json"):
                module(*args)
            found.append(collect(module, tmp_path / "trace.json", [a_point(module)], method="forward"))
            assert module.plan is not None
            heads = {one.weight: one.prefix_bytes for one in module.plan.methods[0].placements if one.is_split}
            kinds = {weight.name: weight.kind for weight in found[-1].weights}
            assert {name for name, kind in kinds.items() if kind == "split"} == set(heads)
            for weight in found[-1].weights:
                if weight.kind == "split":
                    assert (weight.resident_bytes, weight.streamed_bytes) == (heads[weight.name], 0)
    floor, above = found
    assert {weight.kind for weight in floor.weights if weight.name.startswith("low")} == {"in place"}
    assert {weight.kind for weight in above.weights if weight.name.startswith("low")} == {"split"}
    # Copies were seen, but nobody has timed the reads in host memory.
    assert floor.summary.copies and floor.curve == ()
    write_report(tmp_path / "report.html", above)
    assert "a suffix read in host memory" in Parsed((tmp_path / "report.html").read_text()).all("main")[0].text


def test_under_lru_nothing_is_said_of_a_plan(decoder: Path, tmp_path: Path) -> None:
    with a_module(decoder, 0.5, placement="lru") as module:
        data = collected(module, tmp_path / "trace.json")
    assert (data.summary.resident_bytes, data.summary.ring_bytes, data.curve) == (None, None, ())
    assert {weight.kind for weight in data.weights} == {"on demand"}
    assert data.runs[-1].bytes_copied == data.summary.bytes_streamed > 0
    write_report(tmp_path / "report.html", data)
    assert "There is no prediction" in Parsed((tmp_path / "report.html").read_text()).all("main")[0].text


def test_what_does_not_belong_together_is_refused(decoder: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    with a_module(decoder, 0.5) as module:
        with module.trace(trace):
            play(module.run_method, SCRIPT[:1])
        with pytest.raises(PenstockError, match=r"trace\.json has no run of method 'decode'; it has prefill"):
            collect(module, trace, [a_point(module)], method="decode")
        elsewhere = a_point(module, budget_bytes=module.budget_bytes + 1)
        message = rf"in the module's budget of {module.budget_bytes} bytes, only {module.budget_bytes + 1}"
        with pytest.raises(PenstockError, match=message):
            collect(module, trace, [elsewhere], method="prefill")
        for content in ("[]", "no JSON", "{}"):
            (tmp_path / "other.json").write_text(content)
            with pytest.raises(PenstockError, match=r"other\.json is not a trace"):
                collect(module, tmp_path / "other.json", [a_point(module)], method="prefill")
