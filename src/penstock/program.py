"""What a program file says about itself: plain data, written by export and read at load. No torch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from penstock.archive import CODE_FOLDER, METADATA_FILE, CodeFile, read_archive
from penstock.errors import PackageError
from penstock.printable import printable
from penstock.program_rules import check_program
from penstock.regular_file import open_regular
from penstock.schedule import Access, Schedule, Step
from penstock.schema import SchemaError, Signed, decode, encode_constant, parse_json
from penstock.sealed_text import sealed, unsealed
from penstock.weight import State, Weight

__all__ = ["FORMAT_VERSION", "METADATA_FILE"]

FORMAT_VERSION = 6


@dataclass(frozen=True)
class IndexRange:
    """Numbers of an input that index a table or a cache: each is at least `low` and below `high`."""

    low: Signed
    high: Signed
    # What is indexed, along which of its dimensions, and how many entries it has there.
    table: str
    dim: int
    size: int
    # Which numbers of the input: start, stop and step in each of its dimensions. Empty: all of them.
    region: tuple[tuple[Signed, Signed | None, int], ...] = ()


@dataclass(frozen=True)
class TensorSpec:
    """An input or output as a caller sees it. Dynamic sizes are symbols, by name."""

    KIND: ClassVar[str] = "tensor"

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    strides: tuple[int | str, ...]
    # For an input of whole numbers: what they index.
    indexes: tuple[IndexRange, ...] = ()


@dataclass(frozen=True)
class ConstantSpec:
    """An input or output that is not a tensor and was fixed at export."""

    KIND: ClassVar[str] = "constant"

    name: str
    value: Any


@dataclass(frozen=True)
class Signature:
    """What a caller passes and gets, in pytree order. The compiled code takes the states first, then the tensors."""

    inputs: tuple[TensorSpec | ConstantSpec, ...]
    outputs: tuple[TensorSpec | ConstantSpec, ...]
    in_spec: str
    out_spec: str
    # Symbol -> lowest and highest value (None: no bound).
    symbols: dict[str, tuple[int, int | None]]
    # Names of the inputs that the program writes into.
    written: tuple[str, ...] = ()


@dataclass(frozen=True)
class Temporary:
    """A buffer that a method computes from weights alone: a cast, a dequantized or re-laid-out copy."""

    name: str
    kernel: str
    nbytes: int
    weights: tuple[str, ...]


@dataclass(frozen=True)
class Method:
    name: str
    schedule: Schedule
    signature: Signature
    # Names of the states that are this method's leading inputs.
    states: tuple[str, ...]
    # The most memory that the compiled code itself allocates: for the example inputs, and for the largest bounded
    # shapes (None: a dynamic size has no bound).
    activation_example_bytes: int
    activation_bound_bytes: int | None
    temporaries: tuple[Temporary, ...]
    # Weights that look like stacks of experts but are read whole, with the reason.
    whole_experts: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Program:
    """The offload metadata of a .pt2."""

    methods: tuple[Method, ...]
    # In the order of first access, as in the weights file.
    weights: tuple[Weight, ...]
    states: tuple[State, ...]
    identity: str
    # The smallest budget that load accepts in its default mode, with the pages of plan/pages.py: gathered weights are
    # read in place, everything else is streamed. Load computes its own floor, which is the authority.
    floor_bytes: int
    budget_bytes: int | None
    # Parameters and buffers that no compiled method reads: not in the weights file.
    unused: tuple[str, ...]
    device: str
    # What it was built with: torch, penstock, machine, and on CUDA the GPU.
    built_with: dict[str, str]

    @property
    def weight_bytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights)

    @property
    def state_bytes(self) -> int:
        return sum(state.nbytes for state in self.states)

    @property
    def host_state_bytes(self) -> int:
        """Bytes of the states that lie in host memory if the device is a GPU."""
        return sum(state.nbytes for state in self.states if state.host)

    @property
    def caches(self) -> tuple[tuple[State, State], ...]:
        """KV caches whose split is chosen at load: for each, the states with the device's and the host's positions."""
        by_name = {state.name: state for state in self.states}
        return tuple((by_name[state.near], state) for state in self.states if state.near is not None)

    @property
    def gathered_weights(self) -> frozenset[str]:
        """Weights of which some method reads only some rows."""
        accesses = (access for method in self.methods for access in method.schedule.accesses)
        return frozenset(access.weight for access in accesses if access.gathered)

    def method(self, name: str) -> Method:
        for method in self.methods:
            if method.name == name:
                return method
        raise PackageError(f"there is no method {name!r}; the program has {', '.join(m.name for m in self.methods)}")


@dataclass(frozen=True)
class _ScheduleRow:
    accesses: tuple[Access, ...]
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class _MethodRow:
    """A method as the file has it: its schedule does not repeat its name."""

    name: str
    schedule: _ScheduleRow
    signature: Signature
    states: tuple[str, ...]
    activation_example_bytes: int
    activation_bound_bytes: int | None
    temporaries: tuple[Temporary, ...]
    whole_experts: dict[str, str]


@dataclass(frozen=True)
class _Description:
    """All of penstock.json but its seal: the schema that a file is checked against."""

    format_version: int
    methods: tuple[_MethodRow, ...]
    weights: tuple[Weight, ...]
    states: tuple[State, ...]
    identity: str
    floor_bytes: int
    budget_bytes: int | None
    unused: tuple[str, ...]
    device: str
    built_with: dict[str, str]
    code: tuple[CodeFile, ...]


def program_to_json(program: Program, code: Sequence[CodeFile] = ()) -> str:
    """`code`: the files of compiled code that belong to the description and that its seal covers."""
    table = dataclasses.asdict(program)
    for method, row in zip(program.methods, table["methods"], strict=True):
        row["signature"] = signature_to_row(method.signature)
        row["schedule"] = {
            "accesses": [list(dataclasses.astuple(access)) for access in method.schedule.accesses],
            "steps": [[s.kernel, list(s.accesses)] for s in method.schedule.steps],
        }
    rows = [dataclasses.asdict(file) for file in code]
    return sealed(json.dumps({"format_version": FORMAT_VERSION, **table, "code": rows}, allow_nan=False)).decode()


def signature_to_row(signature: Signature) -> dict[str, Any]:
    row = dataclasses.asdict(signature)
    for part in ("inputs", "outputs"):
        row[part] = [_spec_to_row(spec) for spec in getattr(signature, part)]
    return row


def _spec_to_row(spec: TensorSpec | ConstantSpec) -> dict[str, Any]:
    if isinstance(spec, ConstantSpec):
        return {"kind": spec.KIND, "name": spec.name, "value": encode_constant(spec.value)}
    return {"kind": spec.KIND, **dataclasses.asdict(spec)}


def program_from_json(text: str | bytes) -> Program:
    """Raises PackageError if the description is not whole, does not fit the schema, or breaks a rule of its own."""
    return _described(text if isinstance(text, bytes) else text.encode(errors="replace"))[0]


def _described(raw: bytes) -> tuple[Program, tuple[CodeFile, ...]]:
    _check_version(raw)
    try:
        found = decode(_Description, parse_json(unsealed(raw)), rows=(Access, Step))
    except SchemaError as error:
        raise PackageError(f"the offload metadata is damaged: {error}") from error
    fields = {field.name: getattr(found, field.name) for field in dataclasses.fields(Program)}
    program = Program(**{**fields, "methods": tuple(_method(row) for row in found.methods)})
    check_program(program)
    return program, found.code


def _method(row: _MethodRow) -> Method:
    fields = {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}
    return Method(**{**fields, "schedule": Schedule(row.name, row.schedule.accesses, row.schedule.steps)})


def _check_version(raw: bytes) -> None:
    """Before anything else: a file of another release is not a damaged one."""
    try:
        table = parse_json(raw.decode())
    except (SchemaError, UnicodeDecodeError) as error:
        raise PackageError(f"the offload metadata is damaged: {error}") from error
    if type(table) is not dict or "format_version" not in table:
        raise PackageError("the offload metadata is damaged: it has no 'format_version'")
    version = table["format_version"]
    if type(version) is not int or version != FORMAT_VERSION:
        shown = printable(f"{version!r:.40}") if not isinstance(version, list | dict) else type(version).__name__
        raise PackageError(
            f"the program has format version {shown}, and this release reads version {FORMAT_VERSION}: make it again, "
            "with penstock.compile or `penstock export` (a .pte with penstock.executorch.export)"
        )


def read_program(path: str | Path) -> Program:
    """Reads the offload metadata of a .pt2 after checking every byte against its checksum. Loads and runs nothing."""
    with open_regular(path, PackageError) as file:
        return program_from_archive(file, printable(str(path)))


def program_from_archive(file: BinaryIO, shown: str) -> Program:
    """`shown` is the name of the file in messages."""
    archive = read_archive(file, shown)
    try:
        program, code = _described(archive.description)
        _check_code(code, archive.code)
        for method in program.methods:
            if code and not any(entry.name.startswith(f"{CODE_FOLDER}{method.name}/") for entry in code):
                raise PackageError(f"method {method.name!r} has no code")
    except PackageError as error:
        raise PackageError(f"{shown}: {error}") from error
    return program


def _check_code(recorded: tuple[CodeFile, ...], found: tuple[CodeFile, ...]) -> None:
    """Checks that the description was written for this code: the same files, each with the same bytes."""
    wanted, there = ({entry.name: entry for entry in entries} for entries in (recorded, found))
    for name in sorted(wanted.keys() | there.keys()):
        if name not in there:
            raise PackageError(f"its code lacks {printable(name)}, which the description names")
        if name not in wanted:
            raise PackageError(f"its code has {printable(name)}, which the description does not name")
        if wanted[name] != there[name]:
            has, needs = (
                f"{e.nbytes} bytes of SHA-256 {printable(e.sha256)[:16]}..." for e in (there[name], wanted[name])
            )
            raise PackageError(f"its code {printable(name)} is not that of the description: has {has}, needs {needs}")
