"""Experts in slots: time a token, by how much is held, beside the bound and beside other ways.

    python -m bench.experts --out FOLDER [--layers 6] [--held 10,20,38] [--stay 0.6,0.3] [--tokens 250] [--int4]
    python -m bench.experts --out FOLDER --whole --layers 48 --int4 --budgets 4,8,16,24 --stay 0.6

Layers of Qwen3-30B-A3B's experts (128, 8 of them a token, 2,048 x 768, bf16; with --int4 in 4 bits with a scale for
each 64), and nothing else: one token, as a CUDA graph. With --whole also the other weights of that model: projections
of attention, and the output projection of 151,936 words (no cache, and no attention over one); with --prompt a method
that reads experts in groups, or whole where they are in 4 bits. Exported on meta from safetensors; the peaks of memory
are kept beside the program, in its .export.json.

The routing is made, since no trained weights are at hand: a token keeps each expert of the one before with probability
`stay`, and else draws by Zipf's law (tests.experts.routed.routing); the first hundred tokens do not count. "Held" is
the part of all weights that the budget is. The bound is what missed over the link at 50 GB/s, and everything resident.
Other ways: everything routed read in place; by position, as the release before slots did, where the budget holds the
experts of some layers and those of others are read in place; and streamed, where all experts are copied. Exits with 1
when an output is not, to the bit, that of everything resident.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from tests.experts.routed import Shape as RoutingShape
from tests.experts.routed import routing
from torch import Tensor, nn

import penstock
from bench.suite.measure import measure_link, synchronize
from bench.suite.prepare import environment
from penstock.errors import BelowFloorError
from penstock.plan import menu
from penstock.plan.experts import ExpertBank, HitRates, Slots

EVERYTHING = "1024TiB"
WARM_TOKENS = 100
# What kernels read over the link, which experts come by (docs/direct.md).
READ_BYTES_PER_S = 50e9
GROUP = 64
SHARD_BYTES = 2 << 30


@dataclass(frozen=True)
class Shape:
    layers: int
    experts: int = 128
    top: int = 8
    hidden: int = 2048
    inner: int = 768
    int4: bool = False
    # Beside the experts: rows of the projections of attention, and words. 0: there are none.
    attention: int = 0
    words: int = 0


@dataclass(frozen=True)
class Row:
    way: str
    stay: float
    held_percent: float
    # In the mean of all layers.
    slots: float
    budget_bytes: int
    hit_rate: float | None
    miss_bytes_a_token: float
    seconds_a_token: float
    bound_s: float | None
    equal: bool


class Layer(nn.Module):
    def __init__(self, shape: Shape, device: str) -> None:
        super().__init__()
        self.shape = shape
        sizes = {"gate_up": (2 * shape.inner, shape.hidden), "down": (shape.hidden, shape.inner)}
        for name, (rows, columns) in sizes.items():
            if shape.int4:
                packed = torch.empty(shape.experts, rows, columns // 2, dtype=torch.uint8, device=device)
                scales = torch.empty(shape.experts, rows, columns // GROUP, dtype=torch.bfloat16, device=device)
                self.register_buffer(name, packed)
                self.register_buffer(f"{name}_scales", scales)
            else:
                stacked = torch.empty(shape.experts, rows, columns, dtype=torch.bfloat16, device=device)
                self.register_buffer(name, stacked)
        if shape.attention:
            linear = partial(nn.Linear, bias=False, device=device, dtype=torch.bfloat16)
            self.qkv = linear(shape.hidden, shape.attention + shape.attention // 4)
            self.o = linear(shape.attention, shape.hidden)

    def _unpacked(self, packed: Tensor, scales: Tensor) -> Tensor:
        halves = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).to(torch.bfloat16) - 8
        return (halves.unflatten(-1, (-1, GROUP)) * scales.unsqueeze(-1)).flatten(-2)

    def _matrices(self, name: str, ids: Tensor | None) -> Tensor:
        """Of these experts, or of all."""
        weights = getattr(self, name), *([getattr(self, f"{name}_scales")] if self.shape.int4 else [])
        taken = weights if ids is None else tuple(weight[ids] for weight in weights)
        return self._unpacked(*taken) if self.shape.int4 else taken[0]

    def _mixed(self, x: Tensor) -> Tensor:
        if not self.shape.attention:
            return x
        q, kv = self.qkv(F.rms_norm(x, (self.shape.hidden,))).split(
            (self.shape.attention, self.shape.attention // 4), -1
        )
        return x + self.o(q * kv.repeat(1, 4))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """One token: ids [top]"""
        x = self._mixed(x)
        rows = F.rms_norm(x, (self.shape.hidden,))
        up = torch.bmm(self._matrices("gate_up", ids), rows.expand(ids.shape[0], -1).unsqueeze(-1)).squeeze(-1)
        gate, linear = up.chunk(2, -1)
        out = torch.bmm(self._matrices("down", ids), (F.silu(gate) * linear).unsqueeze(-1)).squeeze(-1)
        return x + out.sum(0, keepdim=True)

    def prompt(self, x: Tensor, ids: Tensor) -> Tensor:
        """Many tokens: ids [tokens, top]"""
        x = self._mixed(x)
        top = self.shape.top
        experts, order = torch.sort(ids.reshape(-1))
        rows = F.rms_norm(x, (self.shape.hidden,))[order // top]
        ends = (experts[:, None] == torch.arange(self.shape.experts, device=x.device)).sum(0).cumsum(0).to(torch.int32)
        gate_up, down = (self._matrices(name, None).transpose(-2, -1) for name in ("gate_up", "down"))
        gate, linear = torch._grouped_mm(rows, gate_up, ends).chunk(2, -1)
        out = torch._grouped_mm(F.silu(gate) * linear, down, ends)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.numel(), device=x.device)
        return x + out[back].view(x.shape[0], top, -1).sum(1)


class Model(nn.Module):
    def __init__(self, shape: Shape, device: str = "meta") -> None:
        super().__init__()
        self.shape, self.is_prompt = shape, False
        self.layers = nn.ModuleList(Layer(shape, device) for _ in range(shape.layers))
        if shape.words:
            self.head = nn.Linear(shape.hidden, shape.words, bias=False, device=device, dtype=torch.bfloat16)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """ids [layers, top], or [layers, tokens, top]"""
        for number, layer in enumerate(self.layers):
            x = layer.prompt(x, ids[number]) if self.is_prompt else layer(x, ids[number])
        return self.head(x[-1:]) if self.shape.words else x


def values(shape: Shape, device: str) -> Iterator[tuple[str, Tensor]]:
    """One layer's for all of them, its experts turned by its number: that takes no longer than to write them."""
    generator = torch.Generator(device).manual_seed(0)
    small = replace(shape, layers=1)
    for name, found in Model(small, device).state_dict().items():
        if found.dtype is torch.uint8:
            found.random_(0, 256, generator=generator)
        else:
            found.normal_(0, 0.02, generator=generator)
        if not name.startswith("layers.0."):
            yield name, found.cpu()
            continue
        for number in range(shape.layers):
            yield name.replace("layers.0.", f"layers.{number}."), found.roll(number, 0).cpu()


def write_checkpoint(shape: Shape, folder: Path, device: str) -> None:
    """In shards of a few gigabytes."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    shard: dict[str, Tensor] = {}
    count = 0

    def save() -> None:
        nonlocal count
        save_file(shard, folder / f"model-{count:05}.safetensors")
        shard.clear()
        count += 1

    for name, value in values(shape, device):
        shard[name] = value
        if sum(held.numel() * held.element_size() for held in shard.values()) > SHARD_BYTES:
            save()
    if shard:
        save()


class AnonymousPeak:
    """What the process holds beside files that are mapped, every 20 ms."""

    def __enter__(self) -> AnonymousPeak:
        self._ended = threading.Event()
        self.before_bytes = self.peak_bytes = self._now_bytes()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.02):
            self.peak_bytes = max(self.peak_bytes, self._now_bytes())

    def _now_bytes(self) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


def prepare(shape: Shape, folder: Path, device: str, prompt: int) -> Path:
    kinds = {"int4": shape.int4, "whole": shape.words, "prompt": prompt}
    path = folder / f"experts-{shape.layers}{''.join(f'-{kind}' for kind in kinds if kinds[kind])}.pt2"
    if path.exists():
        return path
    checkpoint = folder / f"{path.stem}-checkpoint"
    # In a process of its own: the memory that this takes would count as that of the export.
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as processes:
        processes.submit(write_checkpoint, shape, checkpoint, device).result()
    model = Model(shape)

    def exported(tokens: int) -> torch.export.ExportedProgram:
        model.is_prompt = tokens > 1
        x = torch.zeros(tokens, shape.hidden, dtype=torch.bfloat16, device="meta")
        sizes = (shape.layers, tokens, shape.top) if model.is_prompt else (shape.layers, shape.top)
        ids = torch.zeros(sizes, dtype=torch.int64, device="meta")
        with torch.no_grad():
            return penstock.apply_weight_offload(torch.export.export(model, (x, ids), strict=False))

    with AnonymousPeak() as peak:
        programs = {"decode": exported(1), **({"prefill": exported(prompt)} if prompt else {})}
        made = penstock.compile(programs, path, device=device, weights=str(checkpoint))
    print(f"anonymous host memory at most {peak.peak_bytes >> 20} MiB, {peak.before_bytes >> 20} before", flush=True)
    shutil.rmtree(checkpoint)
    peaks = {
        "methods": sorted(programs),
        "weight_bytes": made.program.weight_bytes,
        "anonymous_host_peak_bytes": peak.peak_bytes,
        "anonymous_host_bytes_before": peak.before_bytes,
        **asdict(made.peaks),
    }
    path.with_suffix(".export.json").write_text(json.dumps({**environment(device), **peaks}, indent=1))
    return path


def played(module: penstock.Module, x: Tensor, ids: Tensor, device: str) -> tuple[float, Tensor, float | None, float]:
    """Seconds a token, the last output, the hit rate, and bytes that missed a token."""
    warm = min(WARM_TOKENS, len(ids) // 2)
    for token in range(warm):
        module.run_method("decode", x, ids[token])
    before = module.stats()
    synchronize(device)
    begin = time.perf_counter()
    for token in range(warm, len(ids)):
        out = module.run_method("decode", x, ids[token])
    synchronize(device)
    seconds = (time.perf_counter() - begin) / (len(ids) - warm)
    after = module.stats()
    hits, misses = after.expert_hits - before.expert_hits, after.expert_misses - before.expert_misses
    rate = hits / (hits + misses) if hits + misses else None
    return seconds, out, rate, (after.expert_bytes - before.expert_bytes) / (len(ids) - warm)


def by_position(
    banks: Sequence[ExpertBank], spare_bytes: int, page_bytes: int, hit_rates: Mapping[str, HitRates]
) -> Slots:
    """As the release before slots: the experts of one layer after the other, as far as they go."""
    whole: list[str] = []
    for bank in banks:
        spare_bytes -= bank.experts * bank.row_bytes + page_bytes
        if spare_bytes >= 0:
            whole += bank.names
    return Slots({}, tuple(whole))


@dataclass(frozen=True)
class Run:
    way: str
    held_percent: float
    budget: int | str
    options: dict[str, Any]


def runs(given: argparse.Namespace, full_bytes: int) -> Iterator[Run]:
    yield Run("in place", 0.0, 0, {"placement": "in-place"})
    budgets = [int(gib * 2**30) for gib in given.budgets] or [int(full_bytes * held / 100) for held in given.held]
    for budget in budgets:
        if budget >= full_bytes:
            continue
        held = 100 * budget / full_bytes
        yield Run("slots", held, budget, {})
        if given.whole:
            yield Run("by position", held, budget, {})
            yield Run("streamed", held, budget, {"placement": "stream"})


def measure(shape: Shape, path: Path, given: argparse.Namespace, device: str) -> list[Row]:
    rows: list[Row] = []
    # A prompt's product of groups may wait for the host, which no graph can hold: decoding alone is captured.
    graph = {"cuda_graph": True} if device == "cuda" else {}
    x = torch.randn(1, shape.hidden, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16).to(device)
    tokens = WARM_TOKENS + given.tokens
    made = RoutingShape(layers=shape.layers, experts=shape.experts, top=shape.top)
    for stay in given.stay:
        ids = routing(made, tokens, stay=stay, seed=0).to(device)
        with penstock.Module(path, EVERYTHING, **graph) as module:
            full_bytes = module.budget_bytes
            resident_s, _, _, _ = played(module, x, ids, device)
            wanted = [module.run_method("decode", x, one) for one in ids]
        rows.append(Row("resident", stay, 100, shape.experts, full_bytes, None, 0, resident_s, None, True))
        print(rows[-1], flush=True)
        for run in runs(given, full_bytes):
            # Where the link takes that long a few tokens tell.
            few = ids[: {"slots": len(ids), "streamed": 12}.get(run.way, 60)]
            patch = mock.patch.object(menu, "allocate_slots", by_position)
            with patch if run.way == "by position" else nullcontext():
                try:
                    module = penstock.Module(path, run.budget, **run.options, **graph)
                except BelowFloorError as refusal:
                    print(f"{run.way} at {run.budget}: {refusal}", flush=True)
                    continue
            with module:
                seconds, out, rate, missed = played(module, x, few, device)
                plan = module.plan
                slots = [bank.slots for bank in plan.banks] if plan is not None else []
                spent = module.device_memory()[1]
            bound = missed / READ_BYTES_PER_S + resident_s if run.way == "slots" else None
            mean = sum(slots) / len(slots) if slots else 0
            equal = torch.equal(out, wanted[len(few) - 1])
            row = Row(run.way, stay, run.held_percent, mean, spent, rate, missed, seconds, bound, equal)
            rows.append(row)
            print(row, "" if bound is None else f"{seconds / bound:.3f} of the bound", flush=True)
    return rows


def measure_prompt(shape: Shape, path: Path, given: argparse.Namespace, device: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    x = (
        torch.randn(given.prompt, shape.hidden, generator=torch.Generator().manual_seed(2))
        .to(torch.bfloat16)
        .to(device)
    )
    made = RoutingShape(layers=shape.layers, experts=shape.experts, top=shape.top)
    ids = routing(made, given.prompt, stay=given.stay[0], seed=3).transpose(0, 1).contiguous().to(device)
    wanted: Tensor | None = None
    for budget in [EVERYTHING, *(int(gib * 2**30) for gib in reversed(given.budgets))]:
        with penstock.Module(path, budget) as module:
            module.run_method("prefill", x, ids)
            synchronize(device)
            begin = time.perf_counter()
            for _ in range(2):
                out = module.run_method("prefill", x, ids)
            synchronize(device)
            seconds, last = (time.perf_counter() - begin) / 2, module.last_run
            held = module.budget_bytes
        wanted = out if wanted is None else wanted
        row = {"tokens": given.prompt, "budget_bytes": held, "seconds": seconds, "equal": torch.equal(out, wanted)}
        row |= {"expert_bytes": last.expert_bytes, "hits": last.expert_hits, "misses": last.expert_misses}
        found.append({**row, "streamed_bytes": last.bytes_streamed})
        print(found[-1], flush=True)
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers: Callable[[str], list[float]] = lambda text: [float(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--held", type=numbers, default=[10.0, 20.0, 38.0])
    parser.add_argument("--stay", type=numbers, default=[0.6, 0.3])
    parser.add_argument("--tokens", type=int, default=250, help="0: only make the program, which --work keeps")
    parser.add_argument("--int4", action="store_true")
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--budgets", type=numbers, default=[], help="in GiB, in the place of --held")
    parser.add_argument("--prompt", type=int, default=0, help="with --whole: tokens of a prompt")
    parser.add_argument("--small", action="store_true", help="a model that a test can run")
    parser.add_argument("--work", type=Path, help="where the program is made; kept")
    given = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = Shape(given.layers, int4=given.int4)
    if given.small:
        shape = Shape(2, 16, 2, 128, 64, given.int4)
    if given.whole:
        shape = replace(shape, attention=2 * shape.hidden, words=1000 if given.small else 151_936)
    given.out.mkdir(parents=True, exist_ok=True)
    work = given.work or given.out
    work.mkdir(parents=True, exist_ok=True)
    path = prepare(shape, work, device, given.prompt)
    rows = measure(shape, path, given, device) if given.tokens else []
    prompts = measure_prompt(shape, path, given, device) if given.prompt and given.tokens else []
    link = measure_link(device) if device == "cuda" else None
    table = {
        "shape": asdict(shape),
        "link_bytes_per_s": link,
        "rows": [asdict(row) for row in rows],
        "prompts": prompts,
    }
    (given.out / f"{path.stem}.json").write_text(json.dumps({**environment(device), **table}, indent=1))
    if given.out != work:
        shutil.copyfile(path.with_suffix(".export.json"), given.out / f"{path.stem}.export.json")
    return 0 if all(row.equal for row in rows) and all(one["equal"] for one in prompts) else 1


if __name__ == "__main__":
    sys.exit(main())
