"""Two codes for the exponents of packed bf16 weights, on a GPU: bytes, decoding, and a pass through 16 layers.

    python -m bench.packed_codes [--tokens 1,2048] [--budgets 0.1,0.25,0.5,0.6,0.75] [--blocks 132,264,528]
                                 [--weights FILE.safetensors or FILE.ptd] [--round 0.2] [--json OUT]

`seven` is the code of earlier files: three bits for a block's seven most frequent exponents and a byte for any other.
`three` is the one that `penstock pack` writes: two bits for three exponents, three more for the next seven, and then a
byte. Both are packed and decoded as the core does it, and launched as bench.decoding launches kernels.

Every kernel must first make every pattern of 16 bits again, and weights that pack badly. The first table has the
ratio of Gaussian weights (that of --weights is above it) and the rate out of device memory, in raw bytes, by blocks
of 256 threads. The second is one pass through the products of 16 decoder layers of Llama-3-8B's shape
(bench/packed_layers.py) inside budgets of device bytes, rings included; `mixed` keeps residents in `seven` and
streams `three`. "Raw bound" is what the bytes beyond the budget take on the link if nothing is packed. Exits with 1
when anything came out otherwise than it went in.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.packed_kernels import Code, Encoded, all_codes, launches
from bench.packed_layers import Contents, HostMemory, Inputs, Pass, Scheme, all_chunks, placed
from bench.suite.prepare import environment
from penstock.weights import read_index
from penstock.weights.packed_format import BLOCK_RAW_BYTES
from penstock.weights.raw_chunks import raw_content

DECODE_BLOCKS = (16, 132, 264, 528, 1056)
WEIGHT = (14336, 4096)
GUARD_VALUES = 64
LINK_BYTES = 256 << 20


def cases() -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    yield "every pattern", patterns.view(torch.bfloat16)
    yield "every pattern, mixed", patterns[torch.randperm(65536, generator=generator)].view(torch.bfloat16)
    odd = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, -1e-40, 3e38])
    yield "not finite, and denormal", odd.repeat(5000).bfloat16()
    sparse = torch.randn(200_001, generator=generator) * (torch.rand(200_001, generator=generator) < 0.5)
    yield "half zeros", sparse.bfloat16()
    for count in (1, 7, 1023, 1024, 1025, 32767, 32768, 32769, 65537, 31_500_000):
        yield f"{count} values", (torch.randn(count, generator=generator) * 0.02).bfloat16()
    yield "zeros", torch.zeros(70_000, dtype=torch.bfloat16)


def is_same(code: Code, packed: Encoded, tensor: Tensor) -> bool:
    """Decoded, and nothing behind it was written."""
    before = ~tensor.flatten().view(torch.int16)
    guard = torch.full((GUARD_VALUES,), 77, dtype=torch.int16, device=tensor.device)
    out = torch.cat([before, guard])
    code.decode(packed, packed.content.data_ptr(), out, 132)
    return torch.equal(out, torch.cat([tensor.flatten().view(torch.int16), guard]))


def tensors_of(path: Path) -> Iterator[Tensor]:
    """Those of bf16 that `penstock pack` would look at."""
    if path.suffix == ".ptd":
        index = read_index(path)
        for entry in index.unique_entries:
            if entry.dtype == "bfloat16" and entry.raw_bytes >= BLOCK_RAW_BYTES:
                yield torch.frombuffer(raw_content(index, entry), dtype=torch.bfloat16)
        return
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118, it is no dict
            tensor = file.get_tensor(name)
            if tensor.dtype is torch.bfloat16 and tensor.nbytes >= BLOCK_RAW_BYTES:
                yield tensor


def ratios_of(path: Path, codes: dict[str, Code], wrong: list[str]) -> dict[str, Any]:
    raw_bytes, packed_bytes = 0, dict.fromkeys(codes, 0)
    for tensor in tensors_of(path):
        on_device = tensor.cuda()
        raw_bytes += tensor.nbytes
        for name, code in codes.items():
            packed = code.encode(on_device)
            packed_bytes[name] += packed.packed_bytes
            if not is_same(code, packed, on_device):
                wrong.append(f"{path.name} by {name}")
    if not raw_bytes:
        raise SystemExit(f"{path} has no weight of bf16 that is large enough")
    return {"raw_bytes": raw_bytes, "ratio": {name: count / raw_bytes for name, count in packed_bytes.items()}}


def seconds(code: Code, packed: Encoded, out: Tensor, blocks: int, round_s: float) -> float:
    every = list(launches(packed, packed.content.data_ptr(), out.data_ptr()))

    def elapsed_s(times: int) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(times):
            for params in every:
                code.launch(params, blocks)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    elapsed_s(3)
    times = max(10, min(1000, int(round_s * 10 / elapsed_s(10))))
    return elapsed_s(times) / times


def link_bytes_per_s() -> float:
    source = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device="cuda")
    target.copy_(source, non_blocking=True)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(4):
        target.copy_(source, non_blocking=True)
    end.record()
    end.synchronize()
    return 4 * LINK_BYTES / begin.elapsed_time(end) * 1e3


def decoding_rates(codes: dict[str, Code], options: argparse.Namespace, wrong: list[str]) -> list[dict[str, Any]]:
    weight = (torch.randn(WEIGHT, device="cuda", generator=torch.Generator("cuda").manual_seed(0)) * 0.02).bfloat16()
    rows: list[dict[str, Any]] = []
    out = torch.empty_like(weight)
    blocks_wanted = sorted({*DECODE_BLOCKS, *options.blocks})
    print(f"\n| kernel | Gaussian ratio | {' | '.join(f'{blocks} blocks' for blocks in blocks_wanted)} |")
    print("|---" * (2 + len(blocks_wanted)) + "|")
    for name, code in codes.items():
        packed = code.encode(weight)
        if not is_same(code, packed, weight):
            wrong.append(f"Gaussian by {name}")
        rates = {n: packed.raw_bytes / seconds(code, packed, out, n, options.round) for n in blocks_wanted}
        rows += [
            {"kernel": name, "ratio": packed.ratio, "blocks": blocks, "raw_bytes_per_s": rate}
            for blocks, rate in rates.items()
        ]
        shown = " | ".join(f"{rate / 1e9:.0f} GB/s" for rate in rates.values())
        print(f"| {name} | {packed.ratio:.4f} | {shown} |", flush=True)
    return rows


def passes(
    schemes: list[Scheme], options: argparse.Namespace, link: float, wrong: list[str]
) -> Iterator[dict[str, Any]]:
    chunks, host = all_chunks(), HostMemory()
    codes = {code.name: code for scheme in schemes for code in (scheme.resident, scheme.streamed)}
    contents = Contents(chunks, list(codes.values()))
    inputs = [Inputs(contents, tokens) for tokens in options.tokens]
    raw_bytes = sum(chunk.raw_bytes for chunk in chunks)
    for budget in options.budgets:
        for scheme in schemes:
            sizes = (contents.bytes_of(chunks, code) for code in (scheme.resident, scheme.streamed))
            placement = placed(chunks, *sizes, budget * raw_bytes)
            filled = Pass(chunks, contents, scheme, placement, host)
            for each in inputs:
                times_s: dict[int, float] = {}
                for blocks in options.blocks:
                    times_s[blocks], right = filled.measured(each, blocks, options.round)
                    if not right:
                        wrong.append(f"{scheme.name}, {each.tokens} tokens, {budget:.0%}, {blocks} blocks")
                counts = {place: placement.places.count(place) for place in ("raw", "packed", "streamed")}
                yield {
                    "budget": budget,
                    "tokens": each.tokens,
                    "scheme": scheme.name,
                    "raw_bound_s": (1 - budget) * raw_bytes / link,
                    "seconds_by_blocks": times_s,
                    "device_bytes": placement.device_bytes,
                    "streamed_bytes": placement.streamed_bytes,
                    "chunks": counts,
                }
            del filled
            torch.cuda.empty_cache()


def main() -> int:
    options = _parser().parse_args()
    codes = all_codes()
    link = link_bytes_per_s()
    print(f"{torch.cuda.get_device_name()}: link {link / 1e9:.1f} GB/s", flush=True)
    wrong: list[str] = []
    for case, tensor in cases():
        on_device = tensor.cuda()
        wrong += [
            f"{case} by {name}" for name, code in codes.items() if not is_same(code, code.encode(on_device), on_device)
        ]
    print("differs:", wrong or "nothing", flush=True)
    stored: dict[str, Any] = {"environment": environment("cuda"), "link_bytes_per_s": link}
    if options.weights is not None:
        stored["weights"] = ratios_of(options.weights, codes, wrong)
        shown = ", ".join(f"{name} {ratio:.4f}" for name, ratio in stored["weights"]["ratio"].items())
        print(f"{options.weights.name}, {stored['weights']['raw_bytes'] / 1e9:.2f} GB of bf16: {shown}", flush=True)
    stored["decoding"] = decoding_rates(codes, options, wrong)
    torch.cuda.empty_cache()
    seven, three = codes["seven"], codes["three"]
    schemes = [Scheme("seven", seven, seven), Scheme("three", three, three), Scheme("mixed", seven, three)]
    print("\nMilliseconds by blocks of threads.\n")
    columns = " | ".join(f"{blocks} blocks" for blocks in options.blocks)
    print(f"| budget | tokens | scheme | raw/packed/streamed | link | {columns} | raw bound |")
    print("|---" * (6 + len(options.blocks)) + "|")
    stored["passes"] = []
    for row in passes(schemes, options, link, wrong):
        stored["passes"].append(row)
        times = " | ".join(f"{time_s * 1e3:.2f}" for time_s in row["seconds_by_blocks"].values())
        print(
            f"| {row['budget']:.0%} | {row['tokens']} | {row['scheme']} | {'/'.join(map(str, row['chunks'].values()))} "
            f"| {row['streamed_bytes'] / 1e9:.2f} GB | {times} | {row['raw_bound_s'] * 1e3:.2f} |",
            flush=True,
        )
    stored["differs"] = wrong
    print("\ndiffers:", wrong or "nothing")
    if options.json is not None:
        options.json.write_text(json.dumps(stored, indent=1) + "\n")
    return 1 if wrong else 0


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _shares(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=_numbers, default=[1], help="of a pass")
    parser.add_argument("--budgets", type=_shares, default=[0.1, 0.25, 0.5, 0.6, 0.75], help="parts of the raw bytes")
    parser.add_argument("--blocks", type=_numbers, default=[132, 264, 528], help="that decode in a pass")
    parser.add_argument("--weights", type=Path, help="a file whose weights of bf16 are packed as well")
    parser.add_argument("--round", type=float, default=0.2, help="seconds for each figure, about")
    parser.add_argument("--json", type=Path, help="where to store the figures")
    return parser


if __name__ == "__main__":
    sys.exit(main())
