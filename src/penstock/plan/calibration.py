"""What a planner may know about time: the link, how long each step takes with its weights in place, and the bound."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Link:
    bytes_per_s: float
    # What every copy takes, however few its bytes. This is why few large copies beat many small ones.
    copy_latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not (self.bytes_per_s > 0 and math.isfinite(self.bytes_per_s)):
            raise ValueError(f"the link's bytes_per_s is {self.bytes_per_s}; it must be positive and finite")
        if not (self.copy_latency_s >= 0 and math.isfinite(self.copy_latency_s)):
            raise ValueError(f"the link's copy_latency_s is {self.copy_latency_s}; it must be finite and not negative")

    def copy_s(self, nbytes: int) -> float:
        """How long one copy keeps the link busy."""
        return self.copy_latency_s + nbytes / self.bytes_per_s


@dataclass(frozen=True)
class Calibration:
    link: Link
    # By method, one number per step: from the end of the step before it to its own.
    step_s: Mapping[str, tuple[float, ...]]
    # The same where a step reads its weights in host memory. Empty: not measured, and not planned for.
    direct_step_s: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    # How fast packed weights that stay in device memory are decoded, in unpacked bytes. None: not measured.
    decoded_bytes_per_s: float | None = None
    # Whether the times of steps are without decoding beside them. Measured times include it.
    steps_alone: bool = False

    def resident_s(self, method: str) -> float:
        """A run in which no step waits for a copy."""
        return sum(self.step_s[method])

    def __str__(self) -> str:
        steps = ", ".join(f"{self.resident_s(method) * 1e3:.2f} ms of {method}" for method in self.step_s)
        return f"a link of {self.link.bytes_per_s / 1e9:.1f} GB/s and {steps}"


def lower_bound_s(*, weight_bytes: int, budget_bytes: int, resident_s: float, link_bytes_per_s: float) -> float:
    """A lower bound on one run in the steady state, for a program that reads every weight in every run. It is the
    yardstick for every predicted or measured time.

    `resident_s` is the same program with every weight in place. At least what the budget does not hold crosses the link
    once a run; at best, copies and kernels overlap all the time.
    """
    for name, value in (("weight_bytes", weight_bytes), ("budget_bytes", budget_bytes), ("resident_s", resident_s)):
        if not value >= 0:
            raise ValueError(f"{name} is {value}; it must not be negative")
    if not link_bytes_per_s > 0:
        raise ValueError(f"link_bytes_per_s is {link_bytes_per_s}; it must be positive")
    return max(resident_s, (weight_bytes - budget_bytes) / link_bytes_per_s)


def fit_link(samples: Sequence[tuple[int, float]]) -> Link:
    """The link that explains measured copies (nbytes, seconds): exactly for two sizes, by least squares for more.

    It minimizes the relative error. With absolute errors the largest copies would dominate, and the latency, which only
    small copies show, would be whatever suits them.
    """
    sizes = sorted({nbytes for nbytes, _ in samples})
    if len(sizes) < 2:
        raise ValueError(f"a link is fitted to copies of at least two sizes, got {sizes}")
    for nbytes, seconds in samples:
        if nbytes < 0 or not (seconds > 0 and math.isfinite(seconds)):
            raise ValueError(f"a copy of {nbytes} bytes in {seconds} s is not a measurement")
    weights = [1 / seconds**2 for _, seconds in samples]
    total = math.fsum(weights)
    mean_bytes = math.fsum(w * nbytes for w, (nbytes, _) in zip(weights, samples, strict=True)) / total
    mean_s = math.fsum(w * seconds for w, (_, seconds) in zip(weights, samples, strict=True)) / total
    covariance = math.fsum(
        w * (nbytes - mean_bytes) * (seconds - mean_s) for w, (nbytes, seconds) in zip(weights, samples, strict=True)
    )
    variance = math.fsum(w * (nbytes - mean_bytes) ** 2 for w, (nbytes, _) in zip(weights, samples, strict=True))
    if covariance <= 0:
        raise ValueError(f"copies of {sizes[0]} to {sizes[-1]} bytes do not take longer the larger they are")
    s_per_byte = covariance / variance
    latency_s = mean_s - s_per_byte * mean_bytes
    if latency_s < 0:
        # No copy takes negative time: of the links without latency, this is the best.
        latency_s = 0.0
        s_per_byte = math.fsum(nbytes / seconds for nbytes, seconds in samples) / math.fsum(
            (nbytes / seconds) ** 2 for nbytes, seconds in samples
        )
    return Link(1 / s_per_byte, latency_s)
