"""A loaded program, of a .pt2 or a .pte, as its caller sees it. Methods are called by name, one at a time. It is closed
once, never copied, and not used by a child process."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex, TypeVar

from penstock.errors import ClosedError, ConcurrentRunError, ForkedError, NotCopyableError, PackageError
from penstock.renamed import refuse_attribute
from penstock.runtime.operation_lock import Busy, Operation, OperationLock

Self = TypeVar("Self", bound="LoadedProgram")


class LoadedProgram(ABC):
    # The names of the program's methods.
    methods: tuple[str, ...]
    # Whether there is something to give back.
    _open = False

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._lock = OperationLock()
        self._pid = os.getpid()
        self.path = Path(path)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Runs `forward`, or the only method."""
        return self.run_method(self._default_method(), *arguments, **keywords)

    forward = __call__

    def run_method(self, method: str, /, *arguments: Any, **keywords: Any) -> Any:
        """Runs a method by its name, with arguments and results nested as at export."""
        self._require_usable()
        if method not in self.methods:
            raise PackageError(f"there is no method {method!r}; the program has {', '.join(self.methods)}")
        self._before_run()
        try:
            with self._operation(wait=False):
                return self._run(method, arguments, keywords)
        except Busy:
            raise ConcurrentRunError(
                f"method {method!r} was called while another call of this module runs; use one module per thread, or a "
                "lock around the calls"
            ) from None

    @abstractmethod
    def close(self) -> None:
        """Gives everything back; waits for a run in another thread. May be called twice, and never raises."""

    @abstractmethod
    def _run(self, method: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any: ...

    def _before_run(self) -> None:  # noqa: B027 (most have nothing to do)
        """Called outside of the run, so that no result is lost if it fails."""

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """copy, deepcopy and pickle come here."""
        raise NotCopyableError(
            f"a loaded module cannot be copied or pickled: {self.path} holds device memory, a weights file and "
            "compiled code; load it once more, or, in another process, there"
        )

    if not TYPE_CHECKING:  # a type checker would accept every name as an attribute

        def __getattr__(self, name: str) -> NoReturn:
            refuse_attribute(self, name)

    def __del__(self) -> None:
        if self._open:
            self.close()

    def _require_usable(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedError(
                f"{self.path} was loaded by process {self._pid}, and this is its child {os.getpid()}; load it here"
            )
        if not self._open:
            raise ClosedError(f"{self.path} was closed")

    def _operation(self, *, wait: bool = True) -> Operation:
        """One operation at a time: waits for a run in another thread, keeps others out, and makes interrupts wait."""
        return self._lock.operation(self._require_usable, wait=wait)

    def _default_method(self) -> str:
        if "forward" in self.methods:
            return "forward"
        if len(self.methods) == 1:
            return self.methods[0]
        raise PackageError(f"there is no method 'forward'; name one of {', '.join(self.methods)} with run_method")
