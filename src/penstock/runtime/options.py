"""Which options of a module go together. Every combination is judged here; docs/runtime.md has the same table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch

from penstock.budget import parse_bytes
from penstock.direct.launch_shape import Limits
from penstock.errors import BudgetError, CaptureError, DeviceError, HostMemoryError, PenstockError
from penstock.placement_names import PLACEMENTS
from penstock.plan.calibration import Calibration
from penstock.renamed import refuse_options, value_hint
from penstock.runtime.budget_choice import asked_bytes
from penstock.runtime.linear_choice import LinearChoice

REGISTERED = "registered"


@dataclass(frozen=True)
class Asked:
    """The options as the user gave them: all of a module's but its device and its weights file."""

    budget: int | str | None = None
    weight_offload_budget_mb: int | None = None
    device_memory: int | str | None = None
    placement: str = "auto"
    host_memory: int | str = REGISTERED
    calibration: Calibration | Literal["first-runs"] | None = None
    cuda_graph: bool = False
    split_limits: Limits | Literal["measured"] | None = None
    check_indices: bool = False
    verify: bool = False

    @property
    def given_budget(self) -> int | str | None:
        """The budget, whichever way it was given."""
        given = (self.budget, self.weight_offload_budget_mb, self.device_memory)
        return next((one for one in given if one is not None), None)


@dataclass(frozen=True)
class Options:
    """Options that passed the checks: they go together, for this program on this device."""

    asked: Asked
    device: torch.device
    # A .pte, whose delegates ExecuTorch runs.
    is_delegate: bool
    # None: all weights are registered and stay in memory. Else they pass through this many bytes of pinned buffers.
    host_memory_cap_bytes: int | None
    linear: LinearChoice
    # Known once the index of the weights file has been read.
    is_packed: bool = False
    # An option of from_pretrained, which makes the program: its KV cache can lie on both sides.
    host_cache: bool = False
    # The call that is judged; None for the load.
    call: Literal["calibrate()", "calibrate(in_place=True)"] | None = None

    @property
    def is_lru(self) -> bool:
        return self.asked.placement == "lru"

    @property
    def is_capped(self) -> bool:
        return self.host_memory_cap_bytes is not None

    @property
    def planned_as(self) -> str:
        """The placement that is planned. Kernels read in place only what stays in host memory."""
        return "stream" if self.is_lru or self.is_capped else self.asked.placement

    @property
    def can_split(self) -> bool:
        """Whether a plan may put a weight into two places. Not with "first-runs": those runs time steps with their
        weights on the device."""
        times_first_runs = self.asked.calibration == "first-runs"
        return self.linear.uses_kernel and not (self.is_lru or self.is_capped or times_first_runs)

    @property
    def offers_kernel(self) -> bool:
        """Whether the core gets recipes for the kernel."""
        return self.device.type == "cuda" and self.linear.uses_kernel


# For each entry of the table: when it holds.
_HOLDS: dict[str, Callable[[Options], bool]] = {
    "budget=": lambda o: o.asked.budget is not None,
    "weight_offload_budget_mb=": lambda o: o.asked.weight_offload_budget_mb is not None,
    "device_memory=": lambda o: o.asked.device_memory is not None,
    'placement="in-place"': lambda o: o.asked.placement == "in-place",
    'placement="split"': lambda o: o.asked.placement == "split",
    'placement="stream"': lambda o: o.asked.placement == "stream",
    'placement="lru"': lambda o: o.is_lru,
    "calibration=": lambda o: o.asked.calibration is not None,
    'calibration="first-runs"': lambda o: o.asked.calibration == "first-runs",
    "cuda_graph=True": lambda o: o.asked.cuda_graph,
    "split_limits=": lambda o: o.asked.split_limits is not None,
    "calibrate()": lambda o: o.call == "calibrate()",
    "calibrate(in_place=True)": lambda o: o.call == "calibrate(in_place=True)",
    "host_cache=True": lambda o: o.host_cache,
    "a budget for weights alone": lambda o: o.asked.device_memory is None,
    "a .pte": lambda o: o.is_delegate,
    "a CPU": lambda o: o.device.type != "cuda",
    "a cap on host memory": lambda o: o.is_capped,
    "packed weights": lambda o: o.is_packed,
    "a program compiled with split_linear=True": lambda o: o.linear.has_linears,
    "a program compiled without split_linear=True": lambda o: not o.linear.has_linears,
    "a GPU without the kernel for it": lambda o: o.linear.obstacle is not None,
    "a module without the kernel that reads weights in two places": lambda o: not o.offers_kernel,
}


@dataclass(frozen=True)
class Refusal:
    """Two things that do not go together."""

    option: str
    beside: str
    reason: str
    error: type[PenstockError] = PenstockError

    def applies(self, options: Options) -> bool:
        return _HOLDS[self.option](options) and _HOLDS[self.beside](options)


_ONE_BUDGET = "both limit device memory; pass one"
_NOT_IN_MEMORY = "kernels read weights in place in host memory, and under a cap no weight stays there"
_AS_THEY_ARE = "it needs unpacked weights; `penstock unpack` writes a file of them"
_IN_PLACE = "it times reads in place to choose by them, and "
_LINEARS = (
    "compile it with that option, and weights in bfloat16 or float16 that only linears read can be split; models of "
    "from_pretrained are compiled without it"
)

REFUSALS = (
    Refusal("weight_offload_budget_mb=", "budget=", _ONE_BUDGET, BudgetError),
    Refusal("device_memory=", "budget=", _ONE_BUDGET, BudgetError),
    Refusal("device_memory=", "weight_offload_budget_mb=", _ONE_BUDGET, BudgetError),
    Refusal(
        "device_memory=", "a .pte", "ExecuTorch plans memory for state and activations; pass a budget for the weights"
    ),
    Refusal(
        "cuda_graph=True",
        "a .pte",
        "graphs belong to the delegates, and Module gives them other plans; a C++ process gets graphs through "
        "weight_offload_cuda_graph",
    ),
    Refusal(
        'calibration="first-runs"',
        "a .pte",
        "ExecuTorch runs the delegates, so nothing counts their first runs; use calibrate()",
    ),
    Refusal(
        "host_cache=True",
        "a budget for weights alone",
        "it divides one total between weights and the KV cache; give that as device_memory=",
    ),
    Refusal('placement="in-place"', "calibration=", "a calibration is for planning copies, and nothing is copied"),
    Refusal(
        'placement="split"',
        'calibration="first-runs"',
        "steps are timed with their weights on the device, and the first runs read them on both sides; use calibrate()",
    ),
    Refusal('placement="in-place"', "a cap on host memory", _NOT_IN_MEMORY),
    Refusal('placement="split"', "a cap on host memory", _NOT_IN_MEMORY),
    Refusal('placement="split"', "a program compiled without split_linear=True", _LINEARS),
    Refusal('placement="split"', "a GPU without the kernel for it", "{obstacle}", DeviceError),
    Refusal(
        'placement="lru"',
        "a cap on host memory",
        'capped host memory is filled in the order of a plan, and "lru" has none',
        HostMemoryError,
    ),
    Refusal(
        'placement="lru"',
        "a program compiled with split_linear=True",
        'the program\'s kernel is prepared for the addresses of a plan, and "lru" has none',
    ),
    Refusal('placement="lru"', "calibration=", 'a calibration is for a plan, and "lru" has none'),
    Refusal("cuda_graph=True", "a CPU", "only a CUDA device has graphs; leave it out", CaptureError),
    Refusal(
        "cuda_graph=True",
        'placement="lru"',
        "it decides during each run which weight goes where, and a graph would not decide again",
        CaptureError,
    ),
    Refusal(
        "cuda_graph=True",
        "a cap on host memory",
        "the host fills buffers while it runs, and a graph runs without it",
        CaptureError,
    ),
    Refusal(
        "split_limits=",
        "a module without the kernel that reads weights in two places",
        "it needs a GPU that has it, and a program compiled with split_linear=True",
    ),
    Refusal('placement="in-place"', "packed weights", _AS_THEY_ARE),
    Refusal('placement="split"', "packed weights", _AS_THEY_ARE),
    Refusal('placement="lru"', "packed weights", _AS_THEY_ARE),
    Refusal(
        "calibrate()",
        'placement="in-place"',
        'it times copies to plan by, and nothing is copied; placement="auto" and "split" choose by both',
    ),
    Refusal("calibrate()", 'placement="lru"', "it times copies to plan by, and there is no plan"),
    Refusal("calibrate(in_place=True)", 'placement="in-place"', _IN_PLACE + "everything is read in place already"),
    Refusal("calibrate(in_place=True)", 'placement="stream"', _IN_PLACE + "everything is copied"),
    Refusal("calibrate(in_place=True)", 'placement="lru"', _IN_PLACE + "there is no plan"),
    Refusal(
        "calibrate(in_place=True)",
        "a cap on host memory",
        _IN_PLACE + "under a cap no weight stays where it could be read",
    ),
    Refusal("calibrate(in_place=True)", "packed weights", _IN_PLACE + "no kernel reads packed ones"),
)


def refuse_unknown(caller: str, given: Mapping[str, Any]) -> None:
    """Refuses unknown options. For a renamed option the message tells the new name."""
    refuse_options(given)
    for name in given.keys() - {field.name for field in fields(Asked)}:
        raise TypeError(f"{caller}() got an unexpected keyword argument {name!r}")


def judge(
    asked: Asked,
    device: torch.device,
    linear: LinearChoice,
    *,
    is_delegate: bool = False,
    is_packed: bool = False,
    host_cache: bool = False,
) -> Options:
    """Raises the error of a refusal that applies, before anything is loaded."""
    _check_values(asked)
    options = Options(asked, device, is_delegate, _cap_bytes(asked.host_memory), linear, is_packed, host_cache)
    return judged(options)


def _check_values(asked: Asked) -> None:
    """Whether each option by itself has a value that it can have: a mistyped one must not pass for another."""
    if asked.placement not in PLACEMENTS:
        known = ", ".join(map(repr, PLACEMENTS))
        hint = value_hint("placement", asked.placement)
        raise PenstockError(f"placement is {asked.placement!r}; it must be one of {known}{hint}")
    if not (
        asked.calibration is None or asked.calibration == "first-runs" or isinstance(asked.calibration, Calibration)
    ):
        raise PenstockError(f'calibration is {asked.calibration!r:.80}; it must be a Calibration, "first-runs" or None')
    if not (asked.split_limits is None or asked.split_limits == "measured" or isinstance(asked.split_limits, Limits)):
        raise PenstockError(f'split_limits is {asked.split_limits!r:.80}; it must be Limits, "measured" or None')
    for name in ("cuda_graph", "check_indices", "verify"):
        value = getattr(asked, name)
        if not isinstance(value, bool):
            raise PenstockError(f"{name} is {value!r:.80}; it must be True or False")
    asked_bytes(asked.budget, asked.weight_offload_budget_mb)
    if asked.device_memory is not None:
        try:
            parse_bytes(asked.device_memory)
        except BudgetError as error:
            raise BudgetError(f"device_memory: {error}") from error


def judged(options: Options) -> Options:
    """Raises if a refusal applies. Also for what is known later: the weights file, or the call."""
    for refusal in REFUSALS:
        if refusal.applies(options):
            reason = refusal.reason.format(obstacle=options.linear.obstacle)
            raise refusal.error(f"{refusal.option} does not go with {refusal.beside}: {reason}")
    return options


def goes_with_rest(options: Options, placement: str) -> bool:
    """Whether this placement could have been asked for with all other options as they are."""
    other = replace(options, asked=replace(options.asked, placement=placement))
    return not any(refusal.applies(other) for refusal in REFUSALS)


def _cap_bytes(host_memory: int | str) -> int | None:
    if host_memory == REGISTERED:
        return None
    try:
        return parse_bytes(host_memory)
    except BudgetError as error:
        hint = value_hint("host_memory", host_memory)
        forms = 'it must be "registered", or a cap in bytes such as "1GiB"'
        raise HostMemoryError(f"host_memory is {host_memory!r:.80}; {forms} ({error}){hint}") from error
