"""`penstock plan`: what a budget buys, even on a GPU that is not in this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.cli.output import console, emit, json_option, line
from penstock.cli.renamed import PlacementChoice, renamed_option
from penstock.cli.units import FiniteRange, budget_option, bytes_option, rate_option, short_rate
from penstock.placement_names import PLANNED
from penstock.printable import printable

if TYPE_CHECKING:
    from penstock.cli.empty_gpu import GpuRow
    from penstock.cli.plan_report import PlanReport, StepTimes
    from penstock.cli.subject import Subject
    from penstock.plan.calibration import Link
    from penstock.program import Program

_LINK_SHARE_ONLY = (
    "no step times were given: predicted times are the link's share only, as if computing took no time; give "
    "--step-times or --compute-bandwidth"
)
_AT_LINK_RATE = "kernels are taken to read host memory as fast as the link copies, which is the most they can"
_POINTS = 21
_NO_LINK = "no link was given, so no time is predicted; give --link (penstock doctor measures it), as in --link 25GB/s"


@click.command(short_help="Show what a budget buys, on any GPU.")
@click.argument("program", type=click.Path(path_type=Path))
@budget_option(help="Device memory for weights: 8GiB. Default: the baked one.")
@bytes_option(
    "--gpu-memory",
    help="Plan for a GPU of this size, here or not. The budget is what it has left for weights.",
)
@rate_option("--link", "link_rate", help="Rate of the host link: 25GB/s.")
@click.option(
    "--copy-latency-us",
    # At most about a quarter of an hour, so that no sum of times is infinite.
    type=FiniteRange(min=0, max=1e9),
    help="What each copy costs in addition to its bytes. Default: 0.",
)
@click.option(
    "--step-times", type=click.Path(path_type=Path), help="Measured times: what run --write-step-times wrote."
)
@rate_option(
    "--compute-bandwidth",
    help="Rate of device memory: 3.3TB/s. A step is taken to last as long as reading its weights.",
)
@click.option(
    "--placement",
    type=PlacementChoice(PLANNED),
    default="auto",
    show_default=True,
    help="As penstock.Module's placement. auto reads a weight in place, in host memory, if only some of its rows are "
    "read. in-place reads there all that the budget does not hold, split the weights of linears alone; for that the "
    "program must be exported with --split-linear.",
)
@renamed_option("--mode")
@click.option("--method", help="This method alone. Default: one run of each.")
@click.option("--weights", type=click.Path(path_type=Path), help="Default: the .ptd beside PROGRAM, if it is there.")
@click.option("--curve", type=click.Path(path_type=Path), help="Time and throughput against budget: .png or .html.")
@click.option("--points", type=click.IntRange(min=2, max=500), help="Budgets on the curve. Default: 21.")
@json_option
def plan(
    program: Path,
    budget: int | None,
    gpu_memory: int | None,
    link_rate: float | None,
    copy_latency_us: float | None,
    step_times: Path | None,
    compute_bandwidth: float | None,
    placement: str,
    method: str | None,
    weights: Path | None,
    curve: Path | None,
    points: int | None,
    as_json: bool,
) -> None:
    """Show where the weights of PROGRAM (.pt2 or .pte) lie within a budget, what streams, and how long a run takes.

    Nothing is loaded or run, and no GPU is needed. Without step times the predicted time is the link's share only.

    \b
    penstock plan model.pt2 --budget 8GiB --link 25GB/s
    penstock plan model.pt2 --gpu-memory 24GiB --link 25GB/s --compute-bandwidth 1TB/s
    penstock plan model.pt2 --budget 8GiB --step-times times.json --curve curve.html
    """
    from penstock.cli.curve_picture import SUFFIXES, check_curve_path, write_curve
    from penstock.cli.plan_report import PlanReport, Predictor
    from penstock.cli.plan_view import show_plan
    from penstock.cli.subject import read_subject
    from penstock.plan.pages import CUDA_PAGE_BYTES
    from penstock.report.places import places

    if program.suffix not in (".pt2", ".pte"):
        raise click.BadParameter(f"{program} must end in .pt2 or .pte", param_hint="PROGRAM")
    if step_times is not None and compute_bandwidth is not None:
        raise click.UsageError("--step-times and --compute-bandwidth say the same thing twice; give one")
    if curve is not None and curve.suffix not in SUFFIXES:
        raise click.BadParameter(f"{curve} must end in {' or '.join(SUFFIXES)}", param_hint="--curve")
    if points is not None and curve is None:
        raise click.UsageError("--points belongs to --curve, which is not given")
    subject = read_subject(program, weights)
    read = subject.program
    names = [row.name for row in read.methods]
    if method is not None and method not in names:
        raise click.BadParameter(f"there is no method {method!r}, only {', '.join(names)}", param_hint="--method")
    if placement == "split" and not any(one.linear for row in read.methods for one in row.schedule.accesses):
        raise click.BadParameter(
            f"{program} has no weight that can be split; it needs to be exported with --split-linear",
            param_hint="--placement",
        )
    if placement in ("in-place", "split") and subject.begins:
        raise click.BadParameter(
            f"{placement} does not go with packed weights ({subject.weights_file}): kernels read weights as they are",
            param_hint="--placement",
        )
    chosen = names if method is None else [method]
    link, times, source = _times(subject, link_rate, copy_latency_us, step_times, compute_bandwidth)
    if curve is not None:
        if link is None:
            raise click.UsageError("--curve shows times, which need a link: give --link, as in --link 25GB/s")
        check_curve_path(curve)
    predictor = Predictor(
        subject,
        page_bytes=subject.page_bytes if gpu_memory is None else CUDA_PAGE_BYTES,
        placement=placement,
        link=link,
        step_s=times,
        step_times=source,
        methods=chosen,
    )
    floor_bytes = predictor.planner.floor_bytes
    # A module takes no more than all weights need, and says so.
    needed_bytes = floor_bytes if budget is None else min(budget, predictor.top_bytes)
    gpu = None if gpu_memory is None else _gpu(read, gpu_memory, needed_bytes, is_given=budget is not None)
    left_bytes = None if gpu is None else gpu.left_bytes
    budget_bytes, budget_source = _budget(budget, read.budget_bytes, left_bytes, curve is not None, floor_bytes)
    asked_bytes, budget_bytes = budget_bytes, min(budget_bytes, predictor.top_bytes)
    made = predictor.plan(budget_bytes)
    report = PlanReport(
        path=program,
        device=read.device,
        placement=placement,
        page_bytes=made.page_bytes,
        weight_bytes=read.weight_bytes,
        floor_bytes=floor_bytes,
        full_bytes=predictor.planner.full_bytes,
        budget_bytes=budget_bytes,
        asked_bytes=asked_bytes,
        budget_source=budget_source,
        device_bytes=made.device_bytes,
        resident_bytes=made.resident_bytes,
        ring_bytes=made.ring_bytes,
        link_bytes_per_s=None if link is None else link.bytes_per_s,
        copy_latency_s=0.0 if link is None else link.copy_latency_s,
        step_times=source,
        gpu=gpu,
        methods=predictor.predictions(made, budget_bytes),
        placements=places(made, read.weights, chosen),
        curve=() if curve is None else predictor.curve(points or _POINTS),
        weights_file=subject.weights_file,
        notes=(
            *_packed_notes(subject, link),
            *_notes(read, link, source, [name for name in names if name not in times], gpu),
            *([_AT_LINK_RATE] if placement in ("in-place", "split") and link is not None else []),
        ),
    )
    if curve is not None:
        write_curve(curve, report.curve, _title(report, method))
        line(console(stderr=True), f"wrote {printable(str(curve))}")
    emit(report, as_json, show_plan)


def _times(
    subject: Subject,
    link_rate: float | None,
    copy_latency_us: float | None,
    step_times: Path | None,
    compute_bandwidth: float | None,
) -> tuple[Link | None, Mapping[str, Sequence[float]], StepTimes]:
    """For the link, the command line takes precedence over what was measured."""
    from penstock.cli.plan_report import estimated_step_s
    from penstock.cli.step_times_file import read_step_times
    from penstock.plan.calibration import Link

    if copy_latency_us is not None and link_rate is None:
        raise click.UsageError("--copy-latency-us belongs to --link, which is not given")
    link = None if link_rate is None else Link(link_rate, (copy_latency_us or 0.0) * 1e-6)
    if step_times is not None:
        from penstock.errors import PenstockError

        measured = read_step_times(step_times)
        methods = subject.program.methods
        for method in methods:
            found = len(measured.step_s.get(method.name, ()))
            if method.name in measured.step_s and found != len(method.schedule.steps):
                raise PenstockError(
                    f"{step_times} has {found} steps for method {method.name!r}, the program has "
                    f"{len(method.schedule.steps)}: it was measured on another program"
                )
        if not measured.step_s.keys() & {method.name for method in methods}:
            raise PenstockError(f"{step_times} has times of {', '.join(measured.step_s)}, no method of this program")
        return link or measured.link, measured.step_s, "measured"
    if compute_bandwidth is not None:
        return link, estimated_step_s(subject, compute_bandwidth), "estimated"
    return link, {}, "unknown"


def _gpu(program: Program, memory_bytes: int, needed_bytes: int, *, is_given: bool) -> GpuRow:
    from penstock.cli.empty_gpu import empty_gpu
    from penstock.runtime.automatic_budget import activation_bound_bytes

    bounded = all(method.activation_bound_bytes is not None for method in program.methods)
    if is_given and not bounded:
        activation_bytes = max(method.activation_example_bytes for method in program.methods)
    else:
        activation_bytes = activation_bound_bytes(program)
    row, refusal = empty_gpu(
        memory_bytes,
        activation_bytes=activation_bytes,
        state_bytes=program.state_bytes - program.host_state_bytes,
        needed_bytes=needed_bytes,
    )
    if refusal is not None and not is_given:
        raise refusal
    return row


def _budget(
    given: int | None, baked: int | None, left_bytes: int | None, with_curve: bool, floor_bytes: int
) -> tuple[int, str]:
    if given is not None:
        return given, "given"
    if left_bytes is not None:
        return left_bytes, "gpu memory"
    if baked is not None:
        return baked, "baked"
    if with_curve:
        return floor_bytes, "floor"
    raise click.UsageError("no budget is baked into the program: give --budget or --gpu-memory")


def _notes(
    program: Program, link: Link | None, source: StepTimes, untimed: Sequence[str], gpu: GpuRow | None
) -> list[str]:
    notes: list[str] = []
    if link is None:
        notes.append(_NO_LINK)
    elif source == "unknown":
        notes.append(_LINK_SHARE_ONLY)
    elif source == "estimated":
        notes.append(
            "step times are estimated: as long as reading each step's weights from device memory takes. That is about "
            "right for one token at a time, and too little where a run computes more"
        )
    elif untimed:
        notes.append(f"no step times of {', '.join(untimed)}: there, times are the link's share only")
    if gpu is not None:
        notes.append("the GPU is taken to be empty: what the CUDA context and others hold there is not counted")
        if any(method.activation_bound_bytes is None for method in program.methods):
            notes.append(
                "activations have no bound: they are counted for the inputs that the program was exported with"
            )
        if program.device != "cuda":
            notes.append(f"the program is compiled for {program.device}; compiled for CUDA its steps may be others")
    return notes


def _packed_notes(subject: Subject, link: Link | None) -> list[str]:
    from penstock.plan.tuning import NOMINAL_DECODED_BYTES_PER_S

    if not subject.begins:
        return []
    rate = short_rate(NOMINAL_DECODED_BYTES_PER_S)
    told = f"{len(subject.begins)} weights are packed: what is streamed of them are their packed bytes"
    return [told if link is None else f"{told}, and they are taken to be decoded at {rate}"]


def _title(report: PlanReport, method: str | None) -> str:
    rate = short_rate(report.link_bytes_per_s or 0.0)
    what = "one run of each method" if method is None else method
    only = " (link only)" if report.step_times == "unknown" else ""
    return printable(f"{report.path.name}: {what}, link {rate}{only}")
