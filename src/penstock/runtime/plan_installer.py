"""The plan that a session executes, and how it is replaced: for another budget, or by measured times.

Not thread-safe, and never used while a run is under way: the module ensures both.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

from penstock.errors import PenstockError, RuntimeFailure
from penstock.plan.calibration import Calibration
from penstock.plan.plan import Plan
from penstock.runtime.calibration import calibration_of, check_direct_times, step_times
from penstock.runtime.expert_rates import measured_hit_rates
from penstock.runtime.graphs import Graphs
from penstock.runtime.policy import InstalledPlan, PlannedPolicy, Policy
from penstock.runtime.recorder import Recorder, Recording
from penstock.runtime.session import Session, TraceSpan
from penstock.schedule import Schedule

# With calibration="first-runs": after this many runs of one method, the first of them cold, a new plan is made. It is
# installed if it will be better by at least this fraction.
FIRST_RUNS = 4
WORTHWHILE_GAIN = 0.005


class PlanInstaller:
    def __init__(
        self,
        policy: Policy,
        session: Session,
        schedules: Sequence[Schedule],
        graphs: Graphs | None,
        closing: weakref.WeakMethod[Callable[[], None]],
    ) -> None:
        """`closing` closes the module, for when neither the new plan nor the old one can be installed."""
        self._policy = policy
        self._session = session
        self._schedules = schedules
        self._graphs = graphs
        self._closing = closing
        self.recorder = Recorder(session)
        self.calibration: Calibration | None = None
        self._installed: InstalledPlan | None = None
        # While another plan is installed to be timed: the one from before.
        self._before_timing: InstalledPlan | None = None

    @property
    def installed(self) -> InstalledPlan:
        assert self._installed is not None, "arranged when the module was loaded"
        return self._installed

    @property
    def plan(self) -> Plan | None:
        return self.installed.plan

    def plan_at(self, budget_bytes: int) -> Plan | None:
        return self._policy.arrange(budget_bytes, self.calibration).plan

    def arrange_first(self, installed: InstalledPlan, calibration: Calibration | None) -> None:
        self._session.install(installed.numbers)
        self._installed, self.calibration = installed, calibration

    def change_budget(self, budget_bytes: int) -> None:
        again = self.recorder.records_first_runs
        # A recording numbers copies by the current plan; another plan could not name them.
        self._end_recording("set_budget()")
        self._learn()
        self._install(self._policy.arrange(budget_bytes, self.calibration))
        if again:
            self.record_first_runs()

    def _end_recording(self, by: str) -> None:
        """Ends the recording for something newer. A plan that was installed to be timed leaves with it."""
        self.recorder.end(by)
        self._leave_timing()

    def start_trace(self, name: str, keep: Callable[[list[TraceSpan]], None]) -> Recording:
        self._end_recording(name)
        return self.recorder.start(name, keep)

    # ---- by the times of copies and steps

    def start_calibration(self, budget_bytes: int) -> Recording:
        assert isinstance(self._policy, PlannedPolicy)
        to_time = self._policy.arrange_to_time_steps(self._planned(), budget_bytes)
        self._end_recording("another calibrate()")
        return self._start_timing("calibrate()", to_time)

    def plan_by(self, recording: Recording, budget_bytes: int) -> None:
        plan = self._planned()
        spans = self.recorder.stop(recording)
        self._leave_timing()
        calibration = calibration_of(spans, self._schedules, plan)
        self._learn()
        self._install(self._policy.arrange(budget_bytes, calibration))
        self.calibration = calibration

    def _learn(self) -> None:
        """Learns hit rates from the use of experts under the outgoing plan."""
        if isinstance(self._policy, PlannedPolicy):
            policy = self._policy
            policy.learn(measured_hit_rates(self._session, self.plan, policy.hit_rates, policy.taken_together))

    def record_first_runs(self) -> None:
        if self._planned().takes_link:  # else there is nothing to plan by
            self.recorder.start("the record of the first runs", first_runs=True)

    @property
    def has_first_runs(self) -> bool:
        recording = self.recorder.current
        return recording is not None and recording.first_runs and max(recording.runs.values(), default=0) >= FIRST_RUNS

    def plan_by_first_runs(self, budget_bytes: int) -> str:
        """Returns a sentence that tells the outcome."""
        policy, plan, recording = self._policy, self._planned(), self.recorder.current
        assert isinstance(policy, PlannedPolicy) and recording is not None
        calibration = calibration_of(self.recorder.stop(recording), self._schedules, plan)
        installed = policy.arrange(budget_bytes, calibration)
        assert installed.plan is not None
        before_s, after_s = (policy.predicted_s(each, calibration) for each in (plan, installed.plan))
        # With experts, plans are made for more tokens than prompts: the time of one run of each method does not tell.
        better = policy.seconds(installed.plan, calibration) < policy.seconds(plan, calibration) * (1 - WORTHWHILE_GAIN)
        if better:
            self._install(installed)
        self.calibration = calibration
        outcome = f"{after_s * 1e3:.2f} ms with another plan" if better else "no other plan is better"
        if better and after_s >= before_s:
            outcome += ", which is faster with the tokens after a prompt"
        return f"the first runs showed {calibration}: {before_s * 1e3:.2f} ms a run of each method, {outcome}"

    # ---- by the times of reads in place

    def start_direct_calibration(self, _budget_bytes: int) -> Recording:
        policy = self._policy
        assert isinstance(policy, PlannedPolicy)
        if self.calibration is None:
            raise PenstockError("calibrate(in_place=True) compares with what calibrate() measures: use that first")
        to_time = policy.arrange_in_place()
        self._end_recording("calibrate(in_place=True)")
        return self._start_timing("calibrate(in_place=True)", to_time)

    def plan_by_direct(self, recording: Recording, budget_bytes: int) -> None:
        plan = self._planned()
        spans = self.recorder.stop(recording)
        self._leave_timing()
        assert self.calibration is not None
        calibration = replace(self.calibration, direct_step_s=step_times(spans, self._schedules, plan))
        check_direct_times(calibration, self._schedules)
        self._install(self._policy.arrange(budget_bytes, calibration))
        self.calibration = calibration

    def drop(self, recording: Recording) -> None:
        """Discards the recording and restores everything to where it was."""
        if recording is self.recorder.current:
            self._end_recording("nobody")
        elif self.recorder.current is None:
            # Ending it failed halfway: the plan that was installed to be timed must not outlive it.
            self._leave_timing()

    def _start_timing(self, name: str, installed: InstalledPlan | None) -> Recording:
        """Starts a recording; under the plan `installed` until it ends, if one is given."""
        if installed is not None:
            self._learn()
            before = self.installed
            self._install(installed)
            self._before_timing = before
        try:
            return self.recorder.start(name)
        except PenstockError:
            self._leave_timing()
            raise

    def _leave_timing(self) -> None:
        before, self._before_timing = self._before_timing, None
        if before is not None:
            self._install(before)

    # ----

    def _planned(self) -> Plan:
        assert self.plan is not None, "checked before"
        return self.plan

    def _install(self, installed: InstalledPlan) -> None:
        self._drop_graphs()
        try:
            self._session.install(installed.numbers)
        except PenstockError as error:
            self._restore(error)
            raise
        self._installed = installed

    def _drop_graphs(self) -> None:
        """S9: graphs hold addresses of the plan they were captured under. The session drops its own with the plan."""
        if self._graphs is not None:
            self._session.drain()
            self._graphs.clear()

    def _restore(self, error: PenstockError) -> None:
        try:
            self._session.install(self.installed.numbers)
        except PenstockError as second:
            close = self._closing()
            assert close is not None, "it is the module that calls this"
            close()
            kind = type(error) if type(error) is type(second) else RuntimeFailure
            raise kind(
                f"neither the new budget ({error}) nor the old one ({second}) could be installed; the module is closed"
            ) from error
