"""What is fuzzed, each with its property. A target takes a generator and a folder, and says how the case ended.

    refused     by an error of the right family, with a message that a terminal can show
    identical   taken, and the same as undamaged, to the bit
    consistent  taken with another content, by one who recomputed seals and checksums on purpose, and harmless

Anything else is raised, and is a fault. What runs code of a file only ever gets files whose seals were not recomputed.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import random
import struct
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from penstock.archive import METADATA_FILE
from penstock.errors import PackageError, PenstockError, WeightsFileError
from penstock.executorch.payload import PAYLOAD_MAGIC, sealed_parts
from penstock.printable import printable
from penstock.program import read_program
from penstock.sealed_text import SEAL_BYTES, sealed
from penstock.weight import ITEM_BYTES
from penstock.weights import WeightsIndex, read_index, verify_checksums
from penstock.weights.format import parse_header
from tests.fuzz.mutators import damaged_bytes, damaged_json, damaged_numbers
from tests.fuzz.seeds import CORPUS, write_program, write_pte
from tests.native.session import uninstall

Target = Callable[[random.Random, Path], str]
TARGETS: dict[str, Target] = {}

# Compiled programs are too large for the repository: these name folders with a model.pt2 and a model.pte.
COMPILED_VARIABLE = "PENSTOCK_FUZZ_COMPILED"
LOWERED_VARIABLE = "PENSTOCK_FUZZ_LOWERED"
COMMANDS = (("inspect",), ("inspect", "--schedule"), ("plan", "--budget", "1MiB"), ("verify", "--no-run"))


def target(name: str) -> Callable[[Target], Target]:
    def add(function: Target) -> Target:
        TARGETS[name] = function
        return function

    return add


def told(error: PenstockError, *families: type[PenstockError]) -> str:
    assert isinstance(error, families), f"{type(error).__name__} is of another family: {error}"
    text = str(error)
    assert printable(text) == text, f"the message would act on a terminal: {text!r}"
    assert len(text) < 20_000, f"the message has {len(text)} characters"
    return "refused"


# --------------------------------------------------------------------------------------------------- the weights file


@target("ptd")
def weights_file(rng: random.Random, folder: Path) -> str:
    """Any damage to index or data. Where the seal stands, what is read is what was written."""
    name = rng.choice(("ours.ptd", "ours.ptd", "small.ptd", "foreign.ptd", "packed.ptd"))
    whole, index = _stored(name)
    header = parse_header(Path(name), whole[:48], len(whole))
    tail = _metadata_begin(whole) if index.identity is not None else len(whole)
    within = rng.choice((range(header.flatbuffer_end_bytes), range(max(tail - 1, 0), len(whole)), range(len(whole))))
    raw = damaged_bytes(rng, whole, within)
    path = folder / name
    path.write_bytes(raw)
    try:
        found = read_index(path)
        if found.identity is not None:
            verify_checksums(found)
    except PenstockError as error:
        return told(error, WeightsFileError)
    _holds_together(found, len(raw))
    if index.identity is None or found.identity is None:
        return "identical" if found.entries == index.entries else "consistent"
    assert found.entries == index.entries, "an index that was damaged was taken for another one"
    return "identical"


@target("ptd-resealed")
def resealed_weights_file(rng: random.Random, folder: Path) -> str:
    """By somebody who computes the seal anew: refused, or an index that holds together."""
    whole, _ = _stored(rng.choice(("ours.ptd", "ours.ptd", "small.ptd", "packed.ptd")))
    header = parse_header(Path("w"), whole[:48], len(whole))
    head, tail = whole[: header.flatbuffer_end_bytes], _metadata_begin(whole)
    body = whole[tail:-SEAL_BYTES] + b"}"
    if rng.random() < 0.5:
        head = damaged_bytes(rng, head)[: len(head)].ljust(len(head), b"\0")
        text = body.decode()
    else:
        text = json.dumps(damaged_json(rng, json.loads(body)), separators=(",", ":"))
        if len(text) < 2 or text == "{}":
            text = '{"format":2}'
        text = text[: len(body)] if rng.random() < 0.1 else text
    metadata = sealed(text, head)
    raw = head + whole[len(head) : tail] + metadata
    path = folder / "w.ptd"
    # The table names the length of the metadata: what has another one is told by that already, so give it room.
    path.write_bytes(raw[: len(whole)].ljust(len(whole), b" ") if len(metadata) != len(whole) - tail else raw)
    try:
        found = read_index(path)
        if found.identity is not None:
            verify_checksums(found)
    except PenstockError as error:
        return told(error, WeightsFileError)
    _holds_together(found, path.stat().st_size)
    return "consistent"


@cache
def _stored(name: str) -> tuple[bytes, WeightsIndex]:
    return (CORPUS / name).read_bytes(), read_index(CORPUS / name)


def _metadata_begin(whole: bytes) -> int:
    """A packed entry has a format as well, behind the identity."""
    return whole.rindex(b'{"format"', 0, whole.rindex(b'"identity"'))


def _holds_together(index: WeightsIndex, file_bytes: int) -> None:
    end_bytes = 0
    for entry in sorted(index.unique_entries, key=lambda entry: (entry.offset_bytes, entry.length_bytes)):
        assert entry.offset_bytes >= end_bytes or entry.length_bytes == 0
        end_bytes = max(end_bytes, entry.offset_bytes + entry.length_bytes)
    assert end_bytes <= file_bytes == index.file_bytes
    for entry in index.entries:
        assert entry.raw_bytes == math.prod(entry.shape) * ITEM_BYTES[entry.dtype]
        assert entry.packing is not None or entry.length_bytes == entry.raw_bytes
        assert sorted(entry.dim_order) == list(range(len(entry.shape)))


# -------------------------------------------------------------------------------------------------------- the program


@cache
def _description() -> tuple[bytes, dict[str, Any]]:
    with zipfile.ZipFile(CORPUS / "program.pt2") as archive:
        raw = archive.read(f"archive/extra/{METADATA_FILE}")
    table = json.loads(raw)
    del table["seal"]
    return raw, table


@cache
def _program() -> Any:
    return read_program(CORPUS / "program.pt2")


@target("pt2")
def program_file(rng: random.Random, folder: Path) -> str:
    """Damage to the archive, or to the description in a whole archive."""
    path = folder / "program.pt2"
    if rng.random() < 0.5:
        path.write_bytes(damaged_bytes(rng, (CORPUS / "program.pt2").read_bytes()))
    else:
        raw, table = _description()
        if rng.random() < 0.5:
            description = damaged_bytes(rng, raw)
        else:  # a change that parses, under the old seal
            description = json.dumps(damaged_json(rng, table)).encode().removesuffix(b"}") + raw[-SEAL_BYTES:]
        write_program(path, description)
    try:
        found = read_program(path)
    except PenstockError as error:
        return told(error, PackageError)
    assert found == _program(), "a description that was damaged was taken for another one"
    return "identical"


@target("pt2-resealed")
def resealed_program_file(rng: random.Random, folder: Path) -> str:
    """By somebody who computes seal and checksums anew: what only parses, inspect, plan and verify, is unharmed."""
    _, table = _description()
    changed = damaged_json(rng, table)
    text = json.dumps(changed) if isinstance(changed, dict) and changed else '{"format_version": 6}'
    path = write_program(folder / "program.pt2", sealed(text))
    try:
        read_program(path)
    except PenstockError as error:
        return told(error, PackageError)
    command = rng.choice(
        (("inspect",), ("inspect", "--schedule"), ("plan", "--budget", "1MiB"), ("verify", "--no-run"))
    )
    _command(command[0], str(path), *command[1:])
    return "consistent"


def _command(*arguments: str) -> int:
    from penstock.cli.main import main

    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(list(arguments))
    assert "Traceback" not in out.getvalue() + err.getvalue(), err.getvalue()
    return code


@target("pt2-load")
def loaded_program(rng: random.Random, folder: Path) -> str:
    """A compiled program, damaged anywhere, loaded and run: the code of a damaged file never runs."""
    source = Path(os.environ[COMPILED_VARIABLE])
    whole = _bytes(source / "model.pt2")
    start = max(whole.find(b"\x7fELF"), 0)
    within = rng.choice((range(len(whole)), range(start, len(whole)), range(max(len(whole) - 8000, 0), len(whole))))
    path = folder / "model.pt2"
    path.write_bytes(damaged_bytes(rng, whole, within))
    try:
        outputs = _run_compiled(path, source / "model.ptd")
    except PenstockError as error:
        return told(error, PackageError)
    assert outputs == _undamaged_compiled(source), "other bits than those of the undamaged program"
    return "identical"


@cache
def _bytes(path: Path) -> bytes:
    return path.read_bytes()


@cache
def _undamaged_compiled(folder: Path) -> list[bytes]:
    return _run_compiled(folder / "model.pt2", folder / "model.ptd")


def _run_compiled(path: Path, weights: Path) -> list[bytes]:
    import penstock
    from tests.runtime.modules import SCRIPTS, play

    with penstock.Module(path, "1TiB", weights=weights) as module:
        return [_bits(tensor) for outputs in play(module.run_method, SCRIPTS["chain"]) for tensor in outputs]


def _bits(tensor: Any) -> bytes:
    import torch

    return bytes(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())


# --------------------------------------------------------------------------------------------------------- ExecuTorch


@target("pte-parse")
def parsed_pte(rng: random.Random, folder: Path) -> str:
    """What inspect and plan read of a .pte, also with every hash computed anew."""
    path = folder / "m.pte"
    if rng.random() < 0.4:
        path.write_bytes(damaged_bytes(rng, (CORPUS / "shared.pte").read_bytes()))
    else:
        code = (CORPUS / "program.pt2").read_bytes()
        if rng.random() < 0.3:
            code = damaged_bytes(rng, code)
        record = (CORPUS / "description.record").read_bytes()
        by_numbers = rng.random() < 0.5
        record = _record(damaged_numbers(rng, _numbers(record))) if by_numbers else damaged_bytes(rng, record)
        write_pte(path, sealed_parts(PAYLOAD_MAGIC, record, rng.randbytes(8 * rng.randrange(9)), code))
    code_of_inspect = _command("inspect", str(path))
    return "refused" if code_of_inspect else "consistent"


@target("pte")
def loaded_pte(rng: random.Random, folder: Path) -> str:
    """A lowered program, damaged anywhere, loaded and run by ExecuTorch."""
    source = Path(os.environ[LOWERED_VARIABLE])
    whole = _bytes(source / "model.pte")
    payload = whole.index(b"PNSTKPRG")
    within = rng.choice((range(len(whole)), range(payload), range(len(whole) - 64, len(whole))))
    path = folder / "model.pte"
    path.write_bytes(damaged_bytes(rng, whole, within))
    try:
        outputs = _run_lowered(path, source / "model.ptd")
    except PenstockError as error:
        return told(error, PackageError)
    assert outputs == _undamaged_lowered(source), "another result than that of the undamaged program"
    return "identical"


@cache
def _undamaged_lowered(folder: Path) -> list[Any]:
    return _run_lowered(folder / "model.pte", folder / "model.ptd")


def _run_lowered(path: Path, weights: Path) -> list[Any]:
    import torch

    import penstock.executorch

    with penstock.executorch.Module(path, "1GiB", weights=weights) as module:
        result = module(torch.linspace(-1, 1, 3 * 96).reshape(3, 96))
    leaves, spec = torch.utils._pytree.tree_flatten(result)
    return [str(spec), *map(_bits, leaves)]


# ------------------------------------------------------------------------------------------------------- plan records


@target("plan-records")
def plan_records(rng: random.Random, folder: Path) -> str:
    """A plan's numbers as the core reads them: refused, or installed over the soft driver and taken down again."""
    from tests.fuzz.seeds import STREAMED_SIZES, streaming_schedules
    from tests.runtime.session_harness import SessionHarness, write_model

    numbers = _numbers(rng.choice(sorted(CORPUS.glob("plan-*.record"))).read_bytes())
    changed = damaged_numbers(rng, numbers)
    # What the soft driver gives is real memory: blocks of gigabytes would be made. What no machine has is refused.
    changed = [number % (1 << 28) if 1 << 28 < number < 1 << 44 else number for number in changed]
    model = write_model(folder / "weights", streaming_schedules(), STREAMED_SIZES)
    with SessionHarness(model) as harness:
        try:
            harness.session.install((_int64() * len(changed))(*changed))
        except PenstockError as error:
            return told(error, PenstockError)
        # Whatever banks it has, they begin empty.
        assert not any(map(any, harness.session.expert_counts()))
        uninstall(harness.session)
    return "identical" if changed == numbers else "consistent"


def _numbers(record: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(record) // 8}q", record))


def _record(numbers: list[int]) -> bytes:
    return struct.pack(f"<{len(numbers)}q", *numbers)


def _int64() -> Any:
    import ctypes

    return ctypes.c_int64


# ------------------------------------------------------------------------------------------------------ command lines

with contextlib.suppress(ModuleNotFoundError):
    from tests.fuzz.command_lines import run_one  # type: ignore[import-not-found,unused-ignore]

    @target("command-lines")
    def command_lines(rng: random.Random, folder: Path) -> str:
        run_one(rng)
        return "consistent"
