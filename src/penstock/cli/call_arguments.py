"""Turns the content of a file of inputs into the arguments of a call, and makes up inputs if there is no file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from penstock.errors import InputError, PackageError
from penstock.layout import overlaps
from penstock.printable import printable
from penstock.program import ConstantSpec, Method, Signature, TensorSpec
from penstock.runtime.size_expression import size_expression
from penstock.torch_private.pytree import leaves_of, unflatten, with_tensors

# numpy's names for arrays without a name. Plain numbers mean the same.
_POSITION = re.compile(r"(?:arr_)?([0-9]{1,6})")
# The value of a dynamic size if none is given: small, but larger than the sizes that export treats specially.
_USUAL_SIZE = 4

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def call_arguments(held: Any, signature: Signature | None, where: str) -> Arguments:
    """`held` is what a file of inputs holds. Without a signature (a .pte) only positions are known, no names."""
    if isinstance(held, torch.Tensor):
        return (held,), {}
    if isinstance(held, (tuple, list)):
        return tuple(held), {}
    if not isinstance(held, Mapping):
        raise InputError(f"{where} holds a {type(held).__name__}; needs a tensor, a tuple of arguments, or names")
    if held.keys() <= {"args", "kwargs"} and held:
        arguments, keywords = held.get("args", ()), held.get("kwargs", {})
        if not isinstance(arguments, (tuple, list)) or not isinstance(keywords, Mapping):
            raise InputError(
                f"{where} holds args of type {type(arguments).__name__} and kwargs of type {type(keywords).__name__}; "
                "needs a tuple and a dict"
            )
        if not all(isinstance(name, str) for name in keywords):
            raise InputError(f"{where} holds kwargs named {', '.join(map(repr, keywords))}; needs names that are str")
        return tuple(arguments), dict(keywords)
    numbers = {name: _POSITION.fullmatch(str(name)) for name in held}
    if all(numbers.values()):
        found = [(int(match.group(1)), held[name]) for name, match in numbers.items() if match is not None]
        ordered = sorted(found, key=lambda pair: pair[0])
        if [number for number, _ in ordered] != list(range(len(ordered))):
            raise InputError(f"{where} has the positions {sorted(map(str, held))}; needs 0 to {len(ordered) - 1}")
        return _positional([tensor for _, tensor in ordered], signature, where)
    if signature is None:
        raise InputError(f"{where} names its tensors {_listed(held)}; a .pte needs positions: arr_0, arr_1")
    return _named(held, signature, where)


def _positional(tensors: list[Any], signature: Signature | None, where: str) -> Arguments:
    if signature is None:
        return tuple(tensors), {}
    names = [spec.name for spec in signature.inputs if isinstance(spec, TensorSpec)]
    if len(names) != len(tensors):
        raise InputError(f"{where} has {len(tensors)} tensors, the program takes {len(names)}: {_listed(names)}")
    return _named(dict(zip(names, tensors, strict=True)), signature, where)


def _named(held: Mapping[str, Any], signature: Signature, where: str) -> Arguments:
    names = [spec.name for spec in signature.inputs if isinstance(spec, TensorSpec)]
    missing, surplus = [n for n in names if n not in held], [n for n in held if n not in names]
    if missing or surplus:
        raise InputError(
            f"{where} has the tensors {_listed(held)}; the program takes {_listed(names)}"
            + (f"; missing: {_listed(missing)}" if missing else "")
            + (f"; unknown: {_listed(surplus)}" if surplus else "")
        )
    return _nested({name: held[name] for name in names}, signature)


def _listed(names: Iterable[Any]) -> str:
    return ", ".join(printable(str(name)) for name in names)


def _nested(tensors: Mapping[str, Any], signature: Signature) -> Arguments:
    leaves = [spec.value if isinstance(spec, ConstantSpec) else tensors[spec.name] for spec in signature.inputs]
    arguments, keywords = unflatten(leaves, signature.in_spec)
    return arguments, keywords


def made_arguments(method: Method, seed: int) -> Arguments:
    """Inputs of the recorded shapes: random numbers, and whole numbers that count up within what they may index, so
    that they work as tokens and as positions."""
    symbols = {name: _size_within(low, high) for name, (low, high) in method.signature.symbols.items()}
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        spec.name: _made(spec, symbols, generator) for spec in method.signature.inputs if isinstance(spec, TensorSpec)
    }
    return _nested(tensors, method.signature)


def _size_within(low: int, high: int | None) -> int:
    return max(low, _USUAL_SIZE if high is None else min(high, _USUAL_SIZE))


def _made(spec: TensorSpec, symbols: Mapping[str, int], generator: torch.Generator) -> torch.Tensor:
    shape, strides = [_number(n, symbols) for n in spec.shape], [_number(n, symbols) for n in spec.strides]
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise PackageError(f"input {spec.name!r} has dtype {spec.dtype!r}, which this torch does not have")
    span = 0 if 0 in shape else 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    # In the layout that the program reads, so nothing is copied on the way, and expanded inputs are expanded.
    memory = torch.randn(span, generator=generator) if dtype.is_floating_point else torch.zeros(span)
    tensor = memory.to(dtype).as_strided(shape, strides)
    if not dtype.is_floating_point and not dtype.is_complex and shape and not overlaps(shape, strides):
        low = max([0, *(index.low for index in spec.indexes)])
        high = min([2 if dtype is torch.bool else low + 128, *(index.high for index in spec.indexes)])
        tensor.copy_((low + torch.arange(shape[-1]) % max(high - low, 1)).expand(shape))
    return tensor


def _number(size: int | str, symbols: Mapping[str, int]) -> int:
    return size if isinstance(size, int) else size_expression(size).value(symbols)


def copied(arguments: Arguments, device: torch.device) -> Arguments:
    """Copies, because a program may write into its inputs. Expanded tensors are not copied: none writes into them."""

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, copy=not overlaps(tensor.shape, tensor.stride()))

    return with_tensors(arguments, copy)  # type: ignore[no-any-return]


def named_leaves(result: Any, signature: Signature | None) -> dict[str, torch.Tensor]:
    """The tensors of a result by the program's output names, or by number unless each has a name of its own."""
    tensors = [leaf for leaf in leaves_of(result) if isinstance(leaf, torch.Tensor)]
    names = [] if signature is None else [spec.name for spec in signature.outputs if isinstance(spec, TensorSpec)]
    if len(set(names)) != len(tensors):
        names = [str(number) for number in range(len(tensors))]
    return dict(zip(names, tensors, strict=True))
