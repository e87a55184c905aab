"""Which positions of a sequence lie on which side, and what a step therefore reads over the link. Pure, no torch.

The first `device_positions` of every sequence lie in device memory, the rest on the host. In full attention every step
reads every position, so it does not matter which positions are near, only how many. Filling the device first moves the
fewest bytes over the link at every length, and a position never moves once it is written.

Attention sums over fixed blocks of positions, and the sides meet on the border of a block. So results have the same
bits wherever the sides meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.kv.failures import KVCacheCapError

# All splits are multiples of this. Another number would change the last bits of results.
BLOCK_POSITIONS = 64


@dataclass(frozen=True)
class CacheShape:
    """What does not depend on lengths."""

    layers: int
    batch: int
    kv_heads: int
    head_dim: int
    element_bytes: int

    def __post_init__(self) -> None:
        for name in ("layers", "batch", "kv_heads", "head_dim", "element_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"a KV cache's {name} is {getattr(self, name)}; it must be at least 1")

    @property
    def position_bytes(self) -> int:
        """Key and value of one position of one sequence, in all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim * self.element_bytes


def meets_on_a_border(device_positions: int, host_positions: int) -> bool:
    return not host_positions or device_positions % BLOCK_POSITIONS == 0


@dataclass(frozen=True)
class Split:
    """The positions of each sequence that each side has room for."""

    device_positions: int
    host_positions: int

    def __post_init__(self) -> None:
        if self.device_positions < 0 or self.host_positions < 0:
            raise ValueError(
                f"a split of {self.device_positions} positions on the device and {self.host_positions} on the host: "
                "neither may be negative"
            )
        if not meets_on_a_border(self.device_positions, self.host_positions):
            raise ValueError(
                f"a split of {self.device_positions} positions on the device and {self.host_positions} on the host: "
                f"the first must be a multiple of {BLOCK_POSITIONS}, or all of them"
            )

    @property
    def capacity(self) -> int:
        return self.device_positions + self.host_positions

    def device_length(self, length: int) -> int:
        return min(length, self.device_positions)

    def host_length(self, length: int) -> int:
        return max(0, length - self.device_positions)


@dataclass(frozen=True)
class StepTraffic:
    """What one step moves, in all layers. Host memory is read once however many tokens a step has."""

    link_read_bytes: int
    link_written_bytes: int
    device_read_bytes: int


def split_within(shape: CacheShape, *, max_length: int, device_cap_bytes: int) -> Split:
    """As many blocks on the device as the cap holds for every sequence, or all positions; never more, even briefly."""
    if max_length < 1:
        raise ValueError(f"a KV cache's max_length is {max_length}; it must be at least 1")
    if device_cap_bytes < 0:
        raise KVCacheCapError(f"device_cap_bytes is {device_cap_bytes}; it must not be negative")
    held = device_cap_bytes // (shape.batch * shape.position_bytes)
    near = max_length if held >= max_length else held // BLOCK_POSITIONS * BLOCK_POSITIONS
    return Split(near, max_length - near)


def step_traffic(shape: CacheShape, split: Split, starts: Sequence[int], counts: Sequence[int]) -> StepTraffic:
    """A sequence that gets no token in this step is not read."""
    ends = [start + count for start, count in zip(starts, counts, strict=True) if count]
    written = sum(
        split.host_length(start + count) - split.host_length(start) for start, count in zip(starts, counts, strict=True)
    )
    return StepTraffic(
        link_read_bytes=shape.position_bytes * sum(split.host_length(end) for end in ends),
        link_written_bytes=shape.position_bytes * written,
        device_read_bytes=shape.position_bytes * sum(split.device_length(end) for end in ends),
    )
