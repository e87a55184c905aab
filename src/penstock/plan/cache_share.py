"""How one amount of device memory is divided between weights and positions of KV caches: a run is to take least time.

What is not on the device crosses the link in every run: a weight is streamed, a position that is filled is read in
place. A cache is taken to be filled as far as tuning.CACHE_FILL; positions behind that are not read, and the last to
get memory. `plan.ratios` finds the shares, and rounding to whole blocks leaves the rest to the weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.plan.ratios import Operation, TimeCurve, allocate
from penstock.plan.tuning import CACHE_FILL, FAR_READ_COST

_WEIGHTS = "weights"
# More than a ratio of terabytes is off by, and less than a byte.
_ROUNDING_BYTES = 0.01


@dataclass(frozen=True)
class CacheGroup:
    """Caches that are alike, and are split alike: so many layers."""

    names: tuple[str, ...]
    capacity: int
    # Keys and values of one position, of all sequences and of all caches of the group.
    position_bytes: int
    block_positions: int

    @property
    def nbytes(self) -> int:
        return self.capacity * self.position_bytes

    def positions_within(self, nbytes: int) -> int:
        """Whole blocks, or all."""
        held = nbytes // self.position_bytes
        return self.capacity if held >= self.capacity else held // self.block_positions * self.block_positions


@dataclass(frozen=True)
class WeightsRange:
    """From the smallest budget for weights to the one that holds all of them."""

    floor_bytes: int
    full_bytes: int
    # What is streamed while steps run, at no cost; 0 where nothing was measured.
    hidden_bytes: int = 0


@dataclass(frozen=True)
class Division:
    weights_bytes: int
    # On the device, in the order of the groups.
    positions: tuple[int, ...]


def divide(room_bytes: int, weights: WeightsRange, groups: Sequence[CacheGroup]) -> Division:
    """`room_bytes` are at least the floor of the weights. All of it is given: what positions leave is the weights'."""
    if room_bytes < weights.floor_bytes:
        raise ValueError(f"{room_bytes} bytes for weights and caches; weights alone need {weights.floor_bytes}")
    # Of what costs nothing the first goes first: that copies are hidden was measured, how long texts are was not.
    operations = []
    if weights.full_bytes > weights.floor_bytes:
        operations.append(Operation(_WEIGHTS, weights.full_bytes, _weights_curve(weights)))
    operations += [Operation(str(number), group.nbytes, _cache_curve(group)) for number, group in enumerate(groups)]
    # Where all weights are always there, only the caches share.
    taken_bytes = 0 if weights.full_bytes > weights.floor_bytes else weights.floor_bytes
    total_bytes = sum(operation.nbytes for operation in operations)
    lacking_bytes = max(0, total_bytes - (room_bytes - taken_bytes))
    ratios = allocate(operations, lacking_bytes / total_bytes).by_name if operations else {}
    positions: list[int] = []
    left_bytes = room_bytes - weights.floor_bytes
    for number, group in enumerate(groups):
        # Whole bytes, whatever the ratio has lost in rounding; never more than is left above the floor.
        wanted_bytes = math.floor((1 - ratios[str(number)]) * group.nbytes + _ROUNDING_BYTES)
        positions.append(group.positions_within(min(wanted_bytes, left_bytes)))
        left_bytes -= positions[-1] * group.position_bytes
    # What all weights leave over is for positions after all.
    spare_bytes = left_bytes + weights.floor_bytes - max(weights.full_bytes, weights.floor_bytes)
    for number, group in enumerate(groups):
        if spare_bytes > 0:
            before = positions[number]
            positions[number] = group.positions_within(before * group.position_bytes + spare_bytes)
            added_bytes = (positions[number] - before) * group.position_bytes
            spare_bytes -= added_bytes
            left_bytes -= added_bytes
    return Division(weights.floor_bytes + left_bytes, tuple(positions))


def _cache_curve(group: CacheGroup) -> TimeCurve:
    """In bytes of the link: what is far is first what is not filled."""
    free = 1 - CACHE_FILL
    return TimeCurve(((0.0, 0.0), (free, 0.0), (1.0, FAR_READ_COST * CACHE_FILL * group.nbytes)))


def _weights_curve(weights: WeightsRange) -> TimeCurve:
    most = 1 - weights.floor_bytes / weights.full_bytes
    hidden = weights.hidden_bytes / weights.full_bytes
    streamed = most * weights.full_bytes
    if hidden <= 0:
        return TimeCurve(((0.0, 0.0), (most, streamed)))
    if hidden >= most:
        return TimeCurve(((0.0, 0.0), (most, 0.0)))
    return TimeCurve(((0.0, 0.0), (hidden, 0.0), (most, streamed - weights.hidden_bytes)))
