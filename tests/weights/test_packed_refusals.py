"""What cannot be a packed entry is refused by name: its record with the index, header and table when they are read."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import WeightsFileError
from penstock.weights import WeightsIndex, read_index
from penstock.weights.packed_format import block_limits_bytes, entry_limits_bytes, table_end_bytes
from penstock.weights.packing import pack, read_blocks
from penstock.weights.tables import Layout, NamedData, Segment
from tests.weights.packed_cases import gaussian, single
from tests.weights.ptd_cases import Crafted

VALUES = 32768 * 2 + 5
LEAST_BYTES, MOST_BYTES = entry_limits_bytes(6, 2 * VALUES)


def crafted(size_bytes: int = LEAST_BYTES) -> Crafted:
    entry = {
        **{"name": "w", "aliases": [], "dtype": "bfloat16", "shape": [VALUES], "dim_order": [0], "kind": "weight"},
        **{"xxh3_64": "00112233445566aa", "packed": {"format": 3, "xxh3_64": "ffeeddccbbaa9988"}},
    }
    metadata = {"format": 3, "identity": "some identity", "entries": [entry]}
    return Crafted([Segment(0, size_bytes)], [NamedData("w", 0, None)], metadata)


@pytest.mark.parametrize("size_bytes", [LEAST_BYTES, LEAST_BYTES + 16, MOST_BYTES])
def test_what_is_changed_below_is_taken(tmp_path: Path, size_bytes: int) -> None:
    entry = read_index(crafted(size_bytes).write(tmp_path / "w.ptd"))["w"]
    assert entry.packing is not None
    assert (entry.packing.kind, entry.packing.checksum) == (6, 0xFFEEDDCCBBAA9988)
    assert (entry.raw_bytes, entry.length_bytes) == (2 * VALUES, size_bytes)


def _packed(value: Any) -> Callable[[Crafted], None]:
    return lambda made: made.entry(0).update(packed=value)


RECORDS: dict[str, tuple[Callable[[Crafted], Any], str]] = {
    "of a newer format": (lambda made: made.metadata.update(format=5), "has format 5, needs 2, 3 or 4: a newer"),
    "of an older format": (
        lambda made: made.metadata.update(format=1),
        "has format 1, needs 2, 3 or 4: penstock.",
    ),
    "packed in a file that may not": (lambda made: made.metadata.update(format=2), f"'w' has {LEAST_BYTES} bytes"),
    "not an object": (_packed(1), "entry 'w': packed has type int, needs dict"),
    "null": (_packed(None), "entry 'w': packed has type NoneType, needs dict"),
    "without a checksum": (_packed({"format": 3}), "xxh3_64 has None, needs str"),
    "with half a checksum": (_packed({"format": 3, "xxh3_64": "ff"}), "xxh3_64 has 'ff', needs 16"),
    "packed otherwise": (_packed({"format": 4, "xxh3_64": "f" * 16}), "format has 4, needs 1 or 2 or 3, which"),
    "of the other format": (
        _packed({"format": 2, "xxh3_64": "f" * 16}),
        "format has 2, needs 1 or 3, as it is bf",
    ),
    "before its time": (lambda made: made.entry(0).update(dtype="float16"), "format has 3, needs 2, as it is float16"),
    "a boolean": (_packed({"format": True, "xxh3_64": "f" * 16}), "format has True, needs int"),
    "of another dtype": (lambda made: made.entry(0).update(dtype="float64"), "dtype has 'float64', needs bfloat16 or"),
    "in another's code": (
        lambda made: made.entry(0).update(dtype="float32"),
        "format has 3, needs 1, as it is fl",
    ),
    "of the other dtype": (
        lambda made: made.entry(0).update(dtype="float32", packed={"format": 1, "xxh3_64": "f" * 16}),
        "packed float32 of shape",
    ),
    "of the earlier code": (
        _packed({"format": 1, "xxh3_64": "f" * 16}),
        f"has {LEAST_BYTES} bytes, packed bfloat16 of shape [{VALUES}] needs {entry_limits_bytes(1, 2 * VALUES)[0]} to",
    ),
    "of no dtype": (lambda made: made.entry(0).update(dtype="x"), "dtype has 'x'"),
    "a state": (lambda made: made.entry(0).update(kind="state"), "kind has 'state', needs weight"),
    "empty": (lambda made: made.entry(0).update(shape=[0]), "nothing to be packed"),
    "of too many dimensions": (lambda made: made.entry(0).update(dim_order=[1]), "has dim order"),
    "larger": (lambda made: made.entry(0).update(shape=[2 * VALUES]), "packed bfloat16 of shape"),
    "smaller": (lambda made: made.entry(0).update(shape=[VALUES // 3]), "packed bfloat16 of shape"),
    "too short": (lambda made: made.segments.__setitem__(0, Segment(0, LEAST_BYTES - 16)), f"needs {LEAST_BYTES} to"),
    "too long": (lambda made: made.segments.__setitem__(0, Segment(0, MOST_BYTES + 16)), f"to {MOST_BYTES}, a multi"),
    "no multiple": (lambda made: made.segments.__setitem__(0, Segment(0, LEAST_BYTES + 8)), "a multiple of 16"),
    "with a layout": (
        lambda made: made.named_data.__setitem__(0, NamedData("w", 0, Layout(15, (VALUES,), (0,)))),
        "penstock.json needs None",
    ),
}


@pytest.mark.parametrize("fault", RECORDS)
def test_records_that_cannot_be_packed_are_refused(tmp_path: Path, fault: str) -> None:
    change, message = RECORDS[fault]
    made = crafted()
    change(made)
    with pytest.raises(WeightsFileError, match=r"w\.ptd: ") as caught:
        read_index(made.write(tmp_path / "w.ptd"))
    assert message in str(caught.value)


def with_plans() -> Crafted:
    """The packed entry, and plans for it of 16 bytes."""
    made = crafted()
    layout = {"dtype": "uint8", "shape": [16], "dim_order": [0]}
    plans = {"name": "penstock.plans.p", "aliases": [], **layout, "kind": "plans", "xxh3_64": "00112233445566aa"}
    made.segments.append(Segment(-(-LEAST_BYTES // 4096) * 4096, 16))
    made.named_data.append(NamedData("penstock.plans.p", 1, Layout(0, (16,), (0,))))
    made.metadata.update(format=4, entries=[made.entry(0), plans])
    return made


def test_plans_are_taken(tmp_path: Path) -> None:
    assert [entry.kind for entry in read_index(with_plans().write(tmp_path / "w.ptd"))] == ["weight", "plans"]


PLANS: dict[str, tuple[Callable[[Crafted], Any], str]] = {
    "in a file that may not": (lambda made: made.metadata.update(format=3), "kind has 'plans', needs weight or state"),
    "of another name": (lambda made: made.entry(1).update(name="plans"), "name has 'plans', needs penstock.plans."),
    "of another dtype": (lambda made: made.entry(1).update(dtype="int8"), "needs uint8 of one dimension"),
    "of two dimensions": (lambda made: made.entry(1).update(shape=[4, 4], dim_order=[0, 1]), "needs uint8 of one dim"),
    "packed": (
        lambda made: made.entry(1).update(packed={"format": 3, "xxh3_64": "f" * 16}),
        "dtype has 'uint8', needs",
    ),
    "of another length": (lambda made: made.entry(1).update(shape=[17]), "needs 17"),
}


@pytest.mark.parametrize("fault", PLANS)
def test_plans_that_are_none_are_refused(tmp_path: Path, fault: str) -> None:
    change, message = PLANS[fault]
    made = with_plans()
    change(made)
    with pytest.raises(WeightsFileError, match=r"w\.ptd: ") as caught:
        read_index(made.write(tmp_path / "w.ptd"))
    assert message in str(caught.value)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[WeightsIndex, bytes]:
    folder = tmp_path_factory.mktemp("packed")
    single(folder / "model.ptd", "bfloat16", gaussian("bfloat16", VALUES))
    index = pack(folder / "model.ptd", folder / "packed.ptd")
    return index, index.path.read_bytes()


def refusal(packed: tuple[WeightsIndex, bytes], at_bytes: int, content: bytes) -> str:
    """What read_blocks says when that stands in the entry."""
    index, whole = packed
    changed = bytearray(whole)
    begin = index["w"].offset_bytes + at_bytes
    changed[begin : begin + len(content)] = content
    index.path.write_bytes(changed)
    with pytest.raises(WeightsFileError, match=r"packed\.ptd: entry 'w' ") as caught:
        read_blocks(index, index["w"])
    return str(caught.value)


HEADERS: dict[str, tuple[int, bytes, str]] = {
    "magic": (0, b"PSPQ", "has identifier b'PSPQ', needs b'PSPK'"),
    "version": (4, b"\2\0", "is packed in version 2, bfloat16 needs 3"),
    "newer version": (4, b"\4\0", "is packed in version 4, bfloat16 needs 3: a newer Penstock wrote it"),
    "kind": (6, b"\2\0", "has kind 2, needs 6"),
    "raw bytes": (8, struct.pack("<Q", 2 * VALUES - 2), f"has raw bytes {2 * VALUES - 2}, needs {2 * VALUES}"),
    "block": (16, struct.pack("<I", 32768), "has raw bytes per block 32768, needs 65536"),
    "count": (20, struct.pack("<I", 2**32 - 1), f"has block count {2**32 - 1}, needs 3"),
    "layout": (24, struct.pack("<Q", 1), "has layout checksum 0000000000000001, needs "),
}


@pytest.mark.parametrize("fault", HEADERS)
def test_a_damaged_header_is_refused_by_name(packed: tuple[WeightsIndex, bytes], fault: str) -> None:
    at_bytes, content, message = HEADERS[fault]
    assert message in refusal(packed, at_bytes, content)


def test_a_damaged_table_is_refused_by_name(packed: tuple[WeightsIndex, bytes]) -> None:
    index, whole = packed
    begin = index["w"].offset_bytes + 32
    sizes = struct.unpack_from("<3I", whole, begin)
    for block, raw_bytes in ((0, 65536), (1, 65536), (2, 10)):
        least_bytes, most_bytes = block_limits_bytes(6, raw_bytes)
        for size in (least_bytes // 16 - 1, most_bytes // 16 + 1, 0, 2**32 - 1):
            message = f"has {size * 16} bytes in block {block}, needs {least_bytes} to {most_bytes}"
            assert message in refusal(packed, 32 + 4 * block, struct.pack("<I", size))
    moved = refusal(packed, 32, struct.pack("<I", sizes[0] + 1))
    assert f"has {index['w'].length_bytes} bytes, its block table needs {index['w'].length_bytes + 16}" in moved
    assert "needs zeros there" in refusal(packed, 32 + 12, b"\0\0\0\1")
    index.path.write_bytes(whole)
    assert read_blocks(index, index["w"]).begins_bytes[-1] == sum(sizes) * 16


def test_a_cut_header_and_an_entry_that_is_not_packed(packed: tuple[WeightsIndex, bytes], tmp_path: Path) -> None:
    index, whole = packed
    index.path.write_bytes(whole[: index["w"].offset_bytes + 20])
    with pytest.raises(WeightsFileError, match=f"header and table have 20 bytes, need {table_end_bytes(3)}"):
        read_blocks(index, index["w"])
    index.path.write_bytes(whole)
    plain = single(tmp_path / "model.ptd", "bfloat16", gaussian("bfloat16", 8))
    with pytest.raises(WeightsFileError, match="entry 'w' is not packed"):
        read_blocks(plain, plain["w"])
