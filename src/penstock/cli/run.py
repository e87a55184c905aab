"""`penstock run`: runs a program inside a budget, and shows the link's speed beside the program's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.output import emit, facts, json_option, only_json_on_stdout
from penstock.cli.renamed import PlacementChoice, renamed_option
from penstock.cli.units import bytes_option, registered_or_bytes, short_bytes, short_rate, short_time
from penstock.cli.whole_file import refuse_unwritable, whole_file, write_whole
from penstock.errors import InputError, PackageError, RuntimeFailure, WeightsFileError
from penstock.placement_names import PLACEMENTS
from penstock.regular_file import open_regular

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from penstock.cli.call_arguments import Arguments
    from penstock.program import Signature


@dataclass(frozen=True)
class RunReport:
    path: Path
    method: str
    device: str
    floor_bytes: int
    budget_bytes: int
    # Peak device memory for weights since load.
    peak_bytes: int
    weight_bytes: int
    runs: int
    load_s: float
    # The first run finds only the resident weights in place; the others run back to back. None: there was only one.
    first_run_s: float
    run_s: float | None
    # Of the last run.
    bytes_streamed: int
    copies: int
    bytes_hit: int
    # How long the device waited for copies.
    stall_s: float | None
    streamed_bytes_per_s: float
    # Measured when the program was loaded; None if nothing is ever copied.
    link_bytes_per_s: float | None
    link_part: float | None
    summary: str
    trace: Path | None
    outputs: Path | None
    step_times: Path | None


@click.command(short_help="Run a program inside a budget.")
@click.argument("program", type=click.Path(path_type=Path))
@click.option("--budget", help="Device memory for weights: 8GiB, or auto. Default: the baked one, else auto.")
@bytes_option("--device-memory", help="Instead of --budget: one total for weights, state and activations.")
@click.option("--inputs", type=click.Path(path_type=Path), required=True, help=".pt, .npz or .safetensors.")
@click.option("--method", help="Default: forward, or the only one.")
@click.option(
    "--placement",
    type=PlacementChoice(PLACEMENTS),
    default="auto",
    show_default=True,
    help="How the program gets weights that do not fit: as penstock.Module's placement.",
)
@click.option(
    "--host-memory",
    default="registered",
    show_default=True,
    callback=registered_or_bytes,
    help="registered: keep all weights in main memory; or a size like 1GiB: read them through buffers of at most that.",
)
@renamed_option("--mode")
@renamed_option("--linear")
@click.option("--repeat", type=click.IntRange(1, 10**9), default=1, show_default=True, help="Runs, back to back.")
@click.option("--weights", type=click.Path(path_type=Path), help="Default: the .ptd beside PROGRAM.")
@click.option("--trace", type=click.Path(path_type=Path), help="Write a trace of all runs for Perfetto.")
@click.option(
    "--write-step-times", type=click.Path(path_type=Path), help="Write measured times, for plan --step-times."
)
@click.option("--out", type=click.Path(path_type=Path), help="Write the last run's outputs: .pt, .npz, .safetensors.")
@json_option
def run(
    program: Path,
    budget: str | None,
    device_memory: int | None,
    inputs: Path,
    method: str | None,
    placement: str,
    host_memory: str | int,
    repeat: int,
    weights: Path | None,
    trace: Path | None,
    write_step_times: Path | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Run PROGRAM (.pt2 or .pte) inside a budget, and say what it took.

    Loading runs native code from the file: load only what you trust. State (a KV cache) carries on from run to run.

    \b
    penstock run model.pt2 --budget 8GiB --inputs inputs.pt
    penstock run model.pt2 --budget 8GiB --inputs in.npz --method decode --repeat 100 --trace trace.json
    penstock run model.pt2 --inputs in.safetensors --out out.safetensors --json
    """
    from penstock.cli.tensors_file import SUFFIXES

    for name, path in (("--inputs", inputs), ("--out", out)):
        if path is not None and path.suffix not in SUFFIXES:
            raise click.BadParameter(f"{path} must end in {', '.join(SUFFIXES)}", param_hint=name)
    if program.suffix not in (".pt2", ".pte"):
        raise click.BadParameter(f"{program} must end in .pt2 or .pte", param_hint="PROGRAM")
    options: dict[str, Any] = {"placement": placement, "host_memory": host_memory}
    if budget is not None and device_memory is not None:
        raise click.UsageError("--budget and --device-memory both limit device memory; give one")
    if device_memory is not None:
        options["device_memory"] = device_memory
    if trace is not None and write_step_times is not None:
        raise click.UsageError("--trace and --write-step-times record the same runs in different ways; give one")
    refuse_unwritable(trace, write_step_times, out)
    with only_json_on_stdout(as_json):
        report = _run(
            program, budget, inputs, method, options, repeat, weights, trace, write_step_times, out, not as_json
        )
    emit(report, as_json, _show)


def _run(
    path: Path,
    budget: str | None,
    inputs: Path,
    method: str | None,
    options: dict[str, Any],
    repeat: int,
    weights: Path | None,
    trace: Path | None,
    write_step_times: Path | None,
    out: Path | None,
    live: bool,
) -> RunReport:
    import torch

    from penstock.cli.call_arguments import named_leaves
    from penstock.cli.rate_line import rate_line, time_runs
    from penstock.cli.step_times_file import step_times_text
    from penstock.cli.tensors_file import dump_tensors, load_tensors

    held = load_tensors(inputs)
    began_s = time.perf_counter()
    with _loaded(path, budget, weights, options) as module:
        load_s = time.perf_counter() - began_s
        if method is not None and method not in module.methods:
            known = ", ".join(module.methods)
            raise click.BadParameter(f"there is no method {method!r}, only {known}", param_hint="--method")
        name = method or _only_method(module.methods)
        signature = _signature(module, name)
        arguments = _arguments(held, signature, inputs, _tensor_device(module))
        with torch.no_grad(), _recording(module, trace, write_step_times), rate_line(module, live) as tick:
            try:
                first_run_s, run_s, result = time_runs(module, name, arguments, repeat, tick)
            except RuntimeError as error:  # what compiled code raises
                raise RuntimeFailure(f"{path}: {name} failed: {error}") from error
            stats = module.last_run
        if write_step_times is not None and module.calibration is not None:
            write_whole(write_step_times, step_times_text(module.calibration).encode())
        if out is not None:
            write_whole(out, dump_tensors(out, result, named_leaves(result, signature)))
        link = module.link_bytes_per_s
        once_s = run_s or first_run_s
        rate = stats.bytes_streamed / once_s if once_s else 0.0
        return RunReport(
            path=path,
            method=name,
            device=str(module.device),
            floor_bytes=module.floor_bytes,
            budget_bytes=module.budget_bytes,
            peak_bytes=module.device_memory()[1],
            weight_bytes=module.weight_bytes,
            runs=repeat,
            load_s=load_s,
            first_run_s=first_run_s,
            run_s=run_s,
            bytes_streamed=stats.bytes_streamed,
            copies=stats.copies,
            bytes_hit=stats.bytes_hit,
            stall_s=None if stats.stall_ns is None else stats.stall_ns * 1e-9,
            streamed_bytes_per_s=rate,
            link_bytes_per_s=link,
            link_part=rate / link if link else None,
            summary=module.summary,
            trace=trace,
            outputs=out,
            step_times=write_step_times,
        )


def _loaded(path: Path, budget: str | None, weights: Path | None, options: dict[str, Any]) -> Any:
    import penstock
    from penstock.cli.subject import recorded_in

    open_regular(path, PackageError).close()
    if weights is not None:
        open_regular(weights, WeightsFileError).close()
    with recorded_in(path):
        return penstock.Module(path, budget, weights=weights, **options)


def _arguments(held: Any, signature: Signature | None, inputs: Path, device: torch.device) -> Arguments:
    from penstock.cli.call_arguments import call_arguments, copied

    given = call_arguments(held, signature, str(inputs))
    try:
        return copied(given, device)
    except (RuntimeError, TypeError) as error:  # a sparse tensor, for one, or one without memory
        raise InputError(f"{inputs} holds a tensor that no program takes: {error}") from error


def _only_method(methods: tuple[str, ...]) -> str:
    if "forward" in methods or len(methods) == 1:
        return "forward" if "forward" in methods else methods[0]
    raise click.UsageError(f"the program has no method 'forward': give --method, one of {', '.join(methods)}")


def _signature(module: Any, method: str) -> Signature | None:
    """The signature of a .pt2. The caller's signature of a .pte is known only inside its module."""
    if module.path.suffix == ".pte":
        return None
    signature: Signature = module.program.method(method).signature
    return signature


def _tensor_device(module: Any) -> torch.device:
    """Where inputs must be. ExecuTorch takes and gives tensors in main memory."""
    import torch

    device: torch.device = torch.device("cpu") if module.path.suffix == ".pte" else module.device
    return device


@contextmanager
def _recording(module: Any, trace: Path | None, step_times: Path | None) -> Iterator[None]:
    if trace is not None:
        with whole_file(trace) as partial:
            try:
                with module.trace(partial):
                    yield
            except BaseException:
                # A trace that was never entered is written when its module closes: now, so that its file is removed.
                module.close()
                raise
    elif step_times is not None:
        with module.calibrate():
            yield
    else:
        yield


def _show(to: Console, report: RunReport) -> None:
    part = "" if report.link_part is None else f", {report.link_part:.0%} of the link's"
    link = "" if report.link_bytes_per_s is None else f" {short_rate(report.link_bytes_per_s)}"
    later = [] if report.run_s is None else [("each run after", short_time(report.run_s))]
    written = [("trace", report.trace), ("outputs", report.outputs), ("step times", report.step_times)]
    facts(
        to,
        f"{report.path}, {report.method} on {report.device}",
        [
            ("budget", f"{report.budget_bytes} bytes ({short_bytes(report.budget_bytes)})"),
            ("peak", f"{report.peak_bytes} bytes ({short_bytes(report.peak_bytes)}) of device memory for weights"),
            ("floor", f"{report.floor_bytes} bytes"),
            ("streamed", f"{report.bytes_streamed} bytes in {report.copies} copies per run"),
            ("rate", f"{short_rate(report.streamed_bytes_per_s)}{part}{link}"),
            ("loaded in", short_time(report.load_s)),
            ("first run", short_time(report.first_run_s)),
            *later,
            *(
                []
                if report.stall_s is None
                else [("waited for copies", f"{short_time(report.stall_s)} of the last run")]
            ),
            *((name, path) for name, path in written if path is not None),
        ],
    )
