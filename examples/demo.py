"""The demo: exports a small decoder with a KV cache and two methods, shows what was written, and proves it right.

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
    prove(result, model, arguments.device)


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


def prove(result: penstock.Compiled, model: torch.nn.Module, device: str) -> None:
    """Run both methods with every weight lent for its recorded lifetime only, and poisoned right after it."""
    module = PoisonedModule(result.program_path)
    tokens = torch.arange(1, 17, device=device)[None] * 13
    positions = torch.arange(16, device=device)
    print()
    worst = 0.0
    generated: list[int] = []
    for _ in range(8):
        name = "prefill" if tokens.shape[1] > 1 else "decode"
        found = module.run_method(name, tokens, positions)
        with torch.no_grad():
            wanted = model(tokens, positions)
        worst = max(worst, (found.float() - wanted.float()).norm().item() / wanted.float().norm().item())
        generated.append(int(found.argmax()))
        tokens, positions = found.argmax()[None, None], positions[-1:] + 1
    lent = max(session.peak_bytes for session in module.sessions.values())
    print("run under poison: 1 prefill and 7 decode steps, each weight overwritten as soon as its last reader was done")
    print(f"tokens {generated}; relative difference to eager PyTorch at most {worst:.1e} (rounding)")
    print(f"weights lent at once: at most {format_bytes(lent)} of {format_bytes(result.program.weight_bytes)}")


if __name__ == "__main__":
    main()
