"""What the delegates of a .pte share, as a flat record. csrc/description.cpp reads it in the same order and makes the
same checks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.record import from_record
from penstock.schema import SchemaError, Signed

# More bytes than any machine has, and so few that sums of such amounts never overflow.
MOST_BYTES = 1 << 56
MOST_PAGE_BYTES = 1 << 30
# The first so many of ExecuTorch's scalar types are integers.
WHOLE_NUMBER_TYPES = 5
# Inputs and outputs of a run pass between main memory and the device through one block of pinned memory.
TRANSFER_ALIGNMENT_BYTES = 256


@dataclass(frozen=True)
class SharedWeight:
    names: tuple[str, ...]
    scalar_type: int
    shape: tuple[int, ...]
    dim_order: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class SharedState:
    name: str
    scalar_type: int
    shape: tuple[int, ...]
    dim_order: tuple[int, ...]
    nbytes: int
    # 1: the weights file holds its initial value.
    stored: int


@dataclass(frozen=True)
class IndexSlice:
    """A Python slice of one dimension, but always with an end."""

    begin: Signed
    end: Signed
    step: int


@dataclass(frozen=True)
class InputIndex:
    """Values in an input that index a table or a cache, as program.IndexRange describes them."""

    low: Signed
    high: Signed
    table: str
    dim: int
    size: int
    # One slice per dimension of the input; empty: all of it.
    region: tuple[IndexSlice, ...]


@dataclass(frozen=True)
class DelegateInput:
    name: str
    scalar_type: int
    # -1: dynamic.
    shape: tuple[Signed, ...]
    dim_order: tuple[int, ...]
    indexes: tuple[InputIndex, ...]


@dataclass(frozen=True)
class DelegateMethod:
    name: str
    # Numbers of the states that its code takes before its inputs.
    states: tuple[int, ...]
    inputs: tuple[DelegateInput, ...]
    outputs: int
    # Of its inputs and outputs together, each at its largest size and starting at a multiple of TRANSFER_ALIGNMENT.
    transfer_bytes: int


@dataclass(frozen=True)
class PlanRow:
    """A plan in the file. It fits every budget of `device_bytes` or more."""

    device_bytes: int
    # 1: every run copies something, so packed weights need slots to pass through.
    copies: int
    # How many numbers it has, and their checksum: a plan that was changed, or swapped with another, is not the one that
    # was proved.
    numbers: int
    seal: Signed


@dataclass(frozen=True)
class PlanTable:
    """The plans of some of a program's methods over one ring, smallest first."""

    methods: tuple[int, ...]
    # Numbers of the weights that at least one plan reads in place, in host memory.
    in_place: tuple[int, ...]
    floor_bytes: int
    # With everything resident.
    full_bytes: int
    # Below this, weights are read over the link instead of copied. 0: this does not depend on the budget.
    copying_bytes: int
    plans: tuple[PlanRow, ...]


@dataclass(frozen=True)
class Description:
    program: str
    device: str
    page_bytes: int
    budget_bytes: int | None
    activation_bytes: int | None
    built_with: dict[str, str]
    weights: tuple[SharedWeight, ...]
    states: tuple[SharedState, ...]
    methods: tuple[DelegateMethod, ...]
    plan_tables: tuple[PlanTable, ...]


@dataclass(frozen=True)
class DelegateRef:
    """What a delegate holds of its own: the name of the payload, and which of its methods it is."""

    payload: str
    method: str
    number: int


def read_description(record: bytes) -> Description:
    """Raises SchemaError if the record is no description, or if its parts do not fit together."""
    found = from_record(Description, record)
    for message in _faults(found):
        raise SchemaError(message)
    return found


def _faults(found: Description) -> Iterator[str]:
    if not 0 < found.page_bytes <= MOST_PAGE_BYTES:
        yield f"page_bytes is {found.page_bytes}, needs 1 to {MOST_PAGE_BYTES}"
    if not found.plan_tables or not found.methods:
        yield f"it has {len(found.plan_tables)} plan tables and {len(found.methods)} methods, needs one of each"
    if any(nbytes > MOST_BYTES for nbytes in _amounts(found)):
        yield f"something of it has {max(_amounts(found))} bytes, more than there can be"
    for table in found.plan_tables:
        if any(method >= len(found.methods) for method in table.methods):
            yield "a plan table is for a method that is not there"
        if any(weight >= len(found.weights) for weight in table.in_place):
            yield "a plan table is for a weight that is not there"
        if not table.plans:
            yield "a plan table holds no plan"
    for weight in found.weights:
        if not weight.names:
            yield "a weight has no name"
    for state in found.states:
        if sorted(state.dim_order) != list(range(len(state.shape))):
            yield f"state {state.name!r} has dim order {list(state.dim_order)}"
    for method in found.methods:
        if any(state >= len(found.states) for state in method.states):
            yield f"method {method.name!r} has state that is none"
        if any(size < -1 for given in method.inputs for size in given.shape):
            yield f"an input of method {method.name!r} has a size below -1"
        for given in method.inputs:
            if sorted(given.dim_order) != list(range(len(given.dim_order))):
                yield f"input {given.name!r} has dim order {list(given.dim_order)}"
            for index in given.indexes:
                if given.scalar_type >= WHOLE_NUMBER_TYPES or len(index.region) not in (0, len(given.shape)):
                    yield (
                        f"input {given.name!r} indexes a table, and is of scalar type {given.scalar_type}, or has "
                        "other dimensions than what is said of it"
                    )
                if any(part.step < 1 for part in index.region):
                    yield f"input {given.name!r} has a slice with step 0"


def _amounts(found: Description) -> Iterator[int]:
    yield from (found.budget_bytes or 0, found.activation_bytes or 0)
    yield from (weight.nbytes for weight in found.weights)
    yield from (state.nbytes for state in found.states)
    yield from (method.transfer_bytes for method in found.methods)
    for table in found.plan_tables:
        yield from (
            table.floor_bytes,
            table.full_bytes,
            table.copying_bytes,
            *(plan.device_bytes for plan in table.plans),
        )
