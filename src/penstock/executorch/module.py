"""A .pte with delegates of ours, loaded into ExecuTorch's runtime and run inside a byte budget."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch

from penstock.budget import parse_bytes
from penstock.errors import (
    InputError,
    PackageError,
)
from penstock.executorch.data_files import data_files
from penstock.executorch.delegates import Delegates
from penstock.executorch.file_seal import check_seal
from penstock.executorch.native import NativeModule
from penstock.executorch.nested_call import NestedCall
from penstock.executorch.sessions import Sessions
from penstock.executorch.signatures import OWN_METHODS, SIGNATURES_METHOD, methods_from_json
from penstock.executorch.state import ProgramState
from penstock.plan.calibration import Calibration
from penstock.plan.plan import Plan
from penstock.program import Method, Program
from penstock.renamed import refuse_options
from penstock.runtime.expert_rates import ExpertUse
from penstock.runtime.interrupts import HeldInterrupts
from penstock.runtime.loaded import LoadedProgram
from penstock.runtime.session import LinkSample, Stats
from penstock.runtime.trace import Trace

LOGGER = logging.getLogger("penstock")


def _of_sharing(name: str) -> Any:
    return property(lambda self: getattr(self._sharing, name), doc=getattr(Delegates, name).__doc__)


class Module(LoadedProgram):
    """Loads `path` (a .pte with Penstock delegates) and its data files, and runs it within a budget of device bytes.

    It has the interface of penstock.Module for a .pt2, and its options: `device`, `placement`, `host_memory`,
    `calibration`, `verify` and the others. Options that a .pte cannot have are refused by name.

    weights           one .ptd or several; the one beside the program by default
    delegate_budgets  budgets by delegate name, for delegates with a session of their own; the others share `budget`

    Loading runs native code from the file: load only what you trust.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        budget: int | str | None = None,
        *,
        weight_offload_budget_mb: int | None = None,
        weights: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
        delegate_budgets: Mapping[str, int | str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(path)
        try:
            with HeldInterrupts():
                self._load(budget, weight_offload_budget_mb, weights, delegate_budgets, options)
            LOGGER.info("%s", self.summary)
        except BaseException:
            # Also after an interrupt that was held until everything was loaded: nobody gets this module.
            self.close()
            raise

    def _load(
        self,
        budget: int | str | None,
        weight_offload_budget_mb: int | None,
        weights: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None,
        delegate_budgets: Mapping[str, int | str] | None,
        options: dict[str, Any],
    ) -> None:
        check_seal(self.path)
        refuse_options(options)
        if weight_offload_budget_mb is not None:
            options["weight_offload_budget_mb"] = weight_offload_budget_mb
        files = data_files(self.path, weights)
        self._native = NativeModule(str(self.path), [str(index.path) for index in files], None, uuid.uuid4().hex)
        self._sessions = Sessions(self.path, self._native, self._lock)
        try:
            self._sessions.make(files, budget, dict(delegate_budgets or {}), options)
            self._load_methods()
        except BaseException:
            self._native.close()
            self._sessions.close()
            raise
        self._open = True

    def _load_methods(self) -> None:
        names = self._native.method_names()
        self.methods: tuple[str, ...] = tuple(name for name in names if name not in OWN_METHODS)
        if not self.methods:
            raise PackageError(f"{self.path} has no method")
        signatures: dict[str, Method] = {}
        if SIGNATURES_METHOD in names:
            signatures = methods_from_json(str(self._native.execute(SIGNATURES_METHOD, ())[0]))
        # Load all methods before any runs: refusals belong to the load, and loading one writes initial values of state.
        for name in self.methods:
            self._native.load_method(name)
        self._calls = {name: NestedCall(signatures[name]) for name in self.methods if name in signatures}
        self._state = ProgramState(self._native, self._sessions, self.methods)

    # ------------------------------------------------------------------------------------------------------- running

    def _run(self, method: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """A program that penstock.executorch.export did not write takes and returns flat tensors."""
        self._state.require_valid(method)
        call = self._calls.get(method)
        if call is not None:
            return call.nested(self._execute(method, call.flat(arguments, keywords)))
        if keywords:
            raise InputError(f"method {method!r} has no record of its arguments' names; pass them by position")
        return self._execute(method, arguments)

    def _execute(self, method: str, inputs: Sequence[Any]) -> list[Any]:
        try:
            return self._native.execute(method, inputs)
        except InputError:
            raise  # nothing has run
        except BaseException as error:
            self._state.mark_invalid(method, error)
            raise

    # ------------------------------------------------------------------------------------------------- what is there

    # These belong to the delegates that share the budget.
    program: Program = _of_sharing("program")
    floor_bytes: int = _of_sharing("floor_bytes")
    full_bytes: int = _of_sharing("full_bytes")
    budget_bytes: int = _of_sharing("budget_bytes")
    plan: Plan | None = _of_sharing("plan")
    calibration: Calibration | None = _of_sharing("calibration")
    last_run: Stats = _of_sharing("last_run")
    link_bytes_per_s: float | None = _of_sharing("link_bytes_per_s")
    link: tuple[LinkSample, ...] = _of_sharing("link")

    @property
    def delegates(self) -> Mapping[str, Delegates]:
        """Delegates with a budget of their own. Each has the interface of this module, except for running."""
        return MappingProxyType(self._sessions.own)

    @property
    def device(self) -> torch.device:
        return self._sessions.all[0].device

    @property
    def weight_bytes(self) -> int:
        return self._sessions.weight_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of the buffers that the program mutates; they are outside the budget."""
        return self._state.nbytes

    @property
    def device_state_bytes(self) -> int:
        """The part of `state_bytes` in the memory that the delegates compute in."""
        return self._state.device_bytes

    @property
    def host_bytes(self) -> int:
        return self._sessions.host_bytes

    def plan_at(self, budget: int | str) -> Plan | None:
        """The plan for another budget; nothing changes. None under placement="lru"."""
        return self._sharing.plan_at(parse_bytes(budget))

    def stats(self) -> Stats:
        """Totals since load, over all delegates of the program. Waits for the device."""
        return self._sessions.stats()

    def expert_uses(self) -> tuple[ExpertUse, ...]:
        """Slot hits and misses by bank, since the present plans were installed. Waits for the device."""
        return self._sessions.expert_uses()

    def device_memory(self) -> tuple[int, int]:
        """Bytes of device memory held for weights: now, and at most since load."""
        return self._sessions.device_memory()

    @property
    def summary(self) -> str:
        """What was loaded: one line for each session."""
        return self._sessions.summary

    # ------------------------------------------------------------------------------------------------------- changing

    def set_budget(self, budget: int | str) -> None:
        """Plans again, between runs, for the delegates that share a budget. delegates[name] has it for one alone."""
        self._sharing.set_budget(budget)

    @contextmanager
    def calibrate(self, *, in_place: bool = False) -> Iterator[None]:
        """Measures the runs inside it, then plans again for the times that their steps and copies took.

        in_place  use after calibrate(): reads every weight in place meanwhile, then plans by both measurements
        """
        with self._sharing.calibrate(in_place=in_place):
            yield

    def trace(self, path: str | os.PathLike[str]) -> Trace:
        """Records from now on. The file is written when the trace is closed: by `with`, its close() or the module's."""
        return self._sharing.trace(path)

    def read_state(self, name: str) -> torch.Tensor:
        """A copy of the present value."""
        with self._operation():
            return self._state.read(name)

    def write_state(self, name: str, value: torch.Tensor) -> None:
        with self._operation():
            self._state.write(name, value)

    def select_state_rows(self, rows: torch.Tensor) -> None:
        """Row i of every state becomes the former row rows[i], as beam search needs it."""
        with self._operation():
            self._state.select_rows(rows)

    def reset_state(self) -> None:
        """Restores the initial values, also after a failed run, which leaves state unusable."""
        with self._operation():
            self._state.reset()

    # -------------------------------------------------------------------------------------------------------- closing

    def close(self) -> None:
        """Gives everything back; waits for a run in another thread. May be called twice, and never raises."""
        if not self._open:
            return
        if os.getpid() != self._pid:
            self._open = False
            self._native.forget()  # the driver and its threads are the parent's
            self._sessions.close()
            return
        with HeldInterrupts():
            with self._lock.operation(lambda: None):
                if not self._open:
                    return  # another thread was first
                self._open = False
                self._native.close()
            self._sessions.close()  # each of them takes the lock

    @property
    def _sharing(self) -> Delegates:
        self._require_usable()
        return self._sessions.sharing
