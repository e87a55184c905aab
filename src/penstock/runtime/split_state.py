"""The two sides of a KV cache as one value: its name, and how many of its positions lie on each side.

Callers see it as the state of the device's side, with all positions in order, so they can move it between modules that
split it elsewhere. Compiled code still gets two inputs, each with the sizes it really has: only our ops take them
(export.host_states), and those ask the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from penstock.kv.split import Split, meets_on_a_border
from penstock.program import Program
from penstock.weight import POSITIONS_DIM, State


@dataclass(frozen=True)
class SplitState:
    """A cache as it was exported, and the split it gets."""

    near: State
    far: State
    split: Split

    @property
    def whole(self) -> State:
        return _with_positions(self.near, self.split.capacity)

    @property
    def sides(self) -> tuple[State, State]:
        """The states as they are allocated."""
        return (
            _with_positions(self.near, self.split.device_positions),
            _with_positions(self.far, self.split.host_positions),
        )


def split_states(program: Program, device_positions: Mapping[str, int] | None = None) -> tuple[SplitState, ...]:
    """`device_positions` of each cache, by the name of its state; None: as many as at export."""
    found: list[SplitState] = []
    for near, far in program.caches:
        exported, host = near.shape[POSITIONS_DIM], far.shape[POSITIONS_DIM]
        chosen = exported if device_positions is None else device_positions[near.name]
        assert meets_on_a_border(chosen, exported + host - chosen)
        found.append(SplitState(near, far, Split(chosen, exported + host - chosen)))
    return tuple(found)


def summary_of(split: Sequence[SplitState]) -> list[str]:
    """One phrase for each kind of cache."""
    kinds = dict.fromkeys((cache.split.device_positions, cache.split.capacity) for cache in split)
    return [f"KV cache {near} of {capacity} positions on the device" for near, capacity in kinds]


def joined(near: torch.Tensor, far: torch.Tensor) -> torch.Tensor:
    """All positions, in host memory: the device may have no room for them."""
    return torch.cat((near.cpu(), far.cpu()), dim=POSITIONS_DIM)


def spread(value: torch.Tensor, near: torch.Tensor, far: torch.Tensor) -> None:
    first = near.shape[POSITIONS_DIM]
    near.copy_(value.narrow(POSITIONS_DIM, 0, first))
    far.copy_(value.narrow(POSITIONS_DIM, first, far.shape[POSITIONS_DIM]))


def _with_positions(state: State, positions: int) -> State:
    shape = list(state.shape)
    shape[POSITIONS_DIM] = positions
    return replace(state, shape=tuple(shape))
