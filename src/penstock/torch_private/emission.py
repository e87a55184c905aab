"""What the compiler is about to emit, as plain data: the bridge between Inductor's scheduler and the derivation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class Buffer:
    """A tensor that the compiled code makes. `bound_bytes` is None where a dynamic size has no upper bound."""

    name: str
    example_bytes: int
    bound_bytes: int | None


@dataclass(frozen=True)
class EmittedNode:
    """One node of the final schedule: a launch, a library call, or a fetch."""

    name: str
    kernel: str
    # The memory this node makes, by name; without names that only alias or mutate other memory.
    buffers: tuple[Buffer, ...]
    # Every name it defines, with or without memory of its own.
    defines: tuple[str, ...]
    # Names it reads, with what they alias, by the compiler's own rule for lifetimes.
    uses: frozenset[str]
    # Names it writes into.
    mutates: tuple[str, ...]
    # The access number, if this is a call of the fetch op.
    fetch: int | None = None
    # The names it passes on unchanged, if this only unpacks the result of another node.
    unpacks: tuple[str, ...] = ()
    # A kind of node whose reads outlast its launch (a collective, a launch on another stream).
    asynchronous: bool = False


@dataclass(frozen=True)
class Emission:
    """The nodes of one graph in the order in which the compiler would emit them."""

    graph: str
    nodes: tuple[EmittedNode, ...]
    outputs: tuple[str, ...]
    # Name -> names whose memory it shares.
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


class EmissionOrder(Protocol):
    """In which order to emit the nodes of an Emission, by their indices, and which of them end a step."""

    @property
    def order(self) -> tuple[int, ...]: ...

    @property
    def step_nodes(self) -> tuple[int, ...]: ...
