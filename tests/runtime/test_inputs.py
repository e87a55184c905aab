from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

from penstock.errors import InputError, PackageError
from penstock.program import ConstantSpec, IndexRange, TensorSpec
from penstock.program_rules import check_tensor
from penstock.runtime.inputs import ALIGNMENT_BYTES, InputBinding
from penstock.runtime.outputs import OutputBinding
from penstock.schema import SchemaError, decode
from penstock.verify.module import PoisonedModule
from tests.harness import compiled, offloaded
from tests.runtime.programs import CPU, a_method

X = TensorSpec("x", "float32", ("s0", 16), (16, 1))
Y = TensorSpec("y", "float32", ("s0 + 1",), (1,))
PLAIN = TensorSpec("x", "float32", (2, 3), (3, 1))
ONE_TO_64: dict[str, tuple[int, int | None]] = {"s0": (1, 64)}


def binding(
    *specs: TensorSpec | ConstantSpec,
    call: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
    symbols: dict[str, tuple[int, int | None]] | None = None,
    written: tuple[str, ...] = (),
    device: torch.device = CPU,
) -> InputBinding:
    return InputBinding(a_method(specs, call, symbols=symbols), device, written=written)


def refused(bound: InputBinding, pattern: str, *arguments: Any, **keywords: Any) -> None:
    with pytest.raises(InputError, match=pattern) as caught:
        bound.flat(arguments, keywords)
    assert str(caught.value).startswith("method 'forward': ")
    assert str(caught.value).endswith(f"\nexpected: {bound.signature_text}")


# ---------------------------------------------------------------------------------------------------------- structure


def test_what_fits_is_passed_as_it_is() -> None:
    x, y = torch.ones(4, 16), torch.ones(5)
    flat = binding(X, ConstantSpec("flag", True), Y, symbols=ONE_TO_64).flat((x, True, y), {})
    assert len(flat) == 2 and flat[0] is x and flat[1] is y


def test_the_signature_reads_like_a_call() -> None:
    nested = (({"b": [0], "a": 0}, (0,)), {"flag": 0})
    specs = (PLAIN, X, Y, ConstantSpec("flag", None))
    assert binding(*specs, call=nested, symbols=ONE_TO_64).signature_text == (
        "forward({'b': [x: float32[2, 3]], 'a': x: float32[s0, 16]}, (y: float32[s0 + 1],), flag=flag: None) on cpu, "
        "where 1 <= s0 <= 64"
    )
    assert binding().signature_text == "forward() on cpu"
    assert binding(X, symbols={"s0": (2, None)}).signature_text.endswith("on cpu, where 2 <= s0")


def test_nested_arguments_are_taken_in_the_order_of_the_export() -> None:
    call = (({"b": [0], "a": 0},), {"second": 0, "first": 0})
    bound = binding(*(TensorSpec(n, "int64", (), ()) for n in "wxyz"), call=call)
    values = [torch.tensor(n) for n in range(4)]
    flat = bound.flat(({"a": values[1], "b": [values[0]]},), {"first": values[3], "second": values[2]})
    assert [int(tensor) for tensor in flat] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "keywords", "pattern"),
    [
        ((), {}, "got 0 positional arguments, needs 1"),
        (({}, 1), {}, "got 2 positional arguments, needs 1"),
        (([1, 2],), {"flag": 0}, "positional argument 0 is of type list, needs to be a dict"),
        (({"b": [0]},), {"flag": 0}, "keys of positional argument 0 'b'; needs 'b', 'a'"),
        (({"b": [0], "c": 0},), {"flag": 0}, "keys of positional argument 0 'b', 'c'; needs 'b', 'a'"),
        (({"b": (0,), "a": 0},), {"flag": 0}, r"positional argument 0\['b'\] is of type tuple, needs to be a list"),
        (({"b": [0, 0], "a": 0},), {"flag": 0}, r"positional argument 0\['b'\] has 2 items, needs 1"),
        (({"b": [0], "a": 0},), {}, "keyword arguments none; needs 'flag'"),
        (({"b": [0], "a": 0},), {"flags": 0}, "keyword arguments 'flags'; needs 'flag'"),
        (({"b": [0], "a": 0},), {"flag": 0, "more": 0}, "keyword arguments 'flag', 'more'; needs 'flag'"),
    ],
)
def test_another_structure_is_refused(arguments: tuple[Any, ...], keywords: dict[str, Any], pattern: str) -> None:
    bound = binding(PLAIN, PLAIN, PLAIN, call=(({"b": [0], "a": 0},), {"flag": 0}))
    refused(bound, pattern, *arguments, **keywords)


def test_what_was_exported_by_position_cannot_be_given_by_name() -> None:
    bound = binding(PLAIN, call=((0,), {}))
    refused(bound, "got 0 positional arguments, needs 1; 'x', 'y' cannot be given by name", x=0, y=0)


Pair = namedtuple("Pair", "left right")
torch.utils._pytree._register_namedtuple(Pair, serialized_type_name="tests.runtime.test_inputs.Pair")


def test_other_containers_go_through_torch() -> None:
    scalars = [TensorSpec(n, "int64", (), ()) for n in "wxyz"]
    bound = binding(*scalars, call=((Pair(0, 0),), {"o": OrderedDict(b=0), "p": 0}))
    left, right, b, p = (torch.tensor(n) for n in range(4))
    assert bound.flat((Pair(left, right),), {"p": p, "o": OrderedDict(b=b)}) == [left, right, b, p]
    assert bound.signature_text.startswith("forward(namedtuple(w: int64[], x: int64[]), o=OrderedDict(y: int64[]), p=z")
    refused(bound, "got arguments that nest as .*needs", (left, right), p=p, o=OrderedDict(b=b))
    refused(bound, "got arguments that nest as .*needs", Pair(left, right), o=OrderedDict(b=b))


@pytest.mark.parametrize(
    "spec",
    ["", "[1, {}]", "[2, null]", '[1, {"type": null}]', "1", "[1, 2, 3]"],
)
def test_a_damaged_structure_is_refused(spec: str) -> None:
    method = a_method((PLAIN,))
    object.__setattr__(method.signature, "in_spec", spec)
    with pytest.raises(PackageError, match="structure|inputs nest as"):
        InputBinding(method, CPU, written=())


# ---------------------------------------------------------------------------------------------------------- constants

NAN = float("nan")


@pytest.mark.parametrize("value", [None, True, False, 0, 3, 2**70, 0.0, -0.0, 2.5, float("inf"), NAN, "mode", ""])
def test_a_constant_must_be_what_it_was_at_export(value: Any) -> None:
    bound = binding(ConstantSpec("flag", value))
    same = float("nan") if value is NAN else value
    assert bound.flat((same,), {}) == []
    others = [None, True, False, 0, 1, 3, 0.0, -0.0, 1.0, 3.0, 2.5, NAN, "mode", "Mode", torch.tensor(3), [3]]
    for other in others:
        if repr(other) != repr(value):
            refused(bound, re.escape(f"needs {value!r}: it was fixed at export"), other)


# ------------------------------------------------------------------------------------------------------------ tensors


class Marked(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("value", "pattern"),
    [
        (3.5, "input 'x' is 3.5 of type float, needs to be a torch.Tensor"),
        (None, "input 'x' is None of type NoneType"),
        ([[1.0]], "of type list"),
        (torch.ones(2, 3).as_subclass(Marked), r"is a tests.runtime.test_inputs.Marked, a subclass of torch.Tensor"),
        (torch.ones(2, 3).double(), "has dtype float64, needs float32"),
        (torch.ones(2, 3, device="meta"), "is on meta, needs to be on cpu"),
        (torch.ones(2, 3).to_sparse(), "is a sparse_coo tensor, needs to be a dense"),
        (torch.ones(2, 3).to_mkldnn(), "is a _mkldnn tensor, needs to be a dense"),
        (torch.ones(3), r"has 1 dimensions, shape \[3\]; needs 2, shape \[2, 3\]"),
        (torch.ones(()), r"has 0 dimensions, shape \[\]; needs 2"),
        (torch.ones(2, 4), r"has shape \[2, 4\], needs \[2, 3\]: dimension 1 is 4, needs 3"),
        (torch.ones(0, 3), r"has shape \[0, 3\], needs \[2, 3\]"),
    ],
    ids=lambda value: None if isinstance(value, str) else type(value).__name__,
)
def test_what_is_no_such_tensor_is_refused(value: Any, pattern: str) -> None:
    refused(binding(PLAIN), pattern, value)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_quantized_tensor_is_refused() -> None:
    quantized = torch.quantize_per_tensor(torch.ones(2, 3), 1.0, 0, torch.qint8)
    refused(binding(PLAIN), "has dtype qint8, needs float32", quantized)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused() -> None:
    refused(binding(PLAIN), "is a nested tensor", torch.nested.nested_tensor([torch.ones(3), torch.ones(2)]))


def test_inside_vmap_is_refused() -> None:
    bound = binding(PLAIN)

    def inside(x: torch.Tensor) -> torch.Tensor:
        refused(bound, "has no memory of its own", x)
        return x

    torch.vmap(inside)(torch.ones(5, 2, 3))


def test_another_gpu_is_refused() -> None:
    bound = binding(PLAIN, device=torch.device("cuda", 1))
    refused(bound, "is on cpu, needs to be on cuda:1", torch.ones(2, 3))


def test_gradients_are_refused_unless_they_are_off() -> None:
    bound = binding(PLAIN)
    parameter = nn.Parameter(torch.ones(2, 3))
    for leaf in (parameter, torch.ones(2, 3, requires_grad=True) * 2):
        refused(bound, r"requires grad, and .* torch.no_grad\(\)", leaf)
        with torch.no_grad():
            assert bound.flat((leaf,), {})[0] is leaf
        with torch.inference_mode():
            assert bound.flat((leaf,), {})[0] is leaf
    frozen = parameter.requires_grad_(False)
    assert bound.flat((frozen,), {})[0] is frozen


# ------------------------------------------------------------------------------------------------------ dynamic sizes


def test_a_size_may_be_anything_in_its_range() -> None:
    bound = binding(X, Y, symbols=ONE_TO_64)
    for batch in (1, 2, 64):
        assert [t.shape[0] for t in bound.flat((torch.ones(batch, 16), torch.ones(batch + 1)), {})] == [
            batch,
            batch + 1,
        ]
    refused(bound, "size 0 in dimension 0, which makes s0 = 0 .* to be 1 to 64", torch.ones(0, 16), torch.ones(1))
    refused(bound, "size 65 in dimension 0, which makes s0 = 65", torch.ones(65, 16), torch.ones(66))
    refused(
        bound,
        r"input 'y' has size 4 in dimension 0, needs s0 \+ 1 = 5 \(s0 is 4 by dimension 0 of input 'x'\)",
        torch.ones(4, 16),
        torch.ones(4),
    )
    unbounded = binding(X, symbols={"s0": (2, None)})
    assert unbounded.flat((torch.ones(10000, 16),), {})[0].shape[0] == 10000
    refused(unbounded, "needs s0 to be at least 2", torch.ones(1, 16))


def test_the_same_symbol_twice_must_agree() -> None:
    bound = binding(TensorSpec("x", "float32", ("s0", "s0"), ("s0", 1)), symbols=ONE_TO_64)
    bound.flat((torch.ones(3, 3),), {})
    refused(bound, "input 'x' has size 4 in dimension 1, needs s0 = 3", torch.ones(3, 4))


def test_a_symbol_is_found_where_only_expressions_tell_it() -> None:
    even = TensorSpec("e", "float32", ("2*s0",), (1,))
    bound = binding(even, symbols={"s0": (2, 8)})
    assert bound.flat((torch.ones(10),), {})[0].shape == (10,)
    refused(bound, "has size 7 in dimension 0, needs 2\\*s0: no whole s0 gives it", torch.ones(7))
    refused(bound, "makes s0 = 9 .the size is 2\\*s0.; needs s0 to be 2 to 8", torch.ones(18))
    capped = binding(TensorSpec("c", "float32", ("Min(s0, 9)",), (1,)), symbols=ONE_TO_64)
    refused(capped, r"has size 20 in dimension 0, needs Min\(s0, 9\) = 9", torch.ones(20))
    area = TensorSpec("area", "float32", ("s0*s1", "s1 - 1"), ("s1 - 1", 1))
    bound = binding(area, symbols={"s0": (1, 9), "s1": (1, 9)})
    assert bound.flat((torch.ones(12, 3),), {})[0].shape == (12, 3)
    refused(bound, "no whole s0 gives it", torch.ones(13, 3))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("s0", 7),
        ("-s0 + 20", 13),
        ("(s0//2)", 3),
        ("s0 % 4 + Mod(s0, 4) + PythonMod(s0, 4)", 9),
        ("s0**2", 49),
        ("Max(1, s0, 9) + Min(s0, 3)", 12),
        ("CeilDiv(s0, 2)*CleanDiv(s0, 7)", 4),
        ("FloorDiv(s0, s0 - 7 + 2)", 3),
    ],
)
def test_sizes_are_computed_as_torch_writes_them(text: str, value: int) -> None:
    symbol = TensorSpec("n", "float32", ("s0",), (1,))
    bound = binding(symbol, TensorSpec("x", "float32", (text,), (1,)), symbols=ONE_TO_64)
    bound.flat((torch.ones(7), torch.ones(value)), {})
    refused(bound, f"needs {re.escape(text)} = {value}", torch.ones(7), torch.ones(value + 1))


def test_a_size_that_divides_by_zero_is_refused() -> None:
    symbol = TensorSpec("n", "float32", ("s0",), (1,))
    bound = binding(symbol, TensorSpec("x", "float32", ("8//(s0 - 1)",), (1,)), symbols=ONE_TO_64)
    refused(bound, r"8//\(s0 - 1\) divides by zero where {'s0': 1}", torch.ones(1), torch.ones(1))


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('false')",
        "s0.real",
        "s0[0]",
        "[s0]",
        "s0 if s0 else 1",
        "lambda: 1",
        "s0 / 2",
        "1.5",
        "True",
        "'a'",
        "s0 << 9",
        "abs(s0)",
        "Max()",
        "Mod(s0)",
        "CeilDiv(s0, 2, 3)",
        "Max(s0, key=s0)",
        "s0**s0",
        "9**9",
        "((((s0**8)**8)**8)**8)**8",
        "s0 +",
        "",
        "-" * 501 + "1",
        "s0\x00",
    ],
)
def test_a_size_that_is_no_size_is_refused_unexecuted(text: str) -> None:
    symbol = TensorSpec("n", "float32", ("s0",), (1,))
    with pytest.raises(PackageError, match="the size"):
        binding(symbol, TensorSpec("x", "float32", (text,), (1,)), symbols=ONE_TO_64)


@pytest.mark.parametrize(
    ("spec", "symbols", "what"),
    [
        (
            TensorSpec("x", "float32", (4,), ("s0",)),
            {"s0": (1, 64)},
            "symbol s0 is not determined by any size of an input",
        ),
        (TensorSpec("x", "float32", ("s0*s1",), (1,)), {"s0": (1, 64), "s1": (1, 64)}, "s0, s1 is not determined by"),
        (
            TensorSpec("x", "float32", ("s0**2",), (1,)),
            {"s0": (1, 64)},
            "symbol s0 is not determined by any size of an input",
        ),
        (
            TensorSpec("x", "float32", ("8//s0",), (1,)),
            {"s0": (1, 64)},
            "symbol s0 is not determined by any size of an input",
        ),
        (TensorSpec("x", "float32", ("s0",), (1,)), {}, "symbol s0 has no range"),
        (TensorSpec("x", "float33", (4,), (1,)), {}, "has dtype 'float33', which torch .* does not have"),
        (TensorSpec("x", "nn", (4,), (1,)), {}, "has dtype 'nn'"),
    ],
)
def test_a_damaged_signature_is_refused(spec: TensorSpec, symbols: Any, what: str) -> None:
    with pytest.raises(PackageError, match=what):
        binding(spec, symbols=symbols)


# ------------------------------------------------------------------------------------------------------------- layout


def misaligned(value: torch.Tensor) -> torch.Tensor:
    """The same values and strides, one element off."""
    size = value.untyped_storage().nbytes() // value.element_size()
    moved = torch.zeros(size + 1, dtype=value.dtype)
    moved[1:] = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage())
    result = moved.as_strided(value.shape, value.stride(), 1)
    assert result.data_ptr() % ALIGNMENT_BYTES and torch.equal(result, value)
    return result


def transposed(*shape: int) -> torch.Tensor:
    return torch.randn(*reversed(shape)).permute(*reversed(range(len(shape))))


@pytest.mark.parametrize(
    "given",
    [transposed(4, 16), torch.randn(4, 32)[:, ::2], torch.randn(1, 16).expand(4, 16), misaligned(torch.randn(4, 16))],
    ids=["transposed", "sliced", "expanded", "misaligned"],
)
def test_another_layout_is_copied_into_the_expected_one(given: torch.Tensor) -> None:
    (flat,) = binding(X, symbols=ONE_TO_64).flat((given,), {})
    assert flat is not given and torch.equal(flat, given)
    assert flat.stride() == (16, 1) and flat.data_ptr() % ALIGNMENT_BYTES == 0


def test_strides_that_nothing_reads_are_left_alone() -> None:
    bound = binding(TensorSpec("x", "float32", ("s0", "s1", 3), ("3*s1", 3, 1)), symbols={"s0": (0, 9), "s1": (0, 9)})
    for given in (
        torch.randn(5, 3)[:, None].as_strided((5, 1, 3), (3, 77, 1)),
        torch.randn(1, 2, 3).as_strided((1, 2, 3), (1, 3, 1)),
        torch.empty(0, 2, 3).as_strided((0, 2, 3), (1, 1, 7)),
    ):
        assert bound.flat((given,), {})[0] is given


def test_strides_that_depend_on_sizes() -> None:
    bound = binding(TensorSpec("x", "float32", ("s0", 16), (1, "s0")), symbols=ONE_TO_64)
    for batch in (1, 3, 64, 3):
        fitting, other = transposed(batch, 16), torch.randn(batch, 16)
        assert bound.flat((fitting,), {})[0] is fitting
        (copied,) = bound.flat((other,), {})
        assert torch.equal(copied, other) and (batch == 1 or copied.stride() == (1, batch))


def test_an_expanded_example_needs_an_expanded_input() -> None:
    bound = binding(TensorSpec("x", "float32", ("s0", 16), (0, 1)), symbols=ONE_TO_64)
    expanded = torch.randn(16).expand(4, 16)
    assert bound.flat((expanded,), {})[0] is expanded
    moved = misaligned(expanded)
    (flat,) = bound.flat((moved,), {})
    assert flat.data_ptr() % ALIGNMENT_BYTES == 0 and flat.stride() == (0, 1) and torch.equal(flat, expanded)
    refused(bound, r"has strides \[16, 1\]; the program was compiled for an expanded one", torch.randn(4, 16))
    single = torch.randn(1, 16)
    assert bound.flat((single,), {})[0] is single


def test_lazy_conjugates_and_negatives_are_settled() -> None:
    bound = binding(TensorSpec("c", "complex64", (8,), (1,)), TensorSpec("n", "float32", (8,), (2,)))
    c = torch.randn(8, dtype=torch.complex64).conj()
    n = torch.randn(8, dtype=torch.complex64).conj().imag
    assert c.is_conj() and n.is_neg() and n.stride() == (2,)
    settled = bound.flat((c, n), {})
    assert torch.equal(settled[0], c) and torch.equal(settled[1], n) and settled[1].stride() == (2,)
    assert not settled[0].is_conj() and not settled[1].is_neg()


def test_a_copy_belongs_to_no_graph_and_leaves_the_input_alone() -> None:
    given = torch.randn(3, 2, requires_grad=True).t()
    with torch.no_grad():
        (flat,) = binding(PLAIN).flat((given,), {})
    assert not flat.requires_grad and flat.grad_fn is None
    flat.zero_()
    assert given.abs().sum() > 0


def test_an_input_that_is_written_is_never_copied() -> None:
    bound = binding(PLAIN, TensorSpec("y", "float32", (2, 3), (3, 1)), written=("x",))
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    assert bound.flat((x, transposed(2, 3)), {})[0] is x
    refused(bound, "writes into input 'x', so it is not copied: it has strides", transposed(2, 3), y)
    refused(bound, "needs strides .3, 1. at a multiple of 16", misaligned(x), y)
    refused(bound, "writes into input 'x', and input 'y' shares its memory", x, x)


# ------------------------------------------------------------------------------------------------------------ indices

ROWS = IndexRange(0, 128, "embed.weight", 0, 128)
PLACES = IndexRange(-32, 32, "k_cache", 2, 32)
MOST, LEAST = 2**63 - 1, -(2**63)


def tokens_of(dtype: str = "int64", *indexes: IndexRange) -> TensorSpec:
    return TensorSpec("tokens", dtype, (2, "s0"), ("s0", 1), indexes or (ROWS,))


def numbers(*rows: list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(rows, dtype=dtype)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_indices_up_to_their_bounds_are_passed_as_they_are(dtype: str) -> None:
    bound = binding(tokens_of(dtype), symbols=ONE_TO_64)
    given = numbers([0, 5, 127], [127, 0, 1], dtype=getattr(torch, dtype))
    (flat,) = bound.flat((given,), {})
    assert flat is given


@pytest.mark.parametrize(
    ("rows", "dtype", "found"),
    [
        (([0, 128, 3], [0, 0, 0]), "int64", "is 128 at [0, 1]"),
        (([0, 1, 3], [0, 0, -1]), "int64", "is -1 at [1, 2]"),
        (([0, 1, 3], [MOST, 0, LEAST]), "int64", f"is {MOST} at [1, 0]"),
        (([LEAST, 1, 3], [0, 0, 500]), "int64", f"is {LEAST} at [0, 0]"),
        (([0, 1, 128], [0, 0, 0]), "int32", "is 128 at [0, 2]"),
        (([0, 1, 2**31 - 1], [0, 0, 0]), "int32", f"is {2**31 - 1} at [0, 2]"),
        (([-128], [0]), "int8", "is -128 at [0, 0]"),
        (([255], [0]), "uint8", "is 255 at [0, 0]"),
    ],
)
def test_an_index_out_of_range_is_refused(rows: tuple[list[int], ...], dtype: str, found: str) -> None:
    given = numbers(*rows, dtype=getattr(torch, dtype))
    text = (
        f"input 'tokens' {found}; needs to be at least 0 and below 128: it indexes 'embed.weight', which has 128 rows"
    )
    refused(binding(tokens_of(dtype), symbols=ONE_TO_64), re.escape(text), given)


def test_an_index_into_a_cache_names_its_dimension_and_may_count_from_the_end() -> None:
    bound = binding(TensorSpec("position", "int64", (), (), (PLACES,)))
    for fits in (-32, -1, 0, 31):
        bound.flat((torch.tensor(fits),), {})
    text = (
        "input 'position' is {}; needs to be at least -32 and below 32: it indexes dimension 2 of 'k_cache', which has"
    )
    for outside in (-33, 32, MOST, LEAST):
        refused(bound, re.escape(text.format(outside) + " 32 entries"), torch.tensor(outside))


def test_only_the_numbers_that_are_indices_are_checked() -> None:
    """Of the first row all but the last; the second row is something else."""
    part = IndexRange(0, 128, "embed.weight", 0, 128, ((0, 1, 1), (0, -1, 1)))
    bound = binding(tokens_of("int64", part), symbols=ONE_TO_64)
    bound.flat((numbers([0, 127, -100], [-5, 500, 500]),), {})
    refused(bound, re.escape("is -100 at [0, 1]"), numbers([0, -100, -100], [-5, 500, 500]))
    bound.flat((numbers([-100], [500]),), {})  # nothing is left of it


def test_every_range_of_an_input_holds() -> None:
    bound = binding(tokens_of("int64", ROWS, IndexRange(2, 500, "offset.weight", 0, 498)), symbols=ONE_TO_64)
    bound.flat((numbers([2, 127], [3, 3]),), {})
    refused(bound, "is 1 at .*'offset.weight', which has 498 rows", numbers([2, 127], [1, 3]))
    refused(bound, "is 128 at .*'embed.weight'", numbers([2, 128], [3, 3]))


def test_a_nested_index_is_refused_by_its_name() -> None:
    bound = binding(PLAIN, tokens_of(), call=(({"a": 0, "b": [0]},), {}), symbols=ONE_TO_64)
    refused(bound, "input 'tokens' is 128", {"a": torch.ones(2, 3), "b": [numbers([128], [0])]})


def test_what_lies_in_another_layout_is_checked_as_it_is_meant() -> None:
    given = numbers([1, 300, 2], [3, 300, 4]).t()[::2].t()
    (flat,) = binding(tokens_of(), symbols=ONE_TO_64).flat((given,), {})
    assert flat.tolist() == [[1, 2], [3, 4]]
    refused(binding(tokens_of(), symbols=ONE_TO_64), re.escape("is 128 at [1, 1]"), numbers([1, 3], [2, 128]).t().t())


def test_on_a_gpu_indices_are_checked_only_when_asked() -> None:
    """To look at them there is to wait for it."""
    spec, bad = tokens_of(), torch.empty(2, 3, dtype=torch.int64, device="meta")
    meta = torch.device("meta")
    method = a_method((spec,), symbols=ONE_TO_64)
    assert InputBinding(method, meta, written=()).flat((bad,), {}) == [bad]
    with pytest.raises(RuntimeError, match="meta"):  # it looks, and a meta tensor has nothing to look at
        InputBinding(method, meta, written=(), check_indices=True).flat((bad,), {})


@pytest.mark.parametrize(
    "change",
    [
        {"low": 5, "high": 4},
        {"low": 0.5},
        {"high": None},
        {"high": True},
        {"table": 7},
        {"size": -1},
        {"dim": -1},
        {"region": [[0, None, 0], [0, None, 1]]},
        {"region": [[None, None, 1], [0, None, 1]]},
        {"region": [[0, "1", 1], [0, None, 1]]},
        {"region": [[0, None, 1]]},
    ],
)
def test_a_range_that_is_none_is_refused(change: dict[str, Any]) -> None:
    row: dict[str, Any] = dict(low=-4, high=4, table="t", dim=0, size=4, region=[[0, None, 1], [-2, -1, 1]])
    spec = dict(kind="tensor", name="x", dtype="int64", shape=[2, 3], strides=[3, 1])

    def read(index: dict[str, Any]) -> None:
        check_tensor(decode(TensorSpec, {**spec, "indexes": [index]}))

    read(row)
    with pytest.raises((SchemaError, PackageError)):
        read({**row, **change})


class Reader(nn.Module):
    """Tokens in a dictionary, and a cache that is written at positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, 64)
        self.out = nn.Linear(64, 8)
        self.register_buffer("cache", torch.zeros(1, 32, 64), persistent=False)

    def forward(self, batch: dict[str, torch.Tensor], positions: torch.Tensor) -> torch.Tensor:
        h = self.embed(batch["tokens"])
        self.cache.index_copy_(1, positions, h)
        return self.out(h + self.cache.sum(1, keepdim=True))


CHILD = """
import sys, torch, penstock
from penstock.errors import InputError

module = penstock.Module(sys.argv[1])
good = {"read": torch.arange(16)[None], "step": torch.tensor([[5]], dtype=torch.int32)}
places = {"read": torch.arange(16), "step": torch.tensor([31])}
first = {name: module.run_method(name, {"tokens": good[name]}, places[name]) for name in good}
assert torch.get_num_threads() == 2
for name in good:
    last = {"tokens": torch.full_like(good[name], 127)}
    module.run_method(name, last, places[name])
    for bad in (128, -1, 2**31 - 1, -(2**31)):
        tokens = good[name].clone()
        tokens[0, -1] = bad
        try:
            module.run_method(name, {"tokens": tokens}, places[name])
        except InputError as error:
            assert f"input 'batch_tokens' is {bad} at [0, {tokens.shape[1] - 1}]" in str(error), error
            assert "it indexes 'embed.weight', which has 128 rows" in str(error), error
        else:
            sys.exit(f"{name}: token {bad} was taken")
    for bad in (32, -1, 2**62):
        positions = places[name].clone()
        positions[-1] = bad
        try:
            module.run_method(name, {"tokens": good[name]}, positions)
        except InputError as error:
            assert f"input 'positions' is {bad} at [{len(positions) - 1}]" in str(error), error
            assert "it indexes dimension 1 of 'cache', which has 32 entries" in str(error), error
        else:
            sys.exit(f"{name}: position {bad} was taken")
# Nothing of the refused calls has run: state is what it was, and the module runs on.
module.reset_state()
assert all(torch.equal(module.run_method(n, {"tokens": good[n]}, places[n]), first[n]) for n in good)
print("alive")
"""


@pytest.mark.slow
def test_indices_out_of_range_do_not_end_the_process(tmp_path: Path) -> None:
    """With two threads, compiled code that meets one ends it: an exception cannot leave a parallel loop."""
    torch.manual_seed(0)
    model, batch = Reader(), {"tokens": torch.arange(16)[None]}
    single = {"tokens": torch.tensor([[5]], dtype=torch.int32)}
    programs = {
        "read": offloaded(model, (batch, torch.arange(16))),
        "step": offloaded(model, (single, torch.tensor([3]))),
    }
    path = compiled(tmp_path, programs, inductor_configs={"cpp.threads": 2, "cpp.min_chunk_size": 1}).program_path
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(path)],
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


# ----------------------------------------------------------------------------------------------------------- compiled


class Layouts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16))
        self.register_buffer("seen", torch.zeros(16))

    def forward(self, x: torch.Tensor, wide: torch.Tensor, turned: torch.Tensor, count: torch.Tensor) -> dict[str, Any]:
        self.seen.add_(x.sum(0))
        count.add_(1)
        y = x * self.weight + wide + turned.sum(0)
        return {
            "y": y,
            "clone": (y.clone(), y),
            "given": [x, x[0], wide],
            "seen": self.seen,
            "count": count,
            "nothing": None,
        }


def sample(batch: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(batch, 16), torch.randn(16).expand(batch, 16), transposed(8, 16), torch.zeros(3)


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> PoisonedModule:
    torch.manual_seed(0)
    batch = Dim("batch", min=1, max=64)
    program = offloaded(Layouts(), sample(4), ({0: batch}, {0: batch}, None, None))
    module = PoisonedModule(compiled(tmp_path_factory.mktemp("layouts"), program).program_path)
    module(*sample(4))  # makes the session
    return module


def run(module: PoisonedModule, arguments: tuple[torch.Tensor, ...]) -> tuple[Any, list[torch.Tensor]]:
    """The nested result, and all that the compiled code was given."""
    method = module.program.method("forward")
    flat = InputBinding(method, CPU, written=("count",)).flat(arguments, {})
    inputs = [module.states[name] for name in method.states] + flat
    outputs = module.sessions["forward"].run(lambda: module.compiled("forward")(inputs))
    return OutputBinding(method).nested(outputs, inputs), inputs


@pytest.mark.parametrize("batch", [1, 2, 5, 64])
@pytest.mark.parametrize("kind", ["as compiled", "other layouts", "misaligned"])
def test_the_compiled_code_reads_every_layout_right(module: PoisonedModule, batch: int, kind: str) -> None:
    x, wide, turned, count = sample(batch)
    if kind == "other layouts":
        x, turned = transposed(batch, 16), torch.randn(8, 32)[:, 1::2]
    elif kind == "misaligned":
        x, wide, turned = misaligned(x), misaligned(wide), misaligned(turned)
    seen = module.states["seen"].clone()
    result, _ = run(module, (x, wide, turned, count))
    weight = torch.frombuffer(bytearray(module._weights["weight"].numpy().tobytes()), dtype=torch.float32)
    torch.testing.assert_close(result["y"], x * weight + wide + turned.sum(0))
    torch.testing.assert_close(result["seen"], seen + x.sum(0))
    assert torch.equal(result["given"][0], x) and torch.equal(result["given"][2], wide)
    assert torch.equal(count, torch.ones(3)) and torch.equal(result["count"], count)
    assert result["nothing"] is None


def test_every_output_of_the_compiled_code_has_memory_of_its_own(module: PoisonedModule) -> None:
    arguments = sample(4)
    result, inputs = run(module, arguments)
    leaves = torch.utils._pytree.tree_leaves(result)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    kept = [tensor.clone() for tensor in (*arguments, *inputs)]
    assert len(tensors) == 8
    for position, tensor in enumerate(tensors):
        others = [other.clone() for other in tensors]
        tensor.fill_(-7)
        for index, (other, before) in enumerate(zip(tensors, others, strict=True)):
            assert index == position or torch.equal(other, before)
    assert all(torch.equal(a, b) for a, b in zip((*arguments, *inputs), kept, strict=True))
