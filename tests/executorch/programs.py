"""The models that are lowered for these tests, and what is done with them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from examples.decoder import methods
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import penstock.executorch
from tests.harness import FAST, offloaded
from tests.runtime.modules import DECODER, PROMPT, Chain

WIDTH = 96
ROWS = 32
REPOSITORY = Path(__file__).resolve().parents[2]


class Split(nn.Module):
    """A weight that is read on both sides of an op that is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        h = torch.softmax(self.middle(self.first(x)), -1)
        return self.last(h)


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def chain() -> dict[str, ExportedProgram]:
    rows = Dim("rows", max=ROWS)  # with a highest value: ExecuTorch plans memory for it
    return {"forward": offloaded(_seeded(lambda: Chain(WIDTH)), (torch.ones(3, WIDTH),), ({0: rows},))}


def split() -> dict[str, ExportedProgram]:
    return {"forward": offloaded(_seeded(Split), (torch.ones(2, WIDTH),))}


def decoder() -> dict[str, ExportedProgram]:
    cases = methods(DECODER, prompt=PROMPT)
    return {name: offloaded(case.module, case.args, case.dynamic_shapes) for name, case in cases.items()}


PROGRAMS: Mapping[str, Callable[[], dict[str, ExportedProgram]]] = {"chain": chain, "split": split, "decoder": decoder}
OPTIONS: Mapping[str, dict[str, Any]] = {"split": {"leave": ["aten::softmax"]}}


def lower(name: str, folder: Path) -> None:
    penstock.executorch.export(
        PROGRAMS[name](), folder / "model.pte", device="cpu", inductor_configs=FAST, **OPTIONS.get(name, {})
    )


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
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY / 'src'}:{REPOSITORY}"},
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("answer:")]
    return json.loads(line.removeprefix("answer:")), done.stderr
