"""A module with weights of every dtype that is packed: the same bits as with the file that is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.weights import read_index
from penstock.weights.packed_format import EARLIER_KINDS, KINDS
from tests.weights.packed_cases import earlier_code

WIDTH = 300


class EveryDtype(nn.Module):
    """Two weights of each, none a multiple of a block."""

    def __init__(self, dtypes: list[str]) -> None:
        super().__init__()
        self.dtypes = dtypes
        for dtype in dtypes:
            for number in range(2):
                weight = torch.randn(WIDTH, WIDTH) / WIDTH**0.5
                self.register_buffer(f"{dtype}_{number}", weight.to(getattr(torch, dtype)))

    def forward(self, x: Tensor) -> Tensor:
        for dtype in self.dtypes:
            for number in range(2):
                x = torch.tanh(x @ self.get_buffer(f"{dtype}_{number}").float())
        return x


def compiled(folder: Path, device: str) -> tuple[Path, Path, Tensor]:
    """The program beside its packed weights, the raw ones, and an input."""
    torch.manual_seed(0)
    x = torch.randn(3, WIDTH, device=device)
    # Triton's compiler has no code for the others on an NVIDIA GPU.
    dtypes = [dtype for dtype in KINDS if device == "cpu" or not dtype.endswith("fnuz")]
    exported = torch.export.export(EveryDtype(dtypes).eval().to(device), (x,))
    program, raw = folder / "model.pt2", folder / "raw.ptd"
    penstock.compile(penstock.apply_weight_offload(exported), program, device=device, pack=True)
    penstock.unpack(program.with_suffix(".ptd"), raw)
    return program, raw, x


def kinds_in(path: Path) -> set[int]:
    entries = read_index(path).unique_entries
    assert len(entries) == 2 * len(KINDS)
    return {entry.packing.kind for entry in entries if entry.packing is not None}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Tensor]:
    return compiled(tmp_path_factory.mktemp("program"), "cpu")


@pytest.mark.parametrize("earlier", [False, True], ids=["now", "earlier"])
def test_every_dtype_gives_the_same_bits(program: tuple[Path, Path, Tensor], tmp_path: Path, earlier: bool) -> None:
    """Also with a file that was written before there was a code of three levels."""
    path, raw, x = program
    packed = path.with_suffix(".ptd")
    if earlier:
        packed = tmp_path / "earlier.ptd"
        with earlier_code():
            penstock.pack(raw, packed)
    assert kinds_in(packed) == {*({**KINDS, **EARLIER_KINDS} if earlier else KINDS).values()}
    entries = read_index(packed).unique_entries
    with penstock.Module(path, weights=raw) as module:
        expected = module(x)
    with penstock.Module(path, weights=packed) as module:
        decoded_bytes = 0
        for budget_bytes in (module.floor_bytes, (module.floor_bytes + module.full_bytes) // 2, module.full_bytes):
            module.set_budget(budget_bytes)
            for _ in range(2):
                assert torch.equal(module(x), expected)
            decoded_bytes = max(decoded_bytes, module.last_run.bytes_decoded)
        assert decoded_bytes > sum(entry.raw_bytes for entry in entries) // 2
