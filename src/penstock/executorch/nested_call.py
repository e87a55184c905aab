"""One method of a .pte, as a caller sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from penstock.program import ConstantSpec, Method
from penstock.runtime.inputs import InputBinding
from penstock.runtime.outputs import OutputBinding

_CPU = torch.device("cpu")


class NestedCall:
    """Nested arguments in, nested results out."""

    def __init__(self, method: Method) -> None:
        self._specs = method.signature.inputs
        # ExecuTorch takes and gives tensors in main memory, wherever the delegate computes.
        self._inputs = InputBinding(method, _CPU, written=())
        self._outputs = OutputBinding(method)

    def flat(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> list[Any]:
        tensors = iter(self._inputs.flat(arguments, keywords))
        return [spec.value if isinstance(spec, ConstantSpec) else next(tensors) for spec in self._specs]

    def nested(self, outputs: Sequence[Any]) -> Any:
        return self._outputs.built([value for value in outputs if isinstance(value, torch.Tensor)])
