"""A weightless program, loaded and ready to run inside a byte budget."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

import torch

from penstock.budget import parse_bytes
from penstock.direct.launch_shape import Limits
from penstock.direct.recipes import Recipes
from penstock.errors import PenstockError
from penstock.native import core
from penstock.plan.calibration import Calibration
from penstock.plan.pages import soft_page_bytes
from penstock.plan.plan import Plan
from penstock.program import Program
from penstock.runtime.automatic_budget import AutomaticTerms, automatic_terms
from penstock.runtime.budget_choice import BudgetChoice, choose_budget, choose_new_budget
from penstock.runtime.calibration import check_calibration
from penstock.runtime.compatibility import check_build, read_offloaded, resolve_device
from penstock.runtime.device_memory import Grant, grant, weights_range
from penstock.runtime.driver import open_cuda_driver, open_soft_driver
from penstock.runtime.expert_rates import ExpertUse, expert_uses, slots_summary
from penstock.runtime.failures import last_exception
from penstock.runtime.graphs import Graphs
from penstock.runtime.interrupts import HeldInterrupts, deliver_interrupt
from penstock.runtime.linear_choice import choose_linear
from penstock.runtime.loaded import LoadedProgram
from penstock.runtime.method_runner import MethodRunner, OomCounter
from penstock.runtime.options import REGISTERED, Asked, goes_with_rest, judge, judged, refuse_unknown
from penstock.runtime.packed_weights import read_packed_weights
from penstock.runtime.plan_installer import PlanInstaller
from penstock.runtime.policy import LruPolicy, PlannedPolicy, Policy
from penstock.runtime.recorder import Recording
from penstock.runtime.session import LinkSample, Session, Stats, TraceSpan
from penstock.runtime.split_limits import SplitLimits, choose_split_limits
from penstock.runtime.split_state import SplitState, split_states, summary_of
from penstock.runtime.state import StateStore
from penstock.runtime.trace import Trace, writable
from penstock.runtime.weights_fit import check_weights
from penstock.runtime.weights_source import begin_probe, file_source, read_weights_index, stored_bytes
from penstock.weights import WeightsIndex, verify_checksums

LOGGER = logging.getLogger("penstock")

POISON_VARIABLE = "PENSTOCK_POISON"

T = TypeVar("T")


class Module(LoadedProgram):
    """Loads `path` (a .pt2 of penstock.compile) and its weights, and runs it within a budget of device bytes.

    penstock.Module is this, and takes a .pte too.
    """

    # Whether ExecuTorch runs the methods: see penstock.executorch.delegates.
    _is_delegate = False
    # Host memory that inputs and outputs pass through, if the caller does not choose the memory they lie in.
    _transfer_bytes = 0

    def __init__(
        self,
        path: str | os.PathLike[str],
        budget: int | str | None = None,
        *,
        weight_offload_budget_mb: int | None = None,
        device_memory: int | str | None = None,
        weights: str | os.PathLike[str] | None = None,
        placement: str = "auto",
        device: str | torch.device | None = None,
        host_memory: int | str = REGISTERED,
        calibration: Calibration | Literal["first-runs"] | None = None,
        cuda_graph: bool = False,
        split_limits: Limits | Literal["measured"] | None = None,
        check_indices: bool = False,
        verify: bool = False,
        **before: NoReturn,
    ) -> None:
        super().__init__(path)
        self._traces: list[Trace] = []
        self._runners: dict[str, MethodRunner] = {}
        asked = Asked(
            budget=budget,
            weight_offload_budget_mb=weight_offload_budget_mb,
            device_memory=device_memory,
            placement=placement,
            host_memory=host_memory,
            calibration=calibration,
            cuda_graph=cuda_graph,
            split_limits=split_limits,
            check_indices=check_indices,
            verify=verify,
        )
        try:
            refuse_unknown("Module", before)
            with HeldInterrupts():
                self._load(asked, weights, device)
            self._say(self._lines())
        except BaseException:
            # Also for an interrupt that waited until everything was loaded: the caller never gets this module.
            self.close()
            self._let_go()
            raise

    def _load(self, asked: Asked, weights: str | os.PathLike[str] | None, device: str | torch.device | None) -> None:
        """Delivers a pending interrupt between its parts, where it can be given up: everything is then given back."""
        poison = _poison_asked()
        self.program: Program = read_offloaded(self.path, budget=asked.given_budget)
        self.methods = tuple(method.name for method in self.program.methods)
        self.device = resolve_device(self.program, device)
        check_build(self.program, self.device)
        linear = choose_linear(self.program, self.device)
        self._options = judge(asked, self.device, linear, is_delegate=self._is_delegate)
        index = read_weights_index(self.path.with_suffix(".ptd") if weights is None else Path(weights))
        self._entries = check_weights(self.program, index)
        is_packed = any(self._entries[weight.name].packing for weight in self.program.weights)
        self._options = options = judged(replace(self._options, is_packed=is_packed))
        if asked.verify:
            verify_checksums(index)
        deliver_interrupt()
        with ExitStack() as stack:
            # The probe's child process makes a CUDA context, which takes as long as planning does.
            probe = begin_probe(index, self.device, cap_bytes=options.host_memory_cap_bytes)
            if probe is not None:
                stack.callback(probe.close)
            driver = (
                open_cuda_driver(self.device.index)
                if self.device.type == "cuda"
                else open_soft_driver(soft_page_bytes(self.program.weight_bytes), poison=poison)
            )
            stack.callback(driver.close)
            packed = read_packed_weights(self.program, index, self._entries)
            self._policy: Policy = (LruPolicy if options.is_lru else PlannedPolicy)(
                self.program,
                driver,
                packed,
                options.planned_as,
                can_split=options.can_split,
                is_staged=options.is_capped,
            )
            self._driver = driver
            schedules = [method.schedule for method in self.program.methods]
            known = self._given_times = check_calibration(asked.calibration, schedules)
            self._split: tuple[SplitState, ...] = split_states(self.program)
            total = (
                None
                if asked.device_memory is None
                else grant(asked.device_memory, self.program, self.device, cuda_graph=asked.cuda_graph)
            )
            beside_bytes = 0 if total is None else total.beside_weights_bytes
            with self._policy.naming_lower_placements(self._could_place, beside_bytes):
                self._choice: BudgetChoice = choose_budget(
                    budget=asked.budget,
                    weight_offload_budget_mb=asked.weight_offload_budget_mb,
                    granted=None if total is None else partial(self._granted_budget, total),
                    baked_bytes=self.program.budget_bytes,
                    automatic=self._automatic_terms,
                    floor_bytes=self._policy.floor_for(known),
                    full_bytes=self._policy.full_bytes,
                )
            installed = self._policy.arrange(self._choice.budget_bytes, known)
            deliver_interrupt()
            if core().penstock_load_torch():
                raise last_exception()
            self._split_limits = SplitLimits(None)
            if options.offers_kernel:
                self._split_limits = choose_split_limits(asked.split_limits, self.device, self._choice.budget_bytes)
            recipes = Recipes(self.device, self._split_limits.limits) if options.offers_kernel else None
            if recipes is not None:
                stack.callback(recipes.close)
            source = file_source(
                index,
                (self._entries[weight.name] for weight in self.program.weights),
                cap_bytes=options.host_memory_cap_bytes,
                extra_bytes=self._transfer_bytes
                + (self._choice.budget_bytes if self.device.type == "cpu" else self._host_state_bytes),
            )
            self._session = Session.opened(
                driver,
                source,
                lru=options.is_lru,
                device_index=self.device.index or 0,
                poison=poison,
                packed=packed.numbers,
                probe=probe,
            )
            stack.callback(self._session.close)
            self.host_bytes = self._session.host_bytes
            if recipes is not None:
                self._session.offer_linear(recipes.prepare)
            self._graphs = Graphs(self.device) if asked.cuda_graph else None
            # Weak, so that a module that nobody holds is closed at once, not when cycles are collected.
            closing = weakref.WeakMethod(self._close)
            self._installer = PlanInstaller(self._policy, self._session, schedules, self._graphs, closing)
            deliver_interrupt()
            self._installer.arrange_first(installed, known)
            deliver_interrupt()
            self._recorder = self._installer.recorder
            self._state = self._made_state(index)
            oom_counter = OomCounter(self.device)
            self._runners = {
                method.name: MethodRunner(
                    self.path, number, method, self.device, oom_counter, check_indices=asked.check_indices
                )
                for number, method in enumerate(self.program.methods)
            }
            self._wait_for_torch()  # the first values of state, which a run on any stream may read
            deliver_interrupt()
            if asked.calibration == "first-runs":
                self._installer.record_first_runs()
            self._cleanup = stack.pop_all()
            self._open = True

    def _made_state(self, index: WeightsIndex) -> StateStore:
        return StateStore(self.program.states, self.device, index, lambda name: stored_bytes(index, name), self._split)

    # ------------------------------------------------------------------------------------------------------- running

    def _before_run(self) -> None:
        if self._installer.has_first_runs:
            self._plan_by_first_runs()

    def _run(self, method: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        # A recording times each step, and a graph is one piece, so recorded runs use no graphs.
        graphs = None if self._recorder.current is not None else self._graphs
        results = self._runners[method].run(self._session, self._state, arguments, keywords, graphs)
        self._recorder.count(method)
        return results

    # ------------------------------------------------------------------------------------------------- what is there

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, each counted once."""
        return self.program.weight_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of mutated buffers: outside the budget, and on the device except for the host sides of KV caches."""
        return self.program.state_bytes

    @property
    def device_state_bytes(self) -> int:
        """The part of state_bytes that counts as the device's: all but the host sides of KV caches."""
        return self.program.state_bytes - self._host_state_bytes

    @property
    def _host_state_bytes(self) -> int:
        split = {side.name: side for cache in self._split for side in cache.sides}
        return sum(split.get(state.name, state).nbytes for state in self.program.states if state.host)

    @property
    def floor_bytes(self) -> int:
        """The smallest budget this module can run with, here and with this placement."""
        return self._policy.floor_for(self._times)

    @property
    def _times(self) -> Calibration | None:
        return self._installer.calibration if "_installer" in vars(self) else self._given_times

    @property
    def full_bytes(self) -> int:
        """With this budget every weight is on the device; more buys nothing."""
        return self._policy.full_bytes

    @property
    def budget_bytes(self) -> int:
        """The budget in force: what was asked for, or what all weights take if that is less."""
        return self._choice.budget_bytes

    @property
    def plan(self) -> Plan | None:
        """None under placement="lru", which decides while running."""
        return self._installer.plan

    def plan_at(self, budget: int | str) -> Plan | None:
        """The plan for another budget; changes nothing. None under placement="lru"."""
        return self._installer.plan_at(parse_bytes(budget))

    @property
    def last_run(self) -> Stats:
        """Waits for the device."""
        with self._operation():
            return self._session.stats()[0]

    def stats(self) -> Stats:
        """Totals since load. Waits for the device."""
        with self._operation():
            return self._session.stats()[1]

    def expert_uses(self) -> tuple[ExpertUse, ...]:
        """Expert hits and misses in slots, by bank, since the current plan was installed. Waits for the device."""
        with self._operation():
            return expert_uses(self._session, self._installer.plan)

    def device_memory(self) -> tuple[int, int]:
        """Bytes of device memory held for weights: now, and at most since load."""
        with self._operation():
            return self._session.memory()

    @property
    def link_bytes_per_s(self) -> float | None:
        """The rate of copies, measured when the module was loaded; None if nothing is ever copied."""
        with self._operation():
            samples = self._session.link()
        return samples[0].bytes_per_s if samples and samples[0].ns else None

    @property
    def link(self) -> tuple[LinkSample, ...]:
        """Copies timed when the plan was installed: first those of the plan, then some of each size."""
        with self._operation():
            return tuple(self._session.link())

    # ------------------------------------------------------------------------------------------------------- changing

    def set_budget(self, budget: int | str) -> None:
        """Replans, between runs. Never holds more than the larger of the two budgets. If the new plan cannot be
        installed, reinstalls the old one and raises the error."""
        with self._operation():
            with self._policy.naming_lower_placements(self._could_place):
                choice = choose_new_budget(
                    budget,
                    automatic=self._automatic_terms,
                    floor_bytes=self._policy.floor_for(self._times),
                    full_bytes=self._policy.full_bytes,
                )
            self._installer.change_budget(choice.budget_bytes)
            self._choice = choice
            lines = self._lines()
        self._say(lines)

    @property
    def calibration(self) -> Calibration | None:
        """What the current plan was made from, besides sizes; can be given to another Module of the same program."""
        return self._installer.calibration

    @contextmanager
    def calibrate(self, *, in_place: bool = False) -> Iterator[None]:
        """Measures the runs inside the `with` block, then replans with the times that their steps and copies took.

        A newer calibrate(), trace() or set_budget() ends it; leaving the block then raises, and nothing is planned from
        it.

        in_place  reads every weight in place inside the block, then plans by both measurements. For few rows, where a
                  product reads each weight once. Use it after calibrate(), with the same calls.
        """
        self._require_usable()
        judged(replace(self._options, call="calibrate(in_place=True)" if in_place else "calibrate()"))
        installer = self._installer
        start, plan = (
            (installer.start_direct_calibration, installer.plan_by_direct)
            if in_place
            else (installer.start_calibration, installer.plan_by)
        )
        recording: Recording | None = None
        try:
            with self._operation():
                recording = start(self.budget_bytes)
            yield
            with self._operation():
                plan(recording, self.budget_bytes)
                lines = self._lines()
        except BaseException:
            # Also for an interrupt that waited until after the start: nobody else stops that recording.
            if recording is not None and self._open:
                with self._operation():
                    self._installer.drop(recording)
            raise
        self._say(lines)

    def _plan_by_first_runs(self) -> None:
        with self._operation():
            if not self._installer.has_first_runs:
                return  # another thread was first
            outcome = self._installer.plan_by_first_runs(self.budget_bytes)
            lines = self._lines()
        self._say([f"{self.path.name}: {outcome}", *lines])

    def read_state(self, name: str) -> torch.Tensor:
        """A copy of the present value."""
        return self._access_state(lambda: self._state.read(name))

    def write_state(self, name: str, value: torch.Tensor) -> None:
        """Sets the present value; `value` must have the state's own shape and dtype."""
        self._access_state(lambda: self._state.write(name, value))

    def select_state_rows(self, rows: torch.Tensor) -> None:
        """Row i of every state becomes the former row rows[i], on the device. For beam search."""
        self._access_state(lambda: self._state.select_rows(rows))

    def reset_state(self) -> None:
        """Restores the initial values; also makes state usable again after a failed run."""
        self._access_state(lambda: self._state.reset())

    def _access_state(self, access: Callable[[], T]) -> T:
        """S8 for state: earlier runs end before the access, and it ends before the next run, whatever their streams."""
        with self._operation():
            return self._synchronized(access)

    def _synchronized(self, access: Callable[[], T]) -> T:
        self._session.drain()
        result = access()
        self._wait_for_torch()
        return result

    def _wait_for_torch(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def trace(self, path: str | os.PathLike[str]) -> Trace:
        """Records from now on. The file is written when the trace is closed: by `with`, its close(), or the module's.

        A newer trace(), calibrate() or set_budget() ends the recording; the file then holds what was recorded so far.
        """
        with self._operation():
            trace = Trace(writable(path), weakref.ref(self))
            trace.recording = self._installer.start_trace(f"the trace to {path}", trace.keep)
            self._traces = [*(each for each in self._traces if not each.is_closed), trace]
            return trace

    def _stop_trace(self, recording: Recording) -> list[TraceSpan]:
        with self._operation():
            return self._recorder.stop(recording)

    def _span_name(self, span: TraceSpan) -> tuple[str, str]:
        method = self.program.methods[span.method_index]
        if span.lane == "compute":
            return method.name, method.schedule.steps[span.index].kernel
        return method.name, self._installer.installed.copied_weight(span.method_index, span.index)

    # -------------------------------------------------------------------------------------------------------- closing

    def close(self) -> None:
        """Gives everything back; waits for a run in another thread. May be called twice, and never raises."""
        if not self._open:
            return
        if os.getpid() != self._pid:
            # The driver and its threads are the parent's; there is nothing here to give back.
            self._open = False
            self._session.forget()
            self._cleanup.pop_all()
            return
        with HeldInterrupts():
            for trace in self._traces:
                self._close_trace(trace)
            with self._lock.operation(lambda: None):
                self._close()

    def _close_trace(self, trace: Trace) -> None:
        try:
            trace.close(self)
        except (OSError, PenstockError) as error:
            # close() must give everything back even if the disk fails, so this is logged, not raised.
            LOGGER.error("the trace %s could not be written: %s", trace.path, error)

    def _close(self) -> None:
        if self._open:
            self._open = False
            self._cleanup.close()
            self._let_go()  # closing the session has waited for what uses it

    def _let_go(self) -> None:
        """Drops what torch has given the module: compiled code and device memory. The module itself may be held long
        after it was closed, or by the traceback of its failed load."""
        graphs = getattr(self, "_graphs", None)
        if graphs is not None:
            graphs.close()
        # Another thread may be on its way into a run, and must find that the module was closed.
        self._runners = {}
        for name in ("_state", "_graphs"):
            vars(self).pop(name, None)

    # ------------------------------------------------------------------------------------------------------- helpers

    def _could_place(self, placement: str) -> bool:
        return goes_with_rest(self._options, placement)

    def _granted_budget(self, granted: Grant) -> int:
        floor_bytes, full_bytes = self._policy.floor_for(self._times), self._policy.full_bytes
        division = granted.divided(weights_range(self.program, floor_bytes, full_bytes, self._times))
        self._split = split_states(self.program, granted.device_positions(division))
        return division.weights_bytes

    def _automatic_terms(self) -> AutomaticTerms:
        return automatic_terms(
            self.program,
            self.device,
            self._driver.memory,
            held_bytes=self._session.memory()[0] if self._open else None,
            cuda_graph=self._options.asked.cuda_graph,
        )

    @property
    def summary(self) -> str:
        """What was loaded, in one line."""
        with self._operation():
            return self._summary()

    def _summary(self) -> str:
        remarks = [
            *summary_of(self._split),
            *self._options.linear.summary(),
            *self._split_limits.summary,
            *slots_summary(self.program, self.plan),
            *([f"planned for {self.calibration}"] if self.calibration is not None else []),
            *(["replayed as CUDA graphs"] if self._options.asked.cuda_graph else []),
        ]
        return self._session.summary(
            name=self.path.name,
            device=str(self.device),
            methods=self.methods,
            remarks=remarks,
            floor_bytes=self.floor_bytes,
            budget_bytes=self.budget_bytes,
            origin=self._choice.origin,
            copying_bytes=self._policy.copying_bytes,
        )

    def _lines(self) -> list[str]:
        """What to log about the current plan. Made inside the operation that changed it, so that neither a run in
        another thread nor close() comes in between; logged after it has ended."""
        return [self._summary(), *filter(None, [self._choice.clamp_sentence])]

    def _say(self, lines: list[str]) -> None:
        for line in lines:
            LOGGER.info("%s", line)


def _poison_asked() -> bool:
    value = os.environ.get(POISON_VARIABLE, "0")
    if value not in ("0", "1"):
        raise PenstockError(f"{POISON_VARIABLE} is {value!r}; it must be 0 or 1")
    return value == "1"
