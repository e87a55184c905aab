"""Which products become penstock_linear, that they multiply as the model does, and what the compiler emits for them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import Interpreter

import penstock
from penstock.errors import CompileError
from penstock.export.weightless import WeightlessProgram, make_weightless
from penstock.ops import FETCH, LINEAR, WEIGHT
from penstock.program import read_program
from tests.export.builds import Built, built
from tests.harness import compiled, offloaded

ROWS, DEPTH = 24, 16
CPU = torch.device("cpu")
linear = nn.functional.linear


class Weight(nn.Module):
    """One weight, an addend of as many numbers as it has rows, and what is done with both."""

    def __init__(
        self, does: Callable[..., Any], shape: tuple[int, ...] = (ROWS, DEPTH), dtype: torch.dtype = torch.bfloat16
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.does = does
        self.weight = nn.Parameter(torch.randn(shape).to(dtype))
        self.addend = nn.Parameter(torch.randn(shape[0]).to(dtype))

    def forward(self, x: Tensor) -> Any:
        return self.does(x, self.weight, self.addend)


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(shape).to(dtype)


def weightless(program: ExportedProgram, split_linear: bool = True) -> WeightlessProgram:
    return make_weightless(program, CPU, frozenset(), split_linear=split_linear)


class Fetched(Interpreter):
    """Runs a weightless graph on the program's own weights, with torch's product in the place of ours."""

    def __init__(self, program: ExportedProgram, found: WeightlessProgram) -> None:
        super().__init__(found.module)
        self._weights = {n: program.state_dict[name] for n, name in found.weight_of.items()}

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is WEIGHT:
            number, size, dtype, _ = args
            weight = self._weights[number]
            assert (weight.dtype, weight.numel()) == (dtype, torch.Size(size).numel())
            return weight if list(weight.shape) == list(size) else weight.t()
        if target is LINEAR:
            x, weight, bias, number = args
            assert weight is self._weights[number] and x.dim() == 2
            return linear(x, weight, bias)
        return super().call_function(target, args, kwargs)


def linear_weights(model: nn.Module, x: Tensor, *, dynamic: Any = None, decomposed: bool = False) -> list[str]:
    """Names of the weights of the accesses that became linear, once the rewritten program gave what the model gives."""
    model = model.eval().requires_grad_(False)
    program = torch.export.export(model, (x,), dynamic_shapes=dynamic)
    program = penstock.apply_weight_offload(program.run_decompositions() if decomposed else program)
    found = weightless(program)
    ours, theirs = Fetched(program, found).run(x), model(x)
    for mine, wanted in zip(ours, theirs if isinstance(theirs, tuple) else (theirs,), strict=True):
        torch.testing.assert_close(mine, wanted)
        assert mine.dtype == wanted.dtype
    calls = found.module.graph.find_nodes(op="call_function", target=LINEAR)
    assert {call.args[3] for call in calls} == found.linear
    for call in calls:
        assert call.args[1].target is WEIGHT and call.args[1].args[0] == call.args[3]
        assert call.meta["val"].shape == (call.args[0].meta["val"].shape[0], call.args[1].meta["val"].shape[0])
    return [found.weight_of[number] for number in sorted(found.linear)]


PRODUCTS: dict[str, Callable[..., Any]] = {
    "linear": lambda x, w, b: linear(x, w) - b,
    "linear with bias": lambda x, w, b: linear(x, w, b),
    "mm of t": lambda x, w, b: torch.mm(x, w.t()) - b,
    "mm of transpose": lambda x, w, b: torch.mm(x, w.transpose(-1, 0)) - b,
    "mm of permute": lambda x, w, b: torch.mm(x, w.permute(1, 0)) - b,
    "addmm": lambda x, w, b: torch.addmm(b, x, w.t()),
    "matmul": lambda x, w, b: x @ w.T - b,
}


@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize("product", PRODUCTS)
def test_products(product: str, decomposed: bool) -> None:
    assert linear_weights(Weight(PRODUCTS[product]), numbers(5, DEPTH), decomposed=decomposed) == ["weight"]


@pytest.mark.parametrize("product", ["linear", "linear with bias", "matmul"])
@pytest.mark.parametrize("shape", [(DEPTH,), (1, DEPTH), (2, 3, DEPTH), (2, 1, 3, DEPTH), (0, DEPTH), (0, 3, DEPTH)])
def test_tokens_of_any_shape(product: str, shape: tuple[int, ...]) -> None:
    assert linear_weights(Weight(PRODUCTS[product]), numbers(*shape)) == ["weight"]


def test_float16_is_multiplied_as_well() -> None:
    model = Weight(PRODUCTS["linear with bias"], dtype=torch.float16)
    assert linear_weights(model, numbers(5, DEPTH, dtype=torch.float16)) == ["weight"]


@pytest.mark.parametrize("decomposed", [False, True])
def test_dynamic_tokens(decomposed: bool) -> None:
    model = Weight(PRODUCTS["linear with bias"]).eval().requires_grad_(False)
    dynamic = ({0: Dim("batch", max=64), 1: Dim("length", max=64)},)
    program = torch.export.export(model, (numbers(2, 3, DEPTH),), dynamic_shapes=dynamic)
    program = penstock.apply_weight_offload(program.run_decompositions() if decomposed else program)
    found = weightless(program)
    assert [found.weight_of[number] for number in found.linear] == ["weight"]
    for batch, length in ((2, 3), (1, 1), (7, 20)):
        x = numbers(batch, length, DEPTH)
        (given,) = Fetched(program, found).run(x)
        torch.testing.assert_close(given, model(x))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, DEPTH, dtype=torch.bfloat16)

    def forward(self, tokens: Tensor) -> Tensor:
        return linear(self.table(tokens), self.table.weight)


def test_a_tied_weight_is_gathered_in_one_access_and_multiplied_in_the_other() -> None:
    program = offloaded(Tied(), (torch.arange(5),))
    found = weightless(program)
    (gathered,), (multiplied,) = found.gathered, found.linear
    assert found.weight_of[gathered] == found.weight_of[multiplied] == "table.weight" and gathered != multiplied


def read_twice() -> ExportedProgram:
    """One fetch with two readers: apply_weight_offload makes none such, but a user's own pass may merge its calls."""
    program = offloaded(Weight(lambda x, w, b: (linear(x, w, b), linear(x * 2, w))), (numbers(5, DEPTH),))
    first, *others = [f for f in program.graph.find_nodes(op="call_function", target=FETCH) if f.args[2] == "weight"]
    for other in others:
        other.replace_all_uses_with(first)
        program.graph.erase_node(other)
    return program


def test_every_reader_of_an_access_is_rewritten() -> None:
    found = weightless(read_twice())
    assert len(found.linear) == 1
    assert len(found.module.graph.find_nodes(op="call_function", target=LINEAR)) == 2


def test_an_access_that_anything_else_reads_too_is_left_alone() -> None:
    program = read_twice()
    second = program.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)[1]
    with program.graph.inserting_before(second):
        changed = program.graph.call_function(torch.ops.aten.relu.default, (second.args[1],))
    changed.meta["val"] = second.args[1].meta["val"]
    second.args = (second.args[0], changed)
    found = weightless(program)
    assert not found.linear and not found.module.graph.find_nodes(op="call_function", target=LINEAR)


OTHERS: dict[str, Callable[..., Any]] = {
    "mm of the weight itself": lambda x, w, b: torch.mm(w, x.t()),
    "the transpose as the left factor": lambda x, w, b: torch.mm(w.t(), b[:, None]) + x.sum(),
    "mm without a transpose": lambda x, w, b: torch.mm(x[:, :8], w[:8]),
    "two transposes": lambda x, w, b: torch.mm(x, w.t().t().t()),
    "elementwise": lambda x, w, b: (w * 2).sum() + x,
    "some rows": lambda x, w, b: linear(x, w[:8]),
    "a cast of it": lambda x, w, b: linear(x.float(), w.float()),
    "scaled addmm": lambda x, w, b: torch.addmm(b, x, w.t(), alpha=2),
    "half of an addend": lambda x, w, b: torch.addmm(b, x, w.t(), beta=0.5),
    "an addend for every token": lambda x, w, b: torch.addmm(b.expand(5, -1), x, w.t()),
    "one addend for all rows": lambda x, w, b: torch.addmm(b[:1], x, w.t()),
}


@pytest.mark.parametrize("other", OTHERS)
def test_what_is_no_product_with_rows(other: str) -> None:
    assert linear_weights(Weight(OTHERS[other]), numbers(5, DEPTH)) == []


def test_a_weight_that_is_multiplied_with_itself() -> None:
    """One access for both factors, and only one of them may be split."""
    assert linear_weights(Weight(lambda x, w, b: linear(w, w) + x.sum()), numbers(5, DEPTH)) == []


@pytest.mark.parametrize(
    ("shape", "dtype"), [((ROWS, 12), torch.bfloat16), ((ROWS, DEPTH), torch.float32), ((0, DEPTH), torch.bfloat16)]
)
def test_weights_that_do_not_suit(shape: tuple[int, int], dtype: torch.dtype) -> None:
    model = Weight(PRODUCTS["linear"], shape, dtype)
    assert linear_weights(model, numbers(5, shape[1], dtype=dtype)) == []


def test_a_weight_that_is_stored_transposed() -> None:
    model = Weight(PRODUCTS["linear"])
    model.weight = nn.Parameter(numbers(DEPTH, ROWS).t())
    assert linear_weights(model, numbers(5, DEPTH)) == []


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(numbers(DEPTH, DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: linear(x, self.weight), lambda x: x + 1, (x,))


def test_a_weight_inside_control_flow() -> None:
    found = weightless(offloaded(Branch(), (numbers(5, DEPTH),)))
    assert found.pinned and not found.linear


def test_without_split_linear_nothing_changes() -> None:
    program = offloaded(Weight(PRODUCTS["linear with bias"]), (numbers(5, DEPTH),))
    plain = weightless(program, split_linear=False)
    assert not plain.linear and not plain.module.graph.find_nodes(op="call_function", target=LINEAR)
    assert str(plain.module.graph) == str(make_weightless(program, CPU, frozenset()).module.graph)
    unsuited = offloaded(Weight(PRODUCTS["linear"], dtype=torch.float32), (numbers(5, DEPTH, dtype=torch.float32),))
    assert str(weightless(unsuited).module.graph) == str(weightless(unsuited, split_linear=False).module.graph)


@pytest.mark.usefixtures("no_compiler")
def test_split_linear_for_nothing_is_refused_before_compiling(tmp_path: Path) -> None:
    program = offloaded(Weight(PRODUCTS["linear"], dtype=torch.float32), (numbers(5, DEPTH, dtype=torch.float32),))
    with pytest.raises(CompileError, match="no weight of forward can be split; it takes one of bfloat16 or float16"):
        compiled(tmp_path, program, split_linear=True)
    assert not list(tmp_path.iterdir())


class Layers(nn.Module):
    """Products with and without bias; the second one's x does not lie row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DEPTH, ROWS, dtype=torch.bfloat16)
        self.down = nn.Linear(8, DEPTH, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.relu(self.up(x)), self.down(y.t())


BIAS = r"nullptr|&temporary_reference\(\w+\.get\(\)\)"
CALL = re.compile(
    rf"\baoti_torch_cpu_penstock_linear\((?P<x>.*), (?P<weight>\w+), (?P<bias>{BIAS}), (?P<access>\d+)L, &\w+_handle\)"
)


def test_what_is_emitted(tmp_path: Path) -> None:
    shapes = ({0: Dim("tokens", max=64)}, None)
    program = offloaded(Layers(), (numbers(3, 4, DEPTH), numbers(8, 6)), shapes)
    result = built(compiled(tmp_path, program, split_linear=True))
    (method,) = read_program(result.result.program_path).methods
    source = result.wrappers["forward"]
    number = {access.weight: access.number for access in method.schedule.accesses}
    assert [a.weight for a in method.schedule.accesses if a.linear] == ["up.weight", "down.weight"]
    assert (
        "AOTITorchError aoti_torch_cpu_penstock_linear("
        "AtenTensorHandle, AtenTensorHandle, AtenTensorHandle*, int64_t, AtenTensorHandle*);"
    ) in source
    up, down = CALL.finditer(source)
    for call, weight in ((up, "up.weight"), (down, "down.weight")):
        assert int(call["access"]) == number[weight]
        assert re.search(rf"penstock_weight\({number[weight]}L, .*&{call['weight']}_handle\)", source)
    assert up["bias"] != "nullptr" and down["bias"] == "nullptr"
    # An input that lies row by row is taken as it is, another one is copied first.
    assert "arg0_1" in up["x"] and re.fullmatch(r"buf\d+", down["x"])
    assert [(step.kernel, set(step.accesses)) for step in method.schedule.steps] == [
        ("torch.ops.penstock.penstock_linear.default", {number["up.weight"], number["up.bias"]}),
        ("torch.ops.penstock.penstock_linear.default", {number["down.weight"]}),
    ]


def test_what_is_emitted_without_it(small_build: Built) -> None:
    assert all("penstock_linear" not in source for source in small_build.wrappers.values())
    methods = small_build.result.program.methods
    assert not any(access.linear for method in methods for access in method.schedule.accesses)
