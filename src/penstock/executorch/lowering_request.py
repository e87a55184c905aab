"""What a partitioner asks of the backend. ExecuTorch passes on only bytes, and writes them into the program."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from executorch.exir.backend.compile_spec_schema import CompileSpec

from penstock.errors import ProgramError

_ATTRIBUTE = "penstock_request"


class ConstantMethods(dict[str, Any]):
    """Methods that return one value each. The backend adds ours once it knows their values.

    ExecuTorch copies its table of such methods on the way, and a copy would miss what is added later.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> ConstantMethods:
        return self


@dataclass(frozen=True)
class LoweringRequest:
    # Plain values, which are also written into the program.
    options: dict[str, Any]
    constant_methods: ConstantMethods
    # What penstock.compile takes as `weights`; None: the values are in the program.
    checkpoint: Any
    # Call it when all methods have been partitioned: it refuses options that name something that is not there.
    check_names: Callable[[], None]

    def __deepcopy__(self, memo: dict[int, Any]) -> LoweringRequest:
        return self

    def compile_spec(self) -> CompileSpec:
        """ExecuTorch's serializer goes by the class name, so this is ExecuTorch's own class with one more attribute."""
        spec = CompileSpec("options", json.dumps(self.options).encode())
        setattr(spec, _ATTRIBUTE, self)
        return spec


def request_of(specs: list[CompileSpec]) -> LoweringRequest:
    """The one request that all of them carry."""
    found = {id(request): request for spec in specs if (request := getattr(spec, _ATTRIBUTE, None)) is not None}
    if len(found) != 1:
        raise ProgramError(f"the methods of one program have {len(found)} of our partitioners; use one CudaPartitioner")
    (request,) = found.values()
    assert isinstance(request, LoweringRequest)
    return request
