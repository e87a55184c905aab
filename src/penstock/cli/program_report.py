"""What `penstock inspect` says of a file: plain data, the source of both the tables and the JSON. No torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.subject import Subject
from penstock.plan.experts import why_no_slots
from penstock.program import ConstantSpec, Method, TensorSpec

if TYPE_CHECKING:
    from penstock.weights.index import WeightsIndex


@dataclass(frozen=True)
class WeightRow:
    name: str
    aliases: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    # How often one run of each method reads it; and whether it is only gathered from, so that it may stay on the host.
    accesses: int
    gathered: bool
    # Whether some access only multiplies by its rows, which may then lie on both sides of the link.
    linear: bool
    # How many experts its rows are, of which one run takes only some; 0 if they are not experts.
    experts: int


@dataclass(frozen=True)
class StateRow:
    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    init: str


@dataclass(frozen=True)
class StepRow:
    index: int
    kernel: str
    weights: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True)
class MethodRow:
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    states: tuple[str, ...]
    accesses: int
    weight_bytes: int
    # Upper bound, beside the weights; None if there is no bound.
    activation_bytes: int | None
    temporary_bytes: int
    # Weights that look like stacks of experts but are read whole, and why.
    whole_experts: dict[str, str]
    # The whole schedule, in the order of the run.
    steps: tuple[StepRow, ...]

    def largest_steps(self, count: int) -> list[StepRow]:
        return sorted(self.steps, key=lambda step: -step.nbytes)[:count]


@dataclass(frozen=True)
class Part:
    """A weight, and the bytes that it adds."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class FloorRow:
    """The floor, and the two steps and the copy that make it (plan/floor.py)."""

    # As export wrote it: placed_bytes, unless the file was made otherwise.
    recorded_bytes: int
    # By the formula, from the schedule now: exact bytes, before pages.
    computed_bytes: int
    # As the planner places it, in pages: the smallest budget that loading accepts here.
    placed_bytes: int
    # The same with placement="stream", where nothing is read in place in host memory.
    streamed_bytes: int
    page_bytes: int
    # Always held, because control flow reads it.
    pinned_bytes: int
    # None where nothing streams.
    method: str | None
    step_index: int | None
    step_kernel: str | None
    next_kernel: str | None
    pair: tuple[Part, ...]
    next_copy: Part | None

    @property
    def reason(self) -> str:
        if self.method is None:
            return "nothing streams: every weight is held"
        pair = " + ".join(part.name for part in self.pair)
        beside = "" if self.next_copy is None else f", and the copy of {self.next_copy.name} beside them"
        steps = f"step {self.step_index} ({self.step_kernel}) and the next ({self.next_kernel})"
        return f"{steps} of {self.method}: {pair}{beside}"


@dataclass(frozen=True)
class ProgramReport:
    path: Path
    kind: str
    file_bytes: int
    device: str
    identity: str
    built_with: dict[str, str]
    weight_count: int
    weight_bytes: int
    state_bytes: int
    # Device bytes with every weight resident: a larger budget buys nothing.
    full_bytes: int
    baked_budget_bytes: int | None
    # The weights file that the floor and `full_bytes` were computed for.
    weights_file: str
    floor: FloorRow
    methods: tuple[MethodRow, ...]
    weights: tuple[WeightRow, ...]
    states: tuple[StateRow, ...]
    # Parameters and buffers that no method reads.
    unused: tuple[str, ...]
    # Weights of experts that have no slots at any budget, and why.
    without_slots: dict[str, str]
    # Of a .pte: device bytes of the plans that are in it.
    plan_bytes: tuple[int, ...]


@dataclass(frozen=True)
class EntryRow:
    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    # As stored.
    nbytes: int
    # Of the tensor: more than are stored if the entry is packed.
    raw_bytes: int
    packed: bool
    # Stored bytes over the tensor's.
    ratio: float
    offset_bytes: int
    # xxh3_64 of the tensor in hexadecimal; None in a file that ExecuTorch wrote.
    checksum: str | None
    alias_of: str | None


@dataclass(frozen=True)
class WeightsReport:
    path: Path
    kind: str
    file_bytes: int
    identity: str | None
    # Each set of bytes once.
    stored_count: int
    stored_bytes: int
    raw_bytes: int
    packed_count: int
    ratio: float
    entries: tuple[EntryRow, ...]


def program_report(subject: Subject) -> ProgramReport:
    program = subject.program
    accesses = [access for schedule in subject.schedules for access in schedule.accesses]
    uses = Counter(access.weight for access in accesses)
    whole = {access.weight for access in accesses if not access.gathered}
    multiplied = {access.weight for access in accesses if access.linear}
    not_routed = {access.weight for access in accesses if access.routing is None}
    return ProgramReport(
        path=subject.path,
        kind=subject.path.suffix.lstrip("."),
        file_bytes=subject.path.stat().st_size,
        device=program.device,
        identity=program.identity,
        built_with=dict(program.built_with),
        weight_count=len(program.weights),
        weight_bytes=program.weight_bytes,
        state_bytes=program.state_bytes,
        full_bytes=subject.planner("auto").full_bytes,
        baked_budget_bytes=program.budget_bytes,
        weights_file=subject.weights_file,
        floor=_floor(subject),
        methods=tuple(_method(method, subject) for method in program.methods),
        weights=tuple(
            WeightRow(
                w.name,
                w.aliases,
                w.dtype,
                w.shape,
                w.nbytes,
                uses[w.name],
                w.name not in whole,
                w.name in multiplied,
                w.shape[0] if uses[w.name] and w.name not in not_routed else 0,
            )
            for w in program.weights
        ),
        states=tuple(StateRow(s.name, s.dtype, s.shape, s.nbytes, s.init) for s in program.states),
        unused=program.unused,
        without_slots=why_no_slots(subject.schedules, subject.weights),
        plan_bytes=subject.plan_bytes,
    )


def _method(method: Method, subject: Subject) -> MethodRow:
    schedule, weights = method.schedule, subject.weights
    steps: list[StepRow] = []
    for index, step in enumerate(schedule.steps):
        names = tuple(dict.fromkeys(schedule.access_by_number[number].weight for number in step.accesses))
        steps.append(StepRow(index, step.kernel, names, sum(weights[name].nbytes for name in names)))
    return MethodRow(
        name=method.name,
        inputs=tuple(map(_spec_text, method.signature.inputs)),
        outputs=tuple(map(_spec_text, method.signature.outputs)),
        states=method.states,
        accesses=len(schedule.accesses),
        weight_bytes=sum(weights[name].nbytes for name in schedule.weight_names),
        activation_bytes=method.activation_bound_bytes,
        temporary_bytes=sum(temporary.nbytes for temporary in method.temporaries),
        whole_experts=dict(method.whole_experts),
        steps=tuple(steps),
    )


def _spec_text(spec: TensorSpec | ConstantSpec) -> str:
    if isinstance(spec, ConstantSpec):
        return f"{spec.name}: {spec.value!r}"
    return f"{spec.name}: {spec.dtype}[{', '.join(map(str, spec.shape))}]"


def _floor(subject: Subject) -> FloorRow:
    weights = subject.weights
    found = subject.floor()
    kernels: tuple[str | None, str | None] = (None, None)
    if found.method is not None and found.step_index is not None:
        steps = subject.program.method(found.method).schedule.steps
        kernels = (steps[found.step_index].kernel, steps[(found.step_index + 1) % len(steps)].kernel)
    return FloorRow(
        recorded_bytes=subject.program.floor_bytes,
        computed_bytes=found.floor_bytes,
        placed_bytes=subject.planner("auto").floor_bytes,
        streamed_bytes=subject.planner("stream").floor_bytes,
        page_bytes=subject.page_bytes,
        pinned_bytes=found.resident_bytes,
        method=found.method,
        step_index=found.step_index,
        step_kernel=kernels[0],
        next_kernel=kernels[1],
        pair=tuple(Part(name, weights[name].nbytes) for name in found.pair),
        next_copy=None if found.next_copy is None else Part(found.next_copy, weights[found.next_copy].nbytes),
    )


def weights_report(index: WeightsIndex) -> WeightsReport:
    stored_bytes = sum(entry.length_bytes for entry in index.unique_entries)
    raw_bytes = sum(entry.raw_bytes for entry in index.unique_entries)
    return WeightsReport(
        path=index.path,
        kind="ptd",
        file_bytes=index.file_bytes,
        identity=index.identity,
        stored_count=len(index.unique_entries),
        stored_bytes=stored_bytes,
        raw_bytes=raw_bytes,
        packed_count=sum(entry.packing is not None for entry in index.unique_entries),
        ratio=_ratio(stored_bytes, raw_bytes),
        entries=tuple(
            EntryRow(
                name=entry.name,
                kind=entry.kind,
                dtype=entry.dtype,
                shape=entry.shape,
                nbytes=entry.length_bytes,
                raw_bytes=entry.raw_bytes,
                packed=entry.packing is not None,
                ratio=_ratio(entry.length_bytes, entry.raw_bytes),
                offset_bytes=entry.offset_bytes,
                checksum=None if entry.checksum is None else f"{entry.checksum:016x}",
                alias_of=entry.alias_of,
            )
            for entry in index.entries
        ),
    )


def _ratio(stored_bytes: int, raw_bytes: int) -> float:
    return stored_bytes / raw_bytes if raw_bytes else 1.0
