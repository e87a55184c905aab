"""A .pte on a GPU: the outputs of the .pt2 to the bit, inside the same budgets, with memory as the driver sees it.

Device memory is read for the whole GPU, so these tests want it to themselves: run them without xdist.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from examples import decoder

import penstock
from penstock import errors
from penstock.weights import WeightsIndex
from tests.gpu import programs
from tests.harness import bits

pytest.importorskip("executorch.exir")

import penstock.executorch
from penstock.executorch.native import NativeModule

DEVICE = "cuda"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device"),
]

EVERYTHING = "64GiB"
PROMPT = 8
TOKENS = 4
# Events, streams, loaded kernels and activations are the driver's and torch's, not weights.
SLACK_BYTES = 36 << 20


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The .pte and the .pt2 of one decoder; kept in PENSTOCK_GPU_PROGRAMS where that is set."""
    kept = os.environ.get("PENSTOCK_GPU_PROGRAMS")
    folder = Path(kept) if kept else tmp_path_factory.mktemp("gpu_executorch")
    package, program = folder / "decoder" / "model.pt2", folder / "executorch" / "model.pte"
    if not package.exists() or not program.exists():
        torch.manual_seed(0)
        methods = {
            name: penstock.apply_weight_offload(decoder.export(case))
            for name, case in decoder.methods(programs.DECODER).items()
        }
        for path in (package, program):
            path.parent.mkdir(parents=True, exist_ok=True)
        if not program.exists():
            penstock.executorch.export(methods, program, device=DEVICE)
        if not package.exists():
            penstock.compile(methods, package, device=DEVICE)
    return program, package


@pytest.fixture(autouse=True)
def _quiet_device() -> Iterator[None]:
    forget_unused()
    yield
    forget_unused()


def forget_unused() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def device_bytes() -> int:
    if DEVICE != "cuda":
        return 0
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def generated(run: Any, device: str = "cpu") -> list[torch.Tensor]:
    """Prefill, then decode: methods take turns, and share the cache."""
    prompt = torch.arange(PROMPT, device=device)[None] * 7 % programs.DECODER.vocab
    outputs = [run("prefill", prompt.clone(), torch.arange(PROMPT, device=device)).cpu()]
    for step in range(TOKENS):
        token = outputs[-1].argmax(-1).reshape(1, 1).to(device)
        outputs.append(run("decode", token, torch.full((1,), PROMPT + step, device=device)).cpu())
    return outputs


def first_output(native: NativeModule, name: str, *inputs: torch.Tensor) -> torch.Tensor:
    found = native.execute(name, inputs)[0]
    assert isinstance(found, torch.Tensor)
    return found


def afresh(module: Any, device: str = "cpu") -> list[torch.Tensor]:
    module.reset_state()
    return generated(module.run_method, device)


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(bits(a), bits(b)) for a, b in zip(first, second, strict=True))


@pytest.fixture(scope="module")
def resident(files: tuple[Path, Path]) -> tuple[list[torch.Tensor], int, int]:
    """The outputs of the .pte with every weight resident; its floor, and what everything takes."""
    with penstock.executorch.Module(files[0], EVERYTHING) as module:
        return afresh(module), module.floor_bytes, module.budget_bytes


def budgets(resident: tuple[list[torch.Tensor], int, int]) -> list[int]:
    _, floor_bytes, full_bytes = resident
    return [floor_bytes, max(floor_bytes, full_bytes // 2), full_bytes]


def test_outputs_are_those_of_the_pt2_at_every_budget(
    files: tuple[Path, Path], resident: tuple[list[torch.Tensor], int, int]
) -> None:
    wanted, floor_bytes, full_bytes = resident
    for budget_bytes in budgets(resident):
        with penstock.Module(files[1], budget_bytes) as package:
            assert package.floor_bytes == floor_bytes
            package_state_bytes = package.state_bytes
            assert same(afresh(package, DEVICE), wanted), budget_bytes
        with penstock.executorch.Module(files[0], budget_bytes) as module:
            assert module.device.type == DEVICE
            # The caches lie there, too, and ExecuTorch has none of them.
            assert module.device_state_bytes == module.state_bytes == package_state_bytes > 0
            assert [module._native.state_names(method) for method in ("prefill", "decode")] == [[], []]
            for run in range(4):
                assert same(afresh(module), wanted), (budget_bytes, run)
            held_bytes, peak_bytes = module.device_memory()
            assert held_bytes == peak_bytes == module.plan.device_bytes <= budget_bytes
            last, warm = module.last_run, module.plan.method("decode").warm
            assert (last.bytes_streamed, last.copies, last.bytes_hit) == (
                warm.bytes_streamed,
                warm.copies,
                warm.bytes_hit,
            )
            assert (last.bytes_streamed == 0) == (budget_bytes == full_bytes)
    with pytest.raises(errors.BelowFloorError, match=f"needs at least {floor_bytes} bytes"):
        penstock.executorch.Module(files[0], floor_bytes - 1)


def test_device_memory_as_the_driver_sees_it(
    files: tuple[Path, Path], resident: tuple[list[torch.Tensor], int, int]
) -> None:
    wanted, _, full_bytes = resident
    for budget_bytes in budgets(resident):
        before_bytes = device_bytes()
        module = penstock.executorch.Module(files[0], budget_bytes)
        most_bytes = budget_bytes + module.device_state_bytes + SLACK_BYTES
        assert device_bytes() - before_bytes <= most_bytes
        assert same(afresh(module), wanted)
        forget_unused()
        assert device_bytes() - before_bytes <= most_bytes
        module.close()
        del module
        forget_unused()
        assert device_bytes() - before_bytes <= SLACK_BYTES
    assert full_bytes > 2 * SLACK_BYTES or DEVICE != "cuda"  # else the slack would hide a copy of the model


def test_twentieth_run(files: tuple[Path, Path], resident: tuple[list[torch.Tensor], int, int]) -> None:
    wanted, floor_bytes, _ = resident
    with penstock.executorch.Module(files[0], floor_bytes) as module:
        for run in range(20):
            assert same(afresh(module), wanted), run
        assert module.stats().runs == 20 * (1 + TOKENS)


def test_runs_follow_the_current_stream(
    files: tuple[Path, Path], resident: tuple[list[torch.Tensor], int, int]
) -> None:
    if DEVICE != "cuda":
        pytest.skip("there are no streams")
    wanted, floor_bytes, _ = resident
    with penstock.executorch.Module(files[0], floor_bytes) as module:
        for run in range(6):
            side = torch.cuda.Stream()
            with torch.cuda.stream(side if run % 2 else torch.cuda.current_stream()):
                torch.cuda._sleep(20_000_000)
                assert same(afresh(module), wanted), run


def test_the_delegate_s_own_session(files: tuple[Path, Path], resident: tuple[list[torch.Tensor], int, int]) -> None:
    """As a process without Python has it: nothing is lent, the delegates choose among the plans in the file."""
    wanted, floor_bytes, full_bytes = resident
    state_bytes = sum(state.nbytes for state in penstock.read_program(files[1]).states)
    for number, budget_bytes in enumerate(budgets(resident)):
        before_bytes = device_bytes()
        native = NativeModule(
            str(files[0]), [str(files[0].with_suffix(".ptd"))], str(budget_bytes), f"own session {number}"
        )
        try:
            for name in ("prefill", "decode"):
                native.load_method(name)
            found = native.session()
            assert found is not None
            facts = found[1]
            assert (facts.floor_bytes, facts.budget_bytes) == (floor_bytes, budget_bytes)
            assert facts.plan_bytes <= budget_bytes
            assert device_bytes() - before_bytes <= budget_bytes + state_bytes + SLACK_BYTES
            for run in range(3):
                outputs = generated(partial(first_output, native))
                # The cache keeps what the run before left: only positions that are written again are read.
                assert same(outputs, wanted), (budget_bytes, run)
        finally:
            native.close()
    with pytest.raises(errors.BelowFloorError):
        native = NativeModule(
            str(files[0]), [str(files[0].with_suffix(".ptd"))], str(floor_bytes - 1), "below the floor"
        )
        native.load_method("decode")
    assert full_bytes > floor_bytes


def test_budget_trace_and_state(
    files: tuple[Path, Path], resident: tuple[list[torch.Tensor], int, int], tmp_path: Path
) -> None:
    wanted, floor_bytes, full_bytes = resident
    with penstock.executorch.Module(files[0], full_bytes) as module:
        for budget_bytes in (floor_bytes, (floor_bytes + full_bytes) // 2, full_bytes, floor_bytes):
            module.set_budget(budget_bytes)
            assert module.device_memory()[0] <= budget_bytes
            assert same(afresh(module), wanted)
        with module.trace(tmp_path / "trace.json"):
            for step in range(3):
                module.run_method("decode", torch.zeros(1, 1, dtype=torch.int64), torch.full((1,), 20 + step))
        events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        copies = [event for event in events if event.get("cat") == "copy"]
        plan = module.plan.method("decode")
        assert sum(event["args"]["bytes"] for event in copies) == 3 * plan.warm.bytes_streamed
        for before, after in itertools.pairwise(copies):  # one stream: nothing overlaps
            assert before["ts"] + before["dur"] <= after["ts"] + 1
        assert module.read_state("layers.0.attn.k_cache").any()
        assert same(afresh(module), wanted)


def test_staged_weights(files: tuple[Path, Path], resident: tuple[list[torch.Tensor], int, int]) -> None:
    wanted, _, full_bytes = resident
    with penstock.executorch.Module(files[0], (3 * full_bytes) // 4, host_memory="64MiB") as module:
        assert module.host_bytes <= 64 << 20
        for _ in range(3):
            assert same(afresh(module), wanted)


@pytest.fixture(scope="module")
def packed(files: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> WeightsIndex:
    folder = tmp_path_factory.mktemp("packed")
    penstock.executorch.merge_weights([files[0].with_suffix(".ptd")], folder / "raw.ptd")
    return penstock.pack(folder / "raw.ptd", folder / "packed.ptd", program=files[0])


def test_packed_weights_give_the_same_bits(
    files: tuple[Path, Path], packed: WeightsIndex, resident: tuple[list[torch.Tensor], int, int]
) -> None:
    wanted = resident[0]
    assert packed["embed.weight"].packing is None, "it is gathered from"
    with penstock.executorch.Module(files[0], EVERYTHING, weights=packed.path) as module:
        floor_bytes, full_bytes = module.floor_bytes, module.full_bytes
        for budget_bytes in (floor_bytes, max(floor_bytes, full_bytes // 2), full_bytes):
            module.set_budget(budget_bytes)
            for run in range(3):
                assert same(afresh(module), wanted), (budget_bytes, run)
            assert module.device_memory()[0] <= budget_bytes
            last, plan = module.last_run, module.plan.method("decode")
            assert (last.bytes_streamed, last.bytes_decoded) == (plan.warm.bytes_streamed, plan.warm.bytes_decoded)
            assert last.bytes_streamed == sum(copy.link_bytes for copy in plan.copies)
            assert (last.bytes_streamed == 0) == (budget_bytes == full_bytes)
            # Over the link as the file has them, not as they are decoded: whole weights in 0.68 of their bytes,
            # and a part of one that begins inside of a block with all of that block.
            brought = [copy for copy in plan.copies if copy.packed_bytes]
            ratio = sum(copy.link_bytes for copy in brought) / max(1, sum(copy.piece.nbytes for copy in brought))
            assert ratio < 1 and (0.65 < ratio < 0.8 or budget_bytes > floor_bytes), (budget_bytes, ratio)
        # And fewer than of the file that is not packed, in the same room.
        module.set_budget(floor_bytes)
        afresh(module)
        packed_bytes = module.last_run.bytes_streamed
    with penstock.executorch.Module(files[0], floor_bytes) as module:
        assert same(afresh(module), wanted)
        assert 0 < packed_bytes < module.last_run.bytes_streamed


def test_packed_weights_in_the_delegate_s_own_session(
    files: tuple[Path, Path], packed: WeightsIndex, resident: tuple[list[torch.Tensor], int, int]
) -> None:
    """By the plans in the file, and slots beside them."""
    with pytest.raises(errors.BelowFloorError) as refused:
        NativeModule(str(files[0]), [str(packed.path)], "1000", "packed, too little").load_method("decode")
    floor_bytes = refused.value.floor_bytes
    for budget_bytes in (floor_bytes, max(floor_bytes, resident[2] // 2), 2 * resident[2]):
        native = NativeModule(str(files[0]), [str(packed.path)], str(budget_bytes), f"packed {budget_bytes}")
        try:
            for name in ("prefill", "decode"):
                native.load_method(name)
            for run in range(3):
                assert same(generated(partial(first_output, native)), resident[0]), (budget_bytes, run)
        finally:
            native.close()


def test_a_device_that_is_not_there(files: tuple[Path, Path]) -> None:
    missing = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises((errors.DeviceError, errors.BuildMismatchError), match=missing):
        penstock.executorch.Module(files[0], EVERYTHING, device=missing)


def test_another_device_s_number(files: tuple[Path, Path], resident: tuple[list[torch.Tensor], int, int]) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    if torch.cuda.get_device_capability(0) != torch.cuda.get_device_capability(1):
        pytest.skip("needs two CUDA devices of one compute capability")
    with penstock.executorch.Module(files[0], resident[1], device="cuda:1") as module:
        assert module.device == torch.device("cuda", 1)
        assert same(afresh(module), resident[0])
