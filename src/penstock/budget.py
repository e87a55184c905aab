"""Byte amounts as people write them, and back."""

from __future__ import annotations

import re
from fractions import Fraction

from penstock.errors import BudgetError

# What the native core can hold: a signed 64-bit number.
MAX_BYTES = 2**63 - 1

_PREFIXES = "KMGT"
_UNIT_BYTES: dict[str, int] = {"": 1, "B": 1}
for _power, _prefix in enumerate(_PREFIXES, start=1):
    # All upper and all lower case are understood. "Gb" and "Gib" are not: they read as bits.
    for _spelling in (f"{_prefix}iB", f"{_prefix}IB", f"{_prefix.lower()}ib"):
        _UNIT_BYTES[_spelling] = 1024**_power
    for _spelling in (f"{_prefix}B", f"{_prefix.lower()}b"):
        _UNIT_BYTES[_spelling] = 1000**_power
# The only one of these SI prefixes that is written in lower case.
_UNIT_BYTES["kB"] = 1000

# The digits are bounded because Python refuses to convert very long ones, with an error of its own.
_AMOUNT = re.compile(r"(-?[0-9]{1,40}(?:\.[0-9]{1,40})?)[ \t]*([A-Za-z]*)")

_VALID_FORMS = (
    "valid: a whole number of bytes (8589934592), or a number and a unit: "
    "KiB, MiB, GiB, TiB (powers of 1024) or B, KB, MB, GB, TB (powers of 1000), "
    "as in '8GiB', '2.3 GiB', '512MiB', '8 GB'"
)


def parse_bytes(value: int | str) -> int:
    """The number of bytes that `value` stands for; BudgetError for anything that is not clearly one.

    '2.3GiB' is 2469606195 bytes: the fraction of a byte is cut off.
    """
    if isinstance(value, bool):
        raise BudgetError(f"{value!r} is a bool, not a number of bytes; {_VALID_FORMS}")
    if isinstance(value, int):
        return _in_range(value, given=value)
    if not isinstance(value, str):
        raise BudgetError(f"{value!r} is of type {type(value).__name__}, not int or str; {_VALID_FORMS}")
    match = _AMOUNT.fullmatch(value.strip())
    if match is None:
        raise BudgetError(f"{_shown(value)} is not a number of bytes; {_VALID_FORMS}")
    digits, unit = match.groups()
    if unit not in _UNIT_BYTES:
        raise BudgetError(f"{_shown(value)} has the unit {_shown(unit)}, which is unknown or ambiguous; {_VALID_FORMS}")
    # Fraction, not float: the digits count as they are written, and only then is the fraction of a byte cut off.
    amount = Fraction(digits) * _UNIT_BYTES[unit]
    if _UNIT_BYTES[unit] == 1 and amount.denominator != 1:
        raise BudgetError(f"{_shown(value)} is not a whole number of bytes; {_VALID_FORMS}")
    return _in_range(int(amount), given=value)


def mb_to_bytes(mb: int) -> int:
    """Bytes of `weight_offload_budget_mb`, in which 1 MB is 2**20 bytes."""
    if isinstance(mb, bool) or not isinstance(mb, int):
        raise BudgetError(f"weight_offload_budget_mb is {mb!r} ({type(mb).__name__}); valid: an int of 0 or more (MiB)")
    if mb < 0:
        raise BudgetError(f"weight_offload_budget_mb is {_shown(mb)}; valid: an int of 0 or more (MiB)")
    if mb > MAX_BYTES >> 20:
        raise BudgetError(f"weight_offload_budget_mb is {_shown(mb)}; valid: 0 to {MAX_BYTES >> 20} (MiB)")
    return mb << 20


def format_bytes(n: int) -> str:
    """'1.5 GiB' where that is exact, '2.07 GiB (2218786816 bytes)' where it is not.

    The exact form, and the digits in the brackets, can be given to parse_bytes.
    """
    if n < 0:
        return f"-{format_bytes(-n)}"
    if n < 1024:
        return f"{n} B"
    unit_bytes, unit = 1024, "KiB"
    for prefix in _PREFIXES[1:]:
        # The next unit is due as soon as two decimals would round to 1024 of this one.
        if _hundredths(n, unit_bytes) < 102400:
            break
        unit_bytes, unit = unit_bytes * 1024, f"{prefix}iB"
    hundredths = _hundredths(n, unit_bytes)
    text = f"{hundredths // 100}.{hundredths % 100:02d}".rstrip("0").rstrip(".")
    exact = hundredths * unit_bytes == n * 100
    return f"{text} {unit}" if exact else f"{text} {unit} ({n} bytes)"


def _hundredths(n: int, unit_bytes: int) -> int:
    return (n * 100 + unit_bytes // 2) // unit_bytes


def _in_range(n: int, given: int | str) -> int:
    if n < 0:
        raise BudgetError(f"{_shown(given)} is negative; {_VALID_FORMS}")
    if n > MAX_BYTES:
        raise BudgetError(f"{_shown(given)} is more than {MAX_BYTES} bytes, the largest amount; {_VALID_FORMS}")
    return n


def _shown(value: int | str) -> str:
    # An absurdly long number has no place in a message (and Python refuses to print such an int).
    if isinstance(value, int) and value.bit_length() > 200:
        return f"an int of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
