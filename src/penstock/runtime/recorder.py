"""What is being recorded of a session's runs. The core keeps one record, so it is one thing at a time."""

from __future__ import annotations

from collections import Counter

from penstock.errors import PenstockError
from penstock.runtime.session import Session, Span


class Recorder:
    """A record that somebody asked for is not given up for another; one that was only useful (`yields`) is."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._purpose: str | None = None
        self._yields = False
        self._runs: Counter[str] = Counter()

    @property
    def is_on(self) -> bool:
        return self._purpose is not None

    @property
    def yields(self) -> bool:
        return self.is_on and self._yields

    def start(self, purpose: str, *, yields: bool = False) -> None:
        """`purpose` says what is in the way of another, and how it ends."""
        self.make_way()
        self._session.start_trace()
        self._purpose, self._yields = purpose, yields
        self._runs.clear()

    def stop(self) -> list[Span]:
        self._purpose = None
        return self._session.stop_trace()

    def make_way(self) -> bool:
        """Raises unless nothing is recorded, or nothing that anybody asked for. Whether something was given up."""
        if self.is_on and not self._yields:
            raise PenstockError(str(self._purpose))
        gave_up = self.is_on
        if gave_up:
            self.stop()
        return gave_up

    def count(self, method: str) -> None:
        """A run of the method has ended."""
        self._runs[method] += 1

    @property
    def most_runs(self) -> int:
        """Of the method of which most have been recorded."""
        return max(self._runs.values(), default=0)
