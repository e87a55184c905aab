"""penstock.compile: from offloaded programs to a weightless program file and a weights file."""

from __future__ import annotations

import gc
import os
import platform
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from tqdm import tqdm

from penstock.budget import format_bytes, parse_bytes
from penstock.direct.availability import kernel_obstacle
from penstock.errors import (
    BelowFloorError,
    CheckpointError,
    CompileError,
    NotOffloadedError,
    OutputExistsError,
    OutputPathError,
    ProgramError,
)
from penstock.export.catalog import Catalog, build_catalog, state_names
from penstock.export.checkpoint import Checkpoint, mismatches
from penstock.export.method import CompiledMethod, compile_method
from penstock.export.offload import fetches, refuse_training, require_program
from penstock.export.package import pack_program
from penstock.export.packed_floor import check_baked_budget
from penstock.export.peak import PeakMeter, Peaks, peak_lines
from penstock.export.target import target_device
from penstock.export.toolchain import check_toolchain
from penstock.export.values import has_value, is_zero, tensor_pieces
from penstock.export.weightless import make_weightless
from penstock.plan.menu_planner import FloorPlan
from penstock.plan.pages import page_bytes_on
from penstock.plan.planner import Planner, lower_placements_text
from penstock.program import Program
from penstock.schedule import Schedule
from penstock.temporary import TemporaryFolder
from penstock.torch_private.inductor import REQUIRED_OPTIONS, known_option
from penstock.torch_private.versions import check_torch_version
from penstock.torch_private.workspaces import release_device_memory
from penstock.version import VERSION
from penstock.weight import State, Weight
from penstock.weights import Chunk, layout_identity, read_index, write_ptd
from penstock.weights.packing import PackedFor, pack_entries
from penstock.weights.partial import partial_file, restored_on_failure

DEFAULT_METHOD = "forward"

# We patch the compiler while it runs, and the peak covers the whole process: a second thread waits for its turn.
_one_at_a_time = threading.Lock()


@dataclass(frozen=True)
class Compiled:
    """What was written, and what it took."""

    program_path: Path
    weights_path: Path
    program: Program
    # The plan at the floor, and what sets it. Its bytes are the program's floor: the least that load accepts there.
    floor: FloorPlan
    peaks: Peaks
    # Device memory still allocated after each method, on CUDA targets.
    device_bytes_after: dict[str, int]


def compile(
    programs: ExportedProgram | Mapping[str, ExportedProgram],
    path: str | os.PathLike[str],
    *,
    device: str | torch.device | None = None,
    weights: Any = None,
    weight_offload_budget: int | str | None = None,
    overwrite: bool = False,
    inductor_configs: Mapping[str, Any] | None = None,
    split_linear: bool = False,
    pack: bool = False,
) -> Compiled:
    """Compile offloaded programs into `path` (.pt2, no weights in it) and the .ptd beside it (every weight once).

    programs               what apply_weight_offload returned; a mapping for several methods over the same weights
    device                 the target, "cpu" or "cuda[:n]"; where the model sits does not matter. The default is "cuda"
                           where there is a GPU, else "cpu"
    weights                where the values come from, if not from the program: a .safetensors file, a folder of them
                           (with or without index.json), a mapping of tensors, or a list of those, later ones winning
    weight_offload_budget  a default budget to bake in, in bytes or like "8GiB"; refused below the floor, as at load
    overwrite              replace existing files
    inductor_configs       further options for torch._inductor.config
    split_linear           products with bf16 and fp16 weights become calls of penstock_linear, which can read some rows
                           of a weight in device memory and the others in host memory. Off by default, because its
                           results differ from the library's in the last bits
    pack                   write the weights packed without loss: bfloat16 in 68% of the bytes, others in 78 to 91%.
                           `penstock pack` does the same to an existing file
    """
    check_torch_version(str(torch.__version__))
    methods = named_methods(programs)
    target = target_device(device)
    program_path, weights_path = output_paths(path, ".pt2", overwrite)
    budget_bytes = None if weight_offload_budget is None else parse_bytes(weight_offload_budget)
    options = _options(inductor_configs)
    with _one_at_a_time, PeakMeter(target) as meter:
        catalog = build_catalog(methods)
        values = _Values(catalog, None if weights is None else Checkpoint(weights), _read_names(methods, catalog))
        made = _make(methods, catalog, values.states, target, budget_bytes, options, split_linear)
        _write(made.program, made.packed, values, program_path, weights_path, pack_weights=pack)
    for line in peak_lines(meter.peaks):
        print(line, flush=True)
    return Compiled(program_path, weights_path, made.program, made.floor, meter.peaks, made.device_bytes_after)


def compile_program(
    programs: Mapping[str, ExportedProgram],
    path: str | os.PathLike[str],
    *,
    device: str | torch.device | None = None,
    inductor_configs: Mapping[str, Any] | None = None,
    compile_with: Callable[[str], CompiledMethod] | None = None,
) -> Program:
    """Write the program without its weights. write_weights writes those, for any number of checkpoints that fit.

    States start as zeros: they are non-persistent buffers, whose values no checkpoint has. `compile_with` gives
    methods that were compiled elsewhere, with the same options.
    """
    check_torch_version(str(torch.__version__))
    methods = named_methods(programs)
    target = target_device(device)
    program_path, _ = output_paths(path, ".pt2", overwrite=False)
    options = _options(inductor_configs)
    with _one_at_a_time:
        catalog = build_catalog(methods)
        stored = sorted(set(catalog.states) - catalog.transient)
        if stored:
            raise ProgramError(f"state must be non-persistent buffers, and {_listed(stored)} are not")
        states = {name: replace(state, init="zeros") for name, state in catalog.states.items()}
        made = _make(methods, catalog, states, target, None, options, split_linear=False, compile_with=compile_with)
    with partial_file(program_path, len(made.packed)) as file:
        file.write(0, made.packed)
        file.publish()
    return made.program


def write_weights(
    program: Program,
    weights: Any,
    path: str | os.PathLike[str],
    on_bytes: Callable[[int], None] | None = None,
    *,
    pack: bool = False,
) -> None:
    """Write the .ptd of a program from what compile takes as `weights`. One error lists all that does not fit."""
    checkpoint = Checkpoint(weights)
    problems = mismatches(program.weights, frozenset(), checkpoint)
    if problems:
        raise misfit(checkpoint, problems)

    def pieces(item: Weight | State) -> Iterable[Chunk]:
        found = checkpoint.find(item.names if isinstance(item, Weight) else (item.name,))
        assert found is not None  # or it would have been a mismatch
        return checkpoint.pieces(found, item.dim_order)

    with tqdm(total=program.weight_bytes, desc="writing", unit="B", unit_scale=True, disable=None) as bar:
        _write_ptd(program, pieces, Path(path), on_bytes or bar.update, pack_weights=pack)


def _write_ptd(
    program: Program,
    pieces: Callable[[Weight | State], Iterable[Chunk]],
    path: Path,
    on_bytes: Callable[[int], None],
    *,
    pack_weights: bool,
) -> None:
    """Packing a weight needs the checksum of all its bytes, so those are written first, to a file beside this one."""
    unpacked = path.with_suffix(".unpacked.ptd") if pack_weights else path
    write_ptd(
        unpacked,
        program.weights,
        pieces,
        states=program.states,
        identity=program.identity,
        on_bytes=on_bytes,
    )
    if pack_weights:
        try:
            pack_entries(read_index(unpacked), path, PackedFor(program.gathered_weights))
        finally:
            unpacked.unlink()


@dataclass(frozen=True)
class _Made:
    program: Program
    packed: bytes
    floor: FloorPlan
    device_bytes_after: dict[str, int]


def _make(
    methods: Mapping[str, ExportedProgram],
    catalog: Catalog,
    states: Mapping[str, State],
    target: torch.device,
    budget_bytes: int | None,
    options: Mapping[str, Any],
    split_linear: bool,
    compile_with: Callable[[str], CompiledMethod] | None = None,
) -> _Made:
    names = state_names(methods)
    if split_linear:
        _require_linear(methods, target, names)
    check_toolchain()
    with TemporaryFolder("compile") as folder:
        if compile_with is None:
            compiled, device_bytes_after = _compile_methods(
                methods, target, names, catalog, folder, options, split_linear
            )
        else:
            compiled, device_bytes_after = [compile_with(name) for name in methods], {}
        program, floor = _program(compiled, catalog, states, target, budget_bytes)
        packed = pack_program(program, {c.method.name: c.files for c in compiled})
    return _Made(program, packed, floor, device_bytes_after)


# --------------------------------------------------------------------------------------------------------- arguments


def named_methods(programs: Any) -> dict[str, ExportedProgram]:
    methods = dict(programs) if isinstance(programs, Mapping) else {DEFAULT_METHOD: programs}
    if not methods:
        raise ProgramError("no program was given")
    for name, ep in methods.items():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ProgramError(f"{name!r} is not a method name: letters, digits and underscores, as in Python")
        require_program(ep)
        refuse_training(ep)
        if not fetches(ep.graph):
            raise NotOffloadedError(f"method {name!r} did not go through penstock.apply_weight_offload")
    return methods


def output_paths(path: str | os.PathLike[str], suffix: str, overwrite: bool) -> tuple[Path, Path]:
    """The paths of the program and the weights beside it; refuses what would fail only after minutes of compiling."""
    try:
        program_path = Path(path)
    except TypeError as error:
        raise OutputPathError(f"{path!r:.80} is not a path: {error}") from error
    if program_path.suffix != suffix:
        raise OutputPathError(f"{program_path} must end in {suffix}; the weights go to the .ptd beside it")
    if not program_path.parent.is_dir():
        raise OutputPathError(f"the folder {program_path.parent} does not exist")
    weights_path = program_path.with_suffix(".ptd")
    existing = [str(p) for p in (program_path, weights_path) if p.exists()]
    if existing and not overwrite:
        verb = "exist" if len(existing) > 1 else "exists"
        raise OutputExistsError(f"{' and '.join(existing)} {verb}; pass overwrite=True to replace")
    folders = [str(p) for p in (program_path, weights_path) if p.is_dir()]
    if folders:
        raise OutputPathError(f"{' and '.join(folders)} cannot be replaced: a folder of that name is there")
    if not os.access(program_path.parent, os.W_OK | os.X_OK):
        raise OutputPathError(f"the folder {program_path.parent} cannot be written to")
    return program_path, weights_path


def _options(configs: Mapping[str, Any] | None) -> dict[str, Any]:
    options = dict(configs or {})
    for name in options:
        if name in REQUIRED_OPTIONS:
            raise CompileError(f"inductor_configs: {name!r} is set by penstock and cannot be overridden")
        if not isinstance(name, str) or not known_option(name):
            raise CompileError(f"inductor_configs: torch {torch.__version__} has no option {name!r}")
    return options


def _require_linear(methods: Mapping[str, ExportedProgram], device: torch.device, states: frozenset[str]) -> None:
    if not any(make_weightless(ep, device, states, split_linear=True).linear for ep in methods.values()):
        raise CompileError(
            f"split_linear: no weight of {', '.join(methods)} can be split; it takes one of bfloat16 or float16 with "
            "two dimensions that lies row by row, with a multiple of 8 numbers in each row, and that a linear of the "
            "same dtype reads"
        )


# ------------------------------------------------------------------------------------------------------------ values


def _read_names(methods: Mapping[str, ExportedProgram], catalog: Catalog) -> set[str]:
    """Names of the weights that some method's graph reads."""
    names: set[str] = set()
    for method, ep in methods.items():
        users = {node.name: bool(node.users) for node in ep.graph.find_nodes(op="placeholder")}
        for spec in ep.graph_signature.input_specs:
            if users[spec.arg.name] and spec.target is not None and (method, spec.target) in catalog.name_of:
                names.add(catalog.name_of[method, spec.target])
    return names


class _Values:
    """Gives the bytes of every weight and stored state; refuses at once if some have none."""

    def __init__(self, catalog: Catalog, checkpoint: Checkpoint | None, read: set[str]) -> None:
        self._catalog = catalog
        self._checkpoint = checkpoint
        self.states: dict[str, State] = {}
        for name, state in catalog.states.items():
            self.states[name] = self._with_init(state)
        wanted: list[Weight | State] = [w for name, w in catalog.weights.items() if name in read]
        stored = [state for state in self.states.values() if state.init == "stored"]
        valued = {name for name, tensor in catalog.tensors.items() if has_value(tensor)}
        if checkpoint is None:
            missing = [item.name for item in (*wanted, *stored) if item.name not in valued]
            if missing:
                raise CheckpointError(
                    f"{len(missing)} tensors of the program have no values (the model is on meta): "
                    f"{_listed(missing)}; pass weights=<checkpoint>"
                )
            return
        # A state that starts as zeros may be missing from the checkpoint, but if it is there it must fit.
        optional = frozenset(catalog.transient & valued) | {n for n, s in self.states.items() if s.init == "zeros"}
        problems = mismatches([*wanted, *self.states.values()], optional, checkpoint)
        if problems:
            hint = ""
            if any(item.name in catalog.transient and item.name not in valued for item in wanted):
                hint = (
                    "\n(non-persistent buffers of a model on meta: give them with weights=[checkpoint, {name: tensor}])"
                )
            raise misfit(checkpoint, problems, hint)

    def _with_init(self, state: State) -> State:
        tensor = self._catalog.tensors[state.name]
        if self._checkpoint is not None and state.name in self._checkpoint:
            return replace(state, init="stored")
        if has_value(tensor):
            return replace(state, init="zeros" if is_zero(tensor) else "stored")
        if state.name in self._catalog.transient:
            # By definition no checkpoint has it, and a model on meta has no value: caches start empty.
            text = f"state {state.name!r} has no first value (the model is on meta): it starts as zeros"
            warnings.warn(text, stacklevel=4)  # that is where compile was called
            return replace(state, init="zeros")
        return replace(state, init="stored")

    def pieces(self, item: Weight | State) -> Iterable[Chunk]:
        names = item.names if isinstance(item, Weight) else (item.name,)
        found = self._checkpoint.find(names) if self._checkpoint is not None else None
        if found is not None:
            assert self._checkpoint is not None
            return self._checkpoint.pieces(found, item.dim_order)
        return tensor_pieces(self._catalog.tensors[item.name], item.dim_order)


def misfit(checkpoint: Checkpoint, problems: Sequence[str], hint: str = "") -> CheckpointError:
    return CheckpointError(
        f"the checkpoint {checkpoint.description} does not fit the program, {len(problems)} mismatches:\n  "
        + "\n  ".join(problems)
        + hint
    )


def _listed(names: Sequence[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


# -------------------------------------------------------------------------------------------------------- compilation


def _compile_methods(
    methods: Mapping[str, ExportedProgram],
    device: torch.device,
    states: frozenset[str],
    catalog: Catalog,
    folder: Path,
    options: Mapping[str, Any],
    split_linear: bool,
) -> tuple[list[CompiledMethod], dict[str, int]]:
    compiled: list[CompiledMethod] = []
    device_bytes_after: dict[str, int] = {}
    # disable=None: silent unless standard error is a terminal.
    with tqdm(methods.items(), desc="compiling", unit="method", disable=None) as bar:
        for name, ep in bar:
            bar.set_postfix_str(name)
            weight_names = {target: known for (method, target), known in catalog.name_of.items() if method == name}
            compiled.append(
                compile_method(name, ep, device, states, weight_names, folder, options, split_linear=split_linear)
            )
            gc.collect()  # the compiler's graphs form cycles, which keep alive what it allocated for tuning
            if device.type == "cuda":
                release_device_memory()
                device_bytes_after[name] = torch.cuda.memory_allocated(device)
    return compiled, device_bytes_after


def _program(
    compiled: Sequence[CompiledMethod],
    catalog: Catalog,
    first_states: Mapping[str, State],
    device: torch.device,
    budget_bytes: int | None,
) -> tuple[Program, FloorPlan]:
    schedules = [c.method.schedule for c in compiled]
    # The order of first access, method after method.
    order = dict.fromkeys(name for schedule in schedules for name in schedule.weight_names)
    weights = tuple(catalog.weights[name] for name in order)
    unread = {name for weight in catalog.weights.values() if weight.name not in order for name in weight.names}
    states = tuple(first_states.values())
    by_name = {weight.name: weight for weight in weights}
    floor = _floor(schedules, by_name, device, budget_bytes)
    program = Program(
        methods=tuple(c.method for c in compiled),
        weights=weights,
        states=states,
        identity=layout_identity(weights, states),
        floor_bytes=floor.floor_bytes,
        budget_bytes=budget_bytes,
        unused=tuple(sorted(unread | catalog.unlisted)),
        device=device.type,
        built_with=_built_with(device),
    )
    return program, floor


def _floor(
    schedules: Sequence[Schedule], weights: Mapping[str, Weight], device: torch.device, budget_bytes: int | None
) -> FloorPlan:
    """The floor as load finds it on that device unless told otherwise, so that both refuse at the same byte."""
    page_bytes = page_bytes_on(device.type, sum(weight.nbytes for weight in weights.values()))
    has_linears = any(access.linear for schedule in schedules for access in schedule.accesses)
    can_split = has_linears and kernel_obstacle(device) is None
    planner = Planner(schedules, weights, page_bytes=page_bytes, placement="auto", can_split=can_split)
    floor = planner.floor()
    if budget_bytes is not None and budget_bytes < floor.floor_bytes:
        others = lower_placements_text(planner.lower_placements())
        raise BelowFloorError(
            f"weight_offload_budget is {format_bytes(budget_bytes)}, below the floor of this program: it needs at "
            f"least {floor.floor_bytes} bytes (pages of {page_bytes} bytes){others}"
            + (": to use one, leave weight_offload_budget out and give the budget at load" if others else ""),
            budget_bytes=budget_bytes,
            floor_bytes=floor.floor_bytes,
        )
    return floor


def _built_with(device: torch.device) -> dict[str, str]:
    versions = {
        "penstock": VERSION,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        versions["cuda"] = str(torch.version.cuda)
        versions["gpu"] = properties.name
        versions["capability"] = f"{properties.major}.{properties.minor}"
    return versions


def _write(
    program: Program, packed: bytes, values: _Values, program_path: Path, weights_path: Path, *, pack_weights: bool
) -> None:
    """Write both files or none. The program appears only once the weights are whole; if it cannot, they go again."""
    total_bytes = program.weight_bytes + sum(s.nbytes for s in program.states if s.init == "stored")
    with partial_file(program_path, len(packed)) as file:
        file.write(0, packed)
        with (
            restored_on_failure(weights_path, followed_by=file),
            tqdm(total=total_bytes, desc="writing", unit="B", unit_scale=True, disable=None) as bar,
        ):
            _write_ptd(program, values.pieces, weights_path, bar.update, pack_weights=pack_weights)
            if pack_weights:
                page_bytes = page_bytes_on(program.device, program.weight_bytes)
                index = read_index(weights_path)
                entries = {weight.name: index[weight.name] for weight in program.weights}
                check_baked_budget(program, index, entries, page_bytes)
            file.publish()
