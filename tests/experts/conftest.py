"""One mixture, compiled once for all tests of this folder: methods "decode" and "prefill"."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import penstock
from tests.experts.routed import Routed, compiled, routed
from tests.experts.tokens import PROMPT, SHAPE, TOKENS, decoded, inputs


@pytest.fixture(scope="session")
def model() -> Routed:
    return routed(SHAPE)


@pytest.fixture(scope="session")
def path(model: Routed, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(model, tmp_path_factory.mktemp("experts") / "model.pt2", prompt=PROMPT)


@pytest.fixture(scope="session")
def wanted(path: Path, model: Routed) -> torch.Tensor:
    with penstock.Module(path, "1TiB") as module:
        assert module.plan is not None and not module.plan.banks and not module.plan.direct_weights
        got = decoded(module)
    x, ids = inputs(TOKENS)
    model.form = "batched"
    with torch.no_grad():
        torch.testing.assert_close(got, model(x, ids.transpose(0, 1)))
    return got
