"""The budget when none is given: what the device has free, less what the run needs beside the weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.budget import format_bytes
from penstock.errors import BelowFloorError, BudgetError
from penstock.program import Method, Program

_LEAST_RESERVE_BYTES = 256 * 2**20
# On a GPU the reserve is for what appears after the load: libraries' workspaces, kernels loaded at their first launch,
# the allocator's rounding. Main memory is shared with every other process, so more of it is left alone.
_RESERVE_PARTS = {"cuda": 50, "cpu": 20}


@dataclass(frozen=True)
class AutomaticTerms:
    """Taken before state is allocated: its bytes are still among the free ones, and are subtracted."""

    free_bytes: int
    # Held by torch's allocator and in use by nobody. Pages for weights come from the driver, so the allocator must give
    # this back (empty_cache) before they are created.
    allocator_unused_bytes: int
    activation_bytes: int
    state_bytes: int
    reserve_bytes: int

    @property
    def budget_bytes(self) -> int:
        """May be negative."""
        return (
            self.free_bytes
            + self.allocator_unused_bytes
            - self.activation_bytes
            - self.state_bytes
            - self.reserve_bytes
        )

    def __str__(self) -> str:
        return (
            f"free {format_bytes(self.free_bytes)}"
            f" + held unused by torch {format_bytes(self.allocator_unused_bytes)}"
            f" - activations {format_bytes(self.activation_bytes)}"
            f" - state {format_bytes(self.state_bytes)}"
            f" - reserve {format_bytes(self.reserve_bytes)}"
        )


def automatic_budget(terms: AutomaticTerms, floor_bytes: int) -> int:
    if terms.budget_bytes < floor_bytes:
        raise BelowFloorError(
            f"the automatic budget is {format_bytes(terms.budget_bytes)} ({terms}), below the floor of this program: "
            f"it needs at least {floor_bytes} bytes, {floor_bytes - terms.budget_bytes} more than there are; "
            "free device memory, or pass a budget to leave less in reserve",
            budget_bytes=terms.budget_bytes,
            floor_bytes=floor_bytes,
        )
    return terms.budget_bytes


def automatic_terms(
    program: Program, device: torch.device, *, free_bytes: int, total_bytes: int, cuda_graph: bool = False
) -> AutomaticTerms:
    """`free_bytes` and `total_bytes` are the driver's, for `device`, before state is allocated."""
    return AutomaticTerms(
        free_bytes=free_bytes,
        allocator_unused_bytes=_allocator_unused_bytes(device),
        # Graphs keep theirs, and runs that are no replays need as much again.
        activation_bytes=activation_bound_bytes(program) * (2 if cuda_graph else 1),
        state_bytes=device_state_bytes(program, device),
        reserve_bytes=reserve_bytes(device, total_bytes),
    )


def device_state_bytes(program: Program, device: torch.device) -> int:
    """Of the states that lie on the device: with a GPU, all but the host side of a KV cache."""
    return program.state_bytes - (program.host_state_bytes if device.type == "cuda" else 0)


def reserve_bytes(device: torch.device, total_bytes: int) -> int:
    """What is left alone: 2% of a GPU's memory, 5% of main memory, and never less than 256 MiB."""
    return max(_LEAST_RESERVE_BYTES, total_bytes // _RESERVE_PARTS[device.type])


def activation_bound_bytes(program: Program) -> int:
    """The most that any method allocates for itself; refused where that has no bound."""
    bounds: list[int] = []
    for method in program.methods:
        if method.activation_bound_bytes is None:
            raise BudgetError(
                f"there is no automatic budget for method {method.name!r}: {_unbounded(method)}, so the memory it "
                'needs beside the weights has no bound; pass a budget (budget="8GiB", say), or export with a highest '
                "value for every dynamic size"
            )
        bounds.append(method.activation_bound_bytes)
    return max(bounds)


def _unbounded(method: Method) -> str:
    inputs = method.signature.inputs
    named: list[str] = []
    for symbol, (_, highest) in method.signature.symbols.items():
        if highest is None:
            users = [spec.name for spec in inputs if symbol in _symbols_of(getattr(spec, "shape", ()))]
            named.append(f"{symbol} of input {', '.join(map(repr, users))}" if users else symbol)
    if not named:
        return "it has sizes that depend on data"
    return f"the dynamic size {' and '.join(named)} has no highest value"


def _symbols_of(shape: tuple[int | str, ...]) -> set[str]:
    # Sizes are expressions such as "2*s0 + 1"; splitting is enough to find a name in one.
    words = "".join(c if c.isalnum() or c == "_" else " " for size in shape for c in f" {size}")
    return set(words.split())


def _allocator_unused_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
