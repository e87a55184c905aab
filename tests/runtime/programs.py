"""Programs and methods made by hand: metadata without compiled code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree

from penstock.program import ConstantSpec, Method, Program, Signature, TensorSpec
from penstock.schedule import Access, Schedule, Step
from penstock.torch_private.pytree import dump_spec, flatten
from penstock.weight import State, Weight
from penstock.weights import layout_identity

CPU = torch.device("cpu")


def a_method(
    inputs: Sequence[TensorSpec | ConstantSpec] = (),
    call: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
    *,
    name: str = "forward",
    outputs: Sequence[TensorSpec | ConstantSpec] = (),
    result: Any = (),
    symbols: dict[str, tuple[int, int | None]] | None = None,
    states: tuple[str, ...] = (),
    weights: Sequence[str] = ("w",),
    activation_bound_bytes: int | None = 1000,
) -> Method:
    """`call` and `result` show the nesting, with anything for a leaf; the default call is flat."""
    arguments, keywords = ((0,) * len(inputs), {}) if call is None else call
    signature = Signature(
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        in_spec=flatten(arguments, keywords)[1],
        out_spec=dump_spec(_pytree.tree_structure(result)),
        symbols=symbols or {},
    )
    accesses = tuple(Access(number, weight) for number, weight in enumerate(weights))
    schedule = Schedule(name, accesses, tuple(Step(f"kernel {a.number}", (a.number,)) for a in accesses))
    return Method(name, schedule, signature, states, 10, activation_bound_bytes, ())


def a_program(
    methods: Sequence[Method] = (),
    weights: Sequence[Weight] = (Weight("w", "float32", (4, 6), (0, 1)),),
    states: Sequence[State] = (),
    *,
    budget_bytes: int | None = None,
    device: str = "cpu",
    built_with: dict[str, str] | None = None,
) -> Program:
    return Program(
        methods=tuple(methods) or (a_method(weights=[w.name for w in weights]),),
        weights=tuple(weights),
        states=tuple(states),
        identity=layout_identity(weights, states),
        floor_bytes=100,
        budget_bytes=budget_bytes,
        unused=(),
        device=device,
        built_with=built_with or {},
    )
