"""How much memory exporting takes: a Llama-style decoder with two methods and a KV cache, from three kinds of source.

    python -m bench.export_memory --layers 32 --source safetensors --out /tmp/out

Source "zeros" exports from meta with zeros for weights; "memory" holds the model in RAM (uninitialised values);
"safetensors" writes a sharded checkpoint of random bytes first, then exports the model from meta. Prints one line of
figures at the end; --json stores them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import struct
import time
import warnings
from pathlib import Path

import torch
from examples.decoder import LLAMA3_8B, CachedDecoder, DecoderConfig, export, freeze, methods

import penstock
from bench.suite.prepare import environment
from penstock.budget import format_bytes

SHARD_BYTES = 2 << 30


def main() -> None:
    arguments = _parser().parse_args()
    warnings.filterwarnings("ignore", message=".*starts as zeros.*")
    if arguments.memory_fraction:
        torch.cuda.set_per_process_memory_fraction(arguments.memory_fraction)
    config = dataclasses.replace(
        LLAMA3_8B,
        hidden=arguments.hidden,
        ff=arguments.ff,
        layers=arguments.layers,
        vocab=arguments.vocab,
        max_len=arguments.max_len,
    )
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    cases = methods(config, device="meta")
    if arguments.source == "memory":
        module = cases["prefill"].module.to_empty(device="cpu")
        cases = {
            name: case._replace(args=tuple(torch.zeros_like(a, device="cpu") for a in case.args))
            for name, case in cases.items()
        }
        for buffer in module.buffers():
            buffer.zero_()
    programs = {name: penstock.apply_weight_offload(export(case)) for name, case in cases.items()}
    weights = None
    if arguments.source == "zeros":
        weights = zeros(programs)
    elif arguments.source == "safetensors":
        weights = [write_checkpoint(config, out / "checkpoint"), {"inv_freq": inverse_frequencies(config)}]
    exported = time.perf_counter()

    result = penstock.compile(programs, out / "model.pt2", device=arguments.device, weights=weights, overwrite=True)
    seconds = time.perf_counter() - exported
    program = result.program
    print(f"DEVICE_BYTES_AFTER: {max(result.device_bytes_after.values(), default=0)}")
    print(
        f"torch {torch.__version__} device {program.device} layers {config.layers} source {arguments.source} "
        f"weights {format_bytes(program.weight_bytes)} state {format_bytes(program.state_bytes)} "
        f"floor {format_bytes(program.floor_bytes)} host start {result.peaks.host_start_bytes >> 20} MiB "
        f"peak {result.peaks.host_peak_bytes >> 20} MiB gpu peak {(result.peaks.gpu_peak_bytes or 0) >> 20} MiB "
        f"export {exported - started:.0f} s compile and write {seconds:.0f} s"
    )
    if arguments.json is not None:
        stored = {
            "environment": environment(arguments.device),
            "layers": config.layers,
            "source": arguments.source,
            "memory_fraction": arguments.memory_fraction,
            "weight_bytes": program.weight_bytes,
            "state_bytes": program.state_bytes,
            "floor_bytes": program.floor_bytes,
            "device_bytes_after": result.device_bytes_after,
            **dataclasses.asdict(result.peaks),
            "export_s": exported - started,
            "compile_and_write_s": seconds,
        }
        arguments.json.write_text(json.dumps(stored, indent=1) + "\n")
    if arguments.delete:
        shutil.rmtree(out)


def zeros(programs: dict[str, torch.export.ExportedProgram]) -> dict[str, torch.Tensor]:
    """A zero for every weight of a program on meta, expanded to its shape: values that take no memory."""
    tensors = {
        spec.target: program.state_dict.get(spec.target, program.constants.get(spec.target))
        for program in programs.values()
        for spec in program.graph_signature.input_specs
        if spec.target is not None
    }
    return {
        name: torch.zeros(1, dtype=tensor.dtype).expand(tensor.shape)
        for name, tensor in tensors.items()
        if not name.endswith("_cache")
    }


def inverse_frequencies(config: DecoderConfig) -> torch.Tensor:
    steps = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    return config.rope_theta**-steps


def write_checkpoint(config: DecoderConfig, folder: Path) -> Path:
    """A sharded safetensors checkpoint with small random values, written piece by piece."""
    folder.mkdir(parents=True, exist_ok=True)
    with torch.device("meta"):
        tensors = dict(freeze(CachedDecoder(config)).state_dict())
    noise = (torch.randn(8 << 20) * 0.02).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    shards: list[list[str]] = [[]]
    used = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if used and used + size > SHARD_BYTES:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    placed: dict[str, str] = {}
    for index, names in enumerate(shards):
        file = folder / f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        table, offset = {}, 0
        for name in names:
            size = tensors[name].numel() * tensors[name].element_size()
            table[name] = {"dtype": "BF16", "shape": list(tensors[name].shape), "data_offsets": [offset, offset + size]}
            offset += size
            placed[name] = file.name
        header = json.dumps(table).encode()
        with file.open("wb") as stream:
            stream.write(struct.pack("<Q", len(header)) + header)
            while offset:
                count = min(offset, len(noise))
                stream.write(noise[:count])
                offset -= count
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    return folder


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=LLAMA3_8B.layers)
    parser.add_argument("--hidden", type=int, default=LLAMA3_8B.hidden)
    parser.add_argument("--ff", type=int, default=LLAMA3_8B.ff)
    parser.add_argument("--vocab", type=int, default=LLAMA3_8B.vocab)
    parser.add_argument("--max-len", type=int, default=2048, help="slots of the KV cache")
    parser.add_argument("--source", choices=["zeros", "memory", "safetensors"], default="zeros")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--memory-fraction", type=float, help="cap torch's share of the GPU's memory")
    parser.add_argument("--delete", action="store_true", help="remove what was written at the end")
    parser.add_argument("--json", type=Path, help="where to store the figures")
    parser.add_argument("--out", required=True)
    return parser


if __name__ == "__main__":
    main()
