from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch

from penstock.errors import PackageError, RuntimeFailure
from penstock.program import ConstantSpec, TensorSpec
from penstock.runtime.outputs import OutputBinding
from tests.runtime.programs import a_method


def binding(count: int, result: Any) -> OutputBinding:
    return OutputBinding(
        a_method(outputs=[TensorSpec(f"y{n}", "float32", (3,), (1,)) for n in range(count)], result=result)
    )


@pytest.mark.parametrize(
    "nesting",
    [
        "only",
        ("only",),
        ["a", ("b", {"x": "c", "w": ["d"]})],
        OrderedDict(b="x", a=["y"]),
        {1: "a", "two": ("b",)},
        ((), {}, "a", []),
    ],
)
def test_results_nest_as_at_export(nesting: Any) -> None:
    leaves, spec = torch.utils._pytree.tree_flatten(nesting)
    outputs = [torch.randn(3) for _ in leaves]
    result = binding(len(leaves), nesting).nested(outputs, [])
    found, found_spec = torch.utils._pytree.tree_flatten(result)
    assert found_spec == spec and all(a is b for a, b in zip(found, outputs, strict=True))


def test_constants_stand_where_they_stood() -> None:
    specs = [ConstantSpec("", 7), TensorSpec("y", "float32", (3,), (1,)), ConstantSpec("", None)]
    y = torch.randn(3)
    result = OutputBinding(a_method(outputs=specs, result=(0, [0, 0]))).nested([y], [])
    assert result == (7, [y, None])


def test_what_shares_memory_with_an_input_is_copied() -> None:
    given, fresh = torch.randn(3, requires_grad=True), torch.randn(3)
    outputs = [given, given[1:], fresh]
    results = binding(3, (0, 0, 0)).nested(outputs, [torch.randn(2), given])
    assert results[2] is fresh
    for result, output in zip(results[:2], outputs[:2], strict=True):
        assert torch.equal(result, output) and not result.requires_grad
        assert result.untyped_storage().data_ptr() != given.untyped_storage().data_ptr()


def test_what_shares_memory_with_another_output_is_copied() -> None:
    y = torch.randn(3)
    first, second, third = binding(3, (0, 0, 0)).nested([y, y, y[:2]], [])
    assert first is y and torch.equal(second, y) and torch.equal(third, y[:2])
    assert len({tensor.untyped_storage().data_ptr() for tensor in (first, second, third)}) == 3


def test_empty_tensors_share_nothing() -> None:
    outputs = [torch.empty(0), torch.empty(0, 3)]
    assert binding(2, (0, 0)).nested(outputs, [torch.empty(0)]) == tuple(outputs)


@pytest.mark.parametrize("count", [1, 3])
def test_another_number_of_results_is_an_error(count: int) -> None:
    with pytest.raises(RuntimeFailure, match=f"'forward' returned {count} tensors, its signature lists 2"):
        binding(2, (0, 0)).nested([torch.ones(3)] * count, [])


def test_a_structure_of_another_size_than_the_signature_is_refused() -> None:
    with pytest.raises(PackageError, match="has 2 leaves, the signature lists 1"):
        binding(1, (0, 0))
