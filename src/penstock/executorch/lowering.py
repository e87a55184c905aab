"""penstock.executorch.export: from offloaded programs to a .pte, and a .ptd with every weight once."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from penstock.errors import NoWeightsError, PackageError, UnsupportedProgramError
from penstock.executorch.backend import DATA_FILE
from penstock.executorch.data_files import merge_weights
from penstock.executorch.dialect import erase_fetches
from penstock.executorch.file_seal import append_seal
from penstock.executorch.lowered_file import read_lowered
from penstock.executorch.lowering_request import ConstantMethods
from penstock.executorch.partitioner import CudaPartitioner, TornStateError
from penstock.executorch.signatures import (
    FLOOR_METHOD,
    ORDER_METHOD,
    OWN_METHODS,
    SIGNATURES_METHOD,
    signatures_to_json,
)
from penstock.export.catalog import build_catalog, state_names
from penstock.export.checkpoint import Checkpoint, mismatches
from penstock.export.compile import misfit, named_methods, output_paths
from penstock.export.host_states import host_states
from penstock.export.packed_floor import check_baked_budget
from penstock.export.target import target_device
from penstock.export.values import has_value, is_zero
from penstock.export.weightless import make_weightless
from penstock.program import Signature
from penstock.temporary import TemporaryFolder
from penstock.weights.packing import lowered_entries
from penstock.weights.packing import pack as pack_weights

# For copies and registrations of whole pages.
SEGMENT_ALIGNMENT_BYTES = 4096


@dataclass(frozen=True)
class Exported:
    program_path: Path
    weights_path: Path
    # For weights as they are. Packed weights also need room to pass through.
    floor_bytes: int
    # Delegate -> names of the weights in the order in which its code fetches them.
    access_order: dict[str, list[str]]


def export(
    programs: ExportedProgram | Mapping[str, ExportedProgram],
    path: str | os.PathLike[str],
    *,
    device: str | torch.device | None = None,
    weight_offload_budget: int | str | None = None,
    overwrite: bool = False,
    inductor_configs: Mapping[str, Any] | None = None,
    leave: Iterable[str] = (),
    partitioners: Sequence[Any] = (),
    weights: Any = None,
    split_linear: bool = False,
    pack: bool = False,
) -> Exported:
    """Lower offloaded programs into `path` (.pte) and the .ptd beside it.

    programs               what apply_weight_offload returned; a mapping for several methods over the same weights
    device                 "cpu" or "cuda[:n]"; the default is "cuda" where there is a GPU, else "cpu"
    weight_offload_budget  a default budget to bake in, in bytes or like "8GiB"
    overwrite              replace existing files
    inductor_configs       further options for torch._inductor.config
    leave                  ops to leave to ExecuTorch's own kernels, as in "aten::softmax"
    partitioners           of other backends, which choose after ours
    weights, split_linear  as penstock.compile takes them; the model may be on meta where there is a checkpoint
    pack                   write the weights packed without loss, and plans for them, as penstock.pack does
    """
    from executorch.exir import to_edge_transform_and_lower

    methods = named_methods(programs)
    target = target_device(device)
    program_path, weights_path = output_paths(path, ".pte", overwrite)
    _refuse_own_names(methods)
    signatures = _signatures(methods, target)
    tied = _tied_names(methods, weights)
    leave = tuple(leave)

    def lowered(leave_states: Sequence[str]) -> tuple[Any, ConstantMethods]:
        ours = CudaPartitioner(
            device=str(target),
            weight_offload_budget=weight_offload_budget,
            inductor_configs=inductor_configs,
            leave=leave,
            tied=tied,
            leave_states=leave_states,
            weights=weights,
            split_linear=split_linear,
        )
        edge = to_edge_transform_and_lower(
            _apart(methods), partitioner=[ours, *partitioners], constant_methods=ours.constant_methods
        )
        return edge, ours.constant_methods

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # ExecuTorch's, about torch
        try:
            edge, constants = lowered(())
        except TornStateError as torn:
            # Known only once the last method has been looked at, but before anything is compiled.
            edge, constants = lowered(torn.names)
        if FLOOR_METHOD not in constants:
            raise NoWeightsError("no part of the program was delegated: every op that reads a weight was left out")
        constants[SIGNATURES_METHOD] = signatures_to_json(signatures)
        for name in methods:
            erase_fetches(edge.exported_program(name).graph_module)
        program = edge.to_executorch(_configuration(methods))
    _write(program, program_path, weights_path, pack)
    return Exported(program_path, weights_path, constants[FLOOR_METHOD], json.loads(constants[ORDER_METHOD]))


# --------------------------------------------------------------------------------------------------------- arguments


def _refuse_own_names(methods: Iterable[str]) -> None:
    for name in methods:
        if name in OWN_METHODS:
            raise PackageError(
                f"a method cannot be named {name!r}: that name is Penstock's own ({', '.join(OWN_METHODS)})"
            )


def _signatures(methods: Mapping[str, ExportedProgram], device: torch.device) -> dict[str, Signature]:
    states = state_names(methods)
    signatures: dict[str, Signature] = {}
    for name, ep in methods.items():
        if device.type == "cuda" and (far := host_states(ep)):
            raise UnsupportedProgramError(
                f"method {name!r} keeps {', '.join(sorted(far))} in host memory for kernels on the GPU to read, and a "
                ".pte holds all its state on the device; compile it as a .pt2"
            )
        signatures[name] = make_weightless(ep, device, states).signature
        if signatures[name].written:
            raise UnsupportedProgramError(
                f"method {name!r} writes into its input {signatures[name].written[0]!r}: ExecuTorch copies inputs, so "
                "the caller would not see it; return it instead"
            )
    return signatures


def _tied_names(methods: Mapping[str, ExportedProgram], weights: Any) -> list[Sequence[str]]:
    """All names of each weight with several, starting with the one that the checkpoint has it under."""
    tied = [weight for weight in build_catalog(methods).weights.values() if weight.aliases]
    if weights is None:
        return [weight.names for weight in tied]
    checkpoint = Checkpoint(weights)
    if problems := mismatches(tied, frozenset(), checkpoint):
        raise misfit(checkpoint, problems)
    found = [(checkpoint.find(weight.names), weight.names) for weight in tied]
    return [[first, *(name for name in names if name != first)] for first, names in found if first is not None]


# ----------------------------------------------------------------------------------------------------------- lowering


def _apart(methods: Mapping[str, ExportedProgram]) -> dict[str, ExportedProgram]:
    """The same programs with tables of their own, because lowering takes out of them what it puts elsewhere."""
    return {
        name: ExportedProgram(
            root=ep.graph_module,
            graph=ep.graph,
            graph_signature=ep.graph_signature,
            state_dict=dict(ep.state_dict),
            range_constraints=ep.range_constraints,
            module_call_graph=ep.module_call_graph,
            example_inputs=ep.example_inputs,
            constants=dict(ep.constants),
        )
        for name, ep in methods.items()
    }


def _configuration(methods: Mapping[str, ExportedProgram]) -> Any:
    from executorch.exir import ExecutorchBackendConfig
    from executorch.exir.passes import MemoryPlanningPass
    from executorch.exir.passes.init_mutable_pass import InitializedMutableBufferPass

    states = state_names(methods)
    return ExecutorchBackendConfig(
        segment_alignment=SEGMENT_ALIGNMENT_BYTES,
        passes=[InitializedMutableBufferPass(_initialized(methods, states))],
        memory_planning_pass=MemoryPlanningPass(share_mutable_buffers=bool(states) and len(methods) > 1),
        # Module finds state in ExecuTorch's memory by these names.
        emit_mutable_buffer_names=True,
    )


def _initialized(methods: Mapping[str, ExportedProgram], states: frozenset[str]) -> list[str]:
    """Inputs whose initial value is not zero: ExecuTorch stores only what it is told to."""
    names: set[str] = set()
    for ep in methods.values():
        for spec in ep.graph_signature.input_specs:
            if spec.target in states:
                value = ep.state_dict.get(spec.target, ep.constants.get(spec.target))
                if isinstance(value, torch.Tensor) and has_value(value) and not is_zero(value):
                    names.add(spec.arg.name)
    return sorted(names)


# ------------------------------------------------------------------------------------------------------------ writing


def _write(program: Any, program_path: Path, weights_path: Path, pack: bool) -> None:
    """Writes both files or none: the program appears only when the weights are complete."""
    others = [name for name in program._tensor_data if name != DATA_FILE]
    if others:
        raise UnsupportedProgramError(f"other backends keep data outside of the .pte: {', '.join(sorted(others))}")
    with TemporaryFolder("export", program_path.parent) as folder:
        partial_program, partial_weights = folder / program_path.name, folder / weights_path.name
        with partial_weights.open("wb") as file:
            program._tensor_data[DATA_FILE].write_to_file(file)
        with partial_program.open("w+b") as file:
            program.write_to_file(file)
            append_seal(file)
        if pack:
            # ExecuTorch's writer stores no checksums, and packing relies on them.
            raw = merge_weights([partial_weights], folder / "raw.ptd")
            partial_weights.unlink()
            index = pack_weights(raw, partial_weights, program=partial_program)
            lowered = read_lowered(partial_program)
            entries = lowered_entries(partial_program, lowered, index)
            check_baked_budget(lowered.program, index, entries, lowered.page_bytes)
        partial_weights.replace(weights_path)
        partial_program.replace(program_path)
