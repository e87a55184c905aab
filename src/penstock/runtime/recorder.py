"""Recordings of a session's runs. The core keeps one record, so there is one recording at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from penstock.errors import PenstockError
from penstock.runtime.session import Session, TraceSpan


class Recording:
    """Lasts from its start until it is stopped, or until something newer ends it."""

    def __init__(self, name: str, keep: Callable[[list[TraceSpan]], None] | None, *, first_runs: bool) -> None:
        self.name = name
        self.first_runs = first_runs
        # By method: how many runs have ended since the start.
        self.runs: Counter[str] = Counter()
        self.keep = keep
        self.ended_by: str | None = None

    def refusal(self) -> PenstockError:
        """Why it cannot be stopped."""
        return PenstockError(
            f"{self.name} recorded until {self.ended_by} ended it, and nothing was planned from it; "
            "do one after the other"
        )


class Recorder:
    """The newest caller records. It ends the recording before it, which says so when it is stopped.

    A new recording is not refused: one that an interrupt left on must not block everything that follows.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._current: Recording | None = None

    @property
    def current(self) -> Recording | None:
        return self._current

    @property
    def records_first_runs(self) -> bool:
        return self._current is not None and self._current.first_runs

    def start(
        self, name: str, keep: Callable[[list[TraceSpan]], None] | None = None, *, first_runs: bool = False
    ) -> Recording:
        """`name` says what records; `keep` is given the spans if something newer ends it."""
        self.end(name)
        self._session.start_trace()
        self._current = Recording(name, keep, first_runs=first_runs)
        return self._current

    def stop(self, recording: Recording) -> list[TraceSpan]:
        if recording is not self._current:
            raise recording.refusal()
        self._current = None
        return self._session.stop_trace()

    def end(self, by: str) -> None:
        current, self._current = self._current, None
        if current is not None:
            current.ended_by = by
            spans = self._session.stop_trace()
            if current.keep is not None:
                current.keep(spans)

    def count(self, method: str) -> None:
        """A run of the method has ended."""
        if self._current is not None:
            self._current.runs[method] += 1
