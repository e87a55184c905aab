"""Which readers of stacked matrices take experts, and what is said of those that read all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph

from penstock.export.experts import rewrite_experts, why_whole
from penstock.export.weightless import WeightlessProgram, make_weightless
from penstock.ops import GROUPED, ROWS
from tests.harness import offloaded

Does = Callable[..., Any]
SHAPE = (8, 32, 64)


class Stacked(nn.Module):
    """Weights of experts, by the names that tests give them, and what is done with them."""

    def __init__(self, does: Does, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.does = does
        self.moe = nn.Module()
        for name, shape in shapes.items():
            self.moe.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def forward(self, x: Tensor, ids: Tensor) -> Any:
        return self.does(x, ids, *self.moe.parameters())


def found(model: nn.Module, x: Tensor | None = None) -> WeightlessProgram:
    import transformers.integrations.moe  # noqa: F401  registers the op

    given = torch.zeros(2, SHAPE[2]) if x is None else x
    program = offloaded(model.eval(), (given, torch.zeros(2, dtype=torch.int64)))
    return make_weightless(program, torch.device("cpu"), frozenset())


def batched(x: Tensor, ids: Tensor, *weights: Tensor) -> list[Tensor]:
    return [torch.bmm(weight[ids], x.unsqueeze(-1)) for weight in weights]


def grouped(x: Tensor, ids: Tensor, *weights: Tensor) -> list[Tensor]:
    ends = (ids[:, None] == torch.arange(weights[0].shape[0])).sum(0).cumsum(0).to(torch.int32)
    multiply = torch.ops.transformers.grouped_mm_fallback
    return [multiply(x, weight.transpose(-2, -1), ends) for weight in weights]


def test_experts_are_read_by_ops_of_ours() -> None:
    for does, op in ((batched, ROWS), (grouped, GROUPED)):
        program = found(Stacked(does, up=SHAPE, down=SHAPE))
        assert program.whole_experts == {} and program.routing == {0: 0, 1: 0}
        assert len(program.module.graph.find_nodes(op="call_function", target=op)) == 2


@pytest.mark.parametrize(("rows", "columns"), [(33, 64), (34, 64), (32, 62), (32, 63)])
def test_matrices_that_no_session_multiplies_in_groups_are_read_whole(rows: int, columns: int) -> None:
    """Each has a multiple of sixteen bytes, which is enough to take it by index."""
    shape = (8, rows, columns) if rows * columns % 4 == 0 else (8, rows * 2, columns * 2)
    program = found(Stacked(grouped, up=shape), torch.zeros(2, shape[2]))
    text = f"its matrices have rows of {4 * shape[2]} bytes and columns of {4 * shape[1]}"
    assert program.routing == {} and program.whole_experts["moe.up"].startswith(text)
    assert not program.module.graph.find_nodes(op="call_function", target=GROUPED)
    assert found(Stacked(batched, up=shape), torch.zeros(2, shape[2])).routing == {0: 0}


def dense(x: Tensor, ids: Tensor, *weights: Tensor) -> list[Tensor]:
    return [torch.einsum("eij,tj->tei", weight, x) for weight in weights]


def linear(x: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.T


WHOLE: list[tuple[Does, str, tuple[int, ...], str | None]] = [
    (dense, "experts_up", SHAPE, "aten::einsum at 'einsum' reads all of it"),
    (linear, "experts", (8, 64), "experts are modules of their own here, and not rows of one weight"),
    (grouped, "up", (8, 4, 64), "an expert has 1024 bytes; needs a multiple of 16, and 4096 at least"),
    (grouped, "up", (8, 33, 63), "an expert has 8316 bytes; needs a multiple of 16, and 4096 at least"),
    (grouped, "up", (5000, 16, 64), "it has 5000 rows; a table of experts has room for 4096"),
    # Nothing says that these are experts.
    (dense, "up", SHAPE, None),
    # What every token reads.
    (linear, "shared_experts", (8, 64), None),
    (linear, "shared_expert_gate", (8, 64), None),
    # Taken by index all the same, and read where they lie.
    (batched, "experts", (8, 4, 64), None),
]


@pytest.mark.parametrize(("does", "name", "shape", "reason"), WHOLE)
def test_what_is_read_whole_is_said_with_its_reason(
    does: Does, name: str, shape: tuple[int, ...], reason: str | None
) -> None:
    program = found(Stacked(does, **{name: shape}), torch.zeros(2, shape[-1]))
    assert program.whole_experts == ({} if reason is None else {f"moe.{name}": reason}) and not program.routing


def test_experts_that_lie_otherwise_in_memory_are_read_whole() -> None:
    model = Stacked(grouped, up=SHAPE)
    model.moe.up = nn.Parameter(torch.zeros(8, 64, 32).transpose(1, 2))
    assert found(model).whole_experts == {"moe.up": "its experts do not lie one after the other"}


def test_two_indexes_of_one_access_are_named() -> None:
    """The pass gives each reader an access of its own; a program that was changed after it may have two of one."""
    graph = Graph()
    weight, one, other = (graph.placeholder(name) for name in ("weight", "one", "other"))
    weight.meta["val"] = torch.zeros(SHAPE)
    one.meta["val"] = other.meta["val"] = torch.zeros(2, dtype=torch.int64)
    readers = [graph.call_function(torch.ops.aten.index.Tensor, (weight, [index])) for index in (one, other)]
    for reader in readers:
        reader.meta["val"] = torch.zeros(2, *SHAPE[1:])
    graph.output(tuple(readers))
    assert rewrite_experts(graph, weight, 3) is None and not graph.find_nodes(op="call_function", target=ROWS)
    assert why_whole(weight, "up", row_by_row=True) == "its readers take experts by more than one index"
    readers[1].args = readers[0].args
    assert rewrite_experts(graph, weight, 3) is one
    assert len(graph.find_nodes(op="call_function", target=ROWS)) == 2
