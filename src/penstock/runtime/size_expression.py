"""Sizes and strides that depend on symbols, such as "2*s0 + 1", as export writes them.

They come from a file, so they are never executed: the text is parsed, and only the operations listed here are allowed.
"""

from __future__ import annotations

import ast
import itertools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock.errors import PackageError
from penstock.printable import printable

_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
# Keyed by the names of torch's symbolic functions, which are over whole numbers and never negative here.
_FUNCTIONS: dict[str, Callable[[int, int], int]] = {
    "Max": max,
    "Min": min,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "CeilDiv": lambda a, b: -(-a // b),
}
# Anything beyond these limits is not a size, but could take forever to compute.
_MAX_EXPONENT = 8
_MAX_POWERS = 4
_MAX_LENGTH = 500


@dataclass(frozen=True)
class SizeExpression:
    text: str
    symbols: frozenset[str]
    _tree: ast.expr

    def value(self, symbols: Mapping[str, int]) -> int:
        """Every symbol must be given. Raises ZeroDivisionError if the expression divides by zero."""
        return _value(self._tree, symbols)

    def is_linear_in(self, symbol: str) -> bool:
        """Whether the expression's value determines `symbol`. Judged at a few points, so Min(s, 100) passes."""
        others = dict.fromkeys(self.symbols, 3)
        try:
            values = [self.value({**others, symbol: n}) for n in range(5)]
        except ZeroDivisionError:
            return False
        slopes = {after - before for before, after in itertools.pairwise(values)}
        return len(slopes) == 1 and slopes != {0}

    def solve(self, symbol: str, value: int, known: Mapping[str, int]) -> int | None:
        """The `symbol` at which the expression, if linear in it, equals `value`; None if no whole number does that."""
        at_zero, at_one = (self.value({**known, symbol: n}) for n in (0, 1))
        slope = at_one - at_zero
        if slope == 0 or (value - at_zero) % slope != 0:
            return None
        return (value - at_zero) // slope


def size_expression(text: str) -> SizeExpression:
    if len(text) > _MAX_LENGTH:
        raise PackageError(
            f"the size {printable(text[:40])}... has {len(text)} characters, needs to stay within {_MAX_LENGTH}"
        )
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise PackageError(f"the size {printable(text)!r} is not an expression: {printable(str(error))}") from error
    powers = sum(isinstance(node, ast.Pow) for node in ast.walk(tree))
    if powers > _MAX_POWERS:
        raise PackageError(f"the size {printable(text)!r} has {powers} powers, needs to stay within {_MAX_POWERS}")
    symbols: set[str] = set()
    _check(tree, text, symbols)
    return SizeExpression(text, frozenset(symbols), tree)


def _check(tree: ast.expr, text: str, symbols: set[str]) -> None:
    parts: list[ast.expr]
    match tree:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            parts = []
        case ast.Name(id=name):
            symbols.add(name)
            parts = []
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            parts = [operand]
        case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int(n))) if 0 <= n <= _MAX_EXPONENT:
            parts = [left]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            parts = [left, right]
        case ast.Call(func=ast.Name(id="Max" | "Min"), args=[_, *_] as parts, keywords=[]):
            pass
        case ast.Call(func=ast.Name(id=name), args=[_, _] as parts, keywords=[]) if name in _FUNCTIONS:
            pass
        case _:
            raise PackageError(
                f"the size {printable(text)!r} holds {printable(ast.unparse(tree))!r}, which is not understood; "
                f"known are whole numbers, symbols, + - * // % **, and {', '.join(_FUNCTIONS)}"
            )
    for part in parts:
        _check(part, text, symbols)


def _value(tree: ast.expr, symbols: Mapping[str, int]) -> int:
    match tree:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id=name):
            return symbols[name]
        case ast.UnaryOp(operand=operand):
            return -_value(operand, symbols)
        case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int(exponent))):
            return int(_value(left, symbols) ** exponent)
        case ast.BinOp(left=left, op=op, right=right):
            return _OPERATORS[type(op)](_value(left, symbols), _value(right, symbols))
        case ast.Call(func=ast.Name(id=name), args=[first, *rest]):
            result = _value(first, symbols)
            for argument in rest:
                result = _FUNCTIONS[name](result, _value(argument, symbols))
            return result
    raise AssertionError(f"{ast.dump(tree)} passed the check")
