"""Derives the order of fetches and the steps from what the compiler is about to emit. Pure: no torch, no compiler.

Every fetch is put right before its first reader. Steps and last readers follow the compiler's own rule for lifetimes.
Writes into a lent weight and outputs that alias one are refused here; earlier passes should have made them impossible.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import ScheduleError, UnsupportedProgramError, WeightEscapesError, WeightWrittenError
from penstock.schedule import Step
from penstock.torch_private.emission import Emission, EmittedNode


@dataclass(frozen=True)
class Temporary:
    """A buffer computed from weights alone: a cast, a dequantized or re-laid-out copy. It costs activation memory."""

    name: str
    kernel: str
    nbytes: int
    accesses: tuple[int, ...]


@dataclass(frozen=True)
class ActivationPeak:
    """The most memory that the compiled code itself allocates; `bound_bytes` for the largest bounded shapes."""

    example_bytes: int
    bound_bytes: int | None


@dataclass(frozen=True)
class Derivation:
    # Indices into Emission.nodes, in the order to emit.
    order: tuple[int, ...]
    # Access numbers in the order of their fetches.
    accesses: tuple[int, ...]
    steps: tuple[Step, ...]
    # For every step, the index into Emission.nodes of its node.
    step_nodes: tuple[int, ...]
    temporaries: tuple[Temporary, ...]
    activation: ActivationPeak


def derive(emission: Emission) -> Derivation:
    nodes = emission.nodes
    lent, fetch_nodes = _lent_names(emission)
    ours = {index for indices in fetch_nodes.values() for index in indices}

    order: list[int] = []
    accesses: list[int] = []
    steps: list[Step] = []
    step_nodes: list[int] = []
    fetched: set[int] = set()
    for index, node in enumerate(nodes):
        if index in ours:
            continue
        _refuse_writes(node, lent)
        reads = sorted({lent[name] for name in node.uses if name in lent})
        if reads and node.asynchronous:
            raise UnsupportedProgramError(
                f"{node.kernel} reads weights (accesses {reads}) beyond its launch; collectives and user streams over "
                "offloaded weights are not supported"
            )
        for number in reads:
            if number not in fetched:
                fetched.add(number)
                accesses.append(number)
                order.extend(fetch_nodes[number])
        order.append(index)
        if reads:
            steps.append(Step(kernel=node.kernel, accesses=tuple(reads)))
            step_nodes.append(index)

    _refuse_escapes(emission, lent)
    unread = sorted(set(fetch_nodes) - fetched)
    if unread:
        raise ScheduleError(f"accesses {unread} are fetched but no emitted step reads them")
    return Derivation(
        order=tuple(order),
        accesses=tuple(accesses),
        steps=tuple(steps),
        step_nodes=tuple(step_nodes),
        temporaries=_temporaries(nodes, lent, ours),
        activation=_activation_peak(emission, order, set(lent)),
    )


def _lent_names(emission: Emission) -> tuple[dict[str, int], dict[int, list[int]]]:
    """Every name under which a fetch's memory is known -> its access; and the nodes that make each access.

    A fetch is two nodes: the call, and the one that unpacks its result. Readers read the second one's name.
    """
    lent: dict[str, int] = {}
    fetch_nodes: dict[int, list[int]] = {}
    for index, node in enumerate(emission.nodes):
        if node.fetch is None:
            continue
        if node.fetch in fetch_nodes:
            raise ScheduleError(f"access {node.fetch} would be emitted twice, the second time as {node.name}")
        fetch_nodes[node.fetch] = [index]
        lent.update((name, node.fetch) for name in node.defines)
    for index, node in enumerate(emission.nodes):
        number = next((lent[name] for name in node.unpacks if name in lent), None)
        if number is not None:
            fetch_nodes[number].append(index)
            lent.update((name, number) for name in node.defines)
    return lent, fetch_nodes


def _refuse_writes(node: EmittedNode, lent: dict[str, int]) -> None:
    written = sorted({lent[name] for name in node.mutates if name in lent})
    if written:
        raise WeightWrittenError(f"{node.kernel} ({node.name}) would write into the weights of accesses {written}")


def _refuse_escapes(emission: Emission, lent: dict[str, int]) -> None:
    for output in emission.outputs:
        pending, seen = [output], set()
        while pending:
            name = pending.pop()
            if name in lent:
                raise WeightEscapesError(f"output {output} would alias the weight of access {lent[name]}")
            if name not in seen:
                seen.add(name)
                pending.extend(emission.aliases.get(name, ()))


def _temporaries(nodes: tuple[EmittedNode, ...], lent: dict[str, int], ours: set[int]) -> tuple[Temporary, ...]:
    sources: dict[str, frozenset[int]] = {name: frozenset([number]) for name, number in lent.items()}
    found: list[Temporary] = []
    for index, node in enumerate(nodes):
        reads = node.uses - set(node.defines)
        if index in ours or not reads or not all(name in sources for name in reads):
            continue
        accesses = frozenset().union(*(sources[name] for name in reads))
        sources.update((name, accesses) for name in node.defines)
        found.extend(
            Temporary(buffer.name, node.kernel, buffer.example_bytes, tuple(sorted(accesses)))
            for buffer in node.buffers
        )
    return tuple(found)


def _activation_peak(emission: Emission, order: list[int], lent: set[str]) -> ActivationPeak:
    """The largest sum of live buffers. It is a bound: a buffer that is reused in place counts twice for a moment."""
    last_use: dict[str, int] = {}
    for position, index in enumerate(order):
        for name in emission.nodes[index].uses | set(emission.nodes[index].defines):
            last_use[name] = position
    last_use.update((name, len(order)) for output in emission.outputs for name in _alias_closure(emission, output))

    ends: dict[int, list[tuple[int, int | None]]] = {}
    example = example_peak = bound = bound_peak = 0
    bounded = True
    for position, index in enumerate(order):
        for buffer in emission.nodes[index].buffers:
            if buffer.name in lent:
                continue
            example += buffer.example_bytes
            bounded = bounded and buffer.bound_bytes is not None
            bound += buffer.bound_bytes or 0
            ends.setdefault(last_use[buffer.name], []).append((buffer.example_bytes, buffer.bound_bytes))
        example_peak, bound_peak = max(example_peak, example), max(bound_peak, bound)
        for example_bytes, bound_bytes in ends.pop(position, ()):
            example -= example_bytes
            bound -= bound_bytes or 0
    return ActivationPeak(example_peak, bound_peak if bounded else None)


def _alias_closure(emission: Emission, name: str) -> set[str]:
    names, pending = {name}, [name]
    while pending:
        for other in emission.aliases.get(pending.pop(), ()):
            if other not in names:
                names.add(other)
                pending.append(other)
    return names
