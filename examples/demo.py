"""The demo: exports a small decoder with a KV cache and two methods, proves what was written, and runs it in budgets.

    make demo

Everything runs on the CPU where there is no GPU.
"""

from __future__ import annotations

import argparse
import copy
import time
import warnings
from pathlib import Path

import torch

import penstock
import penstock.errors
from examples.decoder import DecoderConfig, export, methods
from penstock.budget import format_bytes
from penstock.verify.module import PoisonedModule
from penstock.weights import read_index, verify_checksums

# About 200 MB. In float32, because not every CPU multiplies bfloat16 well.
CONFIG = DecoderConfig(hidden=768, ff=2048, layers=6, heads=12, kv_heads=4, vocab=12000, max_len=256)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="where to write model.pt2 and model.ptd")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    # Raised inside torch while it copies a program; nothing a reader of the demo could do about.
    warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)

    started = time.perf_counter()
    cases = methods(CONFIG)
    model = copy.deepcopy(cases["prefill"].module).to(arguments.device)
    programs = {name: penstock.apply_weight_offload(export(case)) for name, case in cases.items()}
    print(f"exported {', '.join(programs)} in {time.perf_counter() - started:.0f} s; compiling for {arguments.device}")
    started = time.perf_counter()
    result = penstock.compile(programs, arguments.out / "model.pt2", device=arguments.device, overwrite=True)
    print(f"compiled and written in {time.perf_counter() - started:.0f} s")
    show(result)
    run(result, prove(result, model, arguments.device), arguments.device)


def show(result: penstock.Compiled) -> None:
    program, floor = result.program, result.floor
    index = read_index(result.weights_path)
    verify_checksums(index)
    code_bytes = result.program_path.stat().st_size
    print()
    print(f"{result.program_path}   {format_bytes(code_bytes)}, code only")
    print(f"{result.weights_path}   {format_bytes(index.file_bytes)}, checksums right")
    print()
    print(f"{'method':10} {'steps':>6} {'accesses':>9} {'weights':>12} {'activations':>12} {'temporaries':>12}")
    weights = {w.name: w.nbytes for w in program.weights}
    for method in program.methods:
        read = _mib(sum(weights[name] for name in method.schedule.weight_names))
        activation = _mib(method.activation_bound_bytes)
        steps, accesses = len(method.schedule.steps), len(method.schedule.accesses)
        print(f"{method.name:10} {steps:6} {accesses:9} {read:>12} {activation:>12} {len(method.temporaries):12}")
    print()
    print(f"weights {format_bytes(program.weight_bytes)}, state (KV cache) {format_bytes(program.state_bytes)}")
    print(f"floor   {format_bytes(program.floor_bytes)}: the smallest budget this model can run in, set by step")
    print(f"        {floor.step_index} of {floor.method}: {' + '.join(floor.pair)}, next copy {floor.next_copy}")


def _mib(count: int | None) -> str:
    return "unbounded" if count is None else f"{count / 2**20:.1f} MiB"


def generate(module: penstock.Module | PoisonedModule, device: str) -> tuple[list[int], list[torch.Tensor]]:
    """One prefill and seven decoding steps; the tokens, and everything that was computed for them."""
    tokens = torch.arange(1, 17, device=device)[None] * 13
    positions = torch.arange(16, device=device)
    logits: list[torch.Tensor] = []
    for _ in range(8):
        logits.append(module.run_method("prefill" if tokens.shape[1] > 1 else "decode", tokens, positions))
        tokens, positions = logits[-1].argmax()[None, None], positions[-1:] + 1
    return [int(row.argmax()) for row in logits], logits


def prove(result: penstock.Compiled, model: torch.nn.Module, device: str) -> list[torch.Tensor]:
    """Run both methods with every weight lent for its recorded lifetime only, and poisoned right after it."""
    module = PoisonedModule(result.program_path)
    tokens, logits = generate(module, device)
    worst = 0.0
    given, positions = torch.arange(1, 17, device=device)[None] * 13, torch.arange(16, device=device)
    for found in logits:
        with torch.no_grad():
            wanted = model(given, positions)
        worst = max(worst, (found.float() - wanted.float()).norm().item() / wanted.float().norm().item())
        given, positions = found.argmax()[None, None], positions[-1:] + 1
    lent = max(session.peak_bytes for session in module.sessions.values())
    print()
    print("run under poison: 1 prefill and 7 decode steps, each weight overwritten as soon as its last reader was done")
    print(f"tokens {tokens}; relative difference to eager PyTorch at most {worst:.1e} (rounding)")
    print(f"weights lent at once: at most {format_bytes(lent)} of {format_bytes(result.program.weight_bytes)}")
    return logits


def run(result: penstock.Compiled, wanted: list[torch.Tensor], device: str) -> None:
    """The same tokens within budgets from the floor to everything, and the refusal one byte below the floor."""
    path = result.program_path
    with penstock.Module(path, budget=result.program.weight_bytes * 2, quiet=True) as module:
        floor_bytes, full_bytes = module.floor_bytes, module.budget_bytes
    print()
    print(f"{'budget':>10} {'of weights':>10} {'peak':>10} {'streamed per decode':>20} {'8 tokens':>9}  identical")
    for fraction in (0.0, 0.5, 0.75, 1.0):
        budget_bytes = max(floor_bytes, int(full_bytes * fraction))
        with penstock.Module(path, budget=budget_bytes, quiet=True) as module:
            generate(module, device)
            module.reset_state()
            started = time.perf_counter()
            _, logits = generate(module, device)
            seconds = time.perf_counter() - started
            identical = all(torch.equal(a, b) for a, b in zip(logits, wanted, strict=True))
            _, peak_bytes = module.device_memory()
            part = budget_bytes / result.program.weight_bytes
            print(
                f"{_mib(budget_bytes):>10} {part:>10.0%} {_mib(peak_bytes):>10} "
                f"{_mib(module.last_run.bytes_streamed):>20} {seconds:>7.2f} s  {'yes' if identical else 'NO'}"
            )
            assert identical and peak_bytes <= budget_bytes
    try:
        penstock.Module(path, budget=floor_bytes - 1)
    except penstock.errors.BelowFloorError as refusal:
        print(f"\none byte below the floor: {refusal}")
    else:
        raise AssertionError("a budget below the floor was accepted")


if __name__ == "__main__":
    main()
