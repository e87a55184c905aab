"""What is run of the compiled mixture of tests/experts/conftest.py: one token after the other, with a made routing."""

from __future__ import annotations

import torch

import penstock
from tests.experts.routed import Shape, routing

SHAPE = Shape()
TOKENS = 200
PROMPT = 24
ALL_BYTES = SHAPE.layers * (SHAPE.experts * SHAPE.expert_bytes + 4 * SHAPE.hidden**2)


def inputs(tokens: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, SHAPE.hidden, generator=generator)
    return x, routing(SHAPE, tokens, stay=0.5, seed=seed)


def decoded(module: penstock.Module, tokens: int = TOKENS) -> torch.Tensor:
    x, ids = inputs(TOKENS)
    return torch.cat([module.run_method("decode", x[t : t + 1], ids[t].unsqueeze(1)) for t in range(tokens)])
