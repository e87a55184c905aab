"""Divides one amount of device memory between weights and positions of KV caches, so that a run takes the least time.

What is not on the device crosses the link in every run: weights are streamed, filled positions are read in place. A
cache is assumed to be filled up to tuning.CACHE_FILL. Positions behind that are not read, and get memory last. What a
byte costs on the link does not depend on how many there are, so whatever costs the most comes first. Rounding to whole
blocks leaves the rest to the weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.plan.tuning import CACHE_FILL, FAR_READ_COST

# More than the rounding error of a part of terabytes, and less than a byte.
_ROUNDING_BYTES = 0.01


@dataclass(frozen=True)
class CacheGroup:
    """The caches of several layers, which are alike and are split alike."""

    names: tuple[str, ...]
    capacity: int
    # Keys and values of one position, of all sequences and of all caches of the group.
    position_bytes: int
    block_positions: int

    @property
    def nbytes(self) -> int:
        return self.capacity * self.position_bytes

    def positions_within(self, nbytes: int) -> int:
        """The positions that fit, in whole blocks, or all of them."""
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
    """`room_bytes` are at least the floor of the weights. All of it is given away: weights get what positions leave."""
    if room_bytes < weights.floor_bytes:
        raise ValueError(f"{room_bytes} bytes for weights and caches; weights alone need {weights.floor_bytes}")
    left_bytes = room_bytes - weights.floor_bytes
    wanted = _wanted_bytes(left_bytes, weights, groups)
    positions: list[int] = []
    for number, group in enumerate(groups):
        # Whole bytes, whatever was lost in rounding; never more than is left above the floor.
        positions.append(group.positions_within(min(math.floor(wanted[number] + _ROUNDING_BYTES), left_bytes)))
        left_bytes -= positions[-1] * group.position_bytes
    # What is left over once all weights fit goes to positions after all.
    spare_bytes = left_bytes + weights.floor_bytes - max(weights.full_bytes, weights.floor_bytes)
    for number, group in enumerate(groups):
        if spare_bytes > 0:
            before = positions[number]
            positions[number] = group.positions_within(before * group.position_bytes + spare_bytes)
            added_bytes = (positions[number] - before) * group.position_bytes
            spare_bytes -= added_bytes
            left_bytes -= added_bytes
    return Division(weights.floor_bytes + left_bytes, tuple(positions))


def _wanted_bytes(left_bytes: float, weights: WeightsRange, groups: Sequence[CacheGroup]) -> dict[int | None, float]:
    """Bytes by group, and by None for the weights. Of what costs nothing, weights come last: that copies are hidden was
    measured, how long texts are was not."""
    above_floor = max(weights.full_bytes - weights.floor_bytes, 0)
    hidden = min(weights.hidden_bytes, above_floor)
    # What a byte off the device costs, relative to one that is streamed; who has such bytes, and how many.
    wants: list[tuple[float, int | None, float]] = [(1.0, None, above_floor - hidden), (0.0, None, hidden)]
    for number, group in enumerate(groups):
        wants.append((FAR_READ_COST, number, CACHE_FILL * group.nbytes))
        wants.append((0.0, number, (1 - CACHE_FILL) * group.nbytes))
    found: dict[int | None, float] = {}
    for _, who, nbytes in sorted(wants, key=lambda want: (want[0], want[1] is not None, want[1] or 0), reverse=True):
        taken = min(nbytes, left_bytes)
        found[who] = found.get(who, 0.0) + taken
        left_bytes -= taken
    return found
