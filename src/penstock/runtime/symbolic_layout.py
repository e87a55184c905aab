"""The combinations of sizes that a method's inputs may have, and the strides that they must then have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.errors import InputError, PackageError
from penstock.printable import printable
from penstock.runtime.size_expression import SizeExpression, size_expression

if TYPE_CHECKING:
    from penstock.program import TensorSpec


@dataclass(frozen=True)
class _Origin:
    """The size that determines a symbol's value: dimension `dim` of input `index`."""

    symbol: str
    index: int
    dim: int
    expression: SizeExpression


class SymbolicLayout:
    def __init__(self, specs: Sequence[TensorSpec], ranges: Mapping[str, tuple[int, int | None]]) -> None:
        self._specs = tuple(specs)
        self._ranges = dict(ranges)
        self._sizes = [[_parsed(size) for size in spec.shape] for spec in specs]
        self._strides = [[_parsed(stride) for stride in spec.strides] for spec in specs]
        self._origins = self._find_origins()

    @property
    def ranges_text(self) -> str:
        """ ", where 1 <= s0 <= 64"; nothing when no size is dynamic."""
        if not self._origins:
            return ""
        texts = []
        for origin in self._origins:
            low, high = self._ranges[origin.symbol]
            texts.append(f"{low} <= {origin.symbol}" + ("" if high is None else f" <= {high}"))
        return f", where {', '.join(texts)}"

    def strides(self, shapes: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        """The strides that inputs of these shapes must have; InputError where the shapes do not fit."""
        self._check_fixed(shapes)
        symbols = self._symbols(shapes)
        self._check_dynamic(shapes, symbols)
        return tuple(
            tuple(stride if isinstance(stride, int) else _value(stride, symbols) for stride in strides)
            for strides in self._strides
        )

    def _find_origins(self) -> tuple[_Origin, ...]:
        dynamic = [
            (index, dim, size)
            for index, sizes in enumerate(self._sizes)
            for dim, size in enumerate(sizes)
            if isinstance(size, SizeExpression)
        ]
        used = {
            symbol
            for parts in (*self._sizes, *self._strides)
            for part in parts
            if isinstance(part, SizeExpression)
            for symbol in part.symbols
        }
        # Checked before the search, which goes over all sizes once for each symbol that it finds.
        _require_none(used - self._ranges.keys(), "has no range")
        # Prefer a size that is a symbol by itself. A size in several symbols determines the last unknown one.
        dynamic.sort(key=lambda item: item[2].text not in item[2].symbols)
        found: dict[str, _Origin] = {}
        progress = True
        while progress:
            progress = False
            for index, dim, size in dynamic:
                unknown = size.symbols - found.keys()
                symbol = next(iter(unknown), "")
                if len(unknown) == 1 and size.is_linear_in(symbol):
                    found[symbol] = _Origin(symbol, index, dim, size)
                    progress = True
        _require_none(used - found.keys(), "is not determined by any size of an input")
        return tuple(found.values())

    def _check_fixed(self, shapes: Sequence[tuple[int, ...]]) -> None:
        for spec, shape in zip(self._specs, shapes, strict=True):
            if len(shape) != len(spec.shape):
                raise InputError(
                    f"input {spec.name!r} has {len(shape)} dimensions, shape {_text(shape)}; needs {len(spec.shape)}, "
                    f"shape {_text(spec.shape)}"
                )
            for dim, (size, needed) in enumerate(zip(shape, spec.shape, strict=True)):
                if isinstance(needed, int) and size != needed:
                    raise InputError(
                        f"input {spec.name!r} has shape {_text(shape)}, needs {_text(spec.shape)}: dimension {dim} is "
                        f"{size}, needs {needed}"
                    )

    def _symbols(self, shapes: Sequence[tuple[int, ...]]) -> dict[str, int]:
        symbols: dict[str, int] = {}
        for origin in self._origins:
            size = shapes[origin.index][origin.dim]
            where = f"input {self._specs[origin.index].name!r} has size {size} in dimension {origin.dim}"
            try:
                value = origin.expression.solve(origin.symbol, size, symbols)
            except ZeroDivisionError:
                value = None
            if value is None:
                raise InputError(f"{where}, needs {origin.expression.text}: no whole {origin.symbol} gives it")
            low, high = self._ranges[origin.symbol]
            if value < low or (high is not None and value > high):
                needed = f"at least {low}" if high is None else f"{low} to {high}"
                raise InputError(
                    f"{where}, which makes {origin.symbol} = {value} (the size is {origin.expression.text}); needs "
                    f"{origin.symbol} to be {needed}"
                )
            symbols[origin.symbol] = value
        return symbols

    def _check_dynamic(self, shapes: Sequence[tuple[int, ...]], symbols: Mapping[str, int]) -> None:
        for spec, sizes, shape in zip(self._specs, self._sizes, shapes, strict=True):
            for dim, (expression, size) in enumerate(zip(sizes, shape, strict=True)):
                if isinstance(expression, int):
                    continue
                needed = _value(expression, symbols)
                if size != needed:
                    told = ", ".join(
                        f"{o.symbol} is {symbols[o.symbol]} by dimension {o.dim} of input {self._specs[o.index].name!r}"
                        for o in self._origins
                        if o.symbol in expression.symbols
                    )
                    raise InputError(
                        f"input {spec.name!r} has size {size} in dimension {dim}, needs {expression.text} = {needed} "
                        f"({told})"
                    )


def _require_none(symbols: Set[str], fault: str) -> None:
    if symbols:
        shown = printable(", ".join(sorted(symbols)))
        raise PackageError(f"the signature is damaged: symbol {shown} {fault}")


def _parsed(size: int | str) -> int | SizeExpression:
    return size if isinstance(size, int) else size_expression(size)


def _value(expression: SizeExpression, symbols: Mapping[str, int]) -> int:
    try:
        return expression.value(symbols)
    except ZeroDivisionError as error:
        raise InputError(f"the size {expression.text} divides by zero where {dict(symbols)}") from error


def _text(shape: Sequence[int | str]) -> str:
    return f"[{', '.join(map(str, shape))}]"
