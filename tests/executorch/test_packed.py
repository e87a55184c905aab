"""A .pte with packed weights, planned by Module and by the delegates: the bits of the file that is not packed."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.errors import BelowFloorError, WeightMismatchError, WeightsFileError
from penstock.executorch import merge_weights
from penstock.executorch.native import NativeModule
from penstock.weight import Weight
from penstock.weights import WeightsIndex, layout_identity, read_index, write_ptd
from penstock.weights.packing import PackedFor, pack_entries
from tests.harness import FAST, offloaded
from tests.runtime.modules import EVERYTHING

WIDTH = 256
TABLE = "table.weight"


class Tabled(nn.Module):
    """A table that is gathered from; weights of every packed dtype that ExecuTorch lowers; biases too small for it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2048, WIDTH)
        dtypes = (torch.float32, torch.bfloat16, torch.float16)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for dtype in dtypes * 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)).float())
        return x


TOKENS = torch.arange(12) * 170


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tabled") / "model.pte"
    torch.manual_seed(0)
    exported = offloaded(Tabled().eval(), (TOKENS,))
    penstock.executorch.export(exported, path, device="cpu", inductor_configs=FAST)
    # Of our own writer, with checksums, which packing needs.
    merge_weights([path.with_suffix(".ptd")], path.with_name("raw.ptd"))
    return path


@pytest.fixture(scope="module")
def expected(program: Path) -> Tensor:
    with penstock.Module(program, EVERYTHING, weights=program.with_name("raw.ptd")) as module:
        found: Tensor = module(TOKENS)
        return found


@pytest.fixture(scope="module", params=["all but the table", "all"])
def packed(request: pytest.FixtureRequest, program: Path) -> WeightsIndex:
    left = frozenset({TABLE} if request.param == "all but the table" else ())
    return pack_entries(
        read_index(program.with_name("raw.ptd")), program.with_name(f"{request.param}.ptd"), PackedFor(left)
    )


@contextmanager
def alone(program: Path, weights: Path, budget_bytes: int) -> Iterator[NativeModule]:
    """As in a process without Python: the delegates make their session, by plans in the file."""
    native = NativeModule(str(program), [str(weights)], str(budget_bytes), f"{weights} {budget_bytes}")
    try:
        native.load_method("forward")
        yield native
    finally:
        native.close()


def test_module_plans_for_packed_weights(program: Path, packed: WeightsIndex, expected: Tensor) -> None:
    if packed[TABLE].packing is not None:
        with pytest.raises(WeightsFileError, match=f"gathers from '{TABLE}', which is packed"):
            penstock.Module(program, EVERYTHING, weights=packed.path)
        return
    with penstock.Module(program, EVERYTHING, weights=packed.path) as module:
        floor_bytes, full_bytes = module.floor_bytes, module.full_bytes
        saved_bytes = 0
        for fraction in range(5):
            module.set_budget(floor_bytes + (full_bytes - floor_bytes) * fraction // 4)
            for _ in range(2):
                assert torch.equal(module(TOKENS), expected)
            saved_bytes = max(saved_bytes, module.last_run.bytes_decoded - module.last_run.bytes_streamed)
            assert module.device_memory()[0] <= module.budget_bytes
        assert saved_bytes > 0


def test_delegates_take_their_plans_with_slots(
    program: Path, packed: WeightsIndex, expected: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_POISON", "1")
    with pytest.raises(BelowFloorError) as refused, alone(program, packed.path, 1000):
        pass
    floor_bytes = refused.value.floor_bytes
    if packed[TABLE].packing is None:
        with penstock.Module(program, EVERYTHING, weights=packed.path) as module:
            assert module.floor_bytes == floor_bytes
    with pytest.raises(BelowFloorError), alone(program, packed.path, floor_bytes - 1):
        pass
    for more_bytes in (0, 100_000, 250_000, 1 << 30):
        with alone(program, packed.path, floor_bytes + more_bytes) as native:
            made = native.session()
            assert made is not None and made[1].plan_bytes <= made[1].budget_bytes <= floor_bytes + more_bytes
            for _ in range(3):
                assert torch.equal(native.execute("forward", (TOKENS,))[0], expected)


HEADERS = {
    "version": (4, b"\7\0"),
    "kind": (6, b"\7\0"),
    "raw bytes": (8, struct.pack("<Q", 1)),
    "bytes of a block": (16, struct.pack("<I", 32768)),
    "count": (20, struct.pack("<I", 2**32 - 1)),
    "no layout": (24, bytes(8)),
    "size": (32, struct.pack("<I", 2**32 - 1)),
    "smaller size": (32, struct.pack("<I", 1)),
}


@pytest.mark.parametrize("fault", HEADERS)
def test_damaged_entries_are_refused_by_the_delegate(
    program: Path, packed: WeightsIndex, tmp_path: Path, fault: str
) -> None:
    at_bytes, content = HEADERS[fault]
    whole = bytearray(packed.path.read_bytes())
    begin = packed["layers.0.weight"].offset_bytes + at_bytes
    whole[begin : begin + len(content)] = content
    (tmp_path / "damaged.ptd").write_bytes(whole)
    with (
        pytest.raises(WeightsFileError, match=r"packed weight 'layers\.0\.weight' has"),
        alone(program, tmp_path / "damaged.ptd", 1 << 30),
    ):
        pass


def test_what_is_neither_packed_nor_the_weight_is_refused(program: Path, packed: WeightsIndex, tmp_path: Path) -> None:
    whole = bytearray(packed.path.read_bytes())
    begin = packed["layers.0.weight"].offset_bytes
    whole[begin : begin + 4] = b"PSPQ"
    (tmp_path / "damaged.ptd").write_bytes(whole)
    with (
        pytest.raises(
            WeightMismatchError, match=r"does not fit the program: 'layers\.0\.weight' is \d+ bytes, needs float32\["
        ),
        alone(program, tmp_path / "damaged.ptd", 1 << 30),
    ):
        pass


@pytest.mark.parametrize("change", ["dtype", "shape"])
def test_packed_weights_of_another_model_are_refused(program: Path, tmp_path: Path, change: str) -> None:
    raw = read_index(program.with_name("raw.ptd"))
    content = raw.path.read_bytes()
    places = {entry.name: content[entry.offset_bytes :][: entry.length_bytes] for entry in raw}
    weights = [Weight(entry.name, entry.dtype, entry.shape, entry.dim_order) for entry in raw]
    number = next(i for i, weight in enumerate(weights) if weight.name == "layers.1.weight")
    dtype, shape = ("float16", (WIDTH, WIDTH)) if change == "dtype" else ("bfloat16", (WIDTH // 2, 2 * WIDTH))
    weights[number] = Weight("layers.1.weight", dtype, shape, (0, 1))
    write_ptd(tmp_path / "other.ptd", weights, lambda w: [places[w.name]], identity=layout_identity(weights, ()))
    index = pack_entries(read_index(tmp_path / "other.ptd"), tmp_path / "packed.ptd", PackedFor(frozenset({TABLE})))
    assert index["layers.1.weight"].packing is not None
    with (
        pytest.raises(WeightMismatchError, match=r"packed 'layers\.1\.weight' is .* layout, needs bfloat16\["),
        alone(program, index.path, 1 << 30),
    ):
        pass


def test_what_executorch_wrote_is_merged_first(program: Path, tmp_path: Path) -> None:
    with pytest.raises(WeightsFileError, match="written by ExecuTorch"):
        penstock.pack(program.with_suffix(".ptd"), tmp_path / "packed.ptd")
    assert not list(tmp_path.iterdir())
