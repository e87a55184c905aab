"""Calls of ops that write, as export leaves them in a graph: which op, with what, and what its results were before."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node

from penstock.torch_private.functionalized import before_call, called_op, called_with


@torch.library.custom_op("penstock_tests::store", mutates_args=("a", "b"))
def store(value: Tensor, a: Tensor, b: Tensor) -> None:
    a.copy_(value)
    b.copy_(value * 2)


@torch.library.custom_op("penstock_tests::swap", mutates_args=("a",))
def swap(value: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    old = a.clone()
    a.copy_(value)
    return old, value + 1


@swap.register_fake
def _(value: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(a), torch.empty_like(value)


class Writer(nn.Module):
    def __init__(self, *, swaps: bool) -> None:
        super().__init__()
        self.swaps = swaps
        self.register_buffer("a", torch.zeros(6))
        self.register_buffer("b", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.swaps:
            old, more = torch.ops.penstock_tests.swap(x, self.a[2:5])
            return old + more + self.a[2:5]
        torch.ops.penstock_tests.store(x, self.a[2:5], self.b)
        return self.a[2:5] + self.b


def nodes_of(*, swaps: bool) -> tuple[Node, dict[str, Node], list[Node]]:
    """The call, the placeholders by name, and what is taken out of the call's results."""
    ep = torch.export.export(Writer(swaps=swaps), (torch.zeros(3),)).run_decompositions({})
    calls = [node for node in ep.graph.nodes if (called_op(node) or "").startswith("penstock_tests::")]
    assert len(calls) == 1
    results = [node for node in calls[0].users if node.target is operator.getitem]
    return calls[0], {node.name: node for node in ep.graph.find_nodes(op="placeholder")}, results


def test_an_op_without_results() -> None:
    call, inputs, results = nodes_of(swaps=False)
    assert called_op(call) == "penstock_tests::store"
    assert called_with(call, "value") is inputs["x"]
    # `a` is a view: its base stands for it.
    assert [called_with(call, name) for name in ("a", "b")] == [inputs["b_a"], inputs["b_b"]]
    assert {before_call(node) for node in results} == {inputs["b_a"], inputs["b_b"]}


def test_an_op_with_results_of_its_own() -> None:
    call, inputs, results = nodes_of(swaps=True)
    assert called_op(call) == "penstock_tests::swap"
    assert called_with(call, "a") is inputs["b_a"]
    assert sorted((before_call(node) or "new") == "new" for node in results) == [False, True, True]
    assert [before_call(node) for node in results if node.args[1] == 2] == [inputs["b_a"]]


@pytest.mark.parametrize("name", ["self", "other"])
def test_an_op_that_writes_nowhere(name: str) -> None:
    ep = torch.export.export(nn.ReLU(), (torch.zeros(3),)).run_decompositions({})
    (call,) = (node for node in ep.graph.nodes if node.op == "call_function")
    assert called_op(call) == "aten::relu" and before_call(call) is None
    if name == "self":
        assert called_with(call, name).op == "placeholder"
    else:
        with pytest.raises(KeyError, match="other"):
            called_with(call, name)
