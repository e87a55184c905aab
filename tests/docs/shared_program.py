"""One small model, and one compiled program of it, for all pages."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.export.method import CompiledMethod

WIDTH = 64


class Small(nn.Module):
    """Enough weights to stream; one is tied, one is not row-major, and one is a buffer that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6)))
        self.middle[0].weight = nn.Parameter(torch.randn(WIDTH, WIDTH).t() / WIDTH**0.5)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("inv_freq", torch.arange(1.0, WIDTH + 1) / WIDTH, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x * self.inv_freq)))


@dataclasses.dataclass(frozen=True)
class SharedProgram:
    model: Small
    args: tuple[Tensor, ...]
    path: Path

    def named_tensors(self) -> dict[str, Tensor]:
        return {
            **dict(self.model.named_parameters(remove_duplicate=False)),
            **dict(self.model.named_buffers(remove_duplicate=False)),
        }


def small() -> tuple[Small, tuple[Tensor, ...]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Small().eval().requires_grad_(False), (torch.randn(3, WIDTH),)


class RememberedCompiles:
    """Compiles a program once. The same program a second time gets the code of the first; all else is done again.

    The pages show a dozen calls of penstock.compile with other arguments around the same program.
    """

    def __init__(self, compile_method: Callable[..., CompiledMethod], kept: Path) -> None:
        self._compile_method = compile_method
        self._kept = kept
        self._known: dict[tuple[str, bool, str], CompiledMethod] = {}
        self.count = 0

    def __call__(self, name: str, ep: Any, device: torch.device, *others: Any, split_linear: bool) -> CompiledMethod:
        key = str(device), split_linear, ep.graph_module.print_readable(print_output=False)
        if key not in self._known:
            self.count += 1
            made = self._compile_method(name, ep, device, *others, split_linear=split_linear)
            folder = self._kept / str(self.count)
            folder.mkdir(parents=True)
            files = tuple(str(shutil.copy(file, folder)) for file in made.files)
            self._known[key] = dataclasses.replace(made, files=files)
        known = self._known[key]
        schedule = dataclasses.replace(known.method.schedule, method=name)
        return dataclasses.replace(known, method=dataclasses.replace(known.method, name=name, schedule=schedule))
