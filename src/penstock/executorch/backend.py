"""The backend as ExecuTorch's lowering sees it: all partitions of all methods, compiled as one weightless program."""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from executorch.exir._serialize._named_data_store import NamedDataStore
from executorch.exir.backend.backend_details import BackendDetails, PreprocessResult
from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.exir.tensor import scalar_type_enum
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind

from penstock.budget import format_bytes
from penstock.errors import BelowFloorError, NoWeightsError, ProgramError, UnsupportedProgramError
from penstock.executorch.description import (
    TRANSFER_ALIGNMENT_BYTES,
    DelegateInput,
    DelegateMethod,
    DelegateRef,
    Description,
    IndexSlice,
    InputIndex,
    SharedState,
    SharedWeight,
)
from penstock.executorch.dialect import aten_program
from penstock.executorch.lowering_request import request_of
from penstock.executorch.payload import pack_delegate_ref, pack_payload
from penstock.executorch.plan_table import make_plan_tables
from penstock.executorch.segments import Segment, tensor_layout
from penstock.executorch.signatures import FLOOR_METHOD, ORDER_METHOD, access_order_to_json
from penstock.export.compile import Compiled
from penstock.export.compile import compile as compile_programs
from penstock.export.offload import fetches, insert_program_fetches
from penstock.layout import canonical
from penstock.plan.pages import page_bytes_on
from penstock.program import IndexRange, Method, TensorSpec
from penstock.temporary import TemporaryFolder
from penstock.torch_private.graph import size_bound
from penstock.weight import State
from penstock.weights import read_index

# Alignment of weights in the .ptd: copies and registrations take whole pages.
ALIGNMENT_BYTES = 4096
# Name of the .ptd for external data, without its suffix.
DATA_FILE = "weights"


class PenstockBackend(BackendDetails):  # type: ignore[misc]
    @classmethod
    def copy_exported_program_for_preprocess(
        cls, edge_program: ExportedProgram, compile_specs: list[CompileSpec]
    ) -> ExportedProgram:
        # Nothing here changes the program, and a deep copy would also copy its weights.
        return edge_program

    @staticmethod
    def preprocess(edge_program: ExportedProgram, compile_specs: list[CompileSpec]) -> PreprocessResult:
        raise ProgramError(
            "one partition was to be lowered by itself, but the partitions of a program share one budget: lower with "
            "to_edge_transform_and_lower(programs, partitioner=[CudaPartitioner(...)])"
        )

    @classmethod
    def preprocess_multimethod(
        cls, edge_programs: dict[str, list[ExportedProgram]], compile_specs: dict[str, list[list[CompileSpec]]]
    ) -> dict[str, list[PreprocessResult]]:
        request = request_of([spec for lists in compile_specs.values() for specs in lists for spec in specs])
        request.check_names()
        options = request.options
        names = {method: _part_names(method, len(parts)) for method, parts in edge_programs.items()}
        first_names = {name: tied[0] for tied in options["tied"] for name in tied}
        programs = {
            name: _offloaded(aten_program(ep, first_names), name)
            for method, parts in edge_programs.items()
            for name, ep in zip(names[method], parts, strict=True)
        }
        if not programs:
            return {method: [] for method in edge_programs}
        # Weights are written to disk once and go from there into the .ptd: never a second time into memory.
        folder = TemporaryFolder("executorch")
        compiled = compile_programs(
            programs,
            folder.path / "program.pt2",
            device=options["device"],
            weight_offload_budget=options["budget_bytes"],
            inductor_configs=options["inductor_configs"],
            weights=request.checkpoint,
            split_linear=options["split_linear"],
        )
        key, floor_bytes, store = _store(compiled, programs, options, folder)
        request.constant_methods[FLOOR_METHOD] = floor_bytes
        request.constant_methods[ORDER_METHOD] = access_order_to_json(compiled.program)
        return {method: [_result(key, part, compiled, store) for part in parts] for method, parts in names.items()}


def _part_names(method: str, count: int) -> list[str]:
    return [method] if count == 1 else [f"{method}__{number}" for number in range(count)]


def _offloaded(ep: ExportedProgram, name: str) -> ExportedProgram:
    if not fetches(ep.graph):
        raise NoWeightsError(
            f"what was delegated of {name!r} fetches no weight: apply penstock.apply_weight_offload before lowering"
        )
    insert_program_fetches(ep)  # constants that appeared on the way here
    return ep


def _store(
    compiled: Compiled,
    programs: Mapping[str, ExportedProgram],
    options: Mapping[str, Any],
    folder: TemporaryFolder,
) -> tuple[str, int, NamedDataStore]:
    """The payload's name, the floor of its plans, and everything that all delegates of the program share."""
    program = compiled.program
    page_bytes = page_bytes_on(program.device, program.weight_bytes)
    all_names = {tied[0]: tied for tied in options["tied"]}
    schedules = [method.schedule for method in program.methods]
    plan_tables = make_plan_tables(schedules, program.weights, page_bytes=page_bytes, device=program.device)
    floor_bytes = plan_tables[0].row.floor_bytes
    if program.budget_bytes is not None and program.budget_bytes < floor_bytes:
        # This happens on a GPU, where only Module splits weights: its floor may be below that of the plans in the file.
        raise BelowFloorError(
            f"weight_offload_budget is {format_bytes(program.budget_bytes)}, below the floor of this program in a "
            f"process without Python: it needs at least {floor_bytes} bytes there",
            budget_bytes=program.budget_bytes,
            floor_bytes=floor_bytes,
        )
    code = compiled.program_path.read_bytes()
    bounds = [method.activation_bound_bytes for method in program.methods]
    description = Description(
        program=hashlib.blake2b(code, digest_size=16).hexdigest(),
        device=program.device,
        page_bytes=page_bytes,
        budget_bytes=program.budget_bytes,
        activation_bytes=None if None in bounds else max(bound for bound in bounds if bound is not None),
        built_with=dict(program.built_with),
        weights=tuple(
            SharedWeight(
                # All names of a tied weight: a file that ExecuTorch wrote has just one of them, and it can be any.
                names=tuple(all_names.get(weight.name, [weight.name])),
                scalar_type=tensor_layout(weight).scalar_type.value,
                shape=weight.shape,
                dim_order=weight.dim_order,
                nbytes=weight.nbytes,
            )
            for weight in program.weights
        ),
        states=tuple(_state(state) for state in program.states),
        methods=tuple(_method(method, programs[method.name], program.states) for method in program.methods),
        plan_tables=tuple(table.row for table in plan_tables),
    )
    payload = pack_payload(description, [plan for table in plan_tables for plan in table.plans], code)
    key = f"penstock.program.{description.program}"
    store = NamedDataStore()
    store.add_named_data(key, payload, 64)
    index = read_index(compiled.weights_path)
    for weight in program.weights:
        entry = index[weight.name]
        segment = Segment(index.path, entry.offset_bytes, entry.length_bytes, folder)
        for name in all_names.get(weight.name, [weight.name]):
            store.add_named_data(name, segment, ALIGNMENT_BYTES, DATA_FILE, tensor_layout(weight))
    for state in program.states:
        if state.init == "stored":
            entry = index[state.name]
            first = Segment(index.path, entry.offset_bytes, entry.length_bytes, folder)
            store.add_named_data(state.name, first, ALIGNMENT_BYTES, DATA_FILE, tensor_layout(state))
    return key, floor_bytes, store


def _state(state: State) -> SharedState:
    return SharedState(
        name=state.name,
        scalar_type=tensor_layout(state).scalar_type.value,
        shape=state.shape,
        dim_order=state.dim_order,
        nbytes=state.nbytes,
        stored=int(state.init == "stored"),
    )


def _method(method: Method, ep: ExportedProgram, states: Sequence[State]) -> DelegateMethod:
    names = [state.name for state in states]
    return DelegateMethod(
        name=method.name,
        # Numbers of the states. They are the leading inputs of the code, which writes into them.
        states=tuple(names.index(name) for name in method.states),
        inputs=tuple(_tensor(method.name, spec, ep) for spec in method.signature.inputs),
        outputs=sum(isinstance(spec, TensorSpec) for spec in method.signature.outputs),
        transfer_bytes=_transfer_bytes(method, ep),
    )


def _tensor(method: str, spec: Any, ep: ExportedProgram) -> DelegateInput:
    """What the compiled code takes for granted about an input without checking it: dtype and layout."""
    if not isinstance(spec, TensorSpec):
        raise UnsupportedProgramError(f"input {spec.name!r} of {method!r} is {spec.value!r}, no tensor")
    value = next(node for node in ep.graph.nodes if node.op == "placeholder" and node.name == spec.name).meta["val"]
    hints = [[int(_hint(number)) for number in numbers] for numbers in (value.shape, value.stride())]
    return DelegateInput(
        name=spec.name,
        scalar_type=scalar_type_enum(getattr(torch, spec.dtype)).value,
        shape=tuple(size if isinstance(size, int) else -1 for size in spec.shape),
        dim_order=tuple(canonical(*hints)),
        indexes=tuple(map(_index, spec.indexes)),
    )


def _index(index: IndexRange) -> InputIndex:
    slices = (IndexSlice(begin, sys.maxsize if end is None else end, step) for begin, end, step in index.region)
    return InputIndex(index.low, index.high, index.table, index.dim, index.size, tuple(slices))


def _transfer_bytes(method: Method, ep: ExportedProgram) -> int:
    """Bytes of a run's inputs and outputs at the highest values of all sizes, which is how ExecuTorch plans memory."""
    values = {node.name: node.meta["val"] for node in ep.graph.nodes if "val" in node.meta}
    results = [spec.arg.name for spec in ep.graph_signature.output_specs if spec.kind is OutputKind.USER_OUTPUT]
    total_bytes = 0
    for name in (*(spec.name for spec in method.signature.inputs), *results):
        value = values.get(name)
        if not isinstance(value, torch.Tensor):
            continue
        sizes = [size_bound(size, ep.range_constraints) for size in value.shape]
        if None in sizes:
            raise UnsupportedProgramError(
                f"{name!r} of {method.name!r} has a dynamic size without a highest value, and ExecuTorch plans memory "
                "for it: export with Dim(..., max=...)"
            )
        nbytes = math.prod(size for size in sizes if size is not None) * value.dtype.itemsize
        total_bytes += -(-nbytes // TRANSFER_ALIGNMENT_BYTES) * TRANSFER_ALIGNMENT_BYTES
    return total_bytes


def _hint(number: int | torch.SymInt) -> int:
    return int(number.node.hint) if isinstance(number, torch.SymInt) else number


def _result(key: str, part: str, compiled: Compiled, store: NamedDataStore) -> PreprocessResult:
    number = [method.name for method in compiled.program.methods].index(part)
    return PreprocessResult(
        processed_bytes=pack_delegate_ref(DelegateRef(key, part, number)),
        debug_handle_map={},
        data_store_output=store.get_named_data_store_output(),
    )
