"""Former names of options and methods. Each is refused with a sentence that tells its new name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from penstock.errors import PenstockError

_LOGGER = 'the logger "penstock" has these messages: logging.getLogger("penstock")'

OPTIONS = {
    "mode": 'use placement=: "auto", "stream" (was "streamed"), "in-place" (was "direct") or "split"',
    "policy": 'use placement=: "lru" is one of its values, and every other one plans',
    "linear": "a program compiled with split_linear=True always multiplies with its own kernel; leave it out",
    "host_memory_cap": 'give the cap as host_memory itself, as in host_memory="1GiB"',
    "quiet": f"{_LOGGER}.setLevel(logging.ERROR) silences them",
    "progress": "a bar is shown where standard error is a terminal; TQDM_DISABLE=1 turns it off",
}
METHODS = {"calibrate_direct": "use calibrate(in_place=True)"}
# Former values of options that still exist.
VALUES = {
    ("placement", "streamed"): '"stream"',
    ("placement", "direct"): '"in-place"',
    ("placement", "planned"): '"auto"',
    ("host_memory", "staged"): 'a cap in bytes, as in "1GiB"',
}


def refuse_options(given: Mapping[str, Any]) -> None:
    """Refuses keywords that a module had before; ignores others."""
    for name in given:
        if name in OPTIONS:
            raise PenstockError(f"Module has no {name}= any more: {OPTIONS[name]}")


def refuse_attribute(owner: object, name: str) -> NoReturn:
    kind = type(owner).__name__
    sentence = f" any more: {METHODS[name]}" if name in METHODS else ""
    raise AttributeError(f"{kind!r} object has no attribute {name!r}{sentence}", name=name, obj=owner)


def value_hint(option: str, value: object) -> str:
    """To append to a refusal."""
    now = VALUES.get((option, value)) if isinstance(value, str) else None
    return "" if now is None else f"; what was {option}={value!r} is now {now}"
