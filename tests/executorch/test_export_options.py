"""What a lowering can be asked for beyond the program: values from a checkpoint, split linears, methods that tell."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from executorch.exir import ExecutorchBackendConfig, to_edge_transform_and_lower
from safetensors.torch import save_file
from torch import Tensor, nn

import penstock
import penstock.executorch
from penstock.cli.main import main
from penstock.errors import BelowFloorError, CheckpointError, ProgramError
from penstock.executorch import CudaPartitioner
from penstock.executorch.native import NativeModule
from penstock.runtime.session import counters
from penstock.weights import read_index
from tests.executorch.programs import STOCK_PYTHON, child
from tests.harness import FAST, offloaded
from tests.runtime.modules import EVERYTHING

WIDTH = 64
LARGE_WIDTH = 256
Opened = Callable[..., penstock.executorch.Module]


class Tied(nn.Module):
    """A weight with two names, one without another, and a state."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.second = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.last = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.last.weight = self.first.weight
        self.register_buffer("sums", torch.zeros(WIDTH, dtype=dtype), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(self.second(self.first(x)).relu())
        self.sums.add_(y[0])
        return y + self.sums


def seeded(dtype: torch.dtype = torch.float32) -> Tied:
    torch.manual_seed(5)
    return Tied(dtype).requires_grad_(False)


def rows(seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("kept", ["first.weight", "last.weight"])
def test_a_model_on_meta_takes_its_values_from_a_checkpoint(kept: str, tmp_path: Path, opened: Opened) -> None:
    """Checkpoints have one name of a tied weight, whichever it is."""
    model = seeded()
    values = dict(model.state_dict())
    del values["last.weight" if kept == "first.weight" else "first.weight"]
    save_file(values, tmp_path / "model.safetensors")
    with torch.device("meta"):
        on_meta = Tied().requires_grad_(False)
    ep = offloaded(on_meta, (torch.empty(3, WIDTH, device="meta"),))
    given = [tmp_path / "model.safetensors", {"sums": torch.zeros(WIDTH)}]
    for path, program, options in (
        (tmp_path / "a.pte", ep, {"weights": given}),
        (tmp_path / "b.pte", offloaded(seeded(), (rows(0),)), {}),
    ):
        penstock.executorch.export(program, path, device="cpu", inductor_configs=FAST, **options)
    names = [
        {entry.name for entry in penstock.weights.read_index(tmp_path / name).entries} for name in ("a.ptd", "b.ptd")
    ]
    # A state whose first value is given is stored, zeros or not.
    assert names[0] == names[1] | {"sums"} and {"first.weight", "last.weight"} <= names[1]
    from_checkpoint, from_program = (opened(tmp_path / name, EVERYTHING) for name in ("a.pte", "b.pte"))
    from_checkpoint.set_budget(from_checkpoint.floor_bytes)
    for seed in range(3):
        assert torch.equal(from_checkpoint(rows(seed)), from_program(rows(seed)))


def test_a_checkpoint_without_a_weight_is_refused_by_name(tmp_path: Path) -> None:
    save_file({"first.weight": torch.zeros(WIDTH, WIDTH)}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        ep = offloaded(Tied().requires_grad_(False), (torch.empty(3, WIDTH, device="meta"),))
    with pytest.raises(CheckpointError, match=r"second\.weight"):
        penstock.executorch.export(
            ep, tmp_path / "a.pte", device="cpu", inductor_configs=FAST, weights=tmp_path / "model.safetensors"
        )
    assert not list(tmp_path.glob("*.pt?"))


def test_split_linears(tmp_path: Path, opened: Opened) -> None:
    """As the .pt2 with the same option: to the bit, at every split."""
    dtype = torch.bfloat16
    example = (rows(0, dtype),)
    penstock.executorch.export(
        offloaded(seeded(dtype), example), tmp_path / "a.pte", device="cpu", inductor_configs=FAST, split_linear=True
    )
    compiled = penstock.compile(
        offloaded(seeded(dtype), example), tmp_path / "b.pt2", device="cpu", inductor_configs=FAST, split_linear=True
    )
    with penstock.Module(compiled.program_path, EVERYTHING) as whole:
        expected = [whole(rows(seed, dtype)) for seed in range(3)]
    for placement in ("auto", "stream", "split"):
        module = opened(tmp_path / "a.pte", EVERYTHING, placement=placement)
        for budget_bytes in (module.full_bytes, (module.floor_bytes + module.full_bytes) // 2, module.floor_bytes):
            module.set_budget(budget_bytes)
            module.reset_state()
            assert all(torch.equal(module(rows(seed, dtype)), y) for seed, y in enumerate(expected))


class Large(nn.Module):
    """Weights large enough to be packed, of a dtype that can be split."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Linear(LARGE_WIDTH, LARGE_WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(6))
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


def large() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """What the command line is pointed at."""
    torch.manual_seed(3)
    return Large(), (large_rows(0),)


def large_on_meta() -> tuple[nn.Module, tuple[Tensor, ...]]:
    with torch.device("meta"):
        return Large(), (torch.empty(3, LARGE_WIDTH, dtype=torch.bfloat16),)


def large_rows(seed: int) -> Tensor:
    return torch.randn(3, LARGE_WIDTH, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


@pytest.mark.parametrize("option", ["weights", "split_linear", "pack"])
def test_the_command_line_has_it_for_a_pte(option: str, tmp_path: Path, opened: Opened) -> None:
    """Bits, bytes and floor are those of a .pt2 that Python makes with the same option."""
    values = tmp_path / "values.safetensors"
    save_file(large()[0].state_dict(), values)
    model, example = large_on_meta() if option == "weights" else large()
    function = large_on_meta if option == "weights" else large
    flag = [f"--{option.replace('_', '-')}", *([str(values)] if option == "weights" else [])]
    arguments = ["export", f"{__name__}:{function.__name__}", "-o", str(tmp_path / "a.pte"), "--device", "cpu", *flag]
    with inductor_config.patch(FAST):
        assert main(arguments) == 0
    options: dict[str, Any] = {option: values if option == "weights" else True}
    compiled = penstock.compile(
        offloaded(model, example), tmp_path / "b.pt2", device="cpu", inductor_configs=FAST, **options
    )
    packed = {entry.packing is not None for entry in read_index(tmp_path / "a.ptd") if entry.kind == "weight"}
    assert packed == {option == "pack"}
    # What could be split would not cross the link in copies otherwise.
    ours = opened(tmp_path / "a.pte", EVERYTHING, placement="stream")
    assert {access.linear for access in ours.program.methods[0].schedule.accesses} == {option == "split_linear"}
    with penstock.Module(compiled.program_path, EVERYTHING, placement="stream") as theirs:
        assert (ours.floor_bytes, ours.full_bytes) == (theirs.floor_bytes, theirs.full_bytes)
        for budget_bytes in (ours.full_bytes, (ours.floor_bytes + ours.full_bytes) // 2, ours.floor_bytes):
            for module in (ours, theirs):
                module.set_budget(budget_bytes)
            for seed in range(3):
                assert torch.equal(ours(large_rows(seed)), theirs(large_rows(seed)))
            moved = [(run.bytes_streamed, run.bytes_decoded, run.copies) for run in (ours.last_run, theirs.last_run)]
            assert moved[0] == moved[1] and (moved[0][0] > 0) is (budget_bytes < ours.full_bytes)
            assert (moved[0][1] > 0) is (option == "pack" and budget_bytes < ours.full_bytes)
        with pytest.raises(BelowFloorError) as refused:
            ours.set_budget(theirs.floor_bytes - 1)
        assert refused.value.floor_bytes == theirs.floor_bytes


def test_packed_at_export_is_what_pack_makes_of_it(tmp_path: Path) -> None:
    """With plans for a process without Python, whose floor is Module's."""
    exported = penstock.executorch.export(
        offloaded(*large()), tmp_path / "a.pte", device="cpu", inductor_configs=FAST, pack=True
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.ptd", "a.pte"]
    penstock.unpack(tmp_path / "a.ptd", tmp_path / "raw.ptd")
    penstock.pack(tmp_path / "raw.ptd", tmp_path / "again.ptd", program=exported.program_path)
    assert (tmp_path / "again.ptd").read_bytes() == exported.weights_path.read_bytes()
    with penstock.Module(exported.program_path, EVERYTHING) as module:
        floor_bytes = module.floor_bytes
        module.set_budget(floor_bytes)
        expected = [module(large_rows(seed)) for seed in range(3)]
        moved = module.last_run
    with pytest.raises(BelowFloorError) as refused:
        alone(tmp_path, floor_bytes - 1)
    assert refused.value.floor_bytes == floor_bytes >= exported.floor_bytes
    native = alone(tmp_path, floor_bytes)
    try:
        assert all(torch.equal(native.execute("forward", (large_rows(seed),))[0], expected[seed]) for seed in range(3))
        session = native.session()
        assert session is not None
        last = counters(session[0])[0]
        assert last.bytes_decoded > last.bytes_streamed > 0
        assert (last.bytes_streamed, last.bytes_decoded) == (moved.bytes_streamed, moved.bytes_decoded)
    finally:
        native.close()


def alone(folder: Path, budget_bytes: int) -> NativeModule:
    """The delegate without Module: it takes the plans in the files."""
    native = NativeModule(str(folder / "a.pte"), [str(folder / "a.ptd")], str(budget_bytes), f"{folder} {budget_bytes}")
    try:
        native.load_method("forward")
    except BaseException:
        native.close()
        raise
    return native


RUN = """
from penstock.executorch import load_library
load_library()
from executorch.runtime import Runtime
path, = arguments
program = Runtime.get().load_program(path + ".pte", data_path=path + ".ptd")
answer = [program.load_method(name).execute([])[0]
          for name in ("weight_offload_floor_bytes", "weight_offload_access_order")]
"""


@STOCK_PYTHON
def test_executorchs_lowering_writes_floor_and_order_as_methods(tmp_path: Path, opened: Opened) -> None:
    ours = CudaPartitioner(device="cpu", inductor_configs=FAST)
    edge = to_edge_transform_and_lower(
        offloaded(seeded(), (rows(0),)),
        # ExecuTorch copies the table for every pass and every partitioner.
        transform_passes=[],
        partitioner=[ours],
        constant_methods=ours.constant_methods,
    )
    program = edge.to_executorch(ExecutorchBackendConfig(segment_alignment=4096))
    program.save(str(tmp_path / "weights.pte"))
    program.write_tensor_data_to_file(str(tmp_path))
    (floor_bytes, order), _ = child(RUN, tmp_path / "weights")
    module = opened(tmp_path / "weights.pte", floor_bytes)
    assert floor_bytes == module.floor_bytes
    assert json.loads(order) == {"forward": [access.weight for access in module.program.methods[0].schedule.accesses]}


def test_two_partitioners_of_ours_are_refused() -> None:
    def partitioner() -> Any:
        return [CudaPartitioner(device="cpu", inductor_configs=FAST)]

    programs = {name: offloaded(seeded(), (rows(0),)) for name in ("one", "two")}
    with pytest.raises(ProgramError, match="use one CudaPartitioner"):
        to_edge_transform_and_lower(programs, partitioner={name: partitioner() for name in programs})
