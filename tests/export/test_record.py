"""A corrupted record is found: in the text of the generated wrapper, and by running under poison."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from penstock.errors import ScheduleError
from penstock.export.wrapper import check_wrapper
from penstock.native import core
from penstock.schedule import Access, Schedule, Step
from penstock.torch_private.loader import CompiledMethod as LoadedMethod
from penstock.verify.poison import PoisonSession
from tests.export.builds import DECODE, Built, stored_bytes

# ------------------------------------------------------------------------------------ the wrapper against its record


def events(schedule: Schedule) -> list[tuple[str, int]]:
    """The calls that a record promises, in order."""
    found: list[tuple[str, int]] = []
    pending = list(schedule.accesses)
    for index in range(len(schedule.steps)):
        while pending and schedule.first_step.get(pending[0].number, -1) == index:
            found.append(("access", pending.pop(0).number))
        found.append(("end of step", index))
    return found


def with_steps(schedule: Schedule, steps: list[Step]) -> Schedule:
    """A record of these steps that is sound in itself: every access is read, and fetched before its first reader."""
    first: dict[int, int] = {}
    for index, step in enumerate(steps):
        for number in step.accesses:
            first.setdefault(number, index)
    accesses = sorted((a for a in schedule.accesses if a.number in first), key=lambda a: first[a.number])
    return Schedule(schedule.method, tuple(accesses), tuple(steps))


def moved(schedule: Schedule, number: int, start: int, end: int) -> Schedule:
    """Step `end` reads the access, and step `start` does not any more."""
    steps = list(schedule.steps)
    steps[start] = replace(steps[start], accesses=tuple(n for n in steps[start].accesses if n != number))
    steps[end] = replace(steps[end], accesses=tuple(sorted({*steps[end].accesses, number})))
    return with_steps(schedule, steps)


def readers(schedule: Schedule, number: int) -> list[int]:
    return [index for index, step in enumerate(schedule.steps) if number in step.accesses]


def records(*builds: Built) -> Iterator[tuple[str, Schedule]]:
    for one in builds:
        for method in one.result.program.methods:
            yield one.wrappers[method.name], method.schedule


def assert_diverges(source: str, schedule: Schedule, altered: Schedule) -> None:
    """The error names the first call that is not as recorded: what was recorded there, and what was emitted."""
    have, want = events(schedule), events(altered)
    pairs = zip([*have, None], [*want, None], strict=False)
    position, (emitted, recorded) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
    with pytest.raises(ScheduleError) as caught:
        check_wrapper(source, altered)
    message = str(caught.value)
    assert repr(schedule.method) in message
    assert f"at call {position}: recorded {' '.join(map(str, recorded or ['nothing']))}" in message
    assert f"emitted {' '.join(map(str, emitted or ['nothing']))}" in message


def test_the_records_pass(decoder_build: Built, small_build: Built) -> None:
    for source, schedule in records(decoder_build, small_build):
        assert len(schedule.accesses) >= 4
        check_wrapper(source, schedule)


def test_two_accesses_of_a_step_swapped(decoder_build: Built, small_build: Built) -> None:
    tried = 0
    for source, schedule in records(decoder_build, small_build):
        for place in range(len(schedule.accesses) - 1):
            accesses = list(schedule.accesses)
            accesses[place : place + 2] = reversed(accesses[place : place + 2])
            if len({schedule.first_step[a.number] for a in accesses[place : place + 2]}) == 1:
                altered = Schedule(schedule.method, tuple(accesses), schedule.steps)
                assert_diverges(source, schedule, altered)
                assert f"weight {schedule.accesses[place + 1].weight!r}" in refusal(source, altered)
                tried += 1
    assert tried


def refusal(source: str, altered: Schedule) -> str:
    with pytest.raises(ScheduleError) as caught:
        check_wrapper(source, altered)
    return str(caught.value)


def test_an_access_with_another_number(decoder_build: Built) -> None:
    for source, schedule in records(decoder_build):
        for place, access in enumerate(schedule.accesses):
            accesses = list(schedule.accesses)
            accesses[place] = replace(access, number=99)
            renumbered = tuple(
                replace(s, accesses=tuple(99 if n == access.number else n for n in s.accesses)) for s in schedule.steps
            )
            altered = Schedule(schedule.method, tuple(accesses), renumbered)
            assert_diverges(source, schedule, altered)
            assert f"recorded access 99 (weight {access.weight!r})" in refusal(source, altered)


def test_an_access_left_out(decoder_build: Built) -> None:
    for source, schedule in records(decoder_build):
        for access in schedule.accesses:
            accesses = tuple(a for a in schedule.accesses if a != access)
            steps = tuple(
                replace(s, accesses=tuple(n for n in s.accesses if n != access.number)) for s in schedule.steps
            )
            assert_diverges(source, schedule, Schedule(schedule.method, accesses, steps))


def test_a_step_left_out_or_added(decoder_build: Built, small_build: Built) -> None:
    for source, schedule in records(decoder_build, small_build):
        for place, step in enumerate(schedule.steps):
            fewer = [*schedule.steps[:place], *schedule.steps[place + 1 :]]
            assert_diverges(source, schedule, with_steps(schedule, fewer))
            more = [*schedule.steps[:place], step, *schedule.steps[place:]]
            assert_diverges(source, schedule, with_steps(schedule, more))


def test_two_steps_swapped(decoder_build: Built) -> None:
    for source, schedule in records(decoder_build):
        for place in range(len(schedule.steps) - 1):
            one, other = schedule.steps[place], schedule.steps[place + 1]
            assert set(one.accesses) != set(other.accesses)
            steps = [*schedule.steps[:place], other, one, *schedule.steps[place + 2 :]]
            assert_diverges(source, schedule, with_steps(schedule, steps))


def test_a_first_reader_moved_to_the_step_before(decoder_build: Built, small_build: Built) -> None:
    tried = 0
    for source, schedule in records(decoder_build, small_build):
        for access in schedule.accesses:
            first = schedule.first_step[access.number]
            if first:
                assert_diverges(source, schedule, moved(schedule, access.number, first, first - 1))
                tried += 1
    assert tried > 10


def several_readers(schedule: Schedule) -> list[Access]:
    return [access for access in schedule.accesses if len(readers(schedule, access.number)) > 1]


def test_a_last_reader_moved_earlier_is_seen_in_the_text(decoder_build: Built, small_build: Built) -> None:
    tried = 0
    for source, schedule in records(decoder_build, small_build):
        for access in several_readers(schedule):
            *_, before, last = readers(schedule, access.number)
            for earlier in range(before, last):
                message = refusal(source, moved(schedule, access.number, last, earlier))
                assert f"(access {access.number}, weight {access.weight!r}) is used after step {earlier}" in message
                tried += 1
    assert tried >= 3  # every method has one


def test_a_last_reader_moved_later_passes(decoder_build: Built, small_build: Built) -> None:
    """Held too long is safe."""
    for source, schedule in records(decoder_build, small_build):
        for access in schedule.accesses:
            last = schedule.last_step[access.number]
            for later in range(last + 1, len(schedule.steps)):
                steps = list(schedule.steps)
                steps[later] = replace(steps[later], accesses=(*steps[later].accesses, access.number))
                check_wrapper(source, with_steps(schedule, steps))


def test_two_accesses_of_different_steps_swapped(decoder_build: Built, small_build: Built) -> None:
    tried = 0
    for source, schedule in records(decoder_build, small_build):
        for place in range(len(schedule.accesses) - 1):
            first, second = schedule.accesses[place : place + 2]
            if schedule.first_step[first.number] != schedule.first_step[second.number]:
                accesses = (*schedule.accesses[:place], second, first, *schedule.accesses[place + 2 :])
                message = refusal(source, Schedule(schedule.method, accesses, schedule.steps))
                assert f"emitted access {first.number} (weight {first.weight!r})" in message
                tried += 1
    assert tried > 5


def test_an_access_that_no_step_reads(decoder_build: Built) -> None:
    for source, schedule in records(decoder_build):
        for access in schedule.accesses:
            steps = tuple(
                replace(s, accesses=tuple(n for n in s.accesses if n != access.number)) for s in schedule.steps
            )
            message = refusal(source, Schedule(schedule.method, schedule.accesses, steps))
            assert f"access {access.number} (weight {access.weight!r})" in message


# --------------------------------------------------------------------------------------------- the record under poison


class Runner:
    """One method, run under any record, each time from fresh states."""

    def __init__(self, one: Built, method: str, args: tuple[torch.Tensor, ...]) -> None:
        result = one.result
        core()
        self.schedule = result.program.method(method).schedule
        held = stored_bytes(result.weights_path)
        self._weights = {
            weight.name: torch.frombuffer(bytearray(held[weight.name]), dtype=torch.uint8)
            for weight in result.program.weights
        }
        self._loaded = LoadedMethod(result.program_path, method)
        states = {state.name: state for state in result.program.states}
        assert all(state.init == "zeros" for state in states.values())
        self._states = [states[name] for name in result.program.method(method).states]
        self._args = args

    def run(self, schedule: Schedule) -> list[torch.Tensor]:
        """Outputs, and the states after the run."""
        states = [torch.zeros(state.shape, dtype=getattr(torch, state.dtype)) for state in self._states]
        with PoisonSession(schedule, self._weights) as session:
            outputs = session.run(lambda: self._loaded([*states, *self._args]))
            return [*(tensor.clone() for tensor in outputs), *states]

    def sees_poison(self, schedule: Schedule) -> bool:
        try:
            return any(bool(tensor.isnan().any()) for tensor in self.run(schedule))
        except ScheduleError:
            return True


@pytest.fixture(scope="module")
def runners(decoder_build: Built, small_build: Built) -> list[Runner]:
    inputs = {"first": (torch.ones(3, 8),), "second": (torch.ones(40, 8),)}
    return [
        Runner(decoder_build, "decode", DECODE.args),
        *(Runner(small_build, name, args) for name, args in inputs.items()),
    ]


def test_the_records_run(runners: list[Runner]) -> None:
    for runner in runners:
        assert not runner.sees_poison(runner.schedule)


def test_a_last_reader_moved_earlier_reads_poison(runners: list[Runner]) -> None:
    """For every access that more than one step reads; an only reader that is moved is the next test but one."""
    for runner in runners:
        accesses = several_readers(runner.schedule)
        assert accesses, runner.schedule.method
        for access in accesses:
            *_, before, last = readers(runner.schedule, access.number)
            for earlier in range(before, last):
                altered = moved(runner.schedule, access.number, last, earlier)
                assert altered.last_step[access.number] == earlier
                assert runner.sees_poison(altered), (runner.schedule.method, access, earlier)


def test_a_last_reader_moved_later_changes_nothing(runners: list[Runner]) -> None:
    for runner in runners:
        expected = runner.run(runner.schedule)
        for access in runner.schedule.accesses:
            last = runner.schedule.last_step[access.number]
            for later in {last + 1, len(runner.schedule.steps) - 1} - {last, len(runner.schedule.steps)}:
                steps = list(runner.schedule.steps)
                steps[later] = replace(steps[later], accesses=(*steps[later].accesses, access.number))
                found = runner.run(with_steps(runner.schedule, steps))
                assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)), access


def test_an_only_reader_moved_earlier_fails_the_run(runners: list[Runner]) -> None:
    tried = 0
    for runner in runners:
        for access in runner.schedule.accesses:
            first, last = runner.schedule.first_step[access.number], runner.schedule.last_step[access.number]
            if first == last and first:
                # The order of the calls stays as it is: only the record of who reads it is wrong.
                altered = replace(runner.schedule, steps=moved(runner.schedule, access.number, first, first - 1).steps)
                with pytest.raises(ScheduleError, match=f"access {access.number} was fetched after step {first - 1}"):
                    runner.run(altered)
                tried += 1
    assert tried > 5


def test_a_record_of_other_calls_fails_the_run(runners: list[Runner]) -> None:
    for runner in runners:
        schedule = runner.schedule
        for place in range(len(schedule.accesses) - 1):
            accesses = list(schedule.accesses)
            accesses[place : place + 2] = reversed(accesses[place : place + 2])
            expected = f"position {place}: recorded access {accesses[place].number}, fetched access"
            with pytest.raises(ScheduleError, match=expected):
                runner.run(Schedule(schedule.method, tuple(accesses), schedule.steps))
        with pytest.raises(ScheduleError, match=r"recorded steps|was due"):
            runner.run(with_steps(schedule, [*schedule.steps, schedule.steps[-1]]))
        last = schedule.accesses[-1]
        with pytest.raises(ScheduleError, match=f"access {last.number} was fetched after the last recorded one"):
            runner.run(Schedule(schedule.method, schedule.accesses[:-1], schedule.steps))
