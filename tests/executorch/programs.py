"""The models that are lowered for these tests, and what is done with them."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from examples.decoder import methods
from executorch.exir import ExecutorchBackendConfig, to_edge_transform_and_lower
from executorch.exir._serialize._named_data_store import NamedDataStore
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import penstock.executorch
from tests.harness import FAST, offloaded
from tests.runtime.modules import DECODER, PROMPT, Chain

WIDTH = 96
ROWS = 32
FIRST_CALLS = 5.0
TWIN_WIDTH = 64
TWIN_ROWS = 512
# ExecuTorch's own Python bindings are compiled against this torch; its C++ runtime, which ours stand on, knows none.
STOCK_PYTHON = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13), reason="executorch 1.5's bindings are for torch 2.13"
)
REPOSITORY = Path(__file__).resolve().parents[2]


class Split(nn.Module):
    """A weight that is read on both sides of an op that is left out, and state that does not start as zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("calls", torch.full((2,), FIRST_CALLS))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.softmax(self.middle(self.first(x)), -1)
        self.calls.add_(1)
        return self.last(h), self.calls.clone()


class Hazards(nn.Module):
    """What compiled code might do to a weight that it is only lent: write into it, give it away. And constants."""

    def __init__(self) -> None:
        super().__init__()
        widths = (48, 64, 64, 64, 64, 48)
        self.layers = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))
        self.table = nn.Parameter(torch.randn(48, 48))
        self.register_buffer("offset", torch.full((), 0.25))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.layers(x * 3 + 1.5) + self.offset
        rows = torch.arange(4)
        written = self.table.clone().index_put_((rows,), y)
        return y, written.sum(0), self.table, self.table.t(), x @ self.table


class Twin(nn.Module):
    """Whole numbers, and few: sums are exact in whatever order, so a compiled run is an eager one to the bit."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(TWIN_WIDTH, TWIN_WIDTH, bias=number == 0) for number in range(6))
        for number, weight in enumerate(self.parameters()):
            generator = torch.Generator().manual_seed(number)
            weight.data = torch.randint(-1, 2, weight.shape, generator=generator).float()
        self.register_buffer("calls", torch.full((4,), FIRST_CALLS))


class Wide(Twin):
    """Two inputs that must agree on a size that is nobody's: compiled code fails inside where they do not."""

    def forward(self, x: Tensor, mix: Tensor) -> tuple[Tensor, Tensor]:
        h = mix @ self.layers[1](self.layers[0](x))
        return self.layers[3](self.layers[2](h)), (x > 0).sum(-1)


class Narrow(Twin):
    """Weights of the other one's in another order, weights of its own, and state."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        h = self.layers[4](self.layers[3](x))
        return self.layers[0](self.layers[5](h)) + self.calls.sum()


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def chain() -> dict[str, ExportedProgram]:
    rows = Dim("rows", max=ROWS)  # with a highest value: ExecuTorch plans memory for it
    return {"forward": offloaded(seeded(lambda: Chain(WIDTH)), (torch.ones(3, WIDTH),), ({0: rows},))}


def split() -> dict[str, ExportedProgram]:
    return {"forward": offloaded(seeded(Split), (torch.ones(2, WIDTH),))}


def hazards() -> dict[str, ExportedProgram]:
    return {"forward": offloaded(seeded(Hazards), (torch.ones(4, 48),))}


def decoder() -> dict[str, ExportedProgram]:
    cases = methods(DECODER, prompt=PROMPT)
    return {name: offloaded(case.module, case.args, case.dynamic_shapes) for name, case in cases.items()}


def twin() -> dict[str, ExportedProgram]:
    rows = Dim("rows", min=2, max=TWIN_ROWS)
    inputs = (torch.ones(3, TWIN_WIDTH), torch.ones(3, 3))
    return {
        "wide": offloaded(Wide(), inputs, ({0: rows}, {0: rows, 1: rows})),
        "narrow": offloaded(Narrow(), (torch.ones(1, TWIN_WIDTH),)),
    }


PROGRAMS: Mapping[str, Callable[[], dict[str, ExportedProgram]]] = {
    "chain": chain,
    "split": split,
    "decoder": decoder,
    "hazards": hazards,
    "twin": twin,
}


def lower(name: str, folder: Path) -> None:
    """model.pte and model.ptd, by our own export or, for one of them, by ExecuTorch's tools and our partitioner."""
    if name == "hazards":
        lower_with_stock_tools(PROGRAMS[name]()["forward"], folder)
        return
    with recorded_data(folder / "data.json"):
        penstock.executorch.export(
            PROGRAMS[name](),
            folder / "model.pte",
            device="cpu",
            inductor_configs=FAST,
            leave=["aten::softmax"] if name == "split" else (),
        )


def lower_with_stock_tools(program: ExportedProgram, folder: Path) -> None:
    ours = penstock.executorch.CudaPartitioner(device="cpu", weight_offload_budget="1MiB", inductor_configs=FAST)
    lowered = to_edge_transform_and_lower(program, partitioner=[ours])
    stored = lowered.to_executorch(ExecutorchBackendConfig(segment_alignment=4096))
    stored.write_tensor_data_to_file(str(folder))
    (folder / "weights.ptd").rename(folder / "model.ptd")
    stored.save(str(folder / "model.pte"))


@contextmanager
def recorded_data(path: Path) -> Iterator[None]:
    """Which data a lowering keeps in memory, and what of it lies in files."""
    rows: list[tuple[str, str]] = []
    add = NamedDataStore.add_named_data

    def adding(store: NamedDataStore, key: str, data: Any, *arguments: Any, **keywords: Any) -> Any:
        rows.append((key, type(data).__name__))
        return add(store, key, data, *arguments, **keywords)

    with mock.patch.object(NamedDataStore, "add_named_data", adding):
        yield
    path.write_text(json.dumps(rows))


def random_rows(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def child(script: str, *arguments: object) -> tuple[Any, str]:
    """What a script in a process of its own put into `answer`, and its log. A crash is a failed test."""
    body = f"import json, sys\narguments = json.loads(sys.argv[1])\n{script}\nprint('answer:' + json.dumps(answer))"
    done = subprocess.run(
        [sys.executable, "-c", body, json.dumps([str(a) for a in arguments])],
        capture_output=True,
        text=True,
        errors="replace",  # ExecuTorch logs damaged names as they are
        check=False,
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY / 'src'}:{REPOSITORY}:{os.environ.get('PYTHONPATH', '')}"},
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("answer:")]
    return json.loads(line.removeprefix("answer:")), done.stderr
