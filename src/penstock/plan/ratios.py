"""How much of each operation's data to leave on the host when a share of all of it must be there.

Weights and KV cache alike: an operation reads some bytes, and takes a time that depends on which part of them, its
ratio, it reads over the link. A little of that is better than free: device memory and link are read side by side, and
up to the balance point, where both take equally long, the link only helps. An operation that is bound by its arithmetic
has room beyond that. Behind its free ratio each byte more costs time. Uniform ratios pay in every operation for room
that they leave unused in others.

Times are convex and piecewise linear in the ratio, so the best allocation takes segments of all operations in the order
of their time per byte: an exchange of any two bytes in another order would not be faster.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

# Times that are computed, or read off a table, are convex up to rounding.
_SLACK = 1e-9


@dataclass(frozen=True)
class TimeCurve:
    """Seconds by ratio: points (ratio, seconds) from ratio 0 on, linear between them, convex.

    The last ratio is the largest that the operation can have; 1 unless some of its bytes must stay on the device.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        ratios = [ratio for ratio, _ in self.points]
        if not ratios or ratios[0] != 0 or ratios[-1] > 1 or any(b <= a for a, b in pairwise(ratios)):
            raise ValueError(f"the ratios of a time curve are {ratios}; they must rise from 0 to at most 1")
        for ratio, seconds in self.points:
            if not (seconds >= 0 and math.isfinite(seconds)):
                raise ValueError(f"a time curve has {seconds} s at ratio {ratio}; it must be finite and not negative")
        slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(self.points)]
        tolerance = _SLACK * max((abs(slope) for slope in slopes), default=0.0)
        for at, (before, after) in zip(ratios[1:], pairwise(slopes), strict=False):
            if after < before - tolerance:
                raise ValueError(
                    f"a time curve is not convex at ratio {at}: {before} s per unit before it, {after} after"
                )

    @property
    def most(self) -> float:
        return self.points[-1][0]

    def seconds(self, ratio: float) -> float:
        if not 0 <= ratio <= self.most:
            raise ValueError(f"ratio {ratio} is not between 0 and {self.most}, where the time curve ends")
        for (low, first), (high, last) in pairwise(self.points):
            if ratio <= high:
                return first + (last - first) * (ratio - low) / (high - low)
        return self.points[0][1]


@dataclass(frozen=True)
class Operation:
    """What one operation reads, and how long it takes by the ratio of it that lies on the host."""

    name: str
    nbytes: int
    curve: TimeCurve

    def __post_init__(self) -> None:
        if self.nbytes < 1:
            raise ValueError(f"operation {self.name!r} reads {self.nbytes} bytes; it must read at least one")


@dataclass(frozen=True)
class Allocation:
    """Ratios in the order of the operations, and what they come to."""

    names: tuple[str, ...]
    ratios: tuple[float, ...]
    host_bytes: float
    seconds: float

    @cached_property
    def by_name(self) -> Mapping[str, float]:
        return dict(zip(self.names, self.ratios, strict=True))


def allocate(operations: Sequence[Operation], ratio: float) -> Allocation:
    """The least sum of times with at least `ratio` of all bytes on the host; more than that only where it is faster.

    Takes O(n log n) for n segments in all.
    """
    if not 0 <= ratio <= 1:
        raise ValueError(f"a global ratio of {ratio}; it must be between 0 and 1")
    total_bytes = sum(operation.nbytes for operation in operations)
    wanted = ratio * total_bytes
    room = sum(operation.nbytes * operation.curve.most for operation in operations)
    if wanted > room * (1 + _SLACK):
        raise ValueError(
            f"a global ratio of {ratio} is {wanted:.0f} of {total_bytes} bytes; "
            f"the operations allow {room:.0f} on the host"
        )
    segments = sorted(
        (segment for index, operation in enumerate(operations) for segment in _segments(index, operation)),
        key=lambda segment: (segment.s_per_byte, segment.index),
    )
    ratios = [0.0] * len(operations)
    host_bytes = 0.0
    for segment in segments:
        if segment.s_per_byte >= 0:
            missing = wanted - host_bytes
            if missing <= 0:
                break
            if missing < segment.nbytes:
                # The last: what rounding leaves of the sum is nobody's. It would be the whole way to the next corner.
                ratios[segment.index] = segment.begin + missing / segment.op_bytes
                break
        host_bytes += segment.nbytes
        # The end of a whole segment is its corner exactly, not a sum that rounding may carry past the curve's end.
        ratios[segment.index] = segment.end
    return _allocation(operations, ratios)


def uniform(operations: Sequence[Operation], ratio: float) -> Allocation:
    """The same ratio everywhere: what the allocation is measured against."""
    return _allocation(operations, [ratio] * len(operations))


@dataclass(frozen=True)
class _Segment:
    index: int
    op_bytes: int
    begin: float
    end: float
    s_per_byte: float

    @property
    def nbytes(self) -> float:
        return (self.end - self.begin) * self.op_bytes


def _segments(index: int, operation: Operation) -> Iterator[_Segment]:
    """Times per byte rise along a curve. Where rounding makes one fall, the last stands, or segments would swap."""
    least = -math.inf
    for (begin, first), (end, last) in pairwise(operation.curve.points):
        least = max(least, (last - first) / ((end - begin) * operation.nbytes))
        yield _Segment(index, operation.nbytes, begin, end, least)


def _allocation(operations: Sequence[Operation], ratios: Sequence[float]) -> Allocation:
    return Allocation(
        names=tuple(operation.name for operation in operations),
        ratios=tuple(ratios),
        host_bytes=math.fsum(op.nbytes * ratio for op, ratio in zip(operations, ratios, strict=True)),
        seconds=math.fsum(op.curve.seconds(ratio) for op, ratio in zip(operations, ratios, strict=True)),
    )
