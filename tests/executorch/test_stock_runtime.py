"""ExecuTorch's own tools, with our library loaded and nothing else of ours: its lowering, its Python runtime."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.exir import to_edge_transform_and_lower

import penstock
from penstock.errors import NotOffloadedError, ProgramError
from penstock.executorch import CudaPartitioner
from penstock.executorch.backend import PenstockBackend
from tests.executorch.programs import STOCK_PYTHON, Hazards, child, random_rows, seeded
from tests.runtime.modules import EVERYTHING, generate

RUN = """
import torch
from penstock.executorch import load_library
load_library()
from executorch.runtime import Runtime
from tests.runtime.modules import generate

def loaded(program):
    return Runtime.get().load_program(program, data_path=program.removesuffix("pte") + "ptd")

chain, decoder, hazards, inputs, outputs = arguments
given = torch.load(inputs)
method = loaded(chain).load_method("forward")
results = {"chain": [[value.clone() for value in method.execute([x])] for x in given["chain"]]}
program = loaded(decoder)
methods = {name: program.load_method(name) for name in ("prefill", "decode")}
tokens, results["decoder"] = generate(lambda name, *values: methods[name].execute(values)[0].clone(), 6)
results["hazards"] = loaded(hazards).load_method("forward").execute([given["hazards"]])
torch.save(results, outputs)
own = ["weight_offload_floor_bytes", "weight_offload_access_order"]
answer = [tokens, [program.load_method(name).execute([])[0] for name in own]]
"""


@STOCK_PYTHON
def test_the_stock_python_runtime_runs_it(
    lowered: Callable[[str], Path], packaged: Path, opened: Callable[..., Any], tmp_path: Path
) -> None:
    given = {"chain": [random_rows(rows, seed=rows) for rows in (3, 1, 32, 3)], "hazards": torch.randn(4, 48)}
    torch.save(given, tmp_path / "inputs")
    programs = [lowered(name) for name in ("chain", "decoder", "hazards")]
    (tokens, (floor_bytes, order)), log = child(RUN, *programs, tmp_path / "inputs", tmp_path / "outputs")
    found = torch.load(tmp_path / "outputs")
    assert "(automatic)" in log and "(baked at export)" in log
    for x, results in zip(given["chain"], found["chain"], strict=True):
        expected = opened(programs[0], EVERYTHING)(x)
        assert torch.equal(results[0], expected["hidden"])
        assert torch.equal(results[1], expected["sum"])
    with penstock.Module(packaged, EVERYTHING) as module:
        # Methods share state there, too; and order and floor are methods of the program.
        expected_tokens, logits = generate(module.run_method, 6)
        assert tokens == expected_tokens
        assert all(torch.equal(a, b) for a, b in zip(found["decoder"], logits, strict=True))
        assert floor_bytes == module.floor_bytes
    assert json.loads(order) == {
        method.name: [access.weight for access in method.schedule.accesses]
        for method in opened(programs[1], EVERYTHING).program.methods
    }
    for ours, theirs in zip(found["hazards"], seeded(Hazards)(given["hazards"]), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_stock_lowering_takes_our_partitioner(
    lowered: Callable[[str], Path], opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also obstacles 2 and 5: weights that are returned, or seem to be written into, and constants from nowhere."""
    path = lowered("hazards")
    weights = path.with_suffix(".ptd").read_bytes()
    reference = seeded(Hazards).eval()
    monkeypatch.setenv("PENSTOCK_POISON", "1")
    module = opened(path)
    assert "(baked at export)" in module.summary
    module.set_budget(module.floor_bytes)
    kept = []
    for seed in range(3):
        x = torch.randn(4, 48, generator=torch.Generator().manual_seed(seed))
        # Without our record of the signature: flat tensors in, flat tensors out.
        found = module(x)
        kept.append((found, [value.clone() for value in found]))
        for ours, theirs in zip(found, reference(x), strict=True):
            torch.testing.assert_close(ours, theirs)
        # What was returned is the caller's: later runs leave it alone.
        assert all(torch.equal(a, b) for before, copies in kept for a, b in zip(before, copies, strict=True))
    assert torch.equal(found[2], reference.table) and torch.equal(found[3], reference.table.t())
    assert module.stats().bytes_streamed > 0
    assert path.with_suffix(".ptd").read_bytes() == weights


def test_a_program_without_the_pass_is_refused() -> None:
    plain = torch.export.export(Hazards().eval().requires_grad_(False), (torch.randn(4, 48),))
    with pytest.raises(NotOffloadedError, match="apply_weight_offload"):
        to_edge_transform_and_lower(plain, partitioner=[CudaPartitioner(device="cpu")])


def test_one_partition_alone_is_not_lowered() -> None:
    with pytest.raises(ProgramError, match="share one budget"):
        PenstockBackend.preprocess(None, [])  # type: ignore[arg-type]
