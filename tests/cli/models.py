"""What `penstock export` is pointed at: functions that return a model and its arguments, and some that do not."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 96
TABLE = 32


class Small(nn.Module):
    """Weights of several pages each, an index as input, and a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TABLE, WIDTH)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6)))

    def forward(self, index: Tensor, *, scale: Tensor) -> dict[str, Tensor]:
        h = self.layers(self.table(index)) * scale
        return {"hidden": h, "sum": h.sum(-1)}


def small() -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Tensor]]:
    print("a line on stdout, which a JSON document must not be mixed with")
    torch.manual_seed(0)
    return Small(), (torch.arange(5),), {"scale": torch.ones(WIDTH)}


def pair() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return nn.Linear(4, 4), (torch.ones(2, 4),)


def exported() -> torch.export.ExportedProgram:
    return torch.export.export(nn.Linear(4, 4).eval().requires_grad_(False), (torch.ones(2, 4),))


def junk() -> Any:
    print("a line on stdout, which a JSON document must not be mixed with")
    return nn.Linear(4, 4), torch.ones(2, 4)


def broken() -> Any:
    raise ZeroDivisionError("the user's own mistake")


def leaving() -> Any:
    sys.exit(0)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if x.sum() > 0 else x


def unexportable() -> Any:
    return Branches(), (torch.ones(2, 4),)
