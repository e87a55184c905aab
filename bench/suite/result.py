"""What is measured, as plain data, and what follows from it: rates, bounds, comparisons."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.plan.calibration import lower_bound_s

# Eager and compiled kernels round bf16 differently, layer after layer; what is above this is another result.
WRONG_ABOVE = 0.05

RAN, MISSING, FAILED, REPEATED = "ran", "missing", "failed", "repeated"


@dataclass(frozen=True)
class Samples:
    """Seconds per forward, one figure per round."""

    seconds: tuple[float, ...]
    runs_per_round: int

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """From the fastest to the slowest round, as a part of the median."""
        return (max(self.seconds) - min(self.seconds)) / self.median_s


@dataclass(frozen=True)
class Memory:
    # The figure that the table shows, and where it comes from.
    peak_bytes: int | None
    peak_source: str
    # The least free memory of the whole device while loading and running, against what was free before.
    driver_peak_bytes: int | None
    # torch.cuda.max_memory_allocated: what torch's own allocator gave out.
    torch_peak_bytes: int | None
    # What the system says it held for weights: for our modes Module.device_memory.
    weights_peak_bytes: int | None

    @property
    def beside_weights_bytes(self) -> int:
        """Of the peak, what was not for weights as far as that is known: activations, workspaces, loaded code."""
        if self.peak_bytes is None or self.weights_peak_bytes is None:
            return 0
        return max(0, self.peak_bytes - self.weights_peak_bytes)


@dataclass(frozen=True)
class Traffic:
    """Per forward, once warm."""

    bytes_streamed: int | None
    # "counted" while running, or "by construction": known from what the system does.
    source: str
    planned_bytes: int | None = None
    copies: int | None = None


@dataclass(frozen=True)
class Outputs:
    # Against the resident eager model, for every output that was kept: back to back runs, and one synchronised.
    relative_errors: tuple[float, ...]
    equal_to_eager: bool
    # To the bit, against the same compiled program with every weight resident; None for other systems.
    equal_to_resident: bool | None

    @property
    def wrong(self) -> bool:
        # Written so that a NaN is wrong.
        return not all(error <= WRONG_ABOVE for error in self.relative_errors)


@dataclass(frozen=True)
class Row:
    """One system at one number of tokens and one budget."""

    system: str
    tokens: int
    status: str
    # Why it did not run; empty when it did.
    reason: str = ""
    budget_fraction: float | None = None
    budget_bytes: int | None = None
    floor_bytes: int | None = None
    # Made only to compare with a peer at its footprint.
    for_comparison: bool = False
    load_s: float | None = None
    back_to_back: Samples | None = None
    synchronised: Samples | None = None
    # Until a call returns: on an idle device, and behind a call whose work is under way. None for systems that wait for
    # the device themselves.
    host_alone: Samples | None = None
    host_behind: Samples | None = None
    traffic: Traffic | None = None
    memory: Memory | None = None
    # The most resident pages of the process (VmHWM). Memory that the driver pins may not be in it.
    host_peak_bytes: int | None = None
    # False: the kernel's mark could not be reset, and the peak is since the process began.
    host_mark_was_reset: bool | None = None
    outputs: Outputs | None = None

    @property
    def time_s(self) -> float:
        assert self.back_to_back is not None
        return self.back_to_back.median_s


@dataclass(frozen=True)
class Derived:
    """What a row says once link, weights and the resident time are known."""

    bytes_per_s: float | None
    # max(resident time, (weights - budget) / link); for a system without a budget, its peak stands for it.
    bound_s: float | None
    percent_of_bound: float | None


@dataclass(frozen=True)
class Comparison:
    """A peer against one of our modes that takes no more device memory than the peer, or runs at its floor."""

    peer: str
    ours: str
    tokens: int
    peer_peak_bytes: int
    peer_s: float
    peer_synchronised_s: float
    peer_wrong: bool
    budget_bytes: int
    our_peak_bytes: int | None
    our_s: float
    our_synchronised_s: float

    @property
    def times_faster(self) -> float:
        return self.peer_s / self.our_s

    @property
    def times_faster_synchronised(self) -> float:
        return self.peer_synchronised_s / self.our_synchronised_s


@dataclass(frozen=True)
class Yardsticks:
    weight_bytes: int
    link_bytes_per_s: float
    # Seconds per forward of the compiled program with every weight resident, by tokens.
    resident_s: dict[int, float]


def derive(row: Row, yardsticks: Yardsticks) -> Derived:
    if row.status != RAN:
        return Derived(None, None, None)
    streamed = row.traffic.bytes_streamed if row.traffic else None
    budget = row.budget_bytes
    if budget is None and row.memory is not None:
        budget = row.memory.peak_bytes
    resident_s = yardsticks.resident_s.get(row.tokens)
    bound_s = None
    if budget is not None and resident_s is not None:
        bound_s = lower_bound_s(
            weight_bytes=yardsticks.weight_bytes,
            budget_bytes=budget,
            resident_s=resident_s,
            link_bytes_per_s=yardsticks.link_bytes_per_s,
        )
    return Derived(
        bytes_per_s=None if streamed is None else streamed / row.time_s,
        bound_s=bound_s,
        percent_of_bound=None if bound_s is None else 100 * bound_s / row.time_s,
    )


def compare(rows: Sequence[Row], peers: Collection[str], modes: Iterable[str]) -> list[Comparison]:
    """Every peer that ran, with each mode of ours that was run at its footprint."""
    found = []
    for peer in rows:
        if peer.system not in peers or peer.status != RAN or peer.outputs is None:
            continue
        peak_bytes = peer.memory.peak_bytes if peer.memory else None
        for mode in modes:
            budget_bytes = footprint_bytes(rows, mode, peer)
            row = None if budget_bytes is None else _at_footprint(rows, mode, peer.tokens, budget_bytes)
            if row is None or row.budget_bytes is None or peak_bytes is None:
                continue
            assert row.synchronised is not None and peer.synchronised is not None
            found.append(
                Comparison(
                    peer=peer.system,
                    ours=mode,
                    tokens=peer.tokens,
                    peer_peak_bytes=peak_bytes,
                    peer_s=peer.time_s,
                    peer_synchronised_s=peer.synchronised.median_s,
                    peer_wrong=peer.outputs.wrong,
                    budget_bytes=row.budget_bytes,
                    our_peak_bytes=row.memory.peak_bytes if row.memory else None,
                    our_s=row.time_s,
                    our_synchronised_s=row.synchronised.median_s,
                )
            )
    return found


def footprint_bytes(rows: Iterable[Row], mode: str, peer: Row) -> int | None:
    """The budget at which a mode of ours meets a peer: all in all no more device memory than the peer's peak, but at
    least the floor. None where the mode did not run, or the peer's peak is not known."""
    if peer.status != RAN or peer.memory is None or peer.memory.peak_bytes is None:
        return None
    ours = [row for row in rows if row.system == mode and row.tokens == peer.tokens and row.status == RAN]
    floors = [row.floor_bytes for row in ours if row.floor_bytes is not None]
    # The peer's peak holds activations and workspaces too; so must ours.
    beside = [row.memory.beside_weights_bytes for row in ours if row.memory is not None and not row.for_comparison]
    return max(peer.memory.peak_bytes - max(beside, default=0), max(floors)) if floors else None


def _at_footprint(rows: Iterable[Row], mode: str, tokens: int, budget_bytes: int) -> Row | None:
    """The row that was made for that budget, which may have been clamped to what all weights take."""
    within = [
        row
        for row in rows
        if row.system == mode
        and row.tokens == tokens
        and row.status == RAN
        and row.for_comparison
        and (row.budget_bytes or 0) <= budget_bytes
    ]
    return max(within, key=lambda row: row.budget_bytes or 0, default=None)


def row_from_json(data: dict[str, Any]) -> Row:
    kinds: dict[str, Any] = {
        "back_to_back": Samples,
        "synchronised": Samples,
        "host_alone": Samples,
        "host_behind": Samples,
        "traffic": Traffic,
        "memory": Memory,
        "outputs": Outputs,
    }

    def part(name: str, value: Any) -> Any:
        if name not in kinds or value is None:
            return value
        return kinds[name](**{key: tuple(held) if isinstance(held, list) else held for key, held in value.items()})

    return Row(**{name: part(name, value) for name, value in data.items()})


def row_to_json(row: Row) -> dict[str, Any]:
    return dataclasses.asdict(row)
