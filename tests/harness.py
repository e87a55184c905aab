"""Exports, compiles and runs a model under poison: what most tests of the export side need."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import penstock
from penstock.plan.floor import floor_bytes
from penstock.plan.in_place import read_directly_by_default, stand_ins
from penstock.program import Program
from penstock.schedule import Schedule
from penstock.verify.module import PoisonedModule

# The wrapper's own speed does not matter here; building it without optimisation saves a third of the time.
FAST = {"aot_inductor.compile_wrapper_opt_level": "O0"}


def offloaded(
    model: torch.nn.Module, args: tuple[Any, ...], dynamic_shapes: Any = None, kwargs: dict[str, Any] | None = None
) -> torch.export.ExportedProgram:
    model = model.eval().requires_grad_(False)
    return penstock.apply_weight_offload(torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes))


def compiled(
    folder: Path,
    programs: torch.export.ExportedProgram | Mapping[str, torch.export.ExportedProgram],
    **options: Any,
) -> penstock.Compiled:
    configs = {**FAST, **options.pop("inductor_configs", {})}
    return penstock.compile(
        programs, folder / "model.pt2", device=options.pop("device", "cpu"), inductor_configs=configs, **options
    )


def poisoned(folder: Path, model: torch.nn.Module, args: tuple[Any, ...], **options: Any) -> PoisonedModule:
    """Compile a model of one method, and run it three times under poison beside the eager model."""
    reference = copy.deepcopy(model).eval()
    result = compiled(folder, offloaded(model, args, options.pop("dynamic_shapes", None)), **options)
    module = PoisonedModule(result.program_path)
    compare_runs(module, reference, args)
    return module


def compare_runs(module: PoisonedModule, reference: torch.nn.Module, args: tuple[Any, ...], runs: int = 3) -> None:
    """Equal to the eager model within rounding, on every run, and bit-identical to itself where nothing is kept.

    Tolerances are those of torch.testing for the dtype: the compiler may fuse and reorder sums. That the weights
    themselves are right to the bit is asserted elsewhere; here a wrong weight shows as NaN.
    """
    reference = reference.to(module.program.device)
    first: list[torch.Tensor] | None = None
    for _ in range(runs):
        found = leaves(module(*args))
        with torch.no_grad():
            wanted = leaves(reference(*args))
        assert len(found) == len(wanted)
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, check_stride=False)
        if not module.program.states:
            for a, b in zip(first or found, found, strict=True):
                assert torch.equal(bits(a), bits(b))
        first = first or [t.clone() for t in found]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes: equality of these is equality to the bit, NaN included."""
    plain = tensor.detach().cpu().contiguous()
    return torch.empty(0, dtype=torch.uint8).set_(plain.clone().untyped_storage())


def leaves(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def schedule_weights(module: PoisonedModule, method: str = "forward") -> list[str]:
    return [access.weight for access in module.program.method(method).schedule.accesses]


def exact_floor_bytes(program: Program) -> int:
    """By the formula, before pages: what tells a small program's schedule from one that holds more."""
    schedules, weights = [method.schedule for method in program.methods], {w.name: w for w in program.weights}
    return floor_bytes(*stand_ins(schedules, weights, read_directly_by_default)).floor_bytes


def resident(schedule: Schedule) -> Schedule:
    """The same record with every weight held until the end of the run: what an all-resident run does."""
    everything = tuple(access.number for access in schedule.accesses)
    *steps, last = schedule.steps
    return dataclasses.replace(schedule, steps=(*steps, dataclasses.replace(last, accesses=everything)))


def resident_twin(module: PoisonedModule) -> PoisonedModule:
    """The same files, with no weight poisoned before the run ends."""
    twin = PoisonedModule(module.path)
    methods = tuple(dataclasses.replace(m, schedule=resident(m.schedule)) for m in twin.program.methods)
    twin.program = dataclasses.replace(twin.program, methods=methods)
    return twin
