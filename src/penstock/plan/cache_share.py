"""How one amount of device memory is divided between weights and positions of KV caches: a run is to take least time.

What is not on the device crosses the link in every run: a weight is streamed, a position that is filled is read in
place. A cache is taken to be filled as far as tuning.CACHE_FILL; positions behind that are not read, and the last to
get memory. What a byte costs on the link does not depend on how many there are, so whoever costs the most comes first;
rounding to whole blocks leaves the rest to the weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.plan.tuning import CACHE_FILL, FAR_READ_COST

# More than a part of terabytes is off by, and less than a byte.
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
    left_bytes = room_bytes - weights.floor_bytes
    wanted = _wanted_bytes(left_bytes, weights, groups)
    positions: list[int] = []
    for number, group in enumerate(groups):
        # Whole bytes, whatever was lost in rounding; never more than is left above the floor.
        positions.append(group.positions_within(min(math.floor(wanted[number] + _ROUNDING_BYTES), left_bytes)))
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


def _wanted_bytes(left_bytes: float, weights: WeightsRange, groups: Sequence[CacheGroup]) -> dict[int | None, float]:
    """By group, and None for the weights. Of what costs nothing weights come last: that copies are hidden was measured,
    how long texts are was not."""
    above_floor = max(weights.full_bytes - weights.floor_bytes, 0)
    hidden = min(weights.hidden_bytes, above_floor)
    # What a byte costs that is not on the device, beside one that is streamed; who has such bytes, and how many.
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
