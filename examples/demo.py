"""The demo: exports a small decoder with a KV cache and two methods, proves what was written, and runs it in budgets.

    make demo

Everything runs on the CPU where there is no GPU. The export is reused as long as nothing that made it has changed.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import os
import platform
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

import penstock
import penstock.errors
from examples import decoder
from examples.decoder import DecoderConfig, export, methods
from penstock.budget import format_bytes
from penstock.program import Program
from penstock.report.collect import collect
from penstock.report.data import MeasuredPoint
from penstock.report.page import write_report
from penstock.verify.module import PoisonedModule
from penstock.weights import read_index, verify_checksums

# About 200 MB. In float32, because not every CPU multiplies bfloat16 well; with few words, so that one matrix of all
# of them does not set a floor above a quarter of the weights.
CONFIG = DecoderConfig(hidden=1024, ff=2560, layers=4, heads=16, kv_heads=4, vocab=4096, max_len=256)
PROMPT_TOKENS = 16
NEW_TOKENS = 12
# Of all weights; 0 stands for the floor.
BUDGET_PARTS = (0.0, 0.25, 0.5, 1.0)
REPORTED_PART = 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="where to write the model and the report")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    # Raised inside torch while it copies a program; nothing a reader of the demo could do about.
    warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)

    started = time.perf_counter()
    path = arguments.out / "model.pt2"
    key = export_key(CONFIG, arguments.device)
    if is_current(path, key):
        say(f"{path} was made by these sources and versions: it is used again")
    else:
        make(path, arguments.device)
        remember(path, key)
    show(path)
    prove(path, arguments.device)
    points = run(path, arguments.device)
    refuse(path)
    report(path, points, arguments.device, arguments.out / "report.html")
    say(f"\nall of it in {time.perf_counter() - started:.0f} s")


def say(line: str) -> None:
    print(line, flush=True)


# ---- the export, and whether there is one already


def export_key(config: DecoderConfig, device: str) -> str:
    """Of everything that decides what is exported: the model, the sources, the versions and the machine."""
    digest = hashlib.sha256()
    package = Path(penstock.__file__).parent
    for source in (Path(__file__), Path(decoder.__file__), *sorted(package.rglob("*.py"))):
        digest.update(source.read_bytes() + b"\0")
    cpu = (platform.machine(), platform.processor(), torch.backends.cpu.get_cpu_capability())
    gpu = torch.cuda.get_device_name(device) if device.startswith("cuda") else None
    versions = (platform.python_version(), torch.__version__, os.environ.get("CXX"))
    digest.update(repr((config, device, versions, cpu, gpu)).encode())
    return digest.hexdigest()


def is_current(path: Path, key: str) -> bool:
    """Whether the program was made under this key and is what was written then. Its weights are checked by `show`."""
    if not all(each.exists() for each in (_note(path), path, path.with_suffix(".ptd"))):
        return False
    return bool(json.loads(_note(path).read_text()) == {"key": key, "program": _sha256(path)})


def remember(path: Path, key: str) -> None:
    _note(path).write_text(json.dumps({"key": key, "program": _sha256(path)}))


def _note(path: Path) -> Path:
    return path.with_name("export.json")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def make(path: Path, device: str) -> None:
    started = time.perf_counter()
    cases = methods(CONFIG)
    programs = {name: penstock.apply_weight_offload(export(case)) for name, case in cases.items()}
    say(f"exported {', '.join(programs)} in {time.perf_counter() - started:.0f} s; compiling for {device}")
    started = time.perf_counter()
    penstock.compile(programs, path, device=device, overwrite=True)
    say(f"compiled and written in {time.perf_counter() - started:.0f} s")


def show(path: Path) -> None:
    program = penstock.read_program(path)
    index = read_index(path.with_suffix(".ptd"))
    verify_checksums(index)
    say("")
    say(f"{path}   {format_bytes(path.stat().st_size)}, code only")
    say(f"{path.with_suffix('.ptd')}   {format_bytes(index.file_bytes)}, checksums right")
    say("")
    say(f"{'method':10} {'steps':>6} {'accesses':>9} {'weights':>12} {'activations':>12}")
    weights = {weight.name: weight.nbytes for weight in program.weights}
    for method in program.methods:
        read = _mib(sum(weights[name] for name in method.schedule.weight_names))
        activations = _mib(method.activation_bound_bytes)
        steps, accesses = len(method.schedule.steps), len(method.schedule.accesses)
        say(f"{method.name:10} {steps:6} {accesses:9} {read:>12} {activations:>12}")
    say("")
    say(f"weights {format_bytes(program.weight_bytes)}, state (KV cache) {format_bytes(program.state_bytes)}")


def _mib(count: int | None) -> str:
    return "unbounded" if count is None else f"{count / 2**20:.1f} MiB"


# ---- running it


def generate(run: Callable[..., Any], device: str, *, vocab: int, count: int = NEW_TOKENS) -> Iterator[torch.Tensor]:
    """The logits of one prefill and of the decoding steps after it. Each has been computed when it is handed out."""
    tokens = torch.arange(1, PROMPT_TOKENS + 1, device=device)[None] * 13 % vocab
    positions = torch.arange(PROMPT_TOKENS, device=device)
    for _ in range(count):
        logits = run("prefill" if tokens.shape[1] > 1 else "decode", tokens, positions)
        token = int(logits.argmax())
        yield logits
        tokens, positions = torch.tensor([[token]], device=device), positions[-1:] + 1


def prove(path: Path, device: str) -> None:
    """Run both methods with every weight lent for its recorded lifetime only, and poisoned right after it."""
    module = PoisonedModule(path)
    model = copy.deepcopy(methods(CONFIG)["prefill"].module).to(device)

    def eager(_: str, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(tokens, positions)

    count, worst = 4, 0.0
    under_poison = generate(module.run_method, device, vocab=CONFIG.vocab, count=count)
    for found, wanted in zip(under_poison, generate(eager, device, vocab=CONFIG.vocab, count=count), strict=True):
        worst = max(worst, (found.float() - wanted.float()).norm().item() / wanted.float().norm().item())
    lent_bytes = max(session.peak_bytes for session in module.sessions.values())
    say("")
    say(f"run under poison: 1 prefill, {count - 1} decodes, each weight overwritten once its last reader was done")
    say(f"relative difference to eager PyTorch: at most {worst:.1e} (rounding)")
    say(f"weights lent at once: at most {_mib(lent_bytes)} of {_mib(module.program.weight_bytes)}")
    if not worst < 1e-3:
        raise SystemExit("the exported program computes something else than the model")


def run(path: Path, device: str) -> list[MeasuredPoint]:
    """The same tokens in budgets from the floor to everything."""
    program = penstock.read_program(path)
    with penstock.Module(path, budget=program.weight_bytes * 2) as module:
        floor_bytes, full_bytes = module.floor_bytes, module.budget_bytes
        wanted = [row.clone() for row in generate(module.run_method, device, vocab=_vocab(program))]
    say("")
    say(f"{'budget':>10} {'of weights':>10} {'peak':>10} {'streamed':>10} {'per token':>10}  identical")
    points: list[MeasuredPoint] = []
    for part in BUDGET_PARTS:
        budget_bytes = max(floor_bytes, int(full_bytes * part))
        with penstock.Module(path, budget=budget_bytes) as module:
            for _ in generate(module.run_method, device, vocab=_vocab(program)):
                pass
            module.reset_state()
            point = measure(module, wanted, device)
        points.append(point)
        name = "floor" if part == 0 else f"{part:.0%}"
        say(
            f"{_mib(budget_bytes):>10} {name:>10} {_mib(point.peak_bytes):>10} {_mib(point.bytes_streamed):>10} "
            f"{point.run_s * 1e3:>7.1f} ms  {'yes' if point.identical else 'NO'}"
        )
        if not point.identical or point.peak_bytes > budget_bytes:
            raise SystemExit(f"in {budget_bytes} bytes: identical {point.identical}, peak {point.peak_bytes} bytes")
    say(f"tokens {[int(row.argmax()) for row in wanted]} (of random weights: they mean nothing)")
    return points


def _vocab(program: Program) -> int:
    return next(weight.shape[0] for weight in program.weights if weight.name == "embed.weight")


def measure(module: penstock.Module, wanted: Sequence[torch.Tensor], device: str) -> MeasuredPoint:
    """Streamed bytes, time and stall are those of a decoding step that follows another one."""
    rows: list[torch.Tensor] = []
    seconds: list[float] = []
    stalls_ns: list[int] = []
    started = time.perf_counter()
    for row in generate(module.run_method, device, vocab=_vocab(module.program), count=len(wanted)):
        seconds.append(time.perf_counter() - started)
        stall_ns = module.last_run.stall_ns
        assert stall_ns is not None, "only replays of a graph are not timed, and there is none"
        stalls_ns.append(stall_ns)
        rows.append(row.clone())
        started = time.perf_counter()
    last, warm = module.last_run, slice(2, None)
    return MeasuredPoint(
        budget_bytes=module.budget_bytes,
        run_s=median(seconds[warm]),
        bytes_streamed=last.bytes_streamed,
        copies=last.copies,
        peak_bytes=module.device_memory()[1],
        stall_ns=int(median(stalls_ns[warm])),
        identical=all(torch.equal(a, b) for a, b in zip(rows, wanted, strict=True)),
    )


def refuse(path: Path) -> None:
    with penstock.Module(path, budget="1TiB") as module:
        floor_bytes = module.floor_bytes
    try:
        penstock.Module(path, budget=floor_bytes - 1)
    except penstock.errors.BelowFloorError as refusal:
        say(f"\none byte below the floor: {refusal}")
    else:
        raise SystemExit(f"a budget of {floor_bytes - 1} bytes was accepted; the floor is {floor_bytes}")


def report(path: Path, points: Sequence[MeasuredPoint], device: str, target: Path) -> None:
    """Of runs in half of the weights' bytes, beside what was measured in all budgets."""
    trace = target.with_name("trace.json")
    budget_bytes = points[BUDGET_PARTS.index(REPORTED_PART)].budget_bytes
    with penstock.Module(path, budget=budget_bytes) as module:
        vocab = _vocab(module.program)
        for _ in generate(module.run_method, device, vocab=vocab):
            pass
        module.reset_state()
        with module.trace(trace):
            for _ in generate(module.run_method, device, vocab=vocab, count=6):
                pass
        data = collect(module, trace, points, method="decode", title=f"{_mib(module.weight_bytes)} of weights in half")
    write_report(target, data)
    say(f"\n{target}: timeline, residency, budget curve and stalls; open it in a browser")
    say(f"{trace}: the same runs for https://ui.perfetto.dev")


if __name__ == "__main__":
    main()
