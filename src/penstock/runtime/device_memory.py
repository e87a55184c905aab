"""One total of device memory for weights, state and activations: how much of it weights and KV caches get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from penstock.budget import format_bytes, parse_bytes
from penstock.errors import BelowFloorError
from penstock.kv.split import BLOCK_POSITIONS
from penstock.plan.cache_share import CacheGroup, Division, WeightsRange, divide
from penstock.plan.calibration import Calibration
from penstock.program import Program
from penstock.runtime.automatic_budget import activation_bytes, device_state_bytes
from penstock.weight import POSITIONS_DIM


@dataclass(frozen=True)
class Grant:
    total_bytes: int
    # The most that runs allocate; and the state that stays on the device, except KV caches that can be split.
    activation_bytes: int
    state_bytes: int
    caches: tuple[CacheGroup, ...] = ()

    @property
    def beside_weights_bytes(self) -> int:
        return self.activation_bytes + self.state_bytes

    def divided(self, weights: WeightsRange) -> Division:
        """Refuses a total that leaves less than the floor, and names the smallest that does not: there, every cache
        that can be split is wholly on the host."""
        left_bytes = self.total_bytes - self.beside_weights_bytes
        if left_bytes < weights.floor_bytes:
            least_bytes = weights.floor_bytes + self.beside_weights_bytes
            raise BelowFloorError(
                f"device_memory is {format_bytes(self.total_bytes)}; the smallest for this program is {least_bytes} "
                f"bytes: at least {weights.floor_bytes} for weights, {self.state_bytes} for state and "
                f"{self.activation_bytes} for activations",
                budget_bytes=max(0, left_bytes),
                floor_bytes=weights.floor_bytes,
            )
        return divide(left_bytes, weights, self.caches)

    def device_positions(self, division: Division) -> dict[str, int]:
        """The positions of each cache on the device, by the name of its state."""
        return {
            name: positions
            for group, positions in zip(self.caches, division.positions, strict=True)
            for name in group.names
        }


def grant(asked: int | str, program: Program, device: torch.device, *, cuda_graph: bool) -> Grant:
    """The total does not cover the CUDA context, libraries and what else is on the GPU. Refused if activations have no
    bound.

    Host sides are not part of it. On the CPU they are memory like any other, but are still left out: there, a total
    serves to try out what a GPU would do.
    """
    split = {state.name for cache in program.caches for state in cache}
    split_bytes = sum(
        state.nbytes for state in program.states if state.name in split and (device.type != "cuda" or not state.host)
    )
    return Grant(
        total_bytes=parse_bytes(asked),
        activation_bytes=activation_bytes(program, cuda_graph=cuda_graph),
        state_bytes=device_state_bytes(program, device) - split_bytes,
        caches=_groups(program),
    )


def weights_range(program: Program, floor_bytes: int, full_bytes: int, calibration: Calibration | None) -> WeightsRange:
    """Copies overlap with timed steps, so as many bytes as the link moves during the shortest run cost nothing. If a
    method was not timed, the shortest run is unknown, and no bytes are free."""
    hidden_bytes = 0
    if calibration is not None and all(method.name in calibration.step_s for method in program.methods):
        shortest_s = min(calibration.resident_s(method.name) for method in program.methods)
        hidden_bytes = int(shortest_s * calibration.link.bytes_per_s)
    return WeightsRange(floor_bytes, max(floor_bytes, full_bytes), hidden_bytes)


def _groups(program: Program) -> tuple[CacheGroup, ...]:
    """Layers that are alike get the same split; one group for each shape."""
    alike: dict[tuple[int, int], list[str]] = {}
    for near, far in program.caches:
        capacity = near.shape[POSITIONS_DIM] + far.shape[POSITIONS_DIM]
        if capacity and near.nbytes + far.nbytes:
            alike.setdefault((capacity, (near.nbytes + far.nbytes) // capacity), []).append(near.name)
    return tuple(_group(capacity, nbytes, names) for (capacity, nbytes), names in alike.items())


def _group(capacity: int, position_bytes: int, names: Sequence[str]) -> CacheGroup:
    return CacheGroup(tuple(names), capacity, position_bytes * len(names), BLOCK_POSITIONS)
