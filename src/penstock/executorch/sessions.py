"""The sessions that the delegates of a loaded .pte run in: one for all but those with a budget of their own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.errors import BudgetError, PackageError, PenstockError
from penstock.executorch.data_files import weights_file
from penstock.executorch.delegates import Delegates
from penstock.executorch.native import NativeModule, Payload
from penstock.runtime.expert_rates import ExpertUse
from penstock.runtime.operation_lock import OperationLock
from penstock.runtime.options import REGISTERED
from penstock.runtime.session import Stats
from penstock.weights import WeightsIndex


class Sessions:
    def __init__(self, path: Path, native: NativeModule, lock: OperationLock) -> None:
        self._path = path
        self._native = native
        self._lock = lock
        self.shared: Delegates | None = None
        self.own: dict[str, Delegates] = {}

    def make(
        self,
        files: Sequence[WeightsIndex],
        budget: int | str | None,
        own_budgets: dict[str, int | str],
        options: dict[str, Any],
    ) -> None:
        """`options` are those of penstock.Module. If this raises, some sessions may exist: call close() anyway."""
        given = budget if budget is not None else options.get("weight_offload_budget_mb")
        self._payload = self._only_payload(given)
        self._is_capped = options.get("host_memory", REGISTERED) != REGISTERED
        options = {**options, "weights": weights_file(files, self._payload.weight_names)}
        names = self._payload.delegates
        unknown = sorted(own_budgets.keys() - set(names))
        if unknown:
            raise BudgetError(
                f"delegate_budgets: the program has no delegate {unknown[0]!r}; it has {', '.join(names)}"
            )
        together = [name for name in names if name not in own_budgets]
        if together:
            self.shared = self._made(together, budget, options)
        elif given is not None:
            raise BudgetError("a budget for the program was given, but every delegate has one of its own")
        options.pop("weight_offload_budget_mb", None)
        for name, value in own_budgets.items():
            self.own[name] = self._made([name], value, options)

    def _only_payload(self, budget: int | str | None) -> Payload:
        found = self._native.payloads()
        if not found and budget is not None:
            raise BudgetError(
                f"the budget {budget} was given for {self._path}, which has no Penstock delegate: its weights are not "
                "offloaded"
            )
        if len(found) != 1:
            raise PackageError(
                f"{self._path} has {len(found)} Penstock programs, needs one: lower with one CudaPartitioner; without "
                "Penstock delegates, ExecuTorch's own runtime runs it"
            )
        return found[0]

    def _made(self, names: Sequence[str], budget: int | str | None, options: dict[str, Any]) -> Delegates:
        payload = self._payload
        # One store for all sessions: what a method of one writes, a method of another reads.
        state_store = self.all[0].state_store if self.all else None
        made = Delegates(
            self._path,
            payload.code,
            names,
            payload.weight_names,
            self._lock,
            budget,
            transfer_bytes=payload.transfer_bytes(names),
            state_store=state_store,
            **options,
        )
        numbers = [payload.delegates.index(method.name) for method in made.program.methods]
        if state_store is None and payload.states:
            self._native.share_states(made.device, [made.state_store.input(name) for name in payload.states])
        self._native.share_session(made.session_handle, made.device.index or 0, numbers)
        return made

    @property
    def payload(self) -> Payload:
        return self._payload

    @property
    def all(self) -> list[Delegates]:
        return [*([self.shared] if self.shared is not None else []), *self.own.values()]

    @property
    def sharing(self) -> Delegates:
        if self.shared is None:
            raise PenstockError(
                f"every delegate of {self._path} has a budget of its own; ask one of them: delegates[name], of "
                f"{', '.join(self.own)}"
            )
        return self.shared

    @property
    def weight_bytes(self) -> int:
        return sum(weight.nbytes for weight in self._payload.description.weights)

    @property
    def host_bytes(self) -> int:
        each = [delegates.host_bytes for delegates in self.all]
        # A file held in memory counts once, however many sessions there are.
        return sum(each) if self._is_capped else max(each)

    def stats(self) -> Stats:
        rows = [vars(delegates.stats()) for delegates in self.all]
        return Stats(**{name: sum(row[name] for row in rows) for name in rows[0]})

    def expert_uses(self) -> tuple[ExpertUse, ...]:
        return tuple(use for delegates in self.all for use in delegates.expert_uses())

    def device_memory(self) -> tuple[int, int]:
        found = [delegates.device_memory() for delegates in self.all]
        return sum(held for held, _ in found), sum(peak for _, peak in found)

    @property
    def summary(self) -> str:
        lines = [self.shared.summary] if self.shared is not None else []
        return "\n".join([*lines, *(f"{delegates.summary} (of {name} alone)" for name, delegates in self.own.items())])

    def close(self) -> None:
        """Call it after the delegates, which run in the sessions, are gone."""
        for delegates in self.all:
            delegates.close()
