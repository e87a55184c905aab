"""Compiles one method: weightless program, schedule, code, and the check of one against the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from penstock.errors import CompileError, PenstockError, ScheduleError
from penstock.export.derive import Derivation, derive
from penstock.export.experts import experts_workspace_bound_bytes
from penstock.export.host_states import split_at_load
from penstock.export.kv_workspace import kv_workspace_bound_bytes
from penstock.export.weightless import WeightlessProgram, make_weightless
from penstock.export.wrapper import check_handed_on, check_weightless, check_wrapper
from penstock.program import Method, Temporary
from penstock.schedule import Access, Schedule
from penstock.torch_private.emission import Emission
from penstock.torch_private.inductor import MAIN_GRAPH, compile_graph, scheduled
from penstock.torch_private.wrapper_text import is_wrapper


@dataclass(frozen=True)
class CompiledMethod:
    method: Method
    # What goes into the package.
    files: tuple[str, ...]


class _Recorder:
    """Derives the order of the main graph when the compiler reaches it, and refuses fetches anywhere else."""

    def __init__(self) -> None:
        self.derivation: Derivation | None = None
        # The compiler wraps what is raised inside it; the real error is kept here.
        self.failure: PenstockError | None = None

    def __call__(self, emission: Emission) -> Derivation | None:
        try:
            return self._derive(emission)
        except PenstockError as failure:
            self.failure = failure
            raise

    def _derive(self, emission: Emission) -> Derivation | None:
        if emission.graph != MAIN_GRAPH:
            inside = sorted(node.fetch for node in emission.nodes if node.fetch is not None)
            if inside:
                raise ScheduleError(f"accesses {inside} are fetched inside the subgraph {emission.graph!r}")
            return None
        if self.derivation is not None:
            raise ScheduleError("the compiler emitted the main graph twice; the record would be of the first")
        self.derivation = derive(emission)
        return self.derivation


class _ScheduleOnly(BaseException):
    """Stops the compiler once the schedule is known. Not an Exception: the compiler must not wrap it."""


def compile_method(
    name: str,
    ep: ExportedProgram,
    device: torch.device,
    states: frozenset[str],
    weight_names: Mapping[str, str],
    folder: Path,
    options: Mapping[str, Any],
    *,
    split_linear: bool,
) -> CompiledMethod:
    """`weight_names` maps the names in this program to those of the weights file."""
    program = make_weightless(ep, device, states, split_linear=split_linear)
    recorder = _Recorder()
    files = _compile(name, program, device, folder, recorder, options)
    if recorder.derivation is None:
        raise CompileError(f"method {name!r}: the compiler emitted no main graph")
    method = _method(name, program, recorder.derivation, weight_names, _workspace_bound_bytes(program, ep, device))
    source = wrapper_source(files)
    check_wrapper(source, method.schedule)
    check_weightless(source, name)
    split = {side for pair in split_at_load({name: ep}).items() for side in pair}
    check_handed_on(source, name, {place: state for place, state in enumerate(program.states) if state in split})
    return CompiledMethod(method, tuple(files))


def schedule_method(
    name: str,
    ep: ExportedProgram,
    device: torch.device,
    states: frozenset[str],
    weight_names: Mapping[str, str],
    *,
    split_linear: bool = False,
) -> Method:
    """What compile_method would record, without emitting or building any code."""
    program = make_weightless(ep, device, states, split_linear=split_linear)
    recorder = _Recorder()

    def stop(emission: Emission) -> Derivation | None:
        if recorder(emission) is not None:
            raise _ScheduleOnly
        return None

    try:
        _compile(name, program, device, Path(), recorder, {}, stop)
    except _ScheduleOnly:
        assert recorder.derivation is not None
        return _method(name, program, recorder.derivation, weight_names, _workspace_bound_bytes(program, ep, device))
    raise CompileError(f"method {name!r}: the compiler emitted no main graph")


def _compile(
    name: str,
    program: WeightlessProgram,
    device: torch.device,
    folder: Path,
    recorder: _Recorder,
    options: Mapping[str, Any],
    plan: Any = None,
) -> list[str]:
    try:
        with scheduled(plan or recorder):
            return compile_graph(program.module, program.example_inputs, device, str(folder / name), dict(options))
    except Exception as error:
        if recorder.failure is not None:
            raise type(recorder.failure)(f"method {name!r}: {recorder.failure}") from error
        raise CompileError(f"method {name!r}: Inductor could not compile it: {_first_lines(error)}") from error


def _workspace_bound_bytes(program: WeightlessProgram, ep: ExportedProgram, device: torch.device) -> int | None:
    """What ops allocate besides their results, unseen by the compiler. Calls do not overlap."""
    bounds = (kv_workspace_bound_bytes(ep, device), experts_workspace_bound_bytes(program.module, ep))
    known = [bound for bound in bounds if bound is not None]
    return max(known) if len(known) == len(bounds) else None


def _first_lines(error: Exception) -> str:
    """The C++ compiler's own complaints, if there are any: they stand behind its command and what it includes."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    complaints = dict.fromkeys(line[line.index("error: ") :] for line in lines if ": error: " in line)
    return f"{type(error).__name__}: " + " | ".join([*lines[:1], *complaints][:4] if complaints else lines[:6])


def _method(
    name: str,
    program: WeightlessProgram,
    derivation: Derivation,
    weight_names: Mapping[str, str],
    workspace_bound_bytes: int | None,
) -> Method:
    bound_bytes = derivation.activation.bound_bytes

    def weight(number: int) -> str:
        return weight_names[program.weight_of[number]]

    def access(number: int) -> Access:
        return Access(
            number,
            weight(number),
            pinned=number in program.pinned,
            gathered=number in program.gathered,
            linear=number in program.linear,
            routing=program.routing.get(number),
        )

    return Method(
        name=name,
        schedule=Schedule(
            method=name,
            accesses=tuple(access(number) for number in derivation.accesses),
            steps=derivation.steps,
        ),
        signature=program.signature,
        states=program.states,
        activation_example_bytes=derivation.activation.example_bytes,
        activation_bound_bytes=(
            None if bound_bytes is None or workspace_bound_bytes is None else bound_bytes + workspace_bound_bytes
        ),
        temporaries=tuple(
            Temporary(t.name, t.kernel, t.nbytes, tuple(dict.fromkeys(weight(n) for n in t.accesses)))
            for t in derivation.temporaries
        ),
        whole_experts={weight_names[name]: reason for name, reason in program.whole_experts.items()},
    )


def wrapper_source(files: list[str]) -> str:
    """The text of the generated wrapper among a method's files."""
    wrappers = [file for file in files if is_wrapper(file)]
    if len(wrappers) != 1:
        raise CompileError(f"expected one generated wrapper, found {wrappers}")
    return Path(wrappers[0]).read_text()
