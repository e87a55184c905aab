"""Text generation inside a budget: prefill and decode methods, a KV cache, and a sampling loop to copy.

    python -m examples.generate --budget 64MiB --tokens 24 --temperature 0.8 --top-k 40

The model is a small decoder of our own with random weights, and the prompt is numbers. For a checkpoint of transformers
use `penstock.from_pretrained` or `penstock generate`: this shows what goes on below them.

With --kv-device-bytes the KV cache takes at most that much of the device: what does not fit lies in host memory, where
attention reads it.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.export import ExportedProgram

import penstock
from examples.decoder import DecoderConfig, build, export, methods
from examples.host_cache import HostCachedDecoder
from penstock.budget import format_bytes, parse_bytes
from penstock.program import Program

# About 52 MB.
CONFIG = DecoderConfig(hidden=512, ff=1376, layers=4, heads=8, kv_heads=4, vocab=1024)


def sample(logits: Tensor, generator: torch.Generator, *, temperature: float, top_k: int) -> int:
    """The next token of logits [vocab]. A temperature of 0 takes the likeliest."""
    if temperature == 0:
        return int(logits.argmax())
    values, indices = logits.float().topk(min(top_k, logits.numel()))
    # On the CPU, so that a seed gives the same tokens on every device.
    probabilities = torch.softmax(values / temperature, dim=-1).cpu()
    return int(indices[torch.multinomial(probabilities, 1, generator=generator)])


def generate(
    module: penstock.Module,
    prompt: Sequence[int],
    *,
    tokens: int,
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int = 0,
    stop: frozenset[int] = frozenset(),
) -> Iterator[int]:
    """Yields tokens as they are made. The cache is the module's: a new prompt starts at its beginning."""
    cache_len = cache_positions(module.program)
    if not prompt or len(prompt) + tokens - 1 > cache_len:
        raise ValueError(f"{len(prompt)} tokens and {tokens} more; needs one at least, the cache has {cache_len}")
    generator = torch.Generator().manual_seed(seed)
    given, position = list(prompt), 0
    for _ in range(tokens):
        # prefill takes two tokens or more, decode exactly one.
        method = "prefill" if len(given) > 1 else "decode"
        ids = torch.tensor([given], device=module.device)
        positions = torch.arange(position, position + len(given), device=module.device)
        logits = module.run_method(method, ids, positions)
        position += len(given)
        token = sample(logits[0], generator, temperature=temperature, top_k=top_k)
        yield token
        if token in stop:
            return
        given = [token]


def cache_positions(program: Program) -> int:
    """How many positions the cache has, of a split one on both sides together."""
    sides = [state.shape[3] for state in program.states if state.name.endswith("kv_0")]
    return sum(sides) if sides else program.states[0].shape[2]


def export_decoder(max_len: int, kv_device_bytes: int | None = None) -> dict[str, ExportedProgram]:
    config = dataclasses.replace(CONFIG, max_len=max_len)
    split = None if kv_device_bytes is None else HostCachedDecoder(build(config, cached=False), kv_device_bytes)
    return {name: export(case) for name, case in methods(config, module=split).items()}


def compile_model(max_len: int, path: Path, device: str, kv_device_bytes: int | None = None) -> penstock.Compiled:
    programs = export_decoder(max_len, kv_device_bytes)
    offloaded = {name: penstock.apply_weight_offload(program) for name, program in programs.items()}
    return penstock.compile(offloaded, path, device=device, overwrite=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", default="1 2 3 4", help="numbers, such as '1 2 3'")
    parser.add_argument("--budget", help="device memory for weights, such as 64MiB (default: automatic)")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token")
    parser.add_argument("--top-k", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-len", type=int, default=256, help="slots of the KV cache")
    parser.add_argument("--kv-device-bytes", type=parse_bytes, help="at most so much of the KV cache on the device")
    parser.add_argument("--out", type=Path, default=Path("generate-out"), help="where to write the program")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    # Raised inside torch while it copies a program.
    warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)

    prompt = [int(number) for number in arguments.prompt.split()]
    path = arguments.out / "model.pt2"
    result = compile_model(arguments.max_len, path, arguments.device, arguments.kv_device_bytes)
    with penstock.Module(result.program_path, budget=arguments.budget) as module:
        started = time.perf_counter()
        made = list(
            generate(
                module,
                prompt,
                tokens=arguments.tokens,
                temperature=arguments.temperature,
                top_k=arguments.top_k,
                seed=arguments.seed,
            )
        )
        seconds = time.perf_counter() - started
        print(" ".join(map(str, made)))
        print(
            f"{len(made) / seconds:.1f} tokens/s in {format_bytes(module.budget_bytes)} of "
            f"{format_bytes(module.weight_bytes)}, {format_bytes(module.last_run.bytes_streamed)} streamed for the last"
        )
        near_bytes, far_bytes = module.device_state_bytes, module.state_bytes - module.device_state_bytes
        if far_bytes:
            print(f"KV cache: {format_bytes(near_bytes)} on the device's side, {format_bytes(far_bytes)} on the host's")


if __name__ == "__main__":
    main()
