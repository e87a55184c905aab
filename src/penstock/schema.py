"""Turns JSON from a file into dataclasses by their annotations: the one place that judges types.

What passes has exactly the types that the dataclasses say: whole numbers from 0 to 2^63 - 1 and no booleans among them,
text that UTF-8 can hold, every key once, none missing and none too many. Separate rules judge how the values relate, on
the finished dataclass.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from typing import Annotated, Any, NoReturn, TypeVar

from penstock.printable import printable

T = TypeVar("T")

# A whole number that may be negative.
Signed = Annotated[int, "may be negative"]

HIGHEST = 2**63 - 1
_SHOWN = 80
_NAMES: dict[Any, str] = {
    int: f"a whole number of 0 to {HIGHEST}",
    Signed: "a whole number",
    str: "text",
    bool: "true or false",
    float: "a finite number",
}


class SchemaError(ValueError):
    """The text is not JSON, or does not have the required shape. Whoever reads the file says which file it is."""


def parse_json(text: str) -> Any:
    """Accepts what the standard allows: no NaN, no Infinity, no key twice, nothing nested or spelled beyond reason."""
    try:
        return json.loads(
            text,
            object_pairs_hook=_unique,
            parse_constant=lambda word: _fail("JSON", word, "numbers"),
            parse_float=_finite,
        )
    except SchemaError:
        raise
    except (ValueError, RecursionError) as error:  # ValueError: also a whole number of absurd length
        raise SchemaError(f"it is not JSON: {printable(str(error))[:_SHOWN]}") from error


def decode(kind: type[T], value: Any, where: str = "", *, rows: tuple[type, ...] = ()) -> T:
    """Decodes `value`, which json gave, as a `kind`. Dataclasses of `rows` are lists of their fields in order."""
    found: T = _decoded(kind, value, where, rows)
    return found


def _decoded(kind: Any, value: Any, where: str, rows: tuple[type, ...]) -> Any:
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _fields(kind, value, where, rows)
    if origin is tuple:
        if type(value) is not list:
            _fail(where, value, "a list")
        if parts[-1] is Ellipsis:
            return tuple(_decoded(parts[0], item, f"{where}[{index}]", rows) for index, item in enumerate(value))
        if len(value) != len(parts):
            _fail(where, value, f"a list of {len(parts)}")
        pairs = zip(parts, value, strict=True)
        return tuple(_decoded(part, item, f"{where}[{index}]", rows) for index, (part, item) in enumerate(pairs))
    if origin is dict:
        if type(value) is not dict:
            _fail(where, value, "an object")
        return {
            _text(key, f"a key of {where}"): _decoded(parts[1], item, f"{where}.{_shown(key)}", rows)
            for key, item in value.items()
        }
    if kind == Signed:
        if type(value) is not int or abs(value) > HIGHEST:
            _fail(where, value, _NAMES[Signed])
        return value
    if kind is Any:
        return _constant(value, where)
    if origin in (typing.Union, types.UnionType):
        return _decoded(_member(parts, value, where), value, where, rows)
    return _scalar(kind, value, where)


def _member(parts: tuple[Any, ...], value: Any, where: str) -> Any:
    """Picks the kind that the value says it is, of several: by its `kind`, if it is an object, or by its type."""
    tagged: dict[str, Any] = {part.KIND: part for part in parts if hasattr(part, "KIND")}
    if tagged:
        found = value.get("kind") if type(value) is dict else None
        if type(found) is not str or found not in tagged:
            _fail(f"{where}.kind", found, " or ".join(map(repr, tagged)))
        return tagged[found]
    for part in parts:
        if type(value) is (int if part == Signed else types.NoneType if part is None else part):
            return part
    return _fail(where, value, " or ".join("null" if part is types.NoneType else _NAMES[part] for part in parts))


def _fields(kind: type, value: Any, where: str, rows: tuple[type, ...]) -> Any:
    hints = _hints(kind)
    if kind in rows:
        if type(value) is not list or len(value) != len(hints):
            _fail(where, value, f"a list of {', '.join(hints)}")
        value = dict(zip(hints, value, strict=True))
    if type(value) is not dict:
        _fail(where, value, "an object")
    tag = {"kind"} if hasattr(kind, "KIND") else set()
    for key in value.keys() - hints.keys() - tag:
        raise SchemaError(f"{where or 'it'} has {_shown(key)!r}, which is unknown; known are {', '.join(hints)}")
    for key in hints.keys() - value.keys():
        raise SchemaError(f"{where or 'it'} has no {key!r}")
    return kind(**{k: _decoded(hint, value[k], f"{where}.{k}" if where else k, rows) for k, hint in hints.items()})


_known_hints: dict[type, dict[str, Any]] = {}


def _hints(kind: type) -> dict[str, Any]:
    if kind not in _known_hints:
        names = [field.name for field in dataclasses.fields(kind)]
        hints = typing.get_type_hints(kind, include_extras=True)
        _known_hints[kind] = {name: hints[name] for name in names}
    return _known_hints[kind]


def _scalar(kind: Any, value: Any, where: str) -> Any:
    if kind is types.NoneType:
        return value
    if type(value) is not kind:  # not isinstance: True is no number here
        _fail(where, value, _NAMES[kind])
    if kind is int and not 0 <= value <= HIGHEST:
        _fail(where, value, _NAMES[int])
    return _text(value, where) if kind is str else value


def encode_constant(value: Any) -> Any:
    """A number, text, truth value or null as JSON has it; JSON has no spelling for numbers that are not finite."""
    return {"float": str(value)} if type(value) is float and not math.isfinite(value) else value


def _constant(value: Any, where: str) -> Any:
    if type(value) is dict and value.keys() == {"float"} and value["float"] in ("inf", "-inf", "nan"):
        return float(value["float"])
    if isinstance(value, list | dict):
        _fail(where, value, "a number, text, true, false or null")
    return _text(value, where) if isinstance(value, str) else value


def _text(value: str, where: str) -> str:
    # JSON can spell half a surrogate pair, which no terminal, file or flatbuffer can hold.
    if not value.isascii() and value != value.encode(errors="replace").decode():
        _fail(where, value, "text that UTF-8 can hold")
    return value


def _finite(digits: str) -> float:
    number = float(digits)
    return number if math.isfinite(number) else _fail("JSON", digits, "finite numbers")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise SchemaError(f"it has the key {_shown(twice)!r} twice in one object")
    return table


def _shown(text: str) -> str:
    return printable(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")


def _fail(where: str, has: object, needs: str) -> NoReturn:
    if isinstance(has, list | dict):  # which may be nested too deeply to be printed
        told = f"a {'list' if isinstance(has, list) else 'JSON object'} of {len(has)}"
    elif isinstance(has, int) and not isinstance(has, bool) and abs(has) > HIGHEST:
        told = f"a number of {has.bit_length()} bits"
    elif has is None or isinstance(has, bool):
        told = json.dumps(has)
    else:
        told = _shown(repr(has))
    raise SchemaError(f"{where or 'it'} is {told}, needs {needs}")
