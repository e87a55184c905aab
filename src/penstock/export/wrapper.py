"""Checks the C++ wrapper that the compiler wrote against the recorded schedule.

The text is a check, not a source: it does not show every lifetime. So the spans found in it must lie inside the
recorded spans, and the calls must be exactly the recorded ones.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.errors import CompileError, ScheduleError
from penstock.schedule import Schedule
from penstock.torch_private.wrapper_text import (
    Mention,
    UnknownStatement,
    WrapperText,
    input_uses,
    read_constants,
    read_wrapper,
)

_SHOWN_CHARACTERS = 400


def check_wrapper(source: str, schedule: Schedule) -> None:
    """Raise ScheduleError at the first place where the wrapper is not what the schedule says."""
    text = read_wrapper(source)
    if text is None:
        raise ScheduleError(f"method {schedule.method!r}: the generated wrapper has no run function to check")
    for statement in text.unknown:
        raise _unknown(statement, schedule)
    _check_calls(text, schedule)
    _check_spans(text, schedule)


def check_weightless(source: str, method: str) -> None:
    """Raise CompileError if the compiled program holds any constant: a weight, or something folded from one."""
    constants = read_constants(source)
    if constants is None:
        raise CompileError(f"method {method!r}: the generated wrapper does not say how many constants it has")
    if constants.count:
        names = ", ".join(constants.names[:8])
        raise CompileError(
            f"method {method!r}: the compiled program holds {constants.count} constants ({names}); it must hold none"
        )


def check_handed_on(source: str, method: str, states: Mapping[int, str]) -> None:
    """Raise CompileError if the code does anything but hand these states on: it assumes the sizes of the export, and
    they may have others. `states`: by position among the inputs."""
    for position, name in states.items():
        uses = input_uses(source, position)
        if uses is None:
            raise CompileError(f"method {method!r}: the generated wrapper takes no input {position}, state {name!r}")
        for line in uses:
            raise CompileError(
                f"method {method!r}: the generated wrapper does more with state {name!r} than to hand it to the ops of "
                f"its KV cache: {line[:_SHOWN_CHARACTERS]!r}; report it, with the version of torch"
            )


def _unknown(statement: UnknownStatement, schedule: Schedule) -> ScheduleError:
    line = statement.line[:_SHOWN_CHARACTERS]
    known = (schedule.access_by_number.get(number) for number in sorted(statement.accesses))
    weights = ", ".join(repr(access.weight) for access in known if access is not None)
    what = f"mentions the weight {weights}" if weights else "calls Penstock"
    return ScheduleError(
        f"method {schedule.method!r}: the wrapper has a line that {what} and is of no known kind: {line!r}. Nobody can "
        "say when it reads the weight; report it, with the version of torch"
    )


def _check_calls(text: WrapperText, schedule: Schedule) -> None:
    """Compare the sequence of fetches and step ends."""
    expected = _recorded_events(schedule)
    found = [(call.kind, call.number) for call in text.calls]

    for position in range(max(len(expected), len(found))):
        want = expected[position] if position < len(expected) else None
        have = found[position] if position < len(found) else None
        if want != have:
            raise ScheduleError(
                f"method {schedule.method!r}: the wrapper diverges from the schedule at call {position}: recorded "
                f"{_describe(want, schedule)}, emitted {_describe(have, schedule)}"
            )


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


def _check_spans(text: WrapperText, schedule: Schedule) -> None:
    """No name of a lent weight may stand after the end of its last recorded step."""
    ends = {call.number: place for place, call in enumerate(text.calls) if call.kind == "end of step"}
    for mention in text.mentions:
        for number in sorted(mention.accesses):
            if mention.calls_before > ends[schedule.last_step[number]]:
                raise _used_late(mention, number, schedule)


def _used_late(mention: Mention, number: int, schedule: Schedule) -> ScheduleError:
    access = schedule.access_by_number[number]
    return ScheduleError(
        f"method {schedule.method!r}: {mention.name} (access {number}, weight {access.weight!r}) is used after "
        f"step {schedule.last_step[number]}, its recorded last reader"
    )
