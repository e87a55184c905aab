"""A .pte with delegates of ours, loaded into ExecuTorch's runtime and run inside a byte budget."""

from __future__ import annotations

import os
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from penstock.budget import format_bytes, mb_to_bytes, parse_bytes
from penstock.errors import (
    BelowFloorError,
    BudgetError,
    ClosedError,
    ConcurrentRunError,
    ForkedError,
    InputError,
    PackageError,
    PenstockError,
)
from penstock.executorch.native import NativeModule, SessionFacts
from penstock.executorch.signatures import OWN_METHODS, SIGNATURES_METHOD, methods_from_json
from penstock.native import core
from penstock.program import ConstantSpec, Method
from penstock.runtime.budget_choice import AUTOMATIC
from penstock.runtime.inputs import InputBinding
from penstock.runtime.outputs import OutputBinding
from penstock.runtime.session import LinkSample, Session, Stats, link_text
from penstock.runtime.weights_source import read_weights_index

_CPU = torch.device("cpu")


class _BorrowedSession(Session):
    """The delegates' own: counted and measured here, made and closed there."""

    def __init__(self, handle: int) -> None:
        self._core = core()
        self._handle = handle


class _Entrance:
    """One method: nested arguments in, nested results out."""

    def __init__(self, method: Method) -> None:
        self._specs = method.signature.inputs
        # ExecuTorch takes and gives tensors in main memory, wherever the delegate computes.
        self._inputs = InputBinding(method, _CPU, written=())
        self._outputs = OutputBinding(method)

    def flat(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> list[Any]:
        tensors = iter(self._inputs.flat(arguments, keywords))
        return [spec.value if isinstance(spec, ConstantSpec) else next(tensors) for spec in self._specs]

    def nested(self, outputs: Sequence[Any]) -> Any:
        return self._outputs.built([value for value in outputs if isinstance(value, torch.Tensor)])


class Module:
    """Loads `path` (a .pte with delegates of ours) and its data files, and runs it within a budget of device bytes.

    The surface of penstock.Module for a .pt2. Loading runs native code from the file: load only what you trust.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        budget: int | str | None = None,
        *,
        weight_offload_budget_mb: int | None = None,
        weights: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
        quiet: bool = False,
    ) -> None:
        self._open = False
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self.path = Path(path)
        self._quiet = quiet
        given = _budget_text(budget, weight_offload_budget_mb)
        if not self.path.is_file():
            raise PackageError(f"{self.path} does not exist")
        files = _data_files(self.path, weights)
        for file in files:
            read_weights_index(file)  # ExecuTorch itself looks at no more than the header
        self._native = NativeModule(str(self.path), [str(file) for file in files], given, uuid.uuid4().hex)
        try:
            self._load(given)
        except BaseException:
            self._native.close()
            raise
        self._open = True
        if not quiet:
            print(self.summary, file=sys.stderr)

    def _load(self, given: str | None) -> None:
        names = self._native.method_names()
        self.methods: tuple[str, ...] = tuple(name for name in names if name not in OWN_METHODS)
        if not self.methods:
            raise PackageError(f"{self.path} has no method")
        signatures: dict[str, Method] = {}
        if SIGNATURES_METHOD in names:
            signatures = methods_from_json(str(self._native.execute(SIGNATURES_METHOD, ())[0]))
        # All of them, and before any runs: a refusal belongs to the load, and loading one writes first values of state.
        for name in self.methods:
            try:
                self._native.load_method(name)
            except BelowFloorError as error:
                asked = int(given) if given is not None and given != AUTOMATIC else -1
                raise BelowFloorError(str(error), budget_bytes=asked, floor_bytes=error.floor_bytes) from None
        self._entrances = {name: _Entrance(signatures[name]) for name in self.methods if name in signatures}
        found = self._native.session()
        if found is None:
            if given is not None:
                raise BudgetError(
                    f"the budget {given} was given for {self.path}, which has no delegate of ours: its weights are not "
                    "offloaded"
                )
            raise PackageError(f"{self.path} has no delegate of ours; ExecuTorch's own runtime runs it")
        handle, self._facts = found
        self._session = _BorrowedSession(handle)

    # ------------------------------------------------------------------------------------------------------- running

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Runs `forward`, or the only method."""
        return self.run_method(self._default_method(), *arguments, **keywords)

    forward = __call__

    def run_method(self, method: str, /, *arguments: Any, **keywords: Any) -> Any:
        """Nested as at export; a program that penstock.executorch.export did not write takes and gives flat tensors."""
        self._require_usable()
        if method not in self.methods:
            raise PackageError(f"there is no method {method!r}; the program has {', '.join(self.methods)}")
        if not self._lock.acquire(blocking=False):
            raise ConcurrentRunError(
                f"method {method!r} was called while another call of this module runs; use one module per thread, or a "
                "lock around the calls"
            )
        try:
            self._require_usable()
            entrance = self._entrances.get(method)
            if entrance is not None:
                return entrance.nested(self._native.execute(method, entrance.flat(arguments, keywords)))
            if keywords:
                raise InputError(f"method {method!r} has no record of its arguments' names; pass them by position")
            return self._native.execute(method, arguments)
        finally:
            self._lock.release()

    # ------------------------------------------------------------------------------------------------- what is there

    @property
    def floor_bytes(self) -> int:
        return self._facts.floor_bytes

    @property
    def budget_bytes(self) -> int:
        return self._facts.budget_bytes

    @property
    def choice(self) -> SessionFacts:
        """The budget, where it came from, and which of the plans in the file holds."""
        return self._facts

    @property
    def last_run(self) -> Stats:
        """Of the delegate that ran last. Waits for the device."""
        with self._idle():
            return self._session.stats()[0]

    def stats(self) -> Stats:
        """Totals since load, over all delegates of the program. Waits for the device."""
        with self._idle():
            return self._session.stats()[1]

    def device_memory(self) -> tuple[int, int]:
        """Bytes of device memory held for weights: now, and at most since load."""
        with self._idle():
            return self._session.memory()

    @property
    def link(self) -> tuple[LinkSample, ...]:
        with self._idle():
            return tuple(self._session.link())

    @property
    def summary(self) -> str:
        facts = self._facts
        origins = {"load": "given at load", "baked": "baked at export", "automatic": "automatic"}
        return (
            f"penstock: {self.path.name}: floor {format_bytes(facts.floor_bytes)}, budget "
            f"{format_bytes(facts.budget_bytes)} of {format_bytes(facts.full_bytes)} ({origins[facts.source]}), plan "
            f"{facts.rung + 1} of {facts.rung_count} takes {format_bytes(facts.rung_bytes)}, "
            f"{link_text(self._session.link())}"
        )

    # -------------------------------------------------------------------------------------------------------- closing

    def close(self) -> None:
        """Gives everything back; waits for a run in another thread. May be called twice, and never raises."""
        if not self._open:
            return
        self._open = False
        if os.getpid() != self._pid:
            self._native.forget()  # the driver and its threads are the parent's
            return
        with self._lock:
            self._session.forget()
            self._native.close()

    def __enter__(self) -> Module:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_open", False):
            self.close()

    # ------------------------------------------------------------------------------------------------------- helpers

    def _default_method(self) -> str:
        if "forward" in self.methods:
            return "forward"
        if len(self.methods) == 1:
            return self.methods[0]
        raise PackageError(f"there is no method 'forward'; name one of {', '.join(self.methods)} with run_method")

    def _require_usable(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedError(
                f"{self.path} was loaded by process {self._pid}, and this is its child {os.getpid()}; load it here"
            )
        if not self._open:
            raise ClosedError(f"{self.path} was closed")

    @contextmanager
    def _idle(self) -> Iterator[None]:
        self._require_usable()
        with self._lock:
            self._require_usable()
            yield


def _budget_text(budget: int | str | None, mb: int | None) -> str | None:
    if budget is not None and mb is not None:
        raise BudgetError(f"budget={budget!r} and weight_offload_budget_mb={mb!r} were both given; pass one")
    if mb is not None:
        return str(mb_to_bytes(mb))
    if budget is None or budget == AUTOMATIC:
        return None if budget is None else AUTOMATIC
    return str(parse_bytes(budget))


def _data_files(path: Path, weights: Any) -> list[Path]:
    if weights is None:
        return [path.with_suffix(".ptd")]
    if isinstance(weights, (str, os.PathLike)):
        return [Path(weights)]
    files = [Path(file) for file in weights]
    if not files:
        raise PenstockError("weights is an empty list; leave it out for the .ptd beside the program")
    return files
