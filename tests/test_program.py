"""The offload metadata of a program file: every value round-trips, and damage is a PackageError and nothing else."""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import io
import json
import os
import re
import socket
import struct
import tracemalloc
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.archive import CodeFile
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
from penstock.sealed_text import sealed
from penstock.weight import State, Weight
from penstock.weights import layout_identity

Tree = tuple[str | None, str | None, list[Any]]


def nesting(tree: Tree) -> str:
    """As torch's pytrees dump a spec, from (type, context, children)."""

    def row(tree: Tree) -> dict[str, Any]:
        return {"type": tree[0], "context": tree[1], "children_spec": [row(child) for child in tree[2]]}

    return json.dumps([1, row(tree)])


def positional(count: int) -> Tree:
    return ("builtins.tuple", "null", [(None, None, [])] * count)


def resealed(table: Any) -> str:
    """The description with the seal that its new bytes need: what somebody who means it would write."""
    return sealed(json.dumps({key: value for key, value in table.items() if key != "seal"})).decode()


def a_program() -> Program:
    """Every kind of value that metadata can hold."""
    signature = Signature(
        inputs=(
            TensorSpec("x", "int64", ("s0", 4), (4, 1), (IndexRange(-1, 9, "w", 2, 5, ((0, None, 1), (-2, 3, 2))),)),
            ConstantSpec("flag", True),
            ConstantSpec("none", None),
            ConstantSpec("text", 'quo"te ü \n'),
            ConstantSpec("number", float("-inf")),
            ConstantSpec("big", 2**70),
        ),
        outputs=(ConstantSpec("", -0.5), TensorSpec("y", "bfloat16", (), ())),
        in_spec=nesting(("builtins.tuple", "null", [positional(6), ("builtins.dict", "[]", [])])),
        out_spec=nesting(positional(2)),
        symbols={"s0": (2, None), "s1": (0, 2**40)},
        written=("x",),
    )
    accesses = (Access(7, "w"), Access(3, "w", True), Access(4, "w", gathered=True), Access(5, "w", linear=True))
    schedule = Schedule("forward", accesses, (Step("k", (7,)), Step("l", (7, 3)), Step("m", (4, 5))))
    weight = Weight("w", "float8_e4m3fn", (3, 0, 5), (2, 0, 1), ("ü", "b"))
    method = Method("forward", schedule, signature, ("cache", "other"), 5, None, (Temporary("buf", "k", 12, ("w",)),))
    states = (State("cache", "int8", (2, 3), (1, 0), "stored"), State("other", "int8", (2, 3), (1, 0), "zeros"))
    identity = layout_identity([weight], states)
    return Program((method,), (weight,), states, identity, 30, None, ("unused",), "cuda", {"torch": "2"})


def test_every_kind_of_metadata_round_trips() -> None:
    program = a_program()
    assert program_from_json(program_to_json(program)) == program


@pytest.mark.parametrize("version", [0, 1, 4, 5, 7, 99, None, True, "5", [5]])
def test_another_format_version_is_refused_by_number(version: Any) -> None:
    table = {**TABLE, "format_version": version}
    shown = "list" if isinstance(version, list) else repr(version)
    wanted = (
        f"has format version {shown}, and this release reads version {FORMAT_VERSION}: make it again, with penstock.c"
    )
    with pytest.raises(PackageError, match=re.escape(wanted)):
        program_from_json(resealed(table))


def test_experts_round_trip() -> None:
    program = a_program()
    method, stacked = program.methods[0], Weight("stacked", "bfloat16", (4, 8, 16), (0, 1, 2))
    accesses = (*method.schedule.accesses, Access(9, "stacked", gathered=True, routing=3))
    schedule = dataclasses.replace(method.schedule, accesses=accesses, steps=(*method.schedule.steps, Step("n", (9,))))
    method = dataclasses.replace(method, schedule=schedule, whole_experts={"w": "its rows are read whole"})
    weights = (*program.weights, stacked)
    identity = layout_identity(weights, program.states)
    named = dataclasses.replace(program, methods=(method,), weights=weights, identity=identity)
    assert program_from_json(program_to_json(named)) == named


def a_cache(**changes: Any) -> tuple[State, ...]:
    near = State("kv", "int8", (2, 1, 1, 64, 3), (0, 1, 2, 3, 4), "zeros")
    far = State("host_kv", "int8", (2, 1, 1, 7, 3), (0, 1, 2, 3, 4), "zeros", host=True, near="kv")
    return near, dataclasses.replace(far, **changes)


@pytest.mark.parametrize(
    ("states", "message"),
    [
        (a_cache(near="other"), "state 'host_kv' goes on from 'other', which is not a state on the device"),
        (a_cache(near="host_kv"), "goes on from 'host_kv', which is not a state on the device"),
        (a_cache(host=False), "goes on from 'kv', which is not a state on the device"),
        (a_cache(dtype="uint8"), "goes on from 'kv', which is not like it"),
        (a_cache(shape=(2, 1, 2, 7, 3)), "goes on from 'kv', which is not like it"),
        (a_cache(shape=(2, 1, 21), dim_order=(0, 1, 2)), "goes on from 'kv', which is not like it"),
        ((*a_cache(), dataclasses.replace(a_cache()[1], name="more")), "'kv' twice|kv.*twice"),
    ],
)
def test_caches_that_do_not_fit_together(states: tuple[State, ...], message: str) -> None:
    program = dataclasses.replace(a_program(), methods=(dataclasses.replace(a_program().methods[0], states=()),))
    fine = dataclasses.replace(program, states=a_cache(), identity=layout_identity(program.weights, a_cache()))
    assert program_from_json(program_to_json(fine)).caches == (a_cache(),)
    bad = dataclasses.replace(program, states=states, identity=layout_identity(program.weights, states))
    with pytest.raises(PackageError, match=message):
        program_from_json(program_to_json(bad))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in nested JSON, containers included."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def without_seal(text: str) -> dict[str, Any]:
    return {key: value for key, value in json.loads(text).items() if key != "seal"}


TABLE = without_seal(program_to_json(a_program()))


@pytest.mark.parametrize("path", [p for p in places(TABLE) if isinstance(p[-1], str)], ids=str)
def test_metadata_that_lacks_something(path: tuple[Any, ...]) -> None:
    table = copy.deepcopy(TABLE)
    inner = table
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    if path[-2:] in (("built_with", "torch"), ("symbols", "s1")):  # tables that hold whatever there is
        assert program_from_json(resealed(table)) != a_program()
        return
    with pytest.raises(
        PackageError, match="has no|has format version|is not determined by any size of an input|damaged"
    ):
        program_from_json(resealed(table))


def changed(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    table: dict[str, Any] = copy.deepcopy(TABLE)
    inner: Any = table
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return table


ODD_VALUES = [None, True, -1, 2**63, 1.5, 10**400, "x", "\x1b[2J", "\ud800", [], {}, [[]], [None], {"a": 1}]


PLACES = sorted(places(TABLE), key=str)


@pytest.mark.parametrize("value", ODD_VALUES, ids=lambda value: repr(value)[:20])
def test_something_else_in_any_place_is_refused_or_taken_as_it_stands(value: Any) -> None:
    """With a new seal, so that it is the schema and the rules that judge. Nothing but PackageError comes out."""
    refused = 0
    for path in PLACES:
        table = changed(path, value)
        try:
            found = program_from_json(resealed(table))
        except PackageError as error:
            assert not set(str(error)) & set("\x1b\ud800\n")  # noqa: PT017
            refused += 1
        else:
            # No number for a truth value, no text for a number.
            assert json.dumps(without_seal(program_to_json(found))) == json.dumps(table), path
    assert refused > len(PLACES) // 2


def test_without_a_new_seal_every_change_is_refused() -> None:
    seal = json.loads(program_to_json(a_program()))["seal"]
    for path in PLACES:
        with pytest.raises(PackageError, match="something was changed|format version"):
            program_from_json(json.dumps({**changed(path, "another"), "seal": seal}))


def test_two_states_of_one_shape_cannot_change_places() -> None:
    """The compiled code takes them by position: in the other order it would write each into the other."""
    text = program_to_json(a_program())
    swapped = text.replace('"states": ["cache", "other"]', '"states": ["other", "cache"]')
    assert swapped != text
    with pytest.raises(PackageError, match="something was changed"):
        program_from_json(swapped)


def test_strides_cannot_change() -> None:
    text = program_to_json(a_program())
    other = text.replace('"strides": [4, 1]', '"strides": [1, 4]')
    assert other != text
    with pytest.raises(PackageError, match="something was changed"):
        program_from_json(other)


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none_are_refused(word: str) -> None:
    text = json.dumps(TABLE).replace('"floor_bytes": 30', f'"floor_bytes": {word}')
    with pytest.raises(PackageError, match="needs (finite )?numbers"):
        program_from_json(sealed(text))


def test_a_key_that_is_there_twice_is_refused() -> None:
    text = json.dumps(TABLE).replace('"floor_bytes": 30', '"floor_bytes": 30, "floor_bytes": 31')
    with pytest.raises(PackageError, match="'floor_bytes' twice"):
        program_from_json(sealed(text))


BROKEN: dict[str, tuple[tuple[Any, ...], Any]] = {
    "has no method": (("methods",), []),
    "needs a name of letters": (("methods", 0, "name"), "two words"),
    "the method 'forward' is there twice": (("methods",), TABLE["methods"] * 2),
    "the weight or state 'w' is there twice": (("states", 0, "name"), "w"),
    "the weight or state 'b' is there twice": (("weights", 0, "aliases"), ["b", "b"]),
    "the unused name 'u' is there twice": (("unused",), ["u", "u"]),
    "its device is 'tpu'": (("device",), "tpu"),
    "its identity is 'other'": (("identity",), "other"),
    "has dtype 'float4'": (("weights", 0, "dtype"), "float4"),
    "has dim order [0, 0, 1]": (("weights", 0, "dim_order"), [0, 0, 1]),
    "its tensors have": (("weights", 0, "shape"), [2**31 - 1] * 3),
    "begins as 'ones'": (("states", 0, "init"), "ones"),
    "the numbers are not unique": (("methods", 0, "schedule", "accesses", 1, 0), 7),
    "which is not a weight": (("methods", 0, "schedule", "accesses", 1, 1), "v"),
    "is read by no step": (("methods", 0, "schedule", "steps"), [["k", [7]], ["l", [7, 3]], ["m", [4]]]),
    "which is never called": (("methods", 0, "schedule", "steps", 0, 1), [7, 9]),
    "calls must be in the order": (("methods", 0, "schedule", "steps", 0, 1), [5]),
    "has the state 'gone'": (("methods", 0, "states", 0), "gone"),
    "the state of method 'forward' 'cache' is there twice": (("methods", 0, "states"), ["cache", "cache"]),
    "which is no weight": (("methods", 0, "temporaries", 0, "weights"), ["v"]),
    "the range 5 to 4": (("methods", 0, "signature", "symbols", "s1"), [5, 4]),
    "symbol s0 has no range": (("methods", 0, "signature", "symbols"), {}),
    "symbol s1 is not determined by any size of an input": (
        ("methods", 0, "signature", "inputs", 0, "strides"),
        ["s1", 1],
    ),
    "is not an expression": (("methods", 0, "signature", "inputs", 0, "shape"), ["s0 +", 4]),
    "has 1 sizes and 2 strides": (("methods", 0, "signature", "inputs", 0, "shape"), ["s0"]),
    "has dtype 'x'": (("methods", 0, "signature", "outputs", 1, "dtype"), "x"),
    "the input 'x' is there twice": (("methods", 0, "signature", "inputs", 1, "name"), "x"),
    "writes 'flag', which is not a tensor": (("methods", 0, "signature", "written"), ["flag"]),
    "has 7 leaves, the signature lists 6": (
        ("methods", 0, "signature", "in_spec"),
        nesting(("builtins.tuple", "null", [positional(7), ("builtins.dict", "[]", [])])),
    ),
    "not a tuple of positional ones": (("methods", 0, "signature", "in_spec"), nesting(positional(6))),
    "a dict has 1 keys and 2 values": (
        ("methods", 0, "signature", "out_spec"),
        nesting(("builtins.dict", '["a", "a"]', [(None, None, [])] * 2)),
    ),
    "nested more than": (
        ("methods", 0, "signature", "out_spec"),
        nesting(functools.reduce(lambda tree, _: ("builtins.tuple", "null", [tree]), range(70), positional(2))),
    ),
    "has 'more', which is unknown": (("more",), 1),
    "is 1.5, needs a whole number": (("floor_bytes",), 1.5),
    "is true, needs a whole number": (("floor_bytes",), True),
    "is -1, needs a whole number": (("budget_bytes",), -1),
    "is 1, needs true or false": (("states", 0, "host"), 1),
}


@pytest.mark.parametrize("said", BROKEN)
def test_every_rule_is_broken_by_name(said: str) -> None:
    path, value = BROKEN[said]
    with pytest.raises(PackageError, match=re.escape(said)):
        program_from_json(resealed(changed(path, value)))


def test_what_would_take_for_ever_is_refused() -> None:
    many = 3000
    long_lived = {
        "accesses": [[number, "w", False, False, False, None] for number in range(many)],
        "steps": [["k", list(range(many))], *[["k", []]] * many, ["k", list(range(many))]],
    }
    with pytest.raises(PackageError, match="its accesses live for 9006000 steps together"):
        program_from_json(resealed(changed(("methods", 0, "schedule"), long_lived)))
    symbols = {f"s{number}": [0, None] for number in range(300)}
    with pytest.raises(PackageError, match="has 300 symbols, needs at most 256"):
        program_from_json(resealed(changed(("methods", 0, "signature", "symbols"), symbols)))
    shape = [f"s0 + {number}" for number in range(6000)]
    spec = {"kind": "tensor", "name": "x", "dtype": "int8", "shape": shape, "strides": shape, "indexes": []}
    with pytest.raises(PackageError, match="has 12001 dynamic sizes and strides"):
        program_from_json(resealed(changed(("methods", 0, "signature", "outputs", 1), spec)))


@pytest.mark.parametrize("text", ["", "null", "[]", "{}", "7", '"x"', "{nonsense", "[" * 100_000])
def test_metadata_that_is_something_else(text: str) -> None:
    with pytest.raises(PackageError, match="damaged"):
        program_from_json(text)


CODE = b"code " * 50
CODE_NAME = "data/aotinductor/forward/wrapper.cpp"
CODE_FILE = CodeFile(CODE_NAME, len(CODE), hashlib.sha256(CODE).hexdigest())


def pack(metadata: str | bytes, name: str = "archive/extra/penstock.json", code: bytes = CODE, **options: Any) -> bytes:
    """As torch packs: nothing is compressed."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", **options) as archive:
        archive.writestr(f"archive/{CODE_NAME}", code)
        archive.writestr(name, metadata)
        archive.writestr("archive/version", "1")
    return buffer.getvalue()


DESCRIPTION = program_to_json(a_program(), [CODE_FILE])
ARCHIVE = pack(DESCRIPTION)


def with_byte(at: int) -> bytes:
    raw = bytearray(ARCHIVE)
    raw[at] ^= 1
    return bytes(raw)


def with_directory_of(count: int) -> bytes:
    """An archive that begins with so many bytes of something, all of which are said to be its directory."""
    return bytes(count) + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 9, 9, count, 0, 0)


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
        (with_fields(flags=1), "penstock.json is compressed or encrypted"),
        (with_fields(method=99), "penstock.json is compressed or encrypted"),
        (with_fields(method=8), "penstock.json is compressed or encrypted"),
        (with_directory_of(2**24 + 1), "its directory has 16777217 bytes, needs at most 16777216"),
        (b"in front" + ARCHIVE, "has 8 bytes before its first member"),
        (pack(DESCRIPTION, compression=zipfile.ZIP_DEFLATED), "wrapper.cpp is compressed or encrypted"),
        (pack(b"\xff\xfe"), "the offload metadata is damaged"),
        (pack("{}", "archive/extra/other.json"), "is not a weightless program: it has 0 penstock.json"),
        (pack("{}", "penstock.json"), "is not a weightless program: it has 0 penstock.json"),
        (pack(DESCRIPTION, "other/extra/penstock.json"), "has the member archive/data/aotinductor/forward/wrapper.cpp"),
        (pack(" " * (2**24 + 1)), "has 16777217 bytes, needs at most 16777216"),
        (pack("nonsense"), "the offload metadata is damaged"),
        (pack('{"format_version": 7}'), "has format version 7"),
        (pack(program_to_json(a_program())), f"its code has {CODE_NAME}, which the description does not name"),
        (pack(DESCRIPTION, code=b"edoc " * 50), f"its code {CODE_NAME} is not that of the description"),
        (pack(program_to_json(a_program(), [CODE_FILE, CodeFile("data/aotinductor/x", 1, "")])), "its code lacks data"),
        (with_byte(ARCHIVE.index(CODE)), f"the member archive/{CODE_NAME} is damaged: its bytes have the CRC"),
        (with_byte(ARCHIVE.rindex(b"penstock.json")), "has 0 penstock.json, needs one: it is damaged"),
        (with_byte(ARCHIVE.index(b"archive/version")), "has a header that is not its own"),
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
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        (tmp_path / "closed").touch(mode=0o000)
        for path, kind in (
            (tmp_path, "it is a folder"),
            (tmp_path / "pipe", "it is a named pipe"),
            (tmp_path / "socket", "cannot be read"),
            (Path("/dev/zero"), "it is a device"),
            (Path("nul\0"), "holds a NUL"),
            (Path(os.fsdecode(b"caf\xe9.pt2")), "is not UTF-8"),
        ):
            with pytest.raises(PackageError, match=kind) as caught:
                read_program(path)
            str(caught.value).encode()


def test_an_archive_that_would_expand_is_refused_unexpanded(tmp_path: Path) -> None:
    """A hundred million bytes that deflate to a hundred thousand."""
    path = tmp_path / "model.pt2"
    path.write_bytes(pack(b" " * 100_000_000, compression=zipfile.ZIP_DEFLATED))
    assert path.stat().st_size < 200_000
    tracemalloc.start()
    try:
        with pytest.raises(PackageError, match="compressed"):
            read_program(path)
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


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
