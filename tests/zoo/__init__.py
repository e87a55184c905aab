"""Small models that the tests export: every builder returns one or more `Case`s, seeded, in eval mode, without grad."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn


class Case(NamedTuple):
    """What `torch.export.export` needs; a plain tuple, so `module, args, dynamic_shapes = case` works."""

    module: nn.Module
    args: tuple[torch.Tensor, ...]
    dynamic_shapes: Any = None


def freeze(module: nn.Module) -> nn.Module:
    """Eval mode and no grad, so that no graph gets autograd-only nodes."""
    return module.eval().requires_grad_(False)


def export(case: Case) -> torch.export.ExportedProgram:
    with torch.no_grad():
        return torch.export.export(case.module, case.args, dynamic_shapes=case.dynamic_shapes)
