"""The simulator against the clock, and both against the bound: one program at several budgets, also calibrated.

    python -m bench.prediction PROGRAM.pt2 [--weights FILE.ptd] [--budgets 0.1,0.25,0.5,0.75,0.9] [--tokens N]
                               [--json OUT]

PROGRAM has one method with one input, as the programs that bench.suite compiles; FILE may be packed. Each budget is a
part of the weights as they are without packing, or the floor where that is more. "Simulated" is what the simulator
says of the calibrated plan, with the host's time per access as it was measured; "of link" is the rate over what large
pinned copies reach.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import penstock
from bench.suite.measure import WARM_UP_RUNS, measure_link, synchronize, time_back_to_back, time_host, time_synchronised
from penstock.errors import BelowFloorError
from penstock.plan.calibration import lower_bound_s
from penstock.plan.simulator import Boundary, decoded_per_s, simulate
from penstock.program import Method, Program, TensorSpec

CALIBRATING_RUNS = 5
KEPT_OUTPUTS = 3
EVERYTHING = "1024TiB"


@dataclass(frozen=True)
class Resident:
    """The program with every weight in place: the other side of the bound, and the outputs that must come out."""

    seconds: float
    output: Tensor


@dataclass(frozen=True)
class Prediction:
    budget_fraction: float
    budget_bytes: int
    floor_bytes: int
    weight_bytes: int
    # Per run, of the plan made without times, and of the one made for the times that were measured.
    bytes_streamed_before: int
    bytes_streamed: int
    copies: int
    before_s: float
    measured_s: float
    simulated_s: float
    # As a plan's makers see it: a host that takes no time.
    simulated_without_host_s: float
    measured_synchronised_s: float
    simulated_synchronised_s: float
    host_s_per_access: float
    bound_s: float
    link_bytes_per_s: float
    calibrated_link_bytes_per_s: float
    calibrated_copy_latency_s: float
    calibrated_steps_s: float
    equal: bool

    @property
    def bytes_per_s(self) -> float:
        return self.bytes_streamed / self.measured_s


def main() -> int:
    options = _parser().parse_args()
    program = penstock.read_program(options.program)
    method = _only_method(program)
    device = options.device
    x = torch.randn(_shape(method, options.tokens), generator=torch.Generator().manual_seed(0))
    x = x.to(getattr(torch, _input(method).dtype)).to(device)
    link = max(measure_link(device).values())
    with torch.no_grad():
        resident = _resident(options.program, x, device, options.round)
        print(
            f"{options.program.name} on {device}, {program.weight_bytes / 1e9:.3f} GB of weights, link "
            f"{link / 1e9:.1f} GB/s, all resident {resident.seconds * 1e3:.3f} ms\n"
        )
        print(_line(_COLUMNS), _line(["---"] * len(_COLUMNS)), sep="\n", flush=True)
        rows: list[Prediction] = []
        for fraction in options.budgets:
            if int(fraction * program.weight_bytes) <= max((row.floor_bytes for row in rows), default=-1):
                continue  # the row at the floor stands for it
            module = _load(options.program, options.weights, fraction, device)
            row = _predict(module, method, fraction, x, device, options.round, resident, link)
            rows.append(row)
            print(_line(_cells(row)), flush=True)
    if options.json is not None:
        stored = {
            "program": options.program.name,
            "weights": None if options.weights is None else options.weights.name,
            "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
            "torch": torch.__version__,
            "input": list(x.shape),
            "resident_s": resident.seconds,
            "rows": [dataclasses.asdict(row) | {"bytes_per_s": row.bytes_per_s} for row in rows],
        }
        options.json.write_text(json.dumps(stored, indent=1))
    return int(not all(row.equal for row in rows))


def _resident(path: Path, x: Tensor, device: str, round_s: float) -> Resident:
    with penstock.Module(path, budget=EVERYTHING, device=device) as module:
        output = _warm(module, x, device)[-1]
        return Resident(time_back_to_back(lambda: module(x), device, round_s).median_s, output)


def _predict(
    loaded: penstock.Module,
    method: Method,
    fraction: float,
    x: Tensor,
    device: str,
    round_s: float,
    resident: Resident,
    link: float,
) -> Prediction:
    with loaded as module:
        run: Callable[[], object] = lambda: module(x)  # noqa: E731
        kept = _warm(module, x, device)
        before_s = time_back_to_back(run, device, round_s).median_s
        bytes_before = module.last_run.bytes_streamed
        with module.calibrate():
            for _ in range(CALIBRATING_RUNS):
                module(x)
        kept += _warm(module, x, device)
        measured_s = time_back_to_back(run, device, round_s).median_s
        synchronised_s = time_synchronised(run, device, round_s).median_s
        host_s = time_host(run, device, round_s)[0].median_s / len(method.schedule.accesses)
        plan, calibration, last = module.plan, module.calibration, module.last_run
        assert plan is not None and calibration is not None

        def simulated_s(boundary: Boundary, host_s_per_access: float) -> float:
            return simulate(
                plan.method(method.name),
                method.schedule,
                step_s=calibration.step_s[method.name],
                link=calibration.link,
                slots=plan.slots,
                decoded_bytes_per_s=decoded_per_s(calibration),
                host_s_per_access=host_s_per_access,
                boundary=boundary,
            ).run_s

        return Prediction(
            budget_fraction=fraction,
            budget_bytes=module.budget_bytes,
            floor_bytes=module.floor_bytes,
            weight_bytes=module.weight_bytes,
            bytes_streamed_before=bytes_before,
            bytes_streamed=last.bytes_streamed,
            copies=last.copies,
            before_s=before_s,
            measured_s=measured_s,
            simulated_s=simulated_s("ahead", host_s),
            simulated_without_host_s=simulated_s("ahead", 0.0),
            measured_synchronised_s=synchronised_s,
            simulated_synchronised_s=simulated_s("synchronised", host_s),
            host_s_per_access=host_s,
            bound_s=lower_bound_s(
                weight_bytes=module.weight_bytes,
                budget_bytes=module.budget_bytes,
                resident_s=resident.seconds,
                link_bytes_per_s=link,
            ),
            link_bytes_per_s=link,
            calibrated_link_bytes_per_s=calibration.link.bytes_per_s,
            calibrated_copy_latency_s=calibration.link.copy_latency_s,
            calibrated_steps_s=calibration.resident_s(method.name),
            equal=all(torch.equal(output, resident.output) for output in kept),
        )


def _load(path: Path, weights: Path | None, fraction: float, device: str) -> penstock.Module:
    budget_bytes = int(fraction * penstock.read_program(path).weight_bytes)
    try:
        return penstock.Module(path, weights=weights, budget=budget_bytes, device=device)
    except BelowFloorError as error:
        return penstock.Module(path, weights=weights, budget=error.floor_bytes, device=device)


def _warm(module: penstock.Module, x: Tensor, device: str) -> list[Tensor]:
    for _ in range(WARM_UP_RUNS):
        module(x)
    # Of runs that follow each other without a wait: a copy that comes too late shows only there.
    kept = [module(x) for _ in range(KEPT_OUTPUTS)]
    synchronize(device)
    return kept


_COLUMNS = (
    "budget",
    "streamed before",
    "streamed",
    "before",
    "calibrated",
    "simulated",
    "ratio",
    "synchronised",
    "simulated",
    "ratio",
    "bound",
    "over bound",
    "rate",
    "of link",
    "equal",
)


def _cells(row: Prediction) -> list[str]:
    floor = ", the floor" if row.budget_bytes == row.floor_bytes else ""
    return [
        f"{row.budget_bytes / row.weight_bytes:.1%}{floor}",
        f"{row.bytes_streamed_before / 1e9:.4f} GB",
        f"{row.bytes_streamed / 1e9:.4f} GB, {row.copies} copies",
        _ms(row.before_s),
        _ms(row.measured_s),
        _ms(row.simulated_s),
        f"{row.simulated_s / row.measured_s:.3f}",
        _ms(row.measured_synchronised_s),
        _ms(row.simulated_synchronised_s),
        f"{row.simulated_synchronised_s / row.measured_synchronised_s:.3f}",
        _ms(row.bound_s),
        f"{row.measured_s / row.bound_s:.3f}",
        f"{row.bytes_per_s / 1e9:.1f} GB/s",
        f"{row.bytes_per_s / row.link_bytes_per_s:.1%}",
        "yes" if row.equal else "**NO**",
    ]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"


def _only_method(program: Program) -> Method:
    if len(program.methods) != 1:
        names = ", ".join(method.name for method in program.methods)
        raise SystemExit(f"the program has the methods {names}; it must have one")
    return program.methods[0]


def _input(method: Method) -> TensorSpec:
    inputs = method.signature.inputs
    if len(inputs) != 1 or not isinstance(inputs[0], TensorSpec):
        raise SystemExit(f"method {method.name!r} takes {len(inputs)} inputs; it must take one tensor")
    return inputs[0]


def _shape(method: Method, tokens: int | None) -> list[int]:
    shape = _input(method).shape
    symbols = sorted({size for size in shape if isinstance(size, str)})
    if bool(symbols) != (tokens is not None) or len(symbols) > 1:
        raise SystemExit(
            f"method {method.name!r} takes a tensor of {list(shape)}: --tokens is for one dynamic dimension, "
            f"and it has {len(symbols)}"
        )
    return [tokens if isinstance(size, str) and tokens is not None else int(size) for size in shape]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.prediction", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("program", type=Path, metavar="PROGRAM.pt2")
    parser.add_argument("--weights", type=Path, metavar="FILE.ptd", help="by default the one beside the program")
    parser.add_argument("--budgets", type=_budgets, default=[0.1, 0.25, 0.5, 0.75, 0.9], help="parts of the weights")
    parser.add_argument("--tokens", type=int, help="the size of a dimension that is not fixed")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--round", type=float, default=0.3, metavar="S", help="seconds of one round of runs, about")
    parser.add_argument("--json", type=Path)
    return parser


def _budgets(text: str) -> list[float]:
    values = sorted(float(part) for part in text.split(","))
    if not all(0 <= value < 1 for value in values):
        raise argparse.ArgumentTypeError(f"{text} must be parts of the weights below 1, such as 0.1,0.5")
    return values


if __name__ == "__main__":
    sys.exit(main())
