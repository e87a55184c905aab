"""How a caller's arguments and results are nested. A .pte knows only flat lists, so an extra method returns this."""

from __future__ import annotations

import json
from collections.abc import Mapping

from penstock.errors import PackageError
from penstock.printable import printable
from penstock.program import Method, Program, Signature, signature_to_row
from penstock.program_rules import check_signature
from penstock.schedule import Schedule
from penstock.schema import SchemaError, decode, parse_json

# Methods that we add to a program; each returns a constant.
FLOOR_METHOD = "weight_offload_floor_bytes"
ORDER_METHOD = "weight_offload_access_order"
SIGNATURES_METHOD = "weight_offload_signatures"
OWN_METHODS = (FLOOR_METHOD, ORDER_METHOD, SIGNATURES_METHOD)


def signatures_to_json(signatures: Mapping[str, Signature]) -> str:
    return json.dumps({name: signature_to_row(signature) for name, signature in signatures.items()}, allow_nan=False)


def access_order_to_json(program: Program) -> str:
    """Delegate -> names of the weights in the order in which its code fetches them."""
    return json.dumps(
        {method.name: [access.weight for access in method.schedule.accesses] for method in program.methods}
    )


def methods_from_json(text: str) -> dict[str, Method]:
    """The methods as penstock.Module has them, without what only the delegate knows."""
    try:
        rows = parse_json(text)
        if type(rows) is not dict:
            raise SchemaError("it is not an object")
        signatures = {name: decode(Signature, row, name) for name, row in rows.items()}
        for signature in signatures.values():
            check_signature(signature)
    except (SchemaError, PackageError) as error:
        raise PackageError(f"the signatures in the program are damaged: {printable(str(error))}") from error
    return {
        name: Method(name, Schedule(name, (), ()), signature, (), 0, None, ()) for name, signature in signatures.items()
    }
