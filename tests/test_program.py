"""The offload metadata of a program file: every value round-trips, and damage is a PackageError and nothing else."""

from __future__ import annotations

import copy
import io
import json
import re
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import PackageError
from penstock.program import (
    FORMAT_VERSION,
    ConstantSpec,
    IndexRange,
    Method,
    Program,
    Signature,
    Temporary,
    TensorSpec,
    program_from_json,
    program_to_json,
    read_program,
)
from penstock.schedule import Access, Schedule, Step
from penstock.weight import State, Weight


def a_program() -> Program:
    """Every kind of value that metadata can hold."""
    signature = Signature(
        inputs=(
            TensorSpec("x", "int64", ("s0", 4), (4, 1), (IndexRange(-1, 9, "w", 2, 5, ((0, None, 1), (-2, 3, 2))),)),
            ConstantSpec("flag", True),
            ConstantSpec("none", None),
            ConstantSpec("text", 'quo"te ü \n'),
            ConstantSpec("number", float("inf")),
            ConstantSpec("big", 2**70),
        ),
        outputs=(ConstantSpec("", -0.5), TensorSpec("y", "bfloat16", (), ())),
        in_spec="[1, {}]",
        out_spec="[1, {}]",
        symbols={"s0": (2, None), "s1": (0, 2**40)},
    )
    accesses = (Access(7, "w"), Access(3, "w", True), Access(4, "w", gathered=True), Access(5, "w", linear=True))
    schedule = Schedule("forward", accesses, (Step("k", (7,)), Step("l", (7, 3)), Step("m", (4, 5))))
    weight = Weight("w", "float8_e4m3fn", (3, 0, 5), (2, 0, 1), ("ü", "b"))
    method = Method("forward", schedule, signature, ("cache",), 5, None, (Temporary("buf", "k", 12, ("w",)),))
    state = State("cache", "int8", (2, 3), (1, 0), "stored")
    return Program((method,), (weight,), (state,), "identity", 30, None, ("unused",), "cuda", {"torch": "2"})


def test_every_kind_of_metadata_round_trips() -> None:
    program = a_program()
    assert program_from_json(program_to_json(program)) == program


@pytest.mark.parametrize("version", [0, 1, 2, 99, None, "3", [3]])
def test_another_format_version_is_refused_by_number(version: Any) -> None:
    table = {**json.loads(program_to_json(a_program())), "format_version": version}
    wanted = f"has format version {version}; this release reads version {FORMAT_VERSION}"
    with pytest.raises(PackageError, match=re.escape(wanted)):
        program_from_json(json.dumps(table))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in nested JSON, containers included."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


TABLE = json.loads(program_to_json(a_program()))


@pytest.mark.parametrize("path", [p for p in places(TABLE) if isinstance(p[-1], str)], ids=str)
def test_metadata_that_lacks_something(path: tuple[Any, ...]) -> None:
    table = copy.deepcopy(TABLE)
    inner = table
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    if path[-2:-1] in (("built_with",), ("symbols",)):  # tables that hold whatever there is
        assert program_from_json(json.dumps(table)) != a_program()
        return
    with pytest.raises(PackageError, match="damaged"):
        program_from_json(json.dumps(table))


@given(
    st.sampled_from(sorted(places(TABLE), key=str)),
    st.sampled_from([None, True, -1, 1.5, "x", [], {}, [[]], [None], {"a": 1}]),
)
@settings(max_examples=300, deadline=None)
def test_metadata_with_something_else_in_a_place(path: tuple[Any, ...], value: Any) -> None:
    table = copy.deepcopy(TABLE)
    inner = table
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    try:
        found = program_from_json(json.dumps(table))
    except PackageError as error:
        refusal = str(error)
    else:
        assert isinstance(found, Program)
        return
    assert "damaged" in refusal or path == ("format_version",)


@pytest.mark.parametrize("text", ["", "null", "[]", "{}", "7", '"x"', "{nonsense", "[" * 100_000])
def test_metadata_that_is_something_else(text: str) -> None:
    with pytest.raises(PackageError, match="damaged"):
        program_from_json(text)


def pack(metadata: str | bytes, name: str = "archive/extra/penstock.json") -> bytes:
    """As torch packs: nothing is compressed."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data/aotinductor/forward/wrapper.cpp", "code " * 50)
        archive.writestr(name, metadata)
        archive.writestr("archive/version", "1")
    return buffer.getvalue()


ARCHIVE = pack(program_to_json(a_program()))


def with_fields(*, flags: int = 0, method: int = 0) -> bytes:
    """The archive with other flags, or another method of compression, for its metadata: what torch never writes."""
    raw = bytearray(ARCHIVE)
    name = b"archive/extra/penstock.json"
    local, central = raw.index(name) - 30, raw.rindex(name) - 46
    assert (raw[local : local + 4], raw[central : central + 4]) == (b"PK\x03\x04", b"PK\x01\x02")
    for place in (local + 6, central + 8):
        raw[place : place + 4] = struct.pack("<HH", flags, method)
    return bytes(raw)


def test_a_program_is_read_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    path.write_bytes(ARCHIVE)
    assert read_program(path) == read_program(str(path)) == a_program()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a .pt2 archive, or is damaged"),
        (b"not an archive", "is not a .pt2 archive, or is damaged"),
        (bytes(5000), "is not a .pt2 archive, or is damaged"),
        (ARCHIVE[: len(ARCHIVE) // 2], "is not a .pt2 archive, or is damaged"),
        (ARCHIVE[:-30], "is not a .pt2 archive, or is damaged"),
        (with_fields(flags=1), "damaged: File 'archive/extra/penstock.json' is encrypted"),
        (with_fields(method=99), "damaged: That compression method is not supported"),
        (with_fields(method=8), "damaged: Error -3 while decompressing"),
        (pack(b"\xff\xfe"), "is not a .pt2 archive, or is damaged"),
        (pack("{}", "archive/extra/other.json"), "is no weightless program: it has no penstock.json"),
        (pack("{}", "penstock.json"), "is no weightless program: it has no penstock.json"),
        (pack("nonsense"), "the offload metadata is damaged"),
        (pack('{"format_version": 7}'), "has format version 7"),
    ],
)
def test_files_that_are_no_programs(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "model.pt2"
    path.write_bytes(content)
    with pytest.raises(PackageError, match=re.escape(message)) as caught:
        read_program(path)
    assert str(path) in str(caught.value)


def test_files_that_are_no_files(tmp_path: Path) -> None:
    with pytest.raises(PackageError, match=r"model\.pt2 does not exist"):
        read_program(tmp_path / "model.pt2")
    with pytest.raises(PackageError, match="cannot be read"):
        read_program(tmp_path)


@given(st.lists(st.tuples(st.integers(0, len(ARCHIVE) - 1), st.integers(0, 255)), min_size=1, max_size=3))
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_archives(tmp_path: Path, changes: list[tuple[int, int]]) -> None:
    """The archive's own checksum is over the metadata: either they are whole or they are refused."""
    raw = bytearray(ARCHIVE)
    for place, byte in changes:
        raw[place] = byte
    path = tmp_path / "model.pt2"
    path.write_bytes(raw)
    try:
        found = read_program(path)
    except PackageError as error:
        refusal = str(error)
    else:
        assert found == a_program()
        return
    assert str(path) in refusal
