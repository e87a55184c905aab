"""The budget when none is given: what the device has free, less what the run needs beside the weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from penstock.errors import BudgetError
from penstock.native import core
from penstock.program import Method, Program
from penstock.runtime.driver import Memory


@dataclass(frozen=True)
class AutomaticTerms:
    """The free device memory, and the parts of it that weights may not take."""

    free_bytes: int
    # What the weights of a loaded module hold; replanning frees it. 0 at load.
    held_bytes: int
    activation_bytes: int
    # State that is not yet allocated: 0 for a module that replans.
    state_bytes: int
    reserve_bytes: int


def automatic_terms(
    program: Program,
    device: torch.device,
    read_memory: Callable[[], Memory],
    *,
    held_bytes: int | None = None,
    cuda_graph: bool = False,
) -> AutomaticTerms:
    """`read_memory` asks the driver. `held_bytes` is what a loaded module holds for weights; None means before the
    load, when state is not allocated yet."""
    if device.type == "cuda":
        # Pages for weights come from the driver. So torch's allocator first returns the memory that it holds unused;
        # what it cannot return is not free.
        torch.cuda.empty_cache()
    memory = read_memory()
    return AutomaticTerms(
        free_bytes=memory.free_bytes,
        held_bytes=held_bytes or 0,
        activation_bytes=activation_bytes(program, cuda_graph=cuda_graph),
        state_bytes=device_state_bytes(program, device) if held_bytes is None else 0,
        reserve_bytes=reserve_bytes(device, memory.total_bytes),
    )


def activation_bytes(program: Program, *, cuda_graph: bool) -> int:
    """Twice the bound with graphs: they keep their activations, and runs that are not replays need as much again."""
    return activation_bound_bytes(program) * (2 if cuda_graph else 1)


def device_state_bytes(program: Program, device: torch.device) -> int:
    """Bytes of state on the device: with a GPU, all state except the host sides of KV caches."""
    return program.state_bytes - (program.host_state_bytes if device.type == "cuda" else 0)


def reserve_bytes(device: torch.device, total_bytes: int) -> int:
    """Memory that Penstock leaves free: 2% of a GPU's memory, 5% of main memory, and never less than 256 MiB."""
    return int(core().penstock_reserve_bytes(total_bytes, int(device.type == "cuda")))


def activation_bound_bytes(program: Program) -> int:
    """The most activation memory that any method allocates. Refused if a method has no bound."""
    bounds: list[int] = []
    for method in program.methods:
        if method.activation_bound_bytes is None:
            raise BudgetError(
                f"there is no automatic budget, and no device_memory, for method {method.name!r}: "
                f"{_unbounded(method)}, so the memory it needs beside the weights has no bound; pass a budget "
                '(budget="8GiB", say), or export with a highest value for every dynamic size'
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
