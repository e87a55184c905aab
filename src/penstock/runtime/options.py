"""Which options of a module go together. Every combination is judged here; docs/runtime.md has the same table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from penstock.budget import parse_bytes
from penstock.direct.launch_shape import Limits
from penstock.errors import BudgetError, CaptureError, DeviceError, HostMemoryError, PenstockError
from penstock.placement_names import PLACEMENTS
from penstock.plan.calibration import Calibration
from penstock.program import Program
from penstock.renamed import value_hint
from penstock.runtime.linear_choice import LinearChoice, choose_linear

REGISTERED = "registered"


@dataclass(frozen=True)
class Asked:
    """As the user gave them."""

    placement: str = "auto"
    host_memory: int | str = REGISTERED
    calibration: Calibration | Literal["first-runs"] | None = None
    cuda_graph: bool = False
    split_limits: Limits | Literal["measured"] | None = None
    device_memory: int | str | None = None


@dataclass(frozen=True)
class Options:
    """Judged: these go together, for this program on this device."""

    asked: Asked
    device: torch.device
    # A .pte, whose delegates ExecuTorch runs.
    is_delegate: bool
    # None: all weights are registered, in memory for good. Else they pass through so many bytes of pinned buffers.
    host_memory_cap_bytes: int | None
    linear: LinearChoice

    @property
    def is_lru(self) -> bool:
        return self.asked.placement == "lru"

    @property
    def is_capped(self) -> bool:
        return self.host_memory_cap_bytes is not None

    @property
    def planned_as(self) -> str:
        """What a placement comes to here. Kernels read in place only what is in memory for good."""
        return "stream" if self.is_lru or self.is_capped else self.asked.placement

    @property
    def can_split(self) -> bool:
        """Whether a plan may put a weight into two places. Not if the first runs are to tell how long steps take with
        their weights on the device."""
        times_first_runs = self.asked.calibration == "first-runs"
        return self.linear.uses_kernel and not (self.is_lru or self.is_capped or times_first_runs)

    @property
    def offers_kernel(self) -> bool:
        """Whether the core gets recipes for the kernel."""
        return self.device.type == "cuda" and self.linear.uses_kernel


@dataclass(frozen=True)
class Refusal:
    """Two things that do not go together."""

    option: str
    beside: str
    reason: str
    error: type[PenstockError]
    applies: Callable[[Options], bool]


REFUSALS = (
    Refusal(
        "device_memory=",
        "a .pte",
        "ExecuTorch plans memory for state and activations; pass a budget for the weights",
        PenstockError,
        lambda o: o.asked.device_memory is not None and o.is_delegate,
    ),
    Refusal(
        "cuda_graph=True",
        "a .pte",
        "graphs are the delegates' own, and Module gives them other plans; a process in C++ has them by "
        "weight_offload_cuda_graph",
        PenstockError,
        lambda o: o.asked.cuda_graph and o.is_delegate,
    ),
    Refusal(
        'calibration="first-runs"',
        "a .pte",
        "it is ExecuTorch that runs the delegates, so nobody counts their first runs; use calibrate()",
        PenstockError,
        lambda o: o.is_delegate and o.asked.calibration == "first-runs",
    ),
    Refusal(
        'placement="in-place"',
        "calibration=",
        "a calibration is to plan copies by, and nothing is copied",
        PenstockError,
        lambda o: o.asked.placement == "in-place" and o.asked.calibration is not None,
    ),
    Refusal(
        'placement="split"',
        'calibration="first-runs"',
        "steps are timed with their weights on the device, and the first runs read them on both sides; use calibrate()",
        PenstockError,
        lambda o: o.asked.placement == "split" and o.asked.calibration == "first-runs",
    ),
    Refusal(
        'placement="in-place"',
        "a cap on host memory",
        "kernels read weights where they lie in host memory, and under a cap no weight stays there",
        PenstockError,
        lambda o: o.asked.placement == "in-place" and o.is_capped,
    ),
    Refusal(
        'placement="split"',
        "a cap on host memory",
        "kernels read weights where they lie in host memory, and under a cap no weight stays there",
        PenstockError,
        lambda o: o.asked.placement == "split" and o.is_capped,
    ),
    Refusal(
        'placement="split"',
        "a program without linears of ours",
        "compile it with split_linear=True; bfloat16 and float16 weights that only linears read then have them",
        PenstockError,
        lambda o: o.asked.placement == "split" and not o.linear.has_linears,
    ),
    Refusal(
        'placement="split"',
        "a GPU without the kernel for it",
        "{obstacle}",
        DeviceError,
        lambda o: o.asked.placement == "split" and o.linear.obstacle is not None,
    ),
    Refusal(
        'placement="lru"',
        "a cap on host memory",
        "a capped host memory is filled in the order of a plan, and there is none",
        HostMemoryError,
        lambda o: o.is_lru and o.is_capped,
    ),
    Refusal(
        'placement="lru"',
        "a program compiled with split_linear=True",
        "its kernel is prepared for the addresses of a plan, and there is none",
        PenstockError,
        lambda o: o.is_lru and o.linear.has_linears,
    ),
    Refusal(
        'placement="lru"',
        "calibration=",
        "a calibration is for a plan, and there is none",
        PenstockError,
        lambda o: o.is_lru and o.asked.calibration is not None,
    ),
    Refusal(
        "cuda_graph=True",
        "a CPU",
        "only a CUDA device has graphs; leave it out",
        CaptureError,
        lambda o: o.asked.cuda_graph and o.device.type != "cuda",
    ),
    Refusal(
        "cuda_graph=True",
        'placement="lru"',
        "it is decided while running which weight goes where, and a graph would not decide again",
        CaptureError,
        lambda o: o.asked.cuda_graph and o.is_lru,
    ),
    Refusal(
        "cuda_graph=True",
        "a cap on host memory",
        "the host fills buffers while it runs, and a graph runs without it",
        CaptureError,
        lambda o: o.asked.cuda_graph and o.is_capped,
    ),
    Refusal(
        "split_limits=",
        "a module without the kernel that reads weights in two places",
        "it needs a GPU that has it, and a program compiled with split_linear=True",
        PenstockError,
        lambda o: o.asked.split_limits is not None and not o.offers_kernel,
    ),
)


def judge(program: Program, device: torch.device, asked: Asked, *, is_delegate: bool = False) -> Options:
    """Raises what a refusal says, before anything is loaded."""
    if asked.placement not in PLACEMENTS:
        known = ", ".join(map(repr, PLACEMENTS))
        hint = value_hint("placement", asked.placement)
        raise PenstockError(f"placement is {asked.placement!r}; it must be one of {known}{hint}")
    options = Options(asked, device, is_delegate, _cap_bytes(asked.host_memory), choose_linear(program, device))
    for refusal in REFUSALS:
        if refusal.applies(options):
            reason = refusal.reason.format(obstacle=options.linear.obstacle)
            raise refusal.error(f"{refusal.option} does not go with {refusal.beside}: {reason}")
    return options


def _cap_bytes(host_memory: int | str) -> int | None:
    if host_memory == REGISTERED:
        return None
    try:
        return parse_bytes(host_memory)
    except BudgetError as error:
        hint = value_hint("host_memory", host_memory)
        forms = 'it must be "registered", or a cap in bytes such as "1GiB"'
        raise HostMemoryError(f"host_memory is {host_memory!r:.80}; {forms} ({error}){hint}") from error
