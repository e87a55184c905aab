"""The checks of `penstock verify`, from those that need nothing to those that run the program."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from penstock.budget import format_bytes
from penstock.errors import ChecksumError, PackageError, WeightsFileError
from penstock.program import Program, read_program
from penstock.regular_file import open_regular
from penstock.weights import WeightsIndex

if TYPE_CHECKING:
    import torch

    from penstock.cli.call_arguments import Arguments

Status = Literal["pass", "warn", "fail", "skip"]
# One cold run, then two warm ones: only the second warm run finds what a warm run left.
_RUNS = 3
_EVERYTHING = "1024TiB"


@dataclass(frozen=True)
class Check:
    name: str
    status: Status
    finding: str


class Verifier:
    def __init__(self, path: Path, weights_path: Path, inputs: Path | None, method: str | None, seed: int) -> None:
        self._path = path
        self._weights_path = weights_path
        self._inputs = inputs
        self._method = method
        self._seed = seed
        open_regular(path, PackageError).close()
        self._program: Program = read_program(path)
        if method is not None:
            self._program.method(method)

    @property
    def inputs_text(self) -> str:
        if self._inputs is not None:
            return str(self._inputs)
        return f"made from the recorded shapes, seed {self._seed}"

    def checks(self, *, run: bool) -> Iterator[Check]:
        sound = True
        for name, check in (
            ("archive", self._archive),
            ("weights fit", self._weights_fit),
            ("checksums", self._checksums),
            ("schedule", self._schedule),
            ("floor", self._floor),
        ):
            found = _checked(name, check)
            sound = sound and found.status != "fail"
            yield found
        for name, check in (("lifetimes", self._lifetimes), ("poisoned run", self._poisoned_run)):
            if run and sound:
                found = _checked(name, check)
                if found.status == "fail" and self._inputs is None:
                    hint = "the inputs were made up: if they do not suit the program, give --inputs"
                    found = replace(found, finding=f"{found.finding} ({hint})")
                yield found
            else:
                why = "not asked for" if not run else "what failed above must be repaired first"
                yield Check(name, "skip", f"not run: {why}")

    # ----------------------------------------------------------------------------------------------- without running

    def _archive(self) -> str:
        with zipfile.ZipFile(self._path) as archive:
            damaged = archive.testzip()
            if damaged is not None:
                raise PackageError(f"{self._path}: {damaged} is damaged: its bytes do not have their checksum")
            return f"{len(archive.namelist())} files, every one has its checksum"

    @cached_property
    def _index(self) -> WeightsIndex:
        from penstock.runtime.weights_source import read_weights_index

        open_regular(self._weights_path, WeightsFileError).close()
        return read_weights_index(self._weights_path)

    def _weights_fit(self) -> str:
        from penstock.runtime.weights_fit import check_weights

        found = check_weights(self._program, self._index)
        return f"all {len(found)} are in {self._weights_path.name}, with the right shapes, dtypes and layouts"

    def _checksums(self) -> str | Check:
        from penstock.weights import verify_checksums

        if self._index.identity is None:
            return Check("checksums", "warn", f"{self._weights_path.name} has none: ExecuTorch wrote it")
        verify_checksums(self._index)
        return f"{len(self._index.unique_entries)} entries, {self._index.file_bytes} bytes"

    def _schedule(self) -> str:
        """Compares the generated code with what was recorded."""
        from penstock.export.wrapper import check_weightless, check_wrapper

        sources = self._wrappers()
        for method in self._program.methods:
            check_wrapper(sources[method.name], method.schedule)
            check_weightless(sources[method.name], method.name)
        steps = ", ".join(f"{m.name}: {len(m.schedule.steps)} steps" for m in self._program.methods)
        return f"the generated code makes every recorded access in its order, and holds no weight ({steps})"

    def _wrappers(self) -> Mapping[str, str]:
        from penstock.torch_private.wrapper_text import archived_wrappers

        found: dict[str, str] = {}
        with zipfile.ZipFile(self._path) as archive:
            for method in self._program.methods:
                names = archived_wrappers(archive.namelist(), method.name)
                if len(names) != 1:
                    raise PackageError(f"{self._path}: method {method.name!r} has {len(names)} wrappers, needs one")
                found[method.name] = archive.read(names[0]).decode()
        return found

    def _floor(self) -> str:
        """Computes the floor again, and proves the plan at the floor with code that is not the planner's."""
        from penstock.cli.subject import read_subject
        from penstock.plan.check import check_plan

        subject = read_subject(self._path, self._weights_path)
        # The recorded floor is for weights that are not packed.
        computed = replace(subject, begins={}).planner("auto").floor_bytes
        if computed != self._program.floor_bytes:
            raise PackageError(f"the program records a floor of {self._program.floor_bytes} bytes; it is {computed}")
        told: list[str] = []
        for placement in self._placements:
            planner = subject.planner(placement)
            placed = planner.floor_bytes
            check_plan(
                planner.plan(placed),
                subject.schedules,
                subject.weights,
                budget_bytes=placed,
                packed=subject.begins,
            )
            told.append(f"{placed} ({placement})")
        packed = f", with {len(subject.begins)} packed weights" if subject.begins else ""
        pages = f"in pages of {subject.page_bytes}{packed}"
        return f"{computed} bytes as recorded; {pages}: {', '.join(told)}, each with a safe plan"

    @property
    def _placements(self) -> tuple[str, ...]:
        """placement="auto" reads gathered weights in place, so copying them is tried as well."""
        accesses = (access for method in self._program.methods for access in method.schedule.accesses)
        return ("auto", "stream") if any(access.gathered for access in accesses) else ("auto",)

    # -------------------------------------------------------------------------------------------------------- running

    @cached_property
    def _calls(self) -> list[tuple[str, Arguments]]:
        from penstock.cli.call_arguments import call_arguments, made_arguments
        from penstock.cli.tensors_file import load_tensors

        methods = self._program.methods
        if self._inputs is None:
            return [(method.name, made_arguments(method, self._seed)) for method in methods]
        if self._method is None and len(methods) > 1:
            raise PackageError(f"--inputs are for one of {', '.join(m.name for m in methods)}: say which with --method")
        method = self._program.method(self._method or methods[0].name)
        return [(method.name, call_arguments(load_tensors(self._inputs), method.signature, str(self._inputs)))]

    def _play(self, run: Callable[..., Any], device: torch.device) -> list[tuple[str, torch.Tensor]]:
        """The bytes of every output of every run, with its name. State carries on from run to run."""
        import torch

        from penstock.cli.call_arguments import copied, named_leaves

        played: list[tuple[str, torch.Tensor]] = []
        with torch.no_grad():
            for name, arguments in self._calls:
                signature = self._program.method(name).signature
                for number in range(_RUNS):
                    positional, keywords = copied(arguments, device)
                    for output, tensor in named_leaves(run(name, *positional, **keywords), signature).items():
                        played.append((f"{output} of run {number} of {name}", _bits(tensor)))
        return played

    @cached_property
    def _resident(self) -> list[tuple[str, torch.Tensor]]:
        import penstock

        with penstock.Module(self._path, _EVERYTHING, weights=self._weights_path) as module:
            return self._play(module.run_method, module.device)

    def _lifetimes(self) -> str:
        """Runs with every weight in memory of its own, overwritten the moment its recorded last reader is done."""
        from penstock.runtime.compatibility import resolve_device
        from penstock.verify.module import PoisonedModule

        wanted = self._resident
        module = PoisonedModule(self._path, self._weights_path)
        _compare(wanted, self._play(module.run_method, resolve_device(self._program, None)))
        lent = max(session.peak_bytes for session in module.sessions.values())
        return f"no weight is read after its recorded last reader; at most {format_bytes(lent)} in use at once"

    def _poisoned_run(self) -> str:
        """At the floor, with device bytes overwritten as soon as their last reader is done."""
        told = [self._poisoned(placement) for placement in self._placements]
        return f"{len(self._resident)} outputs bit-identical to those with everything resident: {'; '.join(told)}"

    def _poisoned(self, placement: str) -> str:
        import penstock

        wanted, floor = self._resident, self._floor_here(placement)
        with (
            _poison(),
            penstock.Module(self._path, floor, weights=self._weights_path, placement=placement) as module,
        ):
            _compare(wanted, self._play(module.run_method, module.device))
            peak, streamed = module.device_memory()[1], module.last_run.bytes_streamed
        return f"{placement} within {peak} bytes, {streamed} streamed in the last run"

    def _floor_here(self, placement: str) -> int:
        """The floor on this device, which the refusal of a budget of 0 names."""
        import penstock
        from penstock.errors import BelowFloorError

        try:
            penstock.Module(self._path, 0, weights=self._weights_path, placement=placement).close()
        except BelowFloorError as refusal:
            return refusal.floor_bytes
        return 0


def _compare(wanted: list[tuple[str, torch.Tensor]], played: list[tuple[str, torch.Tensor]]) -> None:
    import torch

    for (_, theirs), (name, ours) in zip(wanted, played, strict=True):
        if not torch.equal(ours, theirs):
            raise ChecksumError(f"{name} differs from the same with every weight resident")


def _checked(name: str, check: Callable[[], str | Check]) -> Check:
    try:
        found = check()
    except Exception as error:  # of any kind: compiled code and readers of damaged files raise what they like
        return Check(name, "fail", f"{type(error).__name__}: {error}")
    return found if isinstance(found, Check) else Check(name, "pass", found)


@contextmanager
def _poison() -> Iterator[None]:
    """Device bytes are overwritten as soon as their last reader is done."""
    from penstock.runtime.module import POISON_VARIABLE

    earlier = os.environ.get(POISON_VARIABLE)
    os.environ[POISON_VARIABLE] = "1"
    try:
        yield
    finally:
        if earlier is None:
            del os.environ[POISON_VARIABLE]
        else:
            os.environ[POISON_VARIABLE] = earlier


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    plain = tensor.detach().cpu().contiguous().clone()
    return torch.empty(0, dtype=torch.uint8).set_(plain.untyped_storage())
