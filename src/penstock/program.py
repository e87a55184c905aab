"""What a program file says about itself: plain data, written by export and read at load. No torch."""

from __future__ import annotations

import dataclasses
import json
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import PackageError
from penstock.schedule import Access, Schedule, Step
from penstock.weight import State, Weight

FORMAT_VERSION = 3
METADATA_FILE = "penstock.json"

# What zipfile raises over a damaged archive, or one of a kind that torch never writes (compressed, encrypted), and what
# decoding text raises.
_DAMAGE = (zipfile.BadZipFile, zlib.error, OSError, EOFError, NotImplementedError, RuntimeError, ValueError)


@dataclass(frozen=True)
class IndexRange:
    """Numbers of an input that index a table or a cache: each is at least `low` and below `high`."""

    low: int
    high: int
    # What is indexed, along which of its dimensions, and how many entries it has there.
    table: str
    dim: int
    size: int
    # Which numbers of the input: start, stop and step in each of its dimensions. Empty: all of them.
    region: tuple[tuple[int, int | None, int], ...] = ()

    def __post_init__(self) -> None:
        numbers = (self.low, self.high, self.dim, self.size, *(start for start, _, _ in self.region))
        parts = [part for _, stop, step in self.region for part in (stop, step) if part is not None]
        if not isinstance(self.table, str) or any(type(number) is not int for number in (*numbers, *parts)):
            raise ValueError(f"a range of indices is none: {self}")
        if self.low > self.high or self.dim < 0 or self.size < 0 or any(step < 1 for _, _, step in self.region):
            raise ValueError(f"a range of indices is none: {self}")


@dataclass(frozen=True)
class TensorSpec:
    """An input or output as a caller sees it. Dynamic sizes are symbols, by name."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    strides: tuple[int | str, ...]
    # Of an input of whole numbers: what they index.
    indexes: tuple[IndexRange, ...] = ()

    def __post_init__(self) -> None:
        if any(index.region and len(index.region) != len(self.shape) for index in self.indexes):
            raise ValueError(f"input {self.name!r} has {len(self.shape)} dimensions, its ranges of indices others")


@dataclass(frozen=True)
class ConstantSpec:
    """An input or output that is no tensor and was fixed when the program was exported."""

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
    # Memory the compiled code itself allocates at most: for the example inputs, and for the largest bounded shapes
    # (None: a dynamic size has no bound).
    activation_example_bytes: int
    activation_bound_bytes: int | None
    temporaries: tuple[Temporary, ...]


@dataclass(frozen=True)
class Program:
    """The offload metadata of a .pt2."""

    methods: tuple[Method, ...]
    # In the order of first access, as in the weights file.
    weights: tuple[Weight, ...]
    states: tuple[State, ...]
    identity: str
    # The floor for the default case, in exact bytes: what is gathered from is read in place, everything else streamed.
    # Load computes its own and is the authority.
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
        """Of the states that lie in host memory where the device is a GPU."""
        return sum(state.nbytes for state in self.states if state.host)

    def method(self, name: str) -> Method:
        for method in self.methods:
            if method.name == name:
                return method
        raise PackageError(f"there is no method {name!r}; the program has {', '.join(m.name for m in self.methods)}")


def program_to_json(program: Program) -> str:
    table = dataclasses.asdict(program)
    for method, row in zip(program.methods, table["methods"], strict=True):
        row["signature"]["inputs"] = [_spec_to_json(spec) for spec in method.signature.inputs]
        row["signature"]["outputs"] = [_spec_to_json(spec) for spec in method.signature.outputs]
        row["schedule"] = {
            "accesses": [[a.number, a.weight, a.pinned, a.gathered, a.linear] for a in method.schedule.accesses],
            "steps": [[s.kernel, list(s.accesses)] for s in method.schedule.steps],
        }
    return json.dumps({"format_version": FORMAT_VERSION, **table})


def program_from_json(text: str) -> Program:
    try:
        table = json.loads(text)
        version = table["format_version"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise PackageError(f"the offload metadata is damaged: {error!r}") from error
    if version != FORMAT_VERSION:
        raise PackageError(f"the program has format version {version}; this release reads version {FORMAT_VERSION}")
    try:
        return Program(
            methods=tuple(_method_from_json(row) for row in table["methods"]),
            weights=tuple(_weight_from_json(row) for row in table["weights"]),
            states=tuple(_state_from_json(row) for row in table["states"]),
            identity=table["identity"],
            floor_bytes=table["floor_bytes"],
            budget_bytes=table["budget_bytes"],
            unused=tuple(table["unused"]),
            device=table["device"],
            built_with=dict(table["built_with"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PackageError(f"the offload metadata is damaged: {error!r}") from error


def read_program(path: str | Path) -> Program:
    """The offload metadata of a .pt2 file; nothing is loaded or run."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith(f"/extra/{METADATA_FILE}")]
            if len(names) != 1:
                raise PackageError(f"{path} is no weightless program: it has no {METADATA_FILE}")
            text = archive.read(names[0]).decode()
    except FileNotFoundError as error:
        raise PackageError(f"{path} does not exist") from error
    except (IsADirectoryError, PermissionError) as error:
        raise PackageError(f"{path} cannot be read: {error}") from error
    except _DAMAGE as error:
        raise PackageError(f"{path} is not a .pt2 archive, or is damaged: {error}") from error
    try:
        return program_from_json(text)
    except PackageError as error:
        raise PackageError(f"{path}: {error}") from error


def _spec_to_json(spec: TensorSpec | ConstantSpec) -> dict[str, Any]:
    return {"kind": "tensor" if isinstance(spec, TensorSpec) else "constant", **dataclasses.asdict(spec)}


def _spec_from_json(row: dict[str, Any]) -> TensorSpec | ConstantSpec:
    fields = dict(row)
    if fields.pop("kind") == "constant":
        return ConstantSpec(**fields)
    return TensorSpec(
        fields["name"],
        fields["dtype"],
        tuple(fields["shape"]),
        tuple(fields["strides"]),
        tuple(index_range_from_json(index) for index in fields["indexes"]),
    )


def index_range_from_json(row: dict[str, Any]) -> IndexRange:
    return IndexRange(**{**row, "region": tuple((start, stop, step) for start, stop, step in row["region"])})


def _weight_from_json(row: dict[str, Any]) -> Weight:
    return Weight(row["name"], row["dtype"], tuple(row["shape"]), tuple(row["dim_order"]), tuple(row["aliases"]))


def _state_from_json(row: dict[str, Any]) -> State:
    return State(
        row["name"], row["dtype"], tuple(row["shape"]), tuple(row["dim_order"]), init=row["init"], host=row["host"]
    )


def _method_from_json(row: dict[str, Any]) -> Method:
    signature = row["signature"]
    return Method(
        name=row["name"],
        schedule=Schedule(
            method=row["name"],
            accesses=tuple(Access(*access) for access in row["schedule"]["accesses"]),
            steps=tuple(Step(kernel, tuple(accesses)) for kernel, accesses in row["schedule"]["steps"]),
        ),
        signature=Signature(
            inputs=tuple(_spec_from_json(spec) for spec in signature["inputs"]),
            outputs=tuple(_spec_from_json(spec) for spec in signature["outputs"]),
            in_spec=signature["in_spec"],
            out_spec=signature["out_spec"],
            symbols={name: (low, high) for name, (low, high) in signature["symbols"].items()},
            written=tuple(signature["written"]),
        ),
        states=tuple(row["states"]),
        activation_example_bytes=row["activation_example_bytes"],
        activation_bound_bytes=row["activation_bound_bytes"],
        temporaries=tuple(
            Temporary(t["name"], t["kernel"], t["nbytes"], tuple(t["weights"])) for t in row["temporaries"]
        ),
    )
