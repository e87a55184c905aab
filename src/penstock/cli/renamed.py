"""Former command line options and their values: each is refused with a sentence that names the new one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from penstock.renamed import OPTIONS, value_hint

F = TypeVar("F", bound=Callable[..., Any])

_SENTENCES = {
    "--mode": "use --placement, where streamed is now stream, and direct in-place",
    "--linear": OPTIONS["linear"],
    "--link-gb-per-s": "use --link, as in --link 25GB/s",
    "--memory-gb-per-s": "use --compute-bandwidth, as in --compute-bandwidth 1TB/s",
}


def renamed_option(name: str) -> Callable[[F], F]:
    def refuse(context: click.Context, option: click.Parameter, value: str | None) -> None:
        if value is not None:
            raise click.UsageError(f"{name} is no longer an option: {_SENTENCES[name]}")

    return click.option(name, hidden=True, expose_value=False, callback=refuse)


class PlacementChoice(click.Choice[str]):
    """The values of --placement."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            raise click.BadParameter(f"{error.message}{value_hint('placement', value)}", ctx, param) from error
