"""A module from its load to its end, while one call of its driver fails: on any driver. So the code that tests a GPU is
itself tested wherever tests run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

import penstock
import penstock.runtime.driver as driver_file
import penstock.runtime.module as module_file
from penstock import errors
from penstock.plan.calibration import Calibration
from penstock.runtime.driver import Driver
from penstock.runtime.policy import InstalledPlan, PlannedPolicy
from tests.native.driver import WrappedDriver, wrap
from tests.runtime.soft import SoftHooks
from tests.runtime.test_driver_faults import CLASSES, QUIET

T = TypeVar("T")
genuine_arrange = PlannedPolicy.arrange
# How drivers are opened, by the device's type.
OPENERS = {"cpu": "open_soft_driver", "cuda": "open_cuda_driver"}


@dataclass(frozen=True)
class Played:
    """What a life does, on which device, and what must come of it."""

    path: Path
    device: str
    inputs: tuple[torch.Tensor, ...]
    wanted: Any
    floor_bytes: int
    full_bytes: int
    options: Mapping[str, Any]
    # By budget. To plan takes ten times as long as all else of a life does, and comes to the same in each.
    installed: dict[int, InstalledPlan] = field(default_factory=dict)

    def arrange(self, policy: PlannedPolicy, budget_bytes: int, calibration: Calibration | None) -> InstalledPlan:
        assert calibration is None
        if budget_bytes not in self.installed:
            self.installed[budget_bytes] = genuine_arrange(policy, budget_bytes, calibration)
        return self.installed[budget_bytes]


class WatchedDriver(Driver):
    """Tells, at its end, which call was made to fail, and what a soft one still had in it."""

    failed_call = ""
    left: Mapping[str, int] = {}

    def __init__(self, handle: int, device: str) -> None:
        super().__init__(wrap(handle))
        self._device = device

    def close(self) -> None:
        if self.handle is not None:
            self.failed_call = WrappedDriver(self.handle).failed_call()
            if self._device == "cpu":
                self.left = SoftHooks(self.handle).counts().alive()
        super().close()


@dataclass
class Life:
    """Whatever fails is tried once more, and must then succeed."""

    played: Played
    # The number of the call that fails, of the driver that is opened first; later ones are whole.
    n: int
    drivers: list[WatchedDriver] = field(default_factory=list)
    raised: list[errors.PenstockError] = field(default_factory=list)

    def live(self) -> str:
        """The name of the call that failed; empty when there were not as many."""
        played = self.played
        with pytest.MonkeyPatch.context() as patch:
            name = OPENERS[played.device]
            genuine = getattr(driver_file, name)
            patch.setattr(module_file, name, lambda *given, **named: self._opened(genuine(*given, **named)))
            patch.setattr(PlannedPolicy, "arrange", lambda *given: played.arrange(*given))
            module = self._twice(lambda: penstock.Module(played.path, played.floor_bytes, **played.options))
            try:
                self._runs(module)
                self._twice(lambda: module.set_budget((played.floor_bytes + played.full_bytes) // 2))
                self._runs(module)
                self._twice(module.stats)
            finally:
                module.close()
        assert all(driver.handle is None for driver in self.drivers)
        failed = self.drivers[0].failed_call
        assert not any(driver.left for driver in self.drivers), (failed, [driver.left for driver in self.drivers])
        self._check_raised(failed)
        return failed

    def _opened(self, driver: Driver) -> Driver:
        assert driver.handle is not None
        made = WatchedDriver(driver.handle, self.played.device)
        driver.handle = None  # it has another owner now
        if not self.drivers:
            assert made.handle is not None
            WrappedDriver(made.handle).fail_at(self.n)
        self.drivers.append(made)
        return made

    def _runs(self, module: penstock.Module) -> None:
        """With graphs: one that is captured, and two of its replays."""
        for _ in range(3):
            got = self._twice(lambda: module(*self.played.inputs))
            torch.testing.assert_close(got, self.played.wanted, rtol=0, atol=0)

    def _twice(self, action: Callable[[], T]) -> T:
        try:
            return action()
        except errors.PenstockError as error:
            self.raised.append(error)
        return action()

    def _check_raised(self, failed: str) -> None:
        if not failed or (failed in QUIET and not self.raised):
            return
        assert len(self.raised) == 1, (failed, self.raised)
        error: BaseException = self.raised[0]
        if isinstance(error, errors.CaptureError):
            # Of what fails while a pass is captured, it tells the failure and has it as its cause.
            assert self.played.options.get("cuda_graph") and error.__cause__ is not None, failed
            error = error.__cause__
        assert "a test asked for this failure" in str(error), failed
        # A staging buffer is its memory and its event.
        pinned = failed == "create_event" and "staging" in str(error)
        wanted = errors.RegistrationError if pinned else CLASSES.get(failed, errors.DriverCallError)
        assert type(error) is wanted, failed


def fail_in_turn(played: Played, stride: int = 1) -> set[str]:
    """One life for each call that a life makes, or for every `stride`-th; the names of those that failed."""
    seen: set[str] = set()
    n = 1
    while failed := Life(played, n).live():
        seen.add(failed)
        n += stride
    return seen
