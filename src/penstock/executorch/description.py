"""The schema of what the delegates of a .pte share. csrc/payload.cpp asks the same of it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from penstock.schema import SchemaError, Signed, decode


@dataclass(frozen=True)
class PlanTable:
    methods: tuple[int, ...]
    reads_in_place: int
    floor_bytes: int
    full_bytes: int
    plans: int
    # Of each plan, in the same order.
    seals: tuple[str, ...]


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
    # 1: the weights file holds what it starts with.
    stored: int


@dataclass(frozen=True)
class DelegateInput:
    scalar_type: int
    # -1: dynamic.
    shape: tuple[Signed, ...]
    dim_order: tuple[int, ...]


@dataclass(frozen=True)
class DelegateMethod:
    name: str
    accesses: tuple[str, ...]
    # Numbers of the states that its code takes before its inputs.
    states: tuple[int, ...]
    inputs: tuple[DelegateInput, ...]
    outputs: int


@dataclass(frozen=True)
class Description:
    program: str
    device: str
    page_bytes: int
    plan_tables: tuple[PlanTable, ...]
    budget_bytes: int | None
    activation_bytes: int | None
    built_with: dict[str, str]
    weights: tuple[SharedWeight, ...]
    states: tuple[SharedState, ...]
    methods: tuple[DelegateMethod, ...]


def check_description(table: Any) -> Description:
    """SchemaError where it is not of this shape, or its parts do not go together."""
    known = {field.name for field in dataclasses.fields(Description)}
    if type(table) is not dict:
        raise SchemaError("the description is no object")
    found = decode(Description, {key: value for key, value in table.items() if key in known})
    if not 0 < found.page_bytes <= 1 << 40:
        raise SchemaError(f"page_bytes is {found.page_bytes}, needs 1 to {1 << 40}")
    if not found.plan_tables or not found.methods:
        raise SchemaError(
            f"it has {len(found.plan_tables)} plan tables and {len(found.methods)} methods, needs one of each"
        )
    for table in found.plan_tables:
        if any(method >= len(found.methods) for method in table.methods):
            raise SchemaError("a plan table is for a method that is not there")
        if len(table.seals) != table.plans:
            raise SchemaError(f"a plan table has {table.plans} plans and {len(table.seals)} seals, needs as many")
    names = {name for weight in found.weights for name in weight.names}
    for state in found.states:
        if sorted(state.dim_order) != list(range(len(state.shape))):
            raise SchemaError(f"state {state.name!r} has dim order {list(state.dim_order)}")
    for method in found.methods:
        if any(state >= len(found.states) for state in method.states):
            raise SchemaError(f"method {method.name!r} has state that is none")
        for name in method.accesses:
            if name not in names:
                raise SchemaError(f"method {method.name!r} reads {name!r}, which is no weight")
    return found
