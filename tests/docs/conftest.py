from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import penstock
import penstock.export.compile as compile_file
from tests.docs.shared_program import RememberedCompiles, SharedProgram, small
from tests.harness import FAST


@pytest.fixture(scope="session")
def compiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RememberedCompiles]:
    """While a page's blocks run, programs are compiled once each."""
    with pytest.MonkeyPatch.context() as patch, torch._inductor.config.patch(FAST):
        remembered = RememberedCompiles(compile_file.compile_method, tmp_path_factory.mktemp("code"))
        patch.setattr(compile_file, "compile_method", remembered)
        yield remembered


@pytest.fixture(scope="session")
def shared_program(compiles: RememberedCompiles, tmp_path_factory: pytest.TempPathFactory) -> SharedProgram:
    model, args = small()
    path = tmp_path_factory.mktemp("shared") / "model.pt2"
    penstock.compile(penstock.apply_weight_offload(torch.export.export(model, args)), path, device="cpu")
    return SharedProgram(model, args, path)
