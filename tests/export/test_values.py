"""Where bytes come from: tensors of every kind in bounded pieces, and checkpoints, well-formed or not."""

from __future__ import annotations

import itertools
import json
import math
import random
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import CheckpointError
from penstock.export import safetensors_file, values
from penstock.export.checkpoint import Checkpoint, mismatches
from penstock.export.values import equal_values, has_value, is_zero, tensor_pieces
from penstock.layout import contiguous_strides
from penstock.weight import ITEM_BYTES, State, Weight

REAL_SIGN_BYTES = {"complex32": 2, "complex64": 4, "complex128": 8}


def joined(pieces: Iterable[memoryview]) -> bytes:
    return b"".join(bytes(piece) for piece in pieces)


def random_bytes(dtype: str, count: int, seed: int = 0) -> bytes:
    """Any bits at all, NaNs with payloads among them; only a bool has no others than 0 and 1."""
    raw = random.Random(seed).randbytes(count * ITEM_BYTES[dtype])
    return bytes(b & 1 for b in raw) if dtype == "bool" else raw


def from_bytes(dtype: str, raw: bytes) -> torch.Tensor:
    tensor = torch.empty(len(raw) // ITEM_BYTES[dtype], dtype=getattr(torch, dtype))
    as_bytes = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    as_bytes.copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
    return tensor


def expected_bytes(
    dtype: str, raw: bytes, size: tuple[int, ...], stride: tuple[int, ...], offset: int, order: tuple[int, ...]
) -> bytes:
    """What numpy makes of the same strides over elements that are nothing but bytes."""
    elements = np.frombuffer(raw, dtype=f"V{ITEM_BYTES[dtype]}")[offset:]
    strides = [s * ITEM_BYTES[dtype] for s in stride]
    shown = np.lib.stride_tricks.as_strided(elements, size, strides)
    return shown.transpose(order).tobytes()


# ------------------------------------------------------------------------------------------------------------ tensors

# Size, stride, storage offset, dim order.
LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[int, ...], int, tuple[int, ...]]] = {
    "contiguous": ((4, 6), (6, 1), 0, (0, 1)),
    "in the order of its memory": ((6, 4), (1, 6), 0, (1, 0)),
    "transposed": ((6, 4), (1, 6), 0, (0, 1)),
    "channels last": ((2, 3, 2, 2), (12, 1, 6, 3), 0, (0, 2, 3, 1)),
    "channels last, row-major": ((2, 3, 2, 2), (12, 1, 6, 3), 0, (0, 1, 2, 3)),
    "inside a storage": ((3, 2), (2, 1), 7, (0, 1)),
    "every other column": ((4, 3), (6, 2), 1, (0, 1)),
    "expanded": ((5, 3), (0, 1), 2, (0, 1)),
    "overlapping": ((4, 4), (1, 1), 0, (0, 1)),
    "scalar": ((), (), 3, ()),
    "one element": ((1, 1), (17, 99), 3, (1, 0)),
    "empty": ((3, 0, 2), (1, 1, 1), 0, (2, 0, 1)),
}


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", ITEM_BYTES)
@pytest.mark.parametrize("piece_bytes", [16, 40, 16 << 20])
def test_every_dtype_in_every_layout(dtype: str, piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "PIECE_BYTES", piece_bytes)
    raw = random_bytes(dtype, 24)
    for layout, (size, stride, offset, order) in LAYOUTS.items():
        tensor = from_bytes(dtype, raw).as_strided(size, stride, offset)
        pieces = []
        for piece in tensor_pieces(tensor, order):
            assert 0 < piece.nbytes <= max(piece_bytes, ITEM_BYTES[dtype])
            pieces.append(bytes(piece))  # a piece is good until the next one is asked for
        assert b"".join(pieces) == expected_bytes(dtype, raw, size, stride, offset, order), layout


@st.composite
def strided(draw: st.DrawFn) -> tuple[str, tuple[int, ...], tuple[int, ...], int, tuple[int, ...]]:
    dtype = draw(st.sampled_from(["uint8", "bfloat16", "float32", "complex128"]))
    size = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    stride = tuple(draw(st.lists(st.integers(0, 40), min_size=len(size), max_size=len(size))))
    return dtype, size, stride, draw(st.integers(0, 9)), tuple(draw(st.permutations(range(len(size)))))


@given(strided(), st.integers(1, 100))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_strides_in_pieces_of_any_size(
    monkeypatch: pytest.MonkeyPatch,
    case: tuple[str, tuple[int, ...], tuple[int, ...], int, tuple[int, ...]],
    piece_bytes: int,
) -> None:
    dtype, size, stride, offset, order = case
    monkeypatch.setattr(values, "PIECE_BYTES", piece_bytes)
    raw = random_bytes(dtype, 9 + 4 * 4 * 40 + 1)
    tensor = from_bytes(dtype, raw).as_strided(size, stride, offset)
    largest, pieces = 0, []
    for piece in tensor_pieces(tensor, order):
        largest = max(largest, piece.nbytes)
        pieces.append(bytes(piece))
    assert b"".join(pieces) == expected_bytes(dtype, raw, size, stride, offset, order)
    assert largest <= max(piece_bytes, ITEM_BYTES[dtype])


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", REAL_SIGN_BYTES)
@pytest.mark.parametrize("piece_bytes", [16, 16 << 20])
def test_conjugated_and_negated_views_are_spelled_out(
    dtype: str, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(values, "PIECE_BYTES", piece_bytes)
    half = REAL_SIGN_BYTES[dtype]
    numbers = np.frombuffer(random_bytes(dtype, 20), dtype=np.uint8).copy().reshape(20, 2, half)
    numbers[:, :, -1] &= 0x3F  # finite: arithmetic on a NaN need not keep its bits
    tensor = from_bytes(dtype, numbers.tobytes()).reshape(4, 5)
    flipped = numbers.copy()
    flipped[:, 1, -1] ^= 0x80
    assert tensor.conj().is_conj()
    assert joined(tensor_pieces(tensor.conj(), (0, 1))) == flipped.tobytes()
    assert joined(tensor_pieces(tensor.conj(), (1, 0))) == flipped.reshape(4, 5, -1).swapaxes(0, 1).tobytes()
    imaginary = tensor.conj().imag
    assert imaginary.is_neg()
    assert joined(tensor_pieces(imaginary, (0, 1))) == np.ascontiguousarray(flipped[:, 1]).tobytes()
    assert joined(tensor_pieces(tensor.imag, (0, 1))) == np.ascontiguousarray(numbers[:, 1]).tobytes()


def test_a_contiguous_tensor_is_not_copied_however_large() -> None:
    parameter = torch.nn.Parameter(torch.arange(5 << 20, dtype=torch.float64))  # 40 MiB, with a gradient
    sizes, address = [], parameter.data_ptr()
    for piece in tensor_pieces(parameter, (0,)):
        assert np.frombuffer(piece, dtype=np.uint8).ctypes.data == address
        sizes.append(piece.nbytes)
        address += piece.nbytes
    assert sizes == [16 << 20, 16 << 20, 8 << 20]


@pytest.mark.parametrize(
    ("size", "dtype", "prepare"),
    [
        ((3000, 3001), torch.float32, torch.Tensor.t),  # many small rows
        ((2, 5 << 20), torch.float32, torch.Tensor.t),  # rows of one element each
        ((5 << 20, 2), torch.float32, torch.Tensor.t),  # two rows that are too large themselves
        ((2, 3, 1200, 1300), torch.float32, lambda t: t.to(memory_format=torch.channels_last)),
        ((3 << 20, 3), torch.complex64, torch.Tensor.conj),
        ((40 << 20,), torch.uint8, lambda t: t[:1].expand(40 << 20)),
        ((80 << 20,), torch.uint8, lambda t: t[::2]),
    ],
)
def test_other_tensors_are_copied_a_slab_at_a_time(
    size: tuple[int, ...], dtype: torch.dtype, prepare: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    tensor = prepare(torch.arange(math.prod(size), dtype=torch.int32).to(dtype).reshape(size))
    count = tensor.numel() * tensor.element_size()
    assert count > 2 * values.PIECE_BYTES
    slabs = [slab.numel() * slab.element_size() for slab in values._slabs(tensor)]
    assert max(slabs) <= values.PIECE_BYTES
    assert sum(slabs) == count
    assert len(slabs) <= 3 * (count // values.PIECE_BYTES + 1)  # small, but not needlessly so
    whole = tensor.resolve_conj().contiguous()
    assert joined(tensor_pieces(tensor, range(tensor.dim()))) == joined(tensor_pieces(whole, range(tensor.dim())))


def test_has_value() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    assert has_value(torch.zeros(2))
    assert has_value(torch.nn.Parameter(torch.zeros(0)))
    assert not has_value(torch.zeros(2, device="meta"))
    with FakeTensorMode():
        assert not has_value(torch.zeros(2))


# --------------------------------------------------------------------------------------------------------- comparisons


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_zero_is_every_byte_zero(dtype: str) -> None:
    raw = bytes(12 * ITEM_BYTES[dtype])
    assert is_zero(from_bytes(dtype, raw).reshape(3, 4))
    assert is_zero(from_bytes(dtype, raw)[:0])
    for place in (0, len(raw) // 2, len(raw) - 1):
        changed = raw[:place] + b"\1" + raw[place + 1 :]
        tensor = from_bytes(dtype, changed).reshape(3, 4)
        assert not is_zero(tensor)
        assert not is_zero(tensor.t())


def test_what_equals_zero_is_not_always_zero() -> None:
    assert not is_zero(torch.tensor([0.0, -0.0]))
    assert not is_zero(torch.tensor([0.0, float("nan")]))
    assert not is_zero(torch.zeros(2, dtype=torch.complex64).conj())  # 0 - 0j
    hidden = torch.ones(4, 2)
    hidden[:, 0] = 0
    assert is_zero(hidden[:, 0])
    assert not is_zero(hidden[:, 1])
    late = torch.zeros((16 << 20) + 1, dtype=torch.uint8)
    assert is_zero(late)
    late[-1] = 1
    assert not is_zero(late)


def test_equal_values_are_equal_bytes_whatever_the_strides() -> None:
    a = torch.tensor([[0.0, 1.0, float("nan")], [2.0, -0.0, 4.0]])
    assert equal_values(a, a.clone())
    assert equal_values(a, a.t().contiguous().t())
    assert equal_values(torch.zeros(0, 3), torch.ones(0, 3))
    assert equal_values(torch.tensor(2.5), torch.tensor(2.5))
    assert not equal_values(a, a + 0)  # -0.0 + 0 is 0.0
    assert not equal_values(torch.tensor(2.5), torch.tensor(2.25))


def test_equal_values_of_large_tensors_that_are_cut_differently() -> None:
    # The one is read as it lies, the others in slabs of whole rows, which end elsewhere.
    plain = torch.arange(9 << 20, dtype=torch.int32).to(torch.complex64).reshape(3 << 20, 3)
    for other in (plain.conj().resolve_conj().conj(), plain.t().contiguous().t()):
        assert not (other.is_contiguous() and not other.is_conj())
        assert equal_values(plain + 0, other) == equal_values(other, plain + 0)
        assert equal_values(other, other.resolve_conj().contiguous())
    changed = plain.t().contiguous().t()
    changed[-1, -1] = 7
    assert not equal_values(plain, changed)
    assert not equal_values(changed, plain)


# --------------------------------------------------------------------------------------------------- checkpoints, read

safetensors_torch = pytest.importorskip("safetensors.torch")

SAFETENSORS_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}


def craft(path: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    """A safetensors file put together by hand. `header` is bytes, or what is to be written as JSON."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def entry(dtype: str = "F32", shape: Any = (2,), begin: Any = 0, end: Any = 8) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def stored(checkpoint: Checkpoint, name: str, order: Iterable[int] | None = None) -> bytes:
    rank = len(checkpoint.layout(name)[1])
    return joined(checkpoint.pieces(name, tuple(range(rank) if order is None else order)))


def raw_of(tensor: torch.Tensor) -> bytes:
    return joined(tensor_pieces(tensor, range(tensor.dim())))


def some_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "matrix": torch.randn(3, 5),
        "half": torch.randn(7).to(torch.bfloat16),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "empty": torch.empty(2, 0, 3),
        "ünïcode / name": torch.tensor([True, False, True]),
        "bytes": torch.arange(5, dtype=torch.uint8),
    }


def test_the_library_loads_what_we_read(tmp_path: Path) -> None:
    tensors = some_tensors()
    safetensors_torch.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    theirs = safetensors_torch.load_file(tmp_path / "model.safetensors")
    ours = Checkpoint(str(tmp_path / "model.safetensors"))
    assert theirs.keys() == tensors.keys()
    for name, tensor in theirs.items():
        assert name in ours
        assert ours.layout(name) == (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        assert stored(ours, name) == raw_of(tensor) == raw_of(tensors[name])
    assert "other" not in ours


def test_every_dtype_that_the_library_knows_is_known() -> None:
    known = {name: str(dtype).removeprefix("torch.") for name, dtype in safetensors_torch._TYPES.items()}
    assert known.items() <= SAFETENSORS_DTYPES.items()
    assert safetensors_file.DTYPES == SAFETENSORS_DTYPES


@pytest.mark.parametrize("name", SAFETENSORS_DTYPES)
def test_every_dtype_from_a_file(tmp_path: Path, name: str) -> None:
    dtype = SAFETENSORS_DTYPES[name]
    raw = random_bytes(dtype, 24)
    path = craft(tmp_path / "model.safetensors", {"w": entry(name, (2, 3, 4), 0, len(raw))}, raw)
    checkpoint = Checkpoint(path)
    assert checkpoint.layout("w") == (dtype, (2, 3, 4))
    assert stored(checkpoint, "w") == raw
    for order in itertools.permutations(range(3)):
        assert stored(checkpoint, "w", order) == expected_bytes(dtype, raw, (2, 3, 4), (12, 4, 1), 0, order)
    if name in safetensors_torch._TYPES:
        theirs = safetensors_torch.load_file(path)["w"]
        assert theirs.dtype == getattr(torch, dtype)
        assert raw_of(theirs) == raw


def test_large_tensors_come_in_pieces_from_a_file(tmp_path: Path) -> None:
    tensor = torch.arange(9 << 20, dtype=torch.int32).reshape(3 << 10, 3 << 10)  # 36 MiB
    safetensors_torch.save_file({"w": tensor}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    for order, whole in (((0, 1), tensor), ((1, 0), tensor.t())):
        sizes, parts = [], []
        for piece in checkpoint.pieces("w", order):
            sizes.append(piece.nbytes)
            parts.append(bytes(piece))
        assert len(sizes) > 1
        assert max(sizes) <= values.PIECE_BYTES
        assert b"".join(parts) == raw_of(whole)


@pytest.mark.parametrize("shift", range(1, 9))
@pytest.mark.parametrize("pad", [0, 1, 4096, 70001])
def test_offsets_that_are_aligned_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shift: int, pad: int
) -> None:
    """Weights with another dim order are read through a mapping, which starts on a page and asks for alignment."""

    def aligned_pieces(tensor: torch.Tensor, order: Any) -> Iterator[memoryview]:
        assert tensor.data_ptr() % tensor.element_size() == 0  # else it depends on the machine whether it can be read
        return tensor_pieces(tensor, order)

    monkeypatch.setattr(safetensors_file, "tensor_pieces", aligned_pieces)
    raw = random_bytes("complex64", 60)
    start = pad + shift
    header = {"pad": entry("U8", (start,), 0, start), "w": entry("C64", (3, 4, 5), start, start + 480)}
    path = craft(tmp_path / "model.safetensors", header, bytes(start) + raw)
    checkpoint = Checkpoint(path)
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        assert stored(checkpoint, "w", order) == expected_bytes("complex64", raw, (3, 4, 5), (20, 5, 1), 0, order)


def test_channels_last_weights_from_a_file(tmp_path: Path) -> None:
    conv = torch.randn(8, 3, 5, 7).to(memory_format=torch.channels_last)
    safetensors_torch.save_file({"bias": torch.randn(3), "conv": conv.contiguous()}, tmp_path / "model.safetensors")
    order = (0, 2, 3, 1)
    assert stored(Checkpoint(tmp_path), "conv", order) == joined(tensor_pieces(conv, order))
    assert stored(Checkpoint({"conv": conv}), "conv", order) == joined(tensor_pieces(conv, order))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_whatever_the_default_device_is(tmp_path: Path, device: str) -> None:
    tensor = torch.randn(3, 4)
    safetensors_torch.save_file({"w": tensor}, tmp_path / "model.safetensors")
    with torch.device(device):
        for order in ((0, 1), (1, 0)):
            assert stored(Checkpoint(tmp_path), "w", order) == joined(tensor_pieces(tensor, order))
        assert is_zero(torch.zeros(3, device="cpu"))


def sharded(folder: Path, tensors: dict[str, torch.Tensor], shards: int = 2) -> Path:
    """As Hugging Face writes them; gives the index."""
    names = sorted(tensors)
    placed = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in names[number::shards]}
        safetensors_torch.save_file(part, folder / file)
        placed |= dict.fromkeys(part, file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": placed}))
    return index


def test_shards(tmp_path: Path) -> None:
    tensors = some_tensors()
    index = sharded(tmp_path, tensors, shards=3)
    for source in (tmp_path, str(tmp_path), index, [tmp_path], (str(index),)):
        checkpoint = Checkpoint(source)
        for name, tensor in tensors.items():
            assert stored(checkpoint, name) == raw_of(tensor)
    index.unlink()  # a folder of files without an index is taken as a whole
    checkpoint = Checkpoint(tmp_path)
    assert all(stored(checkpoint, name) == raw_of(tensor) for name, tensor in tensors.items())


def test_an_index_leaves_out_what_it_does_not_name(tmp_path: Path) -> None:
    index = sharded(tmp_path, some_tensors())
    safetensors_torch.save_file({"extra": torch.ones(2)}, tmp_path / "other.safetensors")
    assert "extra" not in Checkpoint(tmp_path)
    assert "extra" in Checkpoint([index, tmp_path / "other.safetensors"])


def test_later_sources_win(tmp_path: Path) -> None:
    files = []
    for number in range(2):
        files.append(tmp_path / f"{number}.safetensors")
        safetensors_torch.save_file({"a": torch.full((2,), float(number)), f"only{number}": torch.ones(1)}, files[-1])
    tensors = {"a": torch.full((2,), 9.0), "given": torch.ones(1)}
    for sources, winner in (
        ([files[0], files[1]], 1.0),
        ([files[1], files[0]], 0.0),
        ([files[0], tensors], 9.0),
        ([tensors, files[0]], 0.0),
        ([tensors, files[0], files[1], tensors], 9.0),
        ([files[0], {"a": torch.full((2,), 3.0)}, tensors, {"a": torch.full((2,), 5.0)}], 5.0),
    ):
        checkpoint = Checkpoint(sources)
        assert stored(checkpoint, "a") == raw_of(torch.full((2,), winner))
        for source in sources:
            assert ("given" in checkpoint) or source is not tensors
            assert (f"only{files.index(source)}" in checkpoint) if source in files else True
    # A weight of one dtype in the earlier source and of another in the later one has the later one's.
    assert Checkpoint([files[0], {"a": torch.ones(3, 3).half()}]).layout("a") == ("float16", (3, 3))


def test_later_sources_win_under_any_name_of_a_tied_weight() -> None:
    first = {"embed": torch.zeros(2)}
    later = {"head": torch.ones(2)}
    assert Checkpoint([first, later]).find(("embed", "head")) == "head"
    assert Checkpoint([later, first]).find(("embed", "head")) == "embed"
    assert Checkpoint([first]).find(("embed", "head")) == "embed"
    assert Checkpoint([later]).find(("embed", "head")) == "head"
    assert Checkpoint([later]).find(("embed",)) is None


TIED = Weight("embed", "float32", (2, 3), (0, 1), ("head",))


def test_one_source_that_holds_a_tied_weight_twice(tmp_path: Path) -> None:
    same, other = torch.arange(6.0).reshape(2, 3), torch.ones(2, 3)
    assert mismatches([TIED], frozenset(), Checkpoint({"embed": same, "head": same.clone()})) == []
    safetensors_torch.save_file({"embed": same, "head": other}, tmp_path / "untied.safetensors")
    for source in (tmp_path / "untied.safetensors", {"embed": same, "head": other}):
        (problem,) = mismatches([TIED], frozenset(), Checkpoint(source))
        assert problem == "head: differs from embed, to which the program ties it"
    (problem,) = mismatches([TIED], frozenset(), Checkpoint({"embed": same, "head": torch.ones(3, 2)}))
    assert "head: differs from embed" in problem
    # Whoever says which of them it is, is heard.
    chosen = Checkpoint([tmp_path / "untied.safetensors", {"head": other}])
    assert mismatches([TIED], frozenset(), chosen) == []
    assert chosen.find(TIED.names) == "head"


def test_every_mismatch_is_listed_at_once() -> None:
    wanted: list[Weight | State] = [
        Weight("fits", "float32", (2, 3), (1, 0)),
        Weight("lost", "float32", (2,), (0,)),
        Weight("tied", "float32", (2,), (0,), ("again",)),
        Weight("shape", "float32", (2, 3), (0, 1)),
        Weight("dtype", "bfloat16", (2,), (0,)),
        Weight("both", "int8", (4,), (0,)),
        Weight("optional", "float32", (2,), (0,)),
        State("cache", "float32", (2,), (0,), "stored"),
        State("empty", "float32", (2,), (0,), "zeros"),
        Weight("optional but wrong", "float32", (2,), (0,)),
    ]
    checkpoint = Checkpoint(
        {
            "fits": torch.zeros(2, 3),
            "shape": torch.zeros(3, 2),
            "dtype": torch.zeros(2),
            "both": torch.zeros(5, dtype=torch.uint8),
            "optional but wrong": torch.zeros(1),
            "unknown": torch.zeros(1),
        }
    )
    optional = frozenset({"optional", "empty", "optional but wrong"})
    assert mismatches(wanted, optional, checkpoint) == [
        "lost: missing",
        "tied / again: missing",
        "shape: has shape [3, 2], needs [2, 3]",
        "dtype: has dtype float32, needs bfloat16",
        "both: has shape [5], needs [4]",
        "both: has dtype uint8, needs int8",
        "cache: missing",
        "optional but wrong: has shape [1], needs [2]",
    ]


# ------------------------------------------------------------------------------------------------ checkpoints, refused

DATA = bytes(range(8))
TWICE = f'{{"w": {json.dumps(entry())}, "w": {json.dumps(entry(begin=8, end=16))}}}'.encode()
BAD_FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no bytes": (lambda p: p.write_bytes(b""), "would have 0 bytes"),
    "a cut length": (lambda p: p.write_bytes(b"\x05\0\0"), "would have 5 bytes"),
    "a huge header": (lambda p: craft(p, {}, length=2**63), "would have 9223372036854775808 bytes"),
    "a header longer than the file": (lambda p: craft(p, b"{}", length=3), "would have 3 bytes"),
    "a header above the limit": (lambda p: sparse_file(p, 100_000_001), "would have 100000001 bytes"),
    "a cut header": (lambda p: p.write_bytes(craft(p, {"w": entry()}, DATA).read_bytes()[:20]), "would have"),
    "an empty header": (lambda p: craft(p, b""), "Expecting value"),
    "no JSON": (lambda p: craft(p, b"{nonsense}"), "Expecting property name"),
    "no text": (lambda p: craft(p, b'{"\xff\xfe": 1}'), "codec can't decode"),
    "nested JSON": (lambda p: craft(p, b"[" * 100_000), "recursion"),
    "nested entry": (lambda p: craft(p, b'{"w":' + b"[" * 900 + b"]" * 900 + b"}"), "'w' has data_offsets None"),
    "a list": (lambda p: craft(p, [1]), "not a table"),
    "a number": (lambda p: craft(p, 7), "not a table"),
    "an entry that is a list": (lambda p: craft(p, {"w": [1, 2]}), "'w' has data_offsets None"),
    "an entry that is null": (lambda p: craft(p, {"w": None}), "'w' has data_offsets None"),
    "an empty entry": (lambda p: craft(p, {"w": {}}), "'w' has data_offsets None"),
    "no offsets": (lambda p: craft(p, {"w": {"dtype": "F32", "shape": [2]}}, DATA), "'w' has data_offsets None"),
    "no shape": (lambda p: craft(p, {"w": {"dtype": "F32", "data_offsets": [0, 8]}}, DATA), "'w' has shape None"),
    "no dtype": (lambda p: craft(p, {"w": {"shape": [2], "data_offsets": [0, 8]}}, DATA), "'w' has dtype None"),
    "a dtype that is a list": (lambda p: craft(p, {"w": {**entry(), "dtype": ["F32"]}}, DATA), "'w' has dtype"),
    "offsets that are no list": (lambda p: craft(p, {"w": {**entry(), "data_offsets": 8}}, DATA), "data_offsets 8,"),
    "one offset": (lambda p: craft(p, {"w": {**entry(), "data_offsets": [8]}}, DATA), r"data_offsets \[8\],"),
    "three offsets": (lambda p: craft(p, {"w": {**entry(), "data_offsets": [0, 4, 8]}}, DATA), "data_offsets"),
    "negative offsets": (lambda p: craft(p, {"w": entry(begin=-4, end=4)}, DATA), r"data_offsets \[-4, 4\]"),
    "offsets backwards": (lambda p: craft(p, {"w": entry(begin=8, end=0)}, DATA), r"data_offsets \[8, 0\]"),
    "offsets of halves": (lambda p: craft(p, {"w": entry(end=8.0)}, DATA), "data_offsets"),
    "an infinite offset": (lambda p: craft(p, {"w": entry(end=math.inf)}, DATA), "data_offsets"),
    "offsets in words": (lambda p: craft(p, {"w": entry(end="8")}, DATA), "data_offsets"),
    "offsets that are true": (lambda p: craft(p, {"w": entry("U8", (1,), False, True)}, DATA), "data_offsets"),
    "nested offsets": (lambda p: craft(p, {"w": entry(begin=[[[0]]])}, DATA), "data_offsets list"),
    "a negative shape": (lambda p: craft(p, {"w": entry(shape=(-1, -2))}, DATA), r"shape \[-1, -2\]"),
    "a shape of halves": (lambda p: craft(p, {"w": entry(shape=(2.5,))}, DATA), "shape"),
    "an infinite shape": (lambda p: craft(p, {"w": entry(shape=(math.inf,))}, DATA), "shape"),
    "a shape in words": (lambda p: craft(p, {"w": {**entry(), "shape": "2"}}, DATA), "shape '2'"),
    "a number of absurd length": (lambda p: craft(p, b'{"w": ' + b"9" * 5000 + b"}"), "integer string"),
    "too few bytes for the shape": (lambda p: craft(p, {"w": entry(shape=(3,))}, DATA), "'w' has 8 bytes .* needs 12"),
    "too many bytes for the shape": (lambda p: craft(p, {"w": entry(shape=())}, DATA), "'w' has 8 bytes .* needs 4"),
    "no data": (lambda p: craft(p, {"w": entry()}), "'w' ends at byte .* truncated"),
    "cut data": (lambda p: craft(p, {"w": entry()}, DATA[:-1]), "'w' ends at byte .* truncated"),
    "offsets far out": (lambda p: craft(p, {"w": entry(begin=2**62, end=2**62 + 8)}, DATA), "'w' starts at byte"),
    "too much data": (lambda p: craft(p, {"w": entry()}, DATA + b"x"), "the last tensor ends at byte .* damaged"),
    "data of nothing": (lambda p: craft(p, {}, DATA), "the last tensor ends at byte"),
    "a gap": (
        lambda p: craft(p, {"v": entry(end=8), "w": entry(begin=12, end=20)}, bytes(20)),
        "'w' starts at byte .* damaged",
    ),
    "an overlap": (
        lambda p: craft(p, {"v": entry(end=8), "w": entry(begin=4, end=12)}, bytes(12)),
        "'w' starts at byte .* damaged",
    ),
    "the same bytes twice": (lambda p: craft(p, {"v": entry(), "w": entry()}, DATA), "starts at byte"),
    "a name twice": (
        lambda p: craft(p, TWICE, bytes(16)),
        "starts at byte",
    ),
    "another kind of file": (lambda p: p.write_bytes(b"PK\x03\x04" + bytes(200)), "would have"),
    "an unknown dtype of nowhere": (lambda p: craft(p, {"w": entry("Q7", (2,), -1, 8)}, DATA), r"offsets \[-1, 8\]"),
    "an unknown dtype that is cut": (lambda p: craft(p, {"w": entry("Q7", (2,), 0, 9)}, DATA), "truncated"),
}


def sparse_file(path: Path, header_bytes: int) -> None:
    with path.open("wb") as file:
        file.write(struct.pack("<Q", header_bytes))
        file.truncate(8 + header_bytes)


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files_are_refused_by_name(tmp_path: Path, case: str) -> None:
    make, message = BAD_FILES[case]
    path = tmp_path / "bad.safetensors"
    make(path)
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint(path)
    assert str(path) in str(caught.value)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(tmp_path)


def test_the_library_refuses_what_we_refuse(tmp_path: Path) -> None:
    """Strictness is the library's own: no file that loads with it is turned away."""
    for case, (make, _) in BAD_FILES.items():
        path = tmp_path / "bad.safetensors"
        make(path)
        if case == "a name twice":  # JSON leaves open what that means
            continue
        with pytest.raises(Exception):  # noqa: B017  it has more than one class of its own
            safetensors_torch.load_file(path)


def test_a_dtype_nobody_knows_matters_only_where_it_is_needed(tmp_path: Path) -> None:
    header = {"odd": entry("F4", (4,), 0, 2), "w": entry("F32", (2,), 2, 10)}
    checkpoint = Checkpoint(craft(tmp_path / "model.safetensors", header, bytes(2) + DATA))
    assert stored(checkpoint, "w") == DATA
    assert mismatches([Weight("w", "float32", (2,), (0,))], frozenset(), checkpoint) == []
    assert mismatches([Weight("odd", "float32", (4,), (0,))], frozenset(), checkpoint) == [
        "odd: has dtype F4, needs float32"
    ]


def write_index(folder: Path, content: Any, name: str = "model.safetensors.index.json") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a checkpoint index"),
        (b"nonsense", "is not a checkpoint index"),
        (b"\xff\xfe\xff", "is not a checkpoint index"),
        (b"[" * 100_000, "recursion"),
        ([], "not a table"),
        ({}, "needs a weight_map"),
        ({"weight_map": None}, "needs a weight_map"),
        ({"weight_map": ["a"]}, "needs a weight_map"),
        ({"weight_map": {"a": 1}}, "needs a weight_map"),
        ({"weight_map": {"a": ["0.safetensors"]}}, "needs a weight_map"),
        ({"weight_map": {"a": "0.safetensors", "b": "1.safetensors", "c": "2.safetensors"}}, "1.safetensors, 2.saf"),
        ({"weight_map": {"a": "."}}, r"names files that are not there: \."),
        ({"weight_map": {"a": "x\0y"}}, "names files that are not there"),
        ({"weight_map": {"a": "x" * 5000}}, "cannot be read"),
        ({"weight_map": {"a": "0.safetensors", "z": "0.safetensors", "y": "0.safetensors"}}, "'y' in 0.*'z' in 0"),
        ({"weight_map": {"a": "bad.txt"}}, "bad.txt is not a safetensors file"),
    ],
)
def test_a_bad_index_is_refused(tmp_path: Path, content: Any, message: str) -> None:
    safetensors_torch.save_file({"a": torch.ones(2)}, tmp_path / "0.safetensors")
    (tmp_path / "bad.txt").write_text("something else altogether")
    index = write_index(tmp_path, content)
    for source in (index, tmp_path):
        with pytest.raises(CheckpointError, match=message):
            Checkpoint(source)


def test_bad_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no \.safetensors file"):
        Checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    with pytest.raises(CheckpointError, match=f"{tmp_path} has no .safetensors file .other formats are not read"):
        Checkpoint(tmp_path)
    for name in ("0.safetensors", "1.safetensors"):
        safetensors_torch.save_file({"a": torch.ones(2)}, tmp_path / name)
    with pytest.raises(CheckpointError, match=r"'a' is in 0\.safetensors and in 1\.safetensors"):
        Checkpoint(tmp_path)
    for name in ("one", "two"):
        index = write_index(tmp_path, {"weight_map": {"a": "0.safetensors"}}, f"{name}.safetensors.index.json")
    with pytest.raises(CheckpointError, match="has 2 index files; name the one to use"):
        Checkpoint(tmp_path)
    assert "a" in Checkpoint(index)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "folder.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="cannot be read"):
        Checkpoint(tmp_path / "sub")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("/nowhere/model.safetensors", "/nowhere/model.safetensors does not exist"),
        ("", "has no .safetensors file"),
        ("x" * 5000, "cannot be read"),
        ("a\0b", "does not exist"),
        ("/dev/null", "has no .safetensors file"),
        ([], "the list of sources is empty"),
        ((), "the list of sources is empty"),
        (5, "expected a safetensors file.*got int"),
        (b"model.safetensors", "got bytes"),
        (torch.ones(2), "got Tensor"),
        ([{"a": torch.ones(2)}, None], "got NoneType"),
        ([[]], "got list"),
        ({"a": 1.5}, "'a' must be a tensor with values, got float"),
        ({"a": np.ones(2)}, "'a' must be a tensor with values, got ndarray"),
        ({"a": torch.ones(2, device="meta")}, "'a' must be a tensor with values, got one on meta"),
        ({"a": torch.eye(2).to_sparse()}, "'a' must be a strided tensor"),
    ],
)
def test_what_is_no_source_is_refused(
    source: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(source)


def test_a_tensor_subclass_is_refused() -> None:
    class Wrapped(torch.Tensor):
        pass

    with pytest.raises(CheckpointError, match="'a' must be a plain tensor, got Wrapped"):
        Checkpoint({"a": torch.ones(2).as_subclass(Wrapped)})
    for plain in (torch.nn.Parameter(torch.ones(2)), torch.nn.Buffer(torch.ones(2))):
        assert stored(Checkpoint({"a": plain}), "a") == raw_of(torch.ones(2))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_file_that_changes_after_it_was_opened(tmp_path: Path, order: tuple[int, int]) -> None:
    path = tmp_path / "model.safetensors"
    safetensors_torch.save_file({"w": torch.ones(30, 40)}, path)
    checkpoint = Checkpoint(path)
    assert len(stored(checkpoint, "w", order)) == 4800
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="'w' ends early; the file changed"):
        stored(checkpoint, "w", order)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"'w' cannot be read: .*No such file"):
        stored(checkpoint, "w", order)


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_file, "PIECE_BYTES", 100)
    path = tmp_path / "model.safetensors"
    safetensors_torch.save_file({"w": torch.ones(100)}, path)
    pieces = Checkpoint(path).pieces("w", (0,))
    next(pieces)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(CheckpointError, match="'w' ends early; the file changed"):
        list(pieces)


# ----------------------------------------------------------------------------------------------------------- arbitrary


def ours(raw: bytes, path: Path) -> dict[str, tuple[tuple[int, ...], bytes]] | None:
    """What we read, or None where we refuse. Anything but a CheckpointError is a failure of the test."""
    path.write_bytes(raw)
    try:
        checkpoint = Checkpoint(path)
        return {name: (checkpoint.layout(name)[1], stored(checkpoint, name)) for name in checkpoint._tensors}
    except CheckpointError as error:
        refusal = str(error)
    assert str(path) in refusal
    return None


def theirs(raw: bytes) -> dict[str, tuple[tuple[int, ...], bytes]] | None:
    from safetensors import SafetensorError, deserialize

    try:
        return {name: (tuple(found["shape"]), bytes(found["data"])) for name, found in deserialize(raw)}
    except SafetensorError:
        return None


FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

WHOLE = struct.pack("<Q", 128) + (
    json.dumps({"a": entry("F32", (1, 2), 0, 8), "b": entry("U8", (3,), 8, 11)}).encode().ljust(128) + bytes(range(11))
)


def test_the_seed_of_the_fuzz_is_a_good_file(tmp_path: Path) -> None:
    read = ours(WHOLE, tmp_path / "fuzz.safetensors")
    assert read == theirs(WHOLE) == {"a": ((1, 2), bytes(range(8))), "b": ((3,), bytes(range(8, 11)))}


@given(st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), min_size=1, max_size=3))
@FUZZ
def test_changed_bytes(tmp_path: Path, changes: list[tuple[int, int]]) -> None:
    raw = bytearray(WHOLE)
    for place, byte in changes:
        raw[place] = byte
    read = ours(bytes(raw), tmp_path / "fuzz.safetensors")
    expected = theirs(bytes(raw))
    if expected is not None:
        assert read == expected


@given(st.integers(0, len(WHOLE) - 1), st.binary(max_size=4))
@FUZZ
def test_cut_and_spliced_files(tmp_path: Path, place: int, tail: bytes) -> None:
    raw = WHOLE[:place] + tail
    read = ours(raw, tmp_path / "fuzz.safetensors")
    assert read == theirs(raw)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
SIZES = st.lists(st.integers(0, 4), max_size=3)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "U8", "I64"]),
        "shape": SIZES,
        "data_offsets": st.lists(st.integers(-1, 24), min_size=2, max_size=2),
    }
)


@given(st.dictionaries(st.sampled_from("abc"), ENTRIES, max_size=3), st.binary(max_size=24))
@FUZZ
def test_any_offsets_are_judged_as_the_library_does(tmp_path: Path, header: dict[str, Any], data: bytes) -> None:
    raw = craft(tmp_path / "crafted", header, data).read_bytes()
    assert ours(raw, tmp_path / "fuzz.safetensors") == theirs(raw)


@given(st.lists(st.tuples(st.sampled_from(["F32", "BF16", "U8", "F64"]), SIZES), max_size=5), st.randoms())
@FUZZ
def test_any_good_file_is_read_as_the_library_does(
    tmp_path: Path, kinds: list[tuple[str, list[int]]], rng: random.Random
) -> None:
    header, data = {}, b""
    for number, (dtype, shape) in enumerate(kinds):
        count = math.prod(shape) * ITEM_BYTES[SAFETENSORS_DTYPES[dtype]]
        header[f"t{number}"] = entry(dtype, shape, len(data), len(data) + count)
        data += rng.randbytes(count)
    shuffled = dict(rng.sample(sorted(header.items()), len(header)))
    raw = craft(tmp_path / "crafted", shuffled, data).read_bytes()
    read = ours(raw, tmp_path / "fuzz.safetensors")
    assert read is not None
    assert read == theirs(raw)


@given(JSON, st.binary(max_size=16))
@FUZZ
def test_any_json_as_header(tmp_path: Path, header: Any, data: bytes) -> None:
    raw = craft(tmp_path / "crafted", header, data).read_bytes()
    read = ours(raw, tmp_path / "fuzz.safetensors")
    assert read is None or (read == {} and not data and set(header) <= {"__metadata__"})


@given(st.fixed_dictionaries({"w": st.fixed_dictionaries({"dtype": JSON, "shape": JSON, "data_offsets": JSON})}))
@FUZZ
def test_any_json_in_an_entry(tmp_path: Path, header: Any) -> None:
    raw = craft(tmp_path / "crafted", header, DATA).read_bytes()
    read = ours(raw, tmp_path / "fuzz.safetensors")
    assert read is None or read["w"][1] == DATA


@given(JSON)
@FUZZ
def test_any_json_as_index(tmp_path: Path, content: Any) -> None:
    index = write_index(tmp_path, {"weight_map": content})
    if content == {}:
        assert not Checkpoint(index)._tensors
        return
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(index)
    assert str(index) in str(caught.value)


def test_strides_of_the_reference(tmp_path: Path) -> None:
    """The helper of these tests against torch itself."""
    tensor = torch.arange(24, dtype=torch.int16).reshape(2, 3, 4)
    raw = tensor.numpy().tobytes()
    expected = expected_bytes("int16", raw, (2, 3, 4), contiguous_strides((2, 3, 4)), 0, (2, 0, 1))
    assert expected == tensor.permute(2, 0, 1).contiguous().numpy().tobytes()
