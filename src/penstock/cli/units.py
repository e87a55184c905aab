"""Amounts as the command line takes and shows them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

from penstock.budget import format_bytes, parse_bytes
from penstock.errors import BudgetError
from penstock.renamed import value_hint

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


def short_bytes(nbytes: int) -> str:
    """'2.07 GiB': for tables, which have no room for the exact number; the JSON has it."""
    return format_bytes(nbytes).split(" (", maxsplit=1)[0]


def short_time(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.2f} {unit}"
    return "0" if seconds == 0 else f"{seconds / 1e-9:.0f} ns"


def short_rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s"


def budget_option(*, help: str) -> Callable[[Decorated], Decorated]:
    """--budget, which takes 8589934592, 8GiB or 2.3 GB. A malformed one gets the exit code of budget errors."""
    return click.option("--budget", callback=_parse_budget, metavar="BYTES", help=help)


def bytes_option(*names: str, help: str) -> Callable[[Decorated], Decorated]:
    """An option that takes an amount as --budget does."""
    return click.option(*names, callback=_parse_amount, metavar="BYTES", help=help)


def rate_option(*names: str, help: str) -> Callable[[Decorated], Decorated]:
    """An option that takes 25GB/s."""
    return click.option(*names, callback=_parse_rate, metavar="BYTES/s", help=help)


class FiniteRange(click.FloatRange):
    """A range of finite numbers. "nan" lies in no range, but click would let it pass."""

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> Any:
        found = super().convert(value, param, context)
        if not math.isfinite(found):
            self.fail(f"{value!r} is not a finite number", param, context)
        return found


def _parse_budget(context: click.Context, param: click.Parameter, value: str | None) -> int | None:
    try:
        return None if value is None else parse_bytes(value)
    except BudgetError as error:
        raise BudgetError(f"--budget: {error}") from error


def _parse_amount(context: click.Context, param: click.Parameter, value: str | None) -> int | None:
    try:
        return None if value is None else parse_bytes(value)
    except BudgetError as error:
        raise click.BadParameter(str(error), context, param) from error


def registered_or_bytes(context: click.Context, param: click.Parameter, value: str) -> str | int:
    """For --host-memory: the word that is its default, or an amount."""
    if value == param.default:
        return value
    try:
        return parse_bytes(value)
    except BudgetError as error:
        hint = value_hint("host_memory", value)
        forms = f"it must be {param.default}, or a cap in bytes such as 1GiB"
        raise click.BadParameter(f"{forms} ({error}){hint}", context, param) from error


def _parse_rate(context: click.Context, param: click.Parameter, value: str | None) -> float | None:
    if value is None:
        return None
    match = re.fullmatch(r"(.*\S)\s*/\s*s", value.strip())
    if match is None:
        raise click.BadParameter(f"{value!r} is not bytes per second, as in 25GB/s", context, param)
    rate = _parse_amount(context, param, match.group(1))
    if not rate:
        raise click.BadParameter(f"{value!r} is not a rate: nothing would ever arrive", context, param)
    return float(rate)
