"""Ways to damage bytes, JSON and lists of numbers. All chance comes from the generator that is given."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

# Numbers at which an offset, a length or a product tips over.
CORNERS = (0, 1, 2, 4, 7, 8, 0x7F, 0xFF, 0x100, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 2**53, 2**62, 2**63 - 1)
ODD_TEXT = ("", "x", "\x1b[2J\x1b]0;title\x07", "\u202egnp.exe", "\ud800", "\0", "a" * 1000, "../../etc", "s0", "1//0")
ODD_VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    -1,
    1.5,
    -0.0,
    1e300,
    10**30,
    [],
    {},
    [[]],
    {"a": 1},
    *CORNERS,
    *ODD_TEXT,
)


def damaged_bytes(rng: random.Random, raw: bytes, within: range | None = None) -> bytes:
    """One to three changes somewhere in `within`: bits, bytes, corner numbers, pieces moved, lost, doubled, cut off."""
    out = bytearray(raw)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        _damage(rng, out, within or range(len(raw)))
    return bytes(out)


def _damage(rng: random.Random, out: bytearray, within: range) -> None:
    at = min(rng.choice(within), max(len(out) - 1, 0))
    length = rng.choice((1, 2, 4, 8, 16, 64, 512, 4096))
    kind = rng.randrange(9)
    if not out or kind == 0:
        out[at : at + 1] = bytes([rng.randrange(256)])
    elif kind in (1, 2):
        out[at] ^= 1 << rng.randrange(8)
    elif kind == 3:
        width = rng.choice((1, 2, 4, 8))
        out[at : at + width] = (rng.choice(CORNERS) & (256**width - 1)).to_bytes(width, "little")
    elif kind == 4:
        out[at : at + length] = rng.randbytes(min(length, len(out) - at))
    elif kind == 5:
        other = rng.randrange(len(out))
        first, second = out[at : at + length], out[other : other + length]
        if len(first) == len(second) and abs(at - other) >= length:
            out[at : at + length], out[other : other + length] = second, first
    elif kind == 6:
        del out[at : at + length]
    elif kind == 7:
        out[at:at] = out[at : at + length] if rng.random() < 0.5 else rng.randbytes(length)
    else:
        del out[at:]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in nested JSON, containers included."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += places(item, (*path, key))
    return found


def damaged_json(rng: random.Random, table: Any) -> Any:
    """One to three changes: a value put in, taken out, doubled, or exchanged with another one."""
    out = json.loads(json.dumps(table))  # and not a deep copy, in which what is shared stays so
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        found = places(out)
        if not found:
            return out
        path, other = rng.choice(found), rng.choice(found)
        holder, key = _holder(out, path), path[-1]
        kind = rng.randrange(6)
        if kind < 2:
            holder[key] = copy.deepcopy(rng.choice(ODD_VALUES))
        elif kind == 2:
            number = holder[key]
            holder[key] = number + rng.choice((-1, 1)) if type(number) is int else copy.deepcopy(rng.choice(ODD_VALUES))
        elif kind == 3:
            del holder[key]
        elif kind == 4 and isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[key]))
        elif path[: len(other)] != other and other[: len(path)] != path:
            theirs = _holder(out, other)
            holder[key], theirs[other[-1]] = theirs[other[-1]], holder[key]
    return out


def _holder(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        value = value[key]
    return value


def damaged_numbers(rng: random.Random, numbers: list[int]) -> list[int]:
    out = list(numbers)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(out)) if out else 0
        kind = rng.randrange(6)
        if not out or kind == 0:
            out.insert(at, rng.choice(CORNERS))
        elif kind == 1:
            out[at] = rng.choice(CORNERS) * rng.choice((1, -1))
        elif kind == 2:
            out[at] += rng.choice((-4096, -1, 1, 4096))
        elif kind == 3:
            other = rng.randrange(len(out))
            out[at], out[other] = out[other], out[at]
        elif kind == 4:
            del out[at]
        else:
            out = out[:at]
    return [max(-(2**63), min(2**63 - 1, number)) for number in out]
