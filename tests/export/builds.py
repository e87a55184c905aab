"""What the tests of compile share: small models, what a folder and a weights file hold, and a compiler that compiles
nothing."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import penstock
from penstock.export.method import CompiledMethod
from penstock.export.values import tensor_pieces
from penstock.export.weightless import make_weightless
from penstock.program import Method
from penstock.schedule import Access, Schedule, Step
from penstock.weights import read_index
from tests.zoo import decoder


def snapshot(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


@contextmanager
def unchanged(folder: Path) -> Iterator[None]:
    before = snapshot(folder)
    yield
    assert snapshot(folder) == before


def older_files(folder: Path) -> None:
    (folder / "model.pt2").write_bytes(b"an older program")
    (folder / "model.ptd").write_bytes(b"its weights")


def stored_bytes(path: Path) -> dict[str, bytes]:
    """What a .ptd holds under every name."""
    content = path.read_bytes()
    return {e.name: content[e.offset_bytes : e.offset_bytes + e.length_bytes] for e in read_index(path)}


def bytes_of(tensor: torch.Tensor, dim_order: tuple[int, ...] | None = None) -> bytes:
    return b"".join(bytes(piece) for piece in tensor_pieces(tensor, dim_order or range(tensor.dim())))


def build(programs: Any, folder: Path, **options: Any) -> penstock.Compiled:
    return penstock.compile(programs, folder / "model.pt2", device=options.pop("device", "cpu"), **options)


def stand_in(
    name: str,
    ep: torch.export.ExportedProgram,
    device: torch.device,
    states: frozenset[str],
    weight_names: Mapping[str, str],
    folder: Path,
    options: Mapping[str, Any],
    *,
    split_linear: bool,
) -> CompiledMethod:
    """As if every access were a step of its own, in the order of their numbers. Its code is a text file."""
    program = make_weightless(ep, device, states, split_linear=split_linear)
    (folder / name).mkdir()
    file = folder / name / "stand-in.wrapper.cpp"
    file.write_text("no code\n")
    numbers = sorted(program.weight_of)
    accesses = tuple(
        Access(n, weight_names[program.weight_of[n]], n in program.pinned, linear=n in program.linear) for n in numbers
    )
    schedule = Schedule(name, accesses, tuple(Step(f"kernel {n}", (n,)) for n in numbers))
    method = Method(name, schedule, program.signature, program.states, 100, None, ())
    return CompiledMethod(method, (str(file),))


class Net(nn.Module):
    """A tied weight, one that is not stored row by row, buffers of each kind, states of each kind."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, width)
        self.linear = nn.Linear(width, width)
        self.skewed = nn.Parameter(torch.randn(width, 3 * width).t())
        self.head = nn.Linear(3 * width, 12, bias=False)
        self.tail = nn.Linear(width, 12, bias=False)
        self.tail.weight = self.embed.weight
        self.register_buffer("mean", torch.randn(width))
        self.register_buffer("scale", torch.rand(width), persistent=False)
        self.register_buffer("cache", torch.zeros(4, width), persistent=False)
        self.register_buffer("count", torch.arange(6.0).reshape(2, 3).t())
        self.unused = nn.Linear(2, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.linear(self.embed(tokens)) * self.scale - self.mean
        self.cache.add_(x)
        self.count.add_(1)
        return self.head(x @ self.skewed.t()) + self.tail(x) + self.count.sum()


TOKENS = torch.arange(4)


def net(seed: int = 0, device: str = "cpu") -> Net:
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        return Net()


class Built(NamedTuple):
    result: penstock.Compiled
    # Method -> the generated wrapper.
    wrappers: dict[str, str]


def built(result: penstock.Compiled) -> Built:
    with zipfile.ZipFile(result.program_path) as archive:
        found = {re.search(r"aotinductor/(\w+)/[^/]*wrapper\.cpp$", name): name for name in archive.namelist()}
        return Built(result, {match[1]: archive.read(name).decode() for match, name in found.items() if match})


# One layer is enough: what the layers read is alike.
DECODE = decoder.methods(replace(decoder.TINY, layers=1))["decode"]


class Shifted(nn.Module):
    """Reads `shift` in two kernels that cannot become one, counts in a state, and has a constant that export lifts."""

    def __init__(self, width: int, constant: float) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(width))
        self.linear = nn.Linear(width, width)
        self.register_buffer("total", torch.zeros(width), persistent=False)
        self.constant = constant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(x.sum(0))
        shift = self.shift + 1
        return torch.relu(self.linear(x * shift)) * shift + self.total + torch.tensor([self.constant, 0.0]).sum()


def shifted(width: int) -> dict[str, Shifted]:
    """Two methods of one model: the same weights and state, another constant."""
    torch.manual_seed(0)
    first, second = Shifted(width, 1.0), Shifted(width, 2.0)
    second.shift, second.linear, second.total = first.shift, first.linear, first.total
    return {"first": first.eval(), "second": second.eval()}
