"""What the compiled code returns, as the caller gets it: nested as at export, in memory of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from penstock.errors import RuntimeFailure
from penstock.program import ConstantSpec, Method
from penstock.runtime.call_structure import ResultStructure


class OutputBinding:
    def __init__(self, method: Method) -> None:
        self._method = method.name
        self._specs = method.signature.outputs
        self._tensor_count = sum(not isinstance(spec, ConstantSpec) for spec in self._specs)
        self._structure = ResultStructure(method.signature.out_spec, len(self._specs))

    def nested(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Any:
        """`inputs` are all tensors that the compiled code was given, states included.

        An output that is an input, or a view of one, is copied: state changes with the next run, and a caller may write
        into an output. So is an output that shares memory with an earlier one, because the compiler drops the clone
        with which the model keeps them apart.
        """
        # Empty tensors have address 0, and nothing to share.
        taken = {tensor.untyped_storage().data_ptr() for tensor in inputs} - {0}
        return self.built([_fresh(tensor, taken) for tensor in outputs])

    def built(self, outputs: Sequence[torch.Tensor]) -> Any:
        """For outputs that already have memory of their own."""
        if len(outputs) != self._tensor_count:
            raise RuntimeFailure(
                f"method {self._method!r} returned {len(outputs)} tensors, its signature lists {self._tensor_count}"
            )
        fresh = iter(outputs)
        return self._structure.build(
            [spec.value if isinstance(spec, ConstantSpec) else next(fresh) for spec in self._specs]
        )


def _fresh(tensor: torch.Tensor, taken: set[int]) -> torch.Tensor:
    memory = tensor.untyped_storage().data_ptr()
    if memory not in taken:
        if memory:
            taken.add(memory)
        return tensor
    with torch.no_grad():
        return tensor.clone()
