"""A bar while a weights file is brought into memory; and where an interrupt is seen meanwhile."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from tqdm import tqdm

from penstock.native import ON_BYTES
from penstock.runtime.interrupts import deliver_interrupt


class Progress:
    """Shown where standard error is a terminal, unless tqdm's own TQDM_DISABLE says otherwise."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._bar: tqdm | None = None
        self._interrupt: BaseException | None = None
        # The core calls it, between two slices of the file.
        self.on_bytes = ON_BYTES(self._on_bytes)

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
        if self._interrupt is not None:
            raise self._interrupt

    def _on_bytes(self, nbytes: int) -> int:
        """Between here and the caller is code that knows no exceptions: what is raised is raised at the end."""
        try:
            assert self._bar is not None
            self._bar.update(nbytes)
            deliver_interrupt()
        except BaseException as error:
            self._interrupt = error
            return 1
        return 0
