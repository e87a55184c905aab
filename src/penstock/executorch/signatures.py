"""How a caller's arguments and results are nested: a .pte knows flat lists only, so it stands beside in a method."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from penstock.errors import PackageError
from penstock.program import ConstantSpec, Method, Signature, TensorSpec, index_range_from_json
from penstock.schedule import Schedule

# Methods that we add to a program; each returns a constant.
FLOOR_METHOD = "weight_offload_floor_bytes"
ORDER_METHOD = "weight_offload_access_order"
SIGNATURES_METHOD = "weight_offload_signatures"
OWN_METHODS = (FLOOR_METHOD, ORDER_METHOD, SIGNATURES_METHOD)


def signatures_to_json(signatures: Mapping[str, Signature]) -> str:
    return json.dumps({name: _row(signature) for name, signature in signatures.items()})


def _row(signature: Signature) -> dict[str, Any]:
    row = dataclasses.asdict(signature)
    for part in ("inputs", "outputs"):
        row[part] = [[type(spec).__name__, dataclasses.asdict(spec)] for spec in getattr(signature, part)]
    return row


def methods_from_json(text: str) -> dict[str, Method]:
    """As penstock.Module has them, without what only the delegate knows."""
    try:
        return {name: _method(name, row) for name, row in json.loads(text).items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PackageError(f"the signatures in the program are damaged: {error!r}") from error


def _method(name: str, row: dict[str, Any]) -> Method:
    signature = Signature(
        inputs=tuple(_spec(*pair) for pair in row["inputs"]),
        outputs=tuple(_spec(*pair) for pair in row["outputs"]),
        in_spec=row["in_spec"],
        out_spec=row["out_spec"],
        symbols={symbol: (low, high) for symbol, (low, high) in row["symbols"].items()},
        written=tuple(row["written"]),
    )
    return Method(name, Schedule(name, (), ()), signature, (), 0, None, ())


def _spec(kind: str, row: dict[str, Any]) -> TensorSpec | ConstantSpec:
    if kind == "TensorSpec":
        indexes = tuple(index_range_from_json(index) for index in row["indexes"])
        return TensorSpec(row["name"], row["dtype"], tuple(row["shape"]), tuple(row["strides"]), indexes)
    return ConstantSpec(row["name"], row["value"])
