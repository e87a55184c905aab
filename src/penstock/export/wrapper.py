"""Checks the C++ wrapper that the compiler wrote against the recorded schedule.

The text is a check, not a source: it does not show every lifetime. So the spans found in it must lie inside the spans
recorded, and the calls must stand exactly as recorded.
"""

from __future__ import annotations

import re

from penstock.errors import CompileError, ScheduleError
from penstock.schedule import Schedule

_BODY = re.compile(r"::run_impl\(\s*AtenTensorHandle.*?\)\s*\{(.*)\}\s*//\s*\w+::run_impl", re.DOTALL)
_NOISE = re.compile(r"//[^\n]*|if \(_check_aoti_runtime_check_inputs_env\(\)\)[^\n]*|\w+\.reset\(\);")
_FETCH = re.compile(r"\baoti_torch_[a-z]+_penstock_weight\(\s*(\d+)L?\b[^;]*?&(\w+)\s*\)")
_STEP_END = re.compile(r"\bpenstock_done\(\s*(\d+)L?\s*\)")
_EVENT = re.compile(f"(?P<fetch>{_FETCH.pattern})|(?P<end>{_STEP_END.pattern})")
# A new name for existing memory: `auto buf9 = std::move(buf7);`, `RAIIAtenTensorHandle buf3(buf3_handle);`, ...
_ALIAS = re.compile(
    r"\b(?:auto&?|const auto&?|RAIIAtenTensorHandle|AtenTensorHandle|ConstantHandle)\s+(\w+)\s*[=({]"
    r"\s*((?:std::move|reinterpret_tensor_wrapper|wrap_with_raii_handle_if_needed|borrow_arrayref_tensor_as_tensor"
    r"|RAIIAtenTensorHandle|ConstantHandle|copy_arrayref_tensor_to_tensor)?[\s(]*\w+\b)"
)
_CONSTANT_NAME = re.compile(r'constants_info_\[\d+\]\.original_fqn = "([^"]*)"')
_CONSTANTS = re.compile(r"AOTInductorModelBase\(\s*\d+\s*,\s*\d+\s*,\s*(\d+)\s*,")


def check_wrapper(source: str, schedule: Schedule) -> None:
    """Raise ScheduleError at the first place where the wrapper is not what the schedule says."""
    match = _BODY.search(source)
    if match is None:
        raise ScheduleError(f"method {schedule.method!r}: the generated wrapper has no run_impl body to check")
    # Blanked, not removed: positions must stay.
    body = _NOISE.sub(lambda m: " " * len(m.group()), match.group(1))
    ends, fetches = _check_events(body, schedule)
    _check_spans(body, schedule, ends, fetches)


def check_weightless(source: str, method: str) -> None:
    """Raise CompileError if the compiled program holds any constant: a weight, or something folded from one."""
    match = _CONSTANTS.search(source)
    if match is None:
        raise CompileError(f"method {method!r}: the generated wrapper does not say how many constants it has")
    count = int(match.group(1))
    if count:
        names = ", ".join(_CONSTANT_NAME.findall(source)[:8])
        raise CompileError(
            f"method {method!r}: the compiled program holds {count} constants ({names}); it must hold none"
        )


def _check_events(body: str, schedule: Schedule) -> tuple[dict[int, int], dict[int, tuple[int, str]]]:
    """Compare the sequence of fetches and step ends; give the positions of both."""
    expected = _recorded_events(schedule)
    ends: dict[int, int] = {}
    fetches: dict[int, tuple[int, str]] = {}
    found: list[tuple[str, int]] = []
    for event in _EVENT.finditer(body):
        if event.group("fetch"):
            call = _FETCH.match(event.group("fetch"))
            assert call is not None
            number = int(call.group(1))
            found.append(("access", number))
            fetches[number] = (event.end(), call.group(2))
        else:
            call = _STEP_END.match(event.group("end"))
            assert call is not None
            found.append(("end of step", int(call.group(1))))
            ends[int(call.group(1))] = event.start()

    for position in range(max(len(expected), len(found))):
        want = expected[position] if position < len(expected) else None
        have = found[position] if position < len(found) else None
        if want != have:
            raise ScheduleError(
                f"method {schedule.method!r}: the wrapper diverges from the schedule at call {position}: recorded "
                f"{_describe(want, schedule)}, emitted {_describe(have, schedule)}"
            )
    return ends, fetches


def _recorded_events(schedule: Schedule) -> list[tuple[str, int]]:
    """The calls that the record promises: accesses as listed, each after the ends of the steps before its reader."""
    expected: list[tuple[str, int]] = []
    ended = 0
    for access in schedule.accesses:
        first = schedule.first_step.get(access.number)
        if first is None:
            raise ScheduleError(
                f"method {schedule.method!r}: no recorded step reads access {access.number} (weight {access.weight!r})"
            )
        expected.extend(("end of step", index) for index in range(ended, first))
        ended = max(ended, first)
        expected.append(("access", access.number))
    expected.extend(("end of step", index) for index in range(ended, len(schedule.steps)))
    return expected


def _describe(event: tuple[str, int] | None, schedule: Schedule) -> str:
    if event is None:
        return "nothing"
    kind, number = event
    access = schedule.access_by_number.get(number) if kind == "access" else None
    return f"{kind} {number}" + (f" (weight {access.weight!r})" if access else "")


def _check_spans(body: str, schedule: Schedule, ends: dict[int, int], fetches: dict[int, tuple[int, str]]) -> None:
    """No name of a lent weight may stand after the end of its last recorded step."""
    owner: dict[str, int] = {}
    for number, (_, handle) in fetches.items():
        owner[handle] = number
        owner[handle.removesuffix("_handle")] = number
    for alias in _ALIAS.finditer(body):
        base = re.search(r"(\w+)$", alias.group(2))
        if base is not None and base.group(1) in owner and alias.group(1) not in owner:
            owner[alias.group(1)] = owner[base.group(1)]

    for word in re.finditer(r"\b[A-Za-z_]\w*\b", body):
        if word.group() not in owner:
            continue
        number = owner[word.group()]
        end = ends[schedule.last_step[number]]
        if word.start() > end:
            access = schedule.access_by_number[number]
            raise ScheduleError(
                f"method {schedule.method!r}: {word.group()} (access {number}, weight {access.weight!r}) is used after "
                f"step {schedule.last_step[number]}, its recorded last reader"
            )
