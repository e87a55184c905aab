"""Every inconsistency is refused, and the message names the file, the entry, what it has and what it needs."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import WeightsFileError
from penstock.weight import Weight
from penstock.weights import read_index
from penstock.weights.format import INDEX_LIMIT_BYTES, parse_header
from penstock.weights.tables import Layout, NamedData, Segment, Tables, decode_tables, encode_tables, with_header
from tests.weights.ptd_cases import EVERY_KIND, TIED, Crafted, write

Change = Callable[[Crafted], Any]


def refused(path: Path, match: str) -> None:
    with pytest.raises(WeightsFileError, match=match) as caught:
        read_index(path)
    assert str(path) in str(caught.value)


def test_the_crafted_file_is_fine_before_it_is_changed(tmp_path: Path) -> None:
    index = read_index(Crafted().write(tmp_path / "w.ptd"))
    assert [entry.name for entry in index.entries] == ["first", "second", "again"]
    assert (index.identity, index["again"].checksum) == ("some identity", 0xFFEEDDCCBBAA9988)
    crafted = Crafted()
    crafted.metadata = None
    index = read_index(crafted.write(tmp_path / "foreign.ptd"))
    assert (index.identity, index["again"].checksum) == (None, None)
    assert index["again"].alias_of == "second"


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", r"not a \.ptd file: has 0 bytes, needs at least 48"),
        (b"\0" * 47, r"has 47 bytes, needs at least 48"),
        (b"PK\x03\x04" * 20, r"not a \.ptd file: has identifier b'PK\\x03\\x04', needs b'FT01'"),
        (b"\0\0\0\0FT01" + b"\0" * 80, r"not a \.ptd file: has header identifier b'\\x00.*', needs b'FH01'"),
    ],
)
def test_something_else_is_refused(tmp_path: Path, content: bytes, match: str) -> None:
    path = tmp_path / "w.ptd"
    path.write_bytes(content)
    refused(path, match)


def test_directories_and_pipes_are_refused(tmp_path: Path) -> None:
    refused(tmp_path, "it is a folder, needs to be a file")
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "it is a named pipe, needs to be a file")
    refused(Path("/dev/zero"), "it is a device, needs to be a file")
    refused(tmp_path / "absent", "does not exist")


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.ptd"
    write(path, [*EVERY_KIND[:10], TIED])
    whole = path.read_bytes()
    for length in [*range(0, len(whole), 61), len(whole) - 1]:
        path.write_bytes(whole[:length])
        refused(path, f"has {length} bytes, .*needs")


def test_a_longer_file_is_refused_when_it_is_ours(tmp_path: Path) -> None:
    crafted = Crafted(trailing=b"\0")
    path = crafted.write(tmp_path / "w.ptd")
    size = path.stat().st_size
    refused(path, rf"has {size} bytes, the header needs {size - 1}")
    # ExecuTorch reads such a file, so one of its files is read.
    crafted.metadata = None
    assert len(read_index(crafted.write(tmp_path / "foreign.ptd")).entries) == 3


@pytest.mark.parametrize(
    ("header", "match"),
    [
        ({"flatbuffer_offset_bytes": 39}, r"puts the flatbuffer at 39, .*40 bytes"),
        (
            {"flatbuffer_size_bytes": 1 << 40},
            rf"truncated or damaged: has \d+ bytes, the index alone needs {2**40 + 48}",
        ),
        ({"flatbuffer_size_bytes": 10}, r"the index is damaged: .*needs bytes \d+ to \d+, the index has 58"),
        ({"flatbuffer_size_bytes": 2**64 - 1}, r"the index alone needs"),
        ({"segment_base_bytes": 1 << 40}, r"truncated or damaged: has \d+ bytes, the header needs"),
        ({"segment_base_bytes": 64}, r"the segments start at 64, inside the index, which needs \d+ bytes"),
        ({"segment_data_bytes": 1 << 40}, r"truncated or damaged: has \d+ bytes, the header needs"),
        (
            {"segment_data_bytes": 10},
            r"entry 'first' is out of range: needs segment data up to byte 24, the file has 10",
        ),
        ({"segment_data_bytes": 0}, r"entry 'first' is out of range: needs segment data up to byte 24, the file has 0"),
    ],
)
def test_header_numbers_that_disagree_are_refused(tmp_path: Path, header: dict[str, int], match: str) -> None:
    refused(Crafted(header=header).write(tmp_path / "w.ptd"), match)


def test_a_short_header_is_refused(tmp_path: Path) -> None:
    path = Crafted().write(tmp_path / "w.ptd")
    content = bytearray(path.read_bytes())
    struct.pack_into("<I", content, 12, 39)
    path.write_bytes(content)
    refused(path, "the header has 39 bytes, needs at least 40")


def test_an_index_too_large_to_hold_is_refused_unread(tmp_path: Path) -> None:
    path = Crafted(header={"flatbuffer_size_bytes": INDEX_LIMIT_BYTES}).write(tmp_path / "w.ptd")
    os.truncate(path, INDEX_LIMIT_BYTES * 4)
    refused(path, f"the index has {INDEX_LIMIT_BYTES + 48} bytes, needs to stay within {INDEX_LIMIT_BYTES}")


def test_metadata_too_large_to_hold_is_refused_unread(tmp_path: Path) -> None:
    crafted = Crafted(header={"segment_data_bytes": INDEX_LIMIT_BYTES * 2})
    crafted.metadata = None
    crafted.segments = [Segment(0, INDEX_LIMIT_BYTES + 1)]
    crafted.named_data = [NamedData("penstock.json", 0, None)]
    path = crafted.write(tmp_path / "w.ptd")
    os.truncate(path, INDEX_LIMIT_BYTES * 2 + 4096)
    refused(path, rf"'penstock\.json' has {INDEX_LIMIT_BYTES + 1} bytes, needs to stay within {INDEX_LIMIT_BYTES}")


def item(number: int, **changes: Any) -> Change:
    return lambda crafted: crafted.named_data.__setitem__(number, replace(crafted.named_data[number], **changes))


def segment(number: int, offset_bytes: int, size_bytes: int) -> Change:
    return lambda crafted: crafted.segments.__setitem__(number, Segment(offset_bytes, size_bytes))


def foreign(change: Change) -> Change:
    """The same change, to a file that ExecuTorch could have written."""

    def both(crafted: Crafted) -> None:
        change(crafted)
        crafted.metadata = None

    return both


TABLE_FAULTS: dict[str, tuple[Change, str]] = {
    "segment number": (item(2, segment_index=9), "entry 'again' has segment number 9, the file has 3 segments"),
    "out of range": (segment(1, 1 << 40, 8), r"entry 'second' is out of range: needs .* byte 1099511627784"),
    "offset overflow": (segment(1, 2**64 - 4, 8), "entry 'second' is out of range"),
    "overlap": (
        segment(1, 0, 8),
        "entry 'second' and entry 'first' overlap: the second has segment data offset 0, needs at least 8",
    ),
    "overlap by a byte": (
        foreign(segment(1, 23, 8)),
        "entry 'first' and entry 'second' overlap.* 23, needs at least 24",
    ),
    "unnamed overlap": (
        foreign(lambda crafted: crafted.segments.append(Segment(4100, 9))),
        "entry 'second' and segment 2 overlap",
    ),
    "misaligned": (segment(1, 4096 + 64, 8), "entry 'second' is misaligned: has offset 8256, needs a multiple of 4096"),
    "length": (segment(0, 0, 20), r"entry 'first' has 20 bytes, float32 of shape \[2, 3\] needs 24"),
    "foreign length": (foreign(segment(0, 0, 20)), r"entry 'first' has 20 bytes, float32 of shape \[2, 3\] needs 24"),
    "foreign dtype": (
        foreign(item(0, layout=Layout(12, (2, 3), (0, 1)))),
        "entry 'first' has scalar type 12, needs one of 0, 1, 2",
    ),
    "negative dtype": (foreign(item(0, layout=Layout(-1, (2, 3), (0, 1)))), "entry 'first' has scalar type -1, needs"),
    "dim order repeats": (
        foreign(item(0, layout=Layout(6, (2, 3), (1, 1)))),
        r"entry 'first' has dim order \[1, 1\], needs a permutation of the 2 dimensions",
    ),
    "dim order too short": (foreign(item(0, layout=Layout(6, (2, 3), (0,)))), r"'first' has dim order \[0\], needs"),
    "dim order too high": (foreign(item(0, layout=Layout(6, (2, 3), (0, 2)))), r"'first' has dim order \[0, 2\]"),
    "negative size": (
        foreign(item(0, layout=Layout(6, (-2, -3), (0, 1)))),
        "entry 'first' has size -2 in dimension 0, needs 0 to 2147483647",
    ),
    "rank": (
        foreign(item(0, layout=Layout(6, (1,) * 300, (0,) * 300))),
        r"named_data\[0\]\.tensor_layout\.sizes has 300 items, needs at most 256",
    ),
    "duplicate key": (item(2, key="first"), "has more than one entry 'first', needs every name once"),
    "two metadata": (item(2, key="penstock.json"), r"has more than one entry 'penstock\.json'"),
}


@pytest.mark.parametrize("fault", TABLE_FAULTS)
def test_tables_that_cannot_be_are_refused(tmp_path: Path, fault: str) -> None:
    change, match = TABLE_FAULTS[fault]
    crafted = Crafted()
    change(crafted)
    refused(crafted.write(tmp_path / "w.ptd"), match)


def test_an_empty_segment_shares_no_byte_wherever_it_lies(tmp_path: Path) -> None:
    crafted = Crafted()
    crafted.metadata = None
    crafted.segments.append(Segment(8, 0))
    crafted.named_data.append(NamedData("empty", 2, Layout(6, (0,), (0,))))
    index = read_index(crafted.write(tmp_path / "w.ptd"))
    assert index["first"].offset_bytes < index["empty"].offset_bytes < index["first"].offset_bytes + 24


def entry(number: int, **changes: Any) -> Change:
    return lambda crafted: crafted.entry(number).update(changes)


def top(**changes: Any) -> Change:
    return lambda crafted: crafted.metadata.update(changes)


def raw(content: bytes) -> Change:
    return lambda crafted: setattr(crafted, "metadata_bytes", content)


def share_a_segment(crafted: Crafted) -> None:
    item(0, segment_index=1, layout=crafted.named_data[1].layout)(crafted)
    entry(0, dtype="int64", shape=[1], dim_order=[0])(crafted)


def test_segments_of_one_shape_cannot_change_places(tmp_path: Path) -> None:
    """Whoever swaps two offsets, or two names, gives each weight the other's bytes; every other check would pass."""
    path = tmp_path / "w.ptd"
    weights = [Weight(name, "float32", (64, 16), (0, 1)) for name in ("left", "right")]
    write(path, weights)
    whole = path.read_bytes()
    header = parse_header(path, whole[:48], len(whole))
    tables = decode_tables(path, whole[: header.flatbuffer_end_bytes])
    for change in (
        lambda t: replace(t, segments=(t.segments[1], t.segments[0], *t.segments[2:])),
        lambda t: replace(
            t, named_data=tuple(replace(n, segment_index=(1, 0, 2)[n.segment_index]) for n in t.named_data)
        ),
    ):
        flatbuffer = encode_tables(change(tables))
        head = with_header(flatbuffer, replace(header, flatbuffer_size_bytes=len(flatbuffer)))
        path.write_bytes(head + whole[len(head) :])
        refused(path, "something was changed")


METADATA_FAULTS: dict[str, tuple[Change, str]] = {
    "not JSON": (raw(b'{"format": 1'), r"penstock\.json is (|damaged.*)not JSON"),
    "not UTF-8": (raw(b'{"identity": "\xff"}'), r"penstock\.json is (|damaged.*)not JSON"),
    "empty": (raw(b""), r"penstock\.json is (|damaged.*)not JSON"),
    "absurd nesting": (raw(b"[" * 100_000), r"penstock\.json is (|damaged.*)not JSON"),
    "absurd number": (raw(b'{"format": ' + b"9" * 10_000 + b"}"), r"penstock\.json is (|damaged.*)not JSON"),
    "nested identity": (raw(b'{"format":2,"entries":[],"identity":' + b"[" * 900 + b"]" * 900 + b"}"), "penstock.json"),
    "a list": (raw(b"[]"), r"penstock\.json has type list, needs dict"),
    "format": (top(format=1), r"penstock\.json has format 1, needs 2"),
    "format missing": (lambda crafted: crafted.metadata.pop("format"), "format has None, needs int"),
    "format true": (top(format=True), "format has True, needs int"),
    "identity number": (top(identity=5), "identity has 5, needs str"),
    "identity null": (top(identity=None), "identity has None, needs str"),
    "identity list": (top(identity=["a"]), "identity has list, needs str"),
    "identity surrogate": (top(identity="\ud800"), r"identity has '\\ud800', needs a string that UTF-8 can hold"),
    "entries": (top(entries={}), "entries has dict, needs list"),
    "entry": (top(entries=[5]), r"penstock\.json entry 0 has type int, needs dict"),
    "name": (entry(0, name=None), "entry 0: name has None, needs str"),
    "kind": (entry(0, kind="other"), "entry 'first': kind has 'other', needs weight or state"),
    "checksum type": (entry(0, xxh3_64=17), "entry 'first': xxh3_64 has 17, needs str"),
    "checksum length": (entry(0, xxh3_64="0" * 15), "xxh3_64 has '0{15}', needs 16 hexadecimal digits"),
    "checksum digits": (entry(0, xxh3_64="0x" + "0" * 14), "needs 16 hexadecimal digits"),
    "shape type": (entry(0, shape=[2, "3"]), "entry 'first': shape has '3', needs a list of int"),
    "shape float": (entry(0, shape=[2.0, 3]), "entry 'first': shape has 2.0, needs a list of int"),
    "dim order type": (entry(0, dim_order=[True, 0]), "entry 'first': dim_order has True, needs a list of int"),
    "aliases type": (entry(1, aliases="again"), "entry 'second': aliases has 'again', needs list"),
    "unknown dtype": (entry(0, dtype="float4"), "entry 'first' has dtype 'float4', needs one of bool, uint8"),
    "another dtype": (entry(0, dtype="int32"), r"entry 'first' has Layout\(scalar_type=6.*needs Layout\(scalar_type=3"),
    "dtype without layout": (
        entry(1, dtype="complex64"),
        r"entry 'second' has Layout\(.*penstock\.json needs None",
    ),
    "layout missing": (item(0, layout=None), r"entry 'first' has None, penstock\.json needs Layout\(scalar_type=6"),
    "another shape": (entry(0, shape=[3, 2]), r"sizes=\(2, 3\).*needs .*sizes=\(3, 2\)"),
    "a larger shape": (entry(0, shape=[4, 3]), r"entry 'first' has 24 bytes, float32 of shape \[4, 3\] needs 48"),
    "another dim order": (entry(0, dim_order=[0, 1]), r"dim_order=\(1, 0\).*needs .*dim_order=\(0, 1\)"),
    "no permutation": (entry(0, dim_order=[1, 1]), r"entry 'first' has dim order \[1, 1\], needs a permutation"),
    "huge dimension": (entry(0, shape=[2**31, 0]), "has size 2147483648 in dimension 0, needs 0 to 2147483647"),
    "record missing": (
        lambda crafted: crafted.metadata["entries"].pop(0),
        r"entry 'first' has no record in penstock\.json, needs one",
    ),
    "alias missing": (entry(1, aliases=[]), "entry 'again' has no record"),
    "record unknown": (entry(0, name="ghost"), r"penstock\.json has 'ghost', needs names that the table has"),
    "record twice": (entry(0, aliases=["second"]), "entry 'second' has segment number 1.* needs 0, that of 'first'"),
    "alias twice": (entry(1, aliases=["again", "again"]), "has 'again', needs names that the table has, each once"),
    "alias elsewhere": (item(2, segment_index=0), "entry 'again' has segment number 0.* needs 1, that of 'second'"),
    "one segment, two records": (
        share_a_segment,
        "entry 'second' has segment number 1, which is that of 'first'",
    ),
    "in the metadata": (
        item(0, segment_index=2),
        r"entry 'first' has segment number 2, which is that of 'penstock\.json'",
    ),
}


@pytest.mark.parametrize("fault", METADATA_FAULTS)
def test_metadata_that_disagrees_is_refused(tmp_path: Path, fault: str) -> None:
    change, match = METADATA_FAULTS[fault]
    crafted = Crafted()
    change(crafted)
    refused(crafted.write(tmp_path / "w.ptd"), match)


def flatbuffer_with(change: Callable[[bytearray], None]) -> bytes:
    content = bytearray(encode_tables(Tables((Segment(0, 0),), (NamedData("a key", 0, Layout(6, (0,), (0,))),))))
    change(content)
    header = struct.pack("<4sIQQQQ8x", b"FH01", 40, 48, len(content), 4096, 0)
    root = struct.unpack_from("<I", content)[0] + 48
    return (struct.pack("<I4s", root, b"FT01") + header + content[8:]).ljust(4096, b"\0")


def clear_slot(content: bytearray, slot: int) -> None:
    """Makes a field of the root table absent."""
    root = struct.unpack_from("<I", content)[0]
    vtable = root - struct.unpack_from("<i", content, root)[0]
    struct.pack_into("<H", content, vtable + 4 + 2 * slot, 0)


def set_version(content: bytearray) -> None:
    """Lets the version's slot show the root table's vector offset, which is a number above zero."""
    root = struct.unpack_from("<I", content)[0]
    vtable = root - struct.unpack_from("<i", content, root)[0]
    content[vtable + 4 : vtable + 6] = content[vtable + 6 : vtable + 8]


def break_key(content: bytearray) -> None:
    at = content.index(b"a key")
    content[at] = 0xFF


def lengthen_key(content: bytearray) -> None:
    struct.pack_into("<I", content, content.index(b"a key") - 4, 2**32 - 1)


def field_that_points_to(content: bytearray, target: int) -> int:
    (field,) = (at for at in range(0, target, 4) if at + struct.unpack_from("<I", content, at)[0] == target)
    return field


def point_key_at_itself(content: bytearray) -> None:
    struct.pack_into("<I", content, field_that_points_to(content, content.index(b"a key") - 4), 0)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda content: clear_slot(content, 1), "the index is damaged: segments is absent, needs to be a vector"),
        (lambda content: clear_slot(content, 2), "the index is damaged: named_data is absent, needs to be a vector"),
        (set_version, r"has FlatTensor version \d+, needs at most 0"),
        (break_key, r"named_data\[0\]\.key is not UTF-8 at byte 0 of 5"),
        (point_key_at_itself, r"named_data\[0\]\.key has offset 0, needs an offset that points forward"),
        (lengthen_key, r"named_data\[0\]\.key needs bytes \d+ to \d+, the index has \d+"),
        (lambda content: struct.pack_into("<I", content, 0, 2**31), "the root table needs bytes"),
        (lambda content: struct.pack_into("<I", content, 0, 2**32 - 49), "the root table needs bytes"),
    ],
)
def test_a_damaged_flatbuffer_is_refused(tmp_path: Path, change: Callable[[bytearray], None], match: str) -> None:
    path = tmp_path / "w.ptd"
    path.write_bytes(flatbuffer_with(lambda content: None))
    assert read_index(path)["a key"].length_bytes == 0
    path.write_bytes(flatbuffer_with(change))
    refused(path, match)


def test_overlapping_keys_cannot_multiply_the_index(tmp_path: Path) -> None:
    """A long key that many entries point into would give gigabytes of distinct keys from a small file."""
    # The long key holds something that reads as a string of its own: its length, then its text.
    inner_bytes = 0x010101
    inner = struct.pack("<I", inner_bytes).decode() + "b" * inner_bytes
    items = (NamedData("a" * 64 + inner, 0, None), NamedData("short", 0, None))
    content = bytearray(encode_tables(Tables((Segment(0, 0),), items)))
    string = content.index(b"short") - 4
    field = field_that_points_to(content, string)
    struct.pack_into("<I", content, field, content.index(inner.encode()) - field)
    path = tmp_path / "w.ptd"
    path.write_bytes(flatbuffer_with(lambda original: original.__setitem__(slice(None), content)).ljust(70_000, b"\0"))
    refused(path, rf"the index is damaged: named_data\[1\]\.key has {inner_bytes} bytes, needs at most \d+")
