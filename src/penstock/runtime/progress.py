"""Progress of long calls of the core, during which interrupts are checked for."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from tqdm import tqdm

from penstock.native import ON_BYTES
from penstock.runtime.interrupts import deliver_interrupt


class Attended:
    """A call of the core that an interrupt cancels. The interrupt is raised when the call has returned, because the
    code in between knows no exceptions."""

    def __init__(self) -> None:
        self._interrupt: BaseException | None = None
        # The core calls it again and again.
        self.on_bytes = ON_BYTES(self._on_bytes)

    def __enter__(self) -> Attended:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._interrupt is not None:
            raise self._interrupt

    def _on_bytes(self, nbytes: int) -> int:
        try:
            self.show(nbytes)
            deliver_interrupt()
        except BaseException as error:
            self._interrupt = error
            return 1
        return 0

    def show(self, nbytes: int) -> None:
        """`nbytes` more are in memory."""


class Progress(Attended):
    """Shows a bar while a weights file is brought into memory, if standard error is a terminal and tqdm's own
    TQDM_DISABLE does not say otherwise."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._bar: tqdm | None = None

    def __enter__(self) -> Progress:
        size_bytes = self._path.stat().st_size
        name = f"reading {self._path.name}"
        self._bar = tqdm(total=size_bytes, unit="B", unit_scale=True, unit_divisor=1024, desc=name, disable=None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._bar is not None
        self._bar.close()
        super().__exit__(kind, value, trace)

    def show(self, nbytes: int) -> None:
        assert self._bar is not None
        self._bar.update(nbytes)
