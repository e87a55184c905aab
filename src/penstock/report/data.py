"""What a report says. Plain data: collect.py makes it from a module, page.py draws it. No torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from penstock.weight import Weight

# "prefix+suffix": a resident prefix and a streamed suffix. "in place": kernels read it where it lies in host memory.
# "split": kernels read a resident prefix, and the rest in host memory. "on demand": placement="lru" decides nothing
# before a run. "slots": experts, of which the device keeps some.
PlacementKind = Literal["resident", "prefix+suffix", "streamed", "in place", "split", "slots", "on demand"]


@dataclass(frozen=True)
class Summary:
    """One method in one budget. Times, bytes and copies are those of one run."""

    program: str
    device: str
    torch: str
    method: str
    weight_bytes: int
    state_bytes: int
    floor_bytes: int
    budget_bytes: int
    peak_bytes: int
    # None under placement="lru", which has no plan.
    resident_bytes: int | None
    ring_bytes: int | None
    run_s: float
    bytes_streamed: int
    bytes_per_s: float
    copies: int
    # None if it was not timed: inside a CUDA graph.
    stall_ns: int | None
    # None if nothing is ever copied, and so no link matters.
    link_bytes_per_s: float | None
    link_part: float | None
    bound_s: float
    # The bound divided by the time: 1 is as fast as possible.
    bound_part: float
    # Bit-identical to a run with every weight resident. None: not compared.
    identical: bool | None


@dataclass(frozen=True)
class WeightResidency:
    """Where one weight lies. What is not resident goes through the ring, once or several times in a run."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    resident_bytes: int
    # Copied in one run of the summary's method; for `penstock plan`, of each method that is asked for.
    streamed_bytes: int
    kind: PlacementKind
    # What lies only in host memory and is read there; of experts, those without a slot at any one time.
    in_place_bytes: int = 0

    @staticmethod
    def of(
        weight: Weight, kind: PlacementKind, resident_bytes: int = 0, streamed_bytes: int = 0, in_place_bytes: int = 0
    ) -> WeightResidency:
        return WeightResidency(
            weight.name, weight.dtype, weight.shape, weight.nbytes, resident_bytes, streamed_bytes, kind, in_place_bytes
        )


@dataclass(frozen=True)
class ExpertSlots:
    """The experts of a layer with slots, and the hits and misses since the slots were made."""

    weights: tuple[str, ...]
    experts: int
    slots: int
    hits: int
    misses: int
    # None before any expert was asked for.
    hit_rate: float | None


@dataclass(frozen=True)
class TracedRun:
    run: int
    method: str
    # Of its steps. Copies for it may begin earlier, and copies for the next run may end later.
    begin_ns: int
    end_ns: int
    steps: int
    copies: int
    bytes_copied: int
    copy_ns: int
    stall_ns: int


@dataclass(frozen=True)
class Stall:
    """A step whose weights arrived after the previous step had ended, and the last copy that it waited for.

    `stall_ns` is an upper bound: kernels that read no weight may have run meanwhile, and a trace does not show them.
    """

    run: int
    method: str
    step: int
    kernel: str
    begin_ns: int
    stall_ns: int
    weight: str
    copy_bytes: int
    copy_ns: int


@dataclass(frozen=True)
class MeasuredPoint:
    """The summary's method, measured in one budget. Bytes, time and stall are those of one run."""

    budget_bytes: int
    run_s: float
    bytes_streamed: int
    copies: int
    peak_bytes: int
    stall_ns: int | None
    identical: bool | None


@dataclass(frozen=True)
class CurvePoint:
    """The predicted time of one run (of one method, or of each of several), and the bound that no plan beats."""

    budget_bytes: int
    predicted_s: float
    bound_s: float
    streamed_bytes: int

    @property
    def runs_per_s(self) -> float | None:
        """None if a time of 0 is predicted, because everything is resident and the step times are not known."""
        return 1 / self.predicted_s if self.predicted_s else None


@dataclass(frozen=True)
class ReportData:
    title: str
    # When it was collected, as in 2026-01-31 12:00 UTC.
    made_at: str
    summary: Summary
    weights: tuple[WeightResidency, ...]
    # In the order of the layers; empty where no experts have slots.
    experts: tuple[ExpertSlots, ...]
    runs: tuple[TracedRun, ...]
    # The longest first.
    stalls: tuple[Stall, ...]
    measured: tuple[MeasuredPoint, ...]
    # Empty where there is nothing to predict from: no plan, no copies in the trace, or untimed reads in host memory.
    curve: tuple[CurvePoint, ...]
    # The trace's file as it is: the timeline is drawn from it, and it can be saved from the page.
    trace_json: str


def to_document(data: ReportData) -> dict[str, Any]:
    """As the page embeds it. The trace is embedded beside it."""
    document = dataclasses.asdict(data)
    del document["trace_json"]
    return document
