"""ExecuTorch's own tools, with our library loaded and nothing else of ours: its lowering, its Python runtime."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from executorch.exir import ExecutorchBackendConfig, to_edge_transform_and_lower
from torch import nn

import penstock
from penstock.errors import NotOffloadedError, ProgramError
from penstock.executorch import CudaPartitioner
from penstock.executorch.backend import PenstockBackend
from tests.executorch.programs import child, random_rows
from tests.harness import FAST, offloaded
from tests.runtime.modules import EVERYTHING, generate

RUN = """
import torch
from penstock.executorch import load_library
load_library()
from executorch.runtime import Runtime
program, data, inputs, outputs = arguments
loaded = Runtime.get().load_program(program, data_path=data)
method = loaded.load_method("forward")
given = torch.load(inputs)
results = [method.execute([x]) for x in given]
torch.save(results, outputs)
answer = sorted(loaded.method_names)
"""


def test_the_stock_python_runtime_runs_it(
    lowered: Callable[[str], Path], packaged: Callable[[str], Path], tmp_path: Path
) -> None:
    path = lowered("chain")
    given = [random_rows(rows, seed=rows) for rows in (3, 1, 32, 3)]
    torch.save(given, tmp_path / "inputs")
    names, log = child(RUN, path, path.with_suffix(".ptd"), tmp_path / "inputs", tmp_path / "outputs")
    assert "forward" in names
    assert "(automatic)" in log
    with penstock.Module(packaged("chain"), EVERYTHING, quiet=True) as module:
        for x, found in zip(given, torch.load(tmp_path / "outputs"), strict=True):
            expected = module(x)
            assert torch.equal(found[0], expected["hidden"])
            assert torch.equal(found[1], expected["sum"])


def test_methods_share_state_in_the_stock_python_runtime(
    lowered: Callable[[str], Path], packaged: Callable[[str], Path], tmp_path: Path
) -> None:
    script = """
import torch
from penstock.executorch import load_library
load_library()
from executorch.runtime import Runtime
from tests.runtime.modules import generate
program, data, outputs = arguments
loaded = Runtime.get().load_program(program, data_path=data)
methods = {name: loaded.load_method(name) for name in ("prefill", "decode")}
answer, logits = generate(lambda name, *given: methods[name].execute(given)[0].clone(), 6)
torch.save(logits, outputs)
"""
    path = lowered("decoder")
    tokens, _ = child(script, path, path.with_suffix(".ptd"), tmp_path / "outputs")
    with penstock.Module(packaged("decoder"), EVERYTHING, quiet=True) as module:
        expected = generate(module.run_method, 6)
    assert tokens == expected[0]
    assert all(torch.equal(a, b) for a, b in zip(torch.load(tmp_path / "outputs"), expected[1], strict=True))


def test_order_and_floor_are_methods_of_the_program(
    lowered: Callable[[str], Path], packaged: Callable[[str], Path]
) -> None:
    script = """
from executorch.runtime import Runtime
loaded = Runtime.get().load_program(arguments[0])
answer = [loaded.load_method(name).execute([])[0] for name in arguments[1:]]
"""
    path = lowered("chain")
    (floor_bytes, order), _ = child(script, path, "weight_offload_floor_bytes", "weight_offload_access_order")
    program = penstock.read_program(packaged("chain"))
    with penstock.Module(packaged("chain"), EVERYTHING, quiet=True) as module:
        assert floor_bytes == module.floor_bytes
    assert order == ('{"forward": ["' + '", "'.join(a.weight for a in program.methods[0].schedule.accesses) + '"]}')


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(48, 64), nn.Linear(64, 48))
        self.register_buffer("offset", torch.full((), 0.25))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x * 3 + 1.5) + self.offset


def test_the_stock_lowering_takes_our_partitioner(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Pair().eval(), torch.randn(4, 48)
    program = offloaded(model, (x,))
    ours = CudaPartitioner(device="cpu", weight_offload_budget="1MiB", inductor_configs=FAST)
    lowered = to_edge_transform_and_lower(program, partitioner=[ours])
    stored = lowered.to_executorch(ExecutorchBackendConfig(segment_alignment=4096))
    stored.save(str(tmp_path / "model.pte"))
    stored.write_tensor_data_to_file(str(tmp_path))
    torch.save([x], tmp_path / "inputs")
    _, log = child(RUN, tmp_path / "model.pte", tmp_path / "weights.ptd", tmp_path / "inputs", tmp_path / "outputs")
    assert "(baked at export)" in log
    torch.testing.assert_close(torch.load(tmp_path / "outputs")[0][0], model(x))
    # Without our record of the signature: flat tensors in, flat tensors out.
    with penstock.executorch.Module(tmp_path / "model.pte", weights=tmp_path / "weights.ptd", quiet=True) as module:
        assert module.choice.source == "baked"
        assert torch.equal(module(x)[0], torch.load(tmp_path / "outputs")[0][0])


def test_a_program_without_the_pass_is_refused() -> None:
    plain = torch.export.export(Pair().eval().requires_grad_(False), (torch.randn(4, 48),))
    with pytest.raises(NotOffloadedError, match="apply_weight_offload"):
        to_edge_transform_and_lower(plain, partitioner=[CudaPartitioner(device="cpu")])


def test_one_partition_alone_is_not_lowered() -> None:
    with pytest.raises(ProgramError, match="share one budget"):
        PenstockBackend.preprocess(None, [])  # type: ignore[arg-type]
