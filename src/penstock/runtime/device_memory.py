"""One total of device memory for weights, state and activations: what it leaves for weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.budget import format_bytes, parse_bytes
from penstock.errors import BelowFloorError
from penstock.program import Program
from penstock.runtime.automatic_budget import activation_bytes, device_state_bytes


@dataclass(frozen=True)
class Grant:
    total_bytes: int
    # The most that runs allocate, and what lies on the device from run to run.
    activation_bytes: int
    state_bytes: int

    @property
    def beside_weights_bytes(self) -> int:
        return self.activation_bytes + self.state_bytes

    def weights_bytes(self, floor_bytes: int) -> int:
        """Refuses a total that leaves less than the floor, with the smallest that does not."""
        left_bytes = self.total_bytes - self.beside_weights_bytes
        if left_bytes < floor_bytes:
            least_bytes = floor_bytes + self.beside_weights_bytes
            raise BelowFloorError(
                f"device_memory is {format_bytes(self.total_bytes)}; the smallest for this program is {least_bytes} "
                f"bytes: at least {floor_bytes} for weights, {self.state_bytes} for state and {self.activation_bytes} "
                "for activations",
                budget_bytes=max(0, left_bytes),
                floor_bytes=floor_bytes,
            )
        return left_bytes


def grant(asked: int | str, program: Program, device: torch.device, *, cuda_graph: bool) -> Grant:
    """The CUDA context, libraries and what else lies on the GPU are beside it. Refused where activations have no
    bound."""
    return Grant(
        total_bytes=parse_bytes(asked),
        activation_bytes=activation_bytes(program, cuda_graph=cuda_graph),
        state_bytes=device_state_bytes(program, device),
    )
