"""State of a .pte: on the delegates' device wherever one of them reads and writes it, else in ExecuTorch's memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from torch import Tensor, nn

import penstock
import penstock.executorch
from penstock.errors import InputError, ProgramError, StateInvalidError
from penstock.executorch.partitioner import TornStateError
from penstock.weights import read_index
from tests.harness import FAST, offloaded
from tests.runtime.modules import EVERYTHING, generate

WIDTH = 32
Opened = Callable[..., penstock.executorch.Module]


class Counter(nn.Module):
    """One weight, two states: one of sums, and one that does not start as zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(WIDTH * WIDTH).view(WIDTH, WIDTH).remainder(3.0) - 1)
        self.register_buffer("sums", torch.zeros(WIDTH), persistent=False)
        self.register_buffer("calls", torch.full((WIDTH,), 5.0))


class Adding(Counter):
    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight
        self.sums.add_(y[0])
        self.calls.add_(1)
        return y + self.sums + self.calls


class Reading(Counter):
    """Reads what the other method writes."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight * self.sums + self.calls


class Returning(Counter):
    """A next value that is a result as well is ExecuTorch's, in all methods."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls.add_(2)
        return x @ self.weight, self.calls


def programs(**methods: nn.Module) -> dict[str, Any]:
    return {name: offloaded(module, (torch.ones(1, WIDTH),)) for name, module in methods.items()}


@pytest.fixture
def opened_with(tmp_path: Path, opened: Opened) -> Callable[..., penstock.executorch.Module]:
    def make(methods: dict[str, Any], **options: Any) -> penstock.executorch.Module:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.pte"
        penstock.executorch.export(methods, path, device="cpu", inductor_configs=FAST)
        return opened(path, EVERYTHING, **options)

    return make


def rows(seed: int) -> Tensor:
    return torch.randint(-2, 3, (1, WIDTH), generator=torch.Generator().manual_seed(seed)).float()


def test_what_one_method_writes_another_one_reads(opened_with: Callable[..., penstock.executorch.Module]) -> None:
    module = opened_with(programs(add=Adding(), read=Reading()))
    assert [module._native.state_names(method) for method in ("add", "read")] == [[], []]
    assert module.state_bytes == module.device_state_bytes == 2 * 4 * WIDTH
    adding, reading = Adding(), Reading()
    for seed in range(3):
        x = rows(seed)
        assert torch.equal(module.run_method("add", x), adding(x))
        reading.sums.copy_(adding.sums)
        reading.calls.copy_(adding.calls)
        assert torch.equal(module.run_method("read", x), reading(x))
    assert torch.equal(module.read_state("sums"), adding.sums)
    module.reset_state()
    assert not module.read_state("sums").any() and module.read_state("calls").tolist() == [5.0] * WIDTH


def test_one_that_cannot_lie_in_a_delegate_is_executorchs(
    opened_with: Callable[..., penstock.executorch.Module],
) -> None:
    module = opened_with(programs(add=Adding(), give=Returning()))
    # Of the two that a method has, one lies here and one there.
    assert [module._native.state_names(method) for method in ("add", "give")] == [["calls"], ["calls"]]
    assert module._sessions.payload.states == ["sums"]
    assert module.state_bytes == 2 * 4 * WIDTH
    x = rows(1)
    assert module.run_method("give", x)[1].tolist() == [7.0] * WIDTH
    assert torch.equal(module.run_method("add", x), 2 * (x @ Adding().weight) + 8)
    assert module.read_state("calls").tolist() == [8.0] * WIDTH
    module.write_state("calls", torch.zeros(WIDTH))
    module.write_state("sums", torch.ones(WIDTH))
    assert torch.equal(module.run_method("add", x), 2 * (x @ Adding().weight) + 2)
    order = torch.arange(WIDTH).flip(0)
    sums = module.read_state("sums")
    module.select_state_rows(order)
    assert torch.equal(module.read_state("sums"), sums.flip(0))
    with pytest.raises(InputError, match="there is no state 'nothing'; the program has sums, calls"):
        module.read_state("nothing")
    module.reset_state()
    assert module.run_method("give", x)[1].tolist() == [7.0] * WIDTH


def test_executorchs_lowering_is_told_what_to_leave() -> None:
    def lowered(**options: Any) -> Any:
        ours = penstock.executorch.CudaPartitioner(device="cpu", inductor_configs=FAST, **options)
        return to_edge_transform_and_lower(programs(add=Adding(), give=Returning()), partitioner=[ours])

    with pytest.raises(TornStateError, match=r"give CudaPartitioner leave_states=\['calls'\]"):
        lowered()
    with pytest.raises(ProgramError, match="leave_states: the lowered program has no state call; it has calls, sums"):
        lowered(leave_states=["calls", "call"])
    edge = lowered(leave_states=["calls"])
    left = [spec.target for spec in edge.exported_program("add").graph_signature.input_specs if spec.target]
    assert left == ["calls"]


def test_a_method_that_reads_what_is_left_to_executorch(
    opened_with: Callable[..., penstock.executorch.Module],
) -> None:
    """Taken for a weight, it would stay as it was at export."""
    module = opened_with(programs(give=Returning(), read=Reading()))
    x = rows(2)
    for times in (1, 2):
        assert module.run_method("give", x)[1].tolist() == [5.0 + 2 * times] * WIDTH
        assert torch.equal(module.run_method("read", x), torch.full((1, WIDTH), 5.0 + 2 * times))


def test_sessions_of_their_own_share_state(lowered: Callable[[str], Path], packaged: Path, opened: Opened) -> None:
    module = opened(lowered("decoder"), EVERYTHING, delegate_budgets={"decode": EVERYTHING})
    with penstock.Module(packaged, EVERYTHING) as ours:
        tokens, logits = generate(ours.run_method, 4)
    for _ in range(2):
        found = generate(module.run_method, 4)
        assert found[0] == tokens
        assert all(torch.equal(a, b) for a, b in zip(found[1], logits, strict=True))
        module.reset_state()


def test_a_failed_run_invalidates_both_kinds(
    opened_with: Callable[..., penstock.executorch.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = opened_with(programs(add=Adding(), give=Returning()))
    x = rows(3)
    with monkeypatch.context() as patched:
        patched.setattr(module._native, "execute", failing)
        with pytest.raises(penstock.errors.RuntimeFailure):
            module.run_method("add", x)
    for name in ("sums", "calls"):
        with pytest.raises(StateInvalidError, match="'add' failed: planted"):
            module.read_state(name)
    for method in ("add", "give"):
        with pytest.raises(StateInvalidError, match="'add' failed: planted"):
            module.run_method(method, x)
    module.reset_state()
    assert torch.equal(module.run_method("add", x), 2 * (x @ Adding().weight) + 6)


def failing(method: str, inputs: object) -> list[object]:
    raise penstock.errors.RuntimeFailure("planted")


class Remembering(nn.Module):
    """One weight, and a state with a first value, both large enough to be packed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(256, 256, bias=False, dtype=torch.bfloat16)
        self.register_buffer("state", torch.randn(256, 256, generator=torch.Generator().manual_seed(1)).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        self.state.add_(self.linear(x))
        return self.state.clone()


def test_a_first_value_may_be_packed(tmp_path: Path, opened: Opened) -> None:
    """In ExecuTorch's files nothing tells it from a weight."""
    path, first = tmp_path / "model.pte", Remembering().state
    ep = offloaded(Remembering(), (first,))
    penstock.executorch.export(ep, path, device="cpu", inductor_configs=FAST)
    penstock.executorch.merge_weights([path.with_suffix(".ptd")], tmp_path / "raw.ptd")
    penstock.pack(tmp_path / "raw.ptd", tmp_path / "packed.ptd")
    packed = {entry.name for entry in read_index(tmp_path / "packed.ptd").entries if entry.packing is not None}
    assert packed == {"linear.weight", "state"}
    for name in ("model", "packed"):
        module = opened(path, EVERYTHING, weights=tmp_path / f"{name}.ptd")
        for _ in range(2):
            assert torch.equal(module.read_state("state"), first)
            module(first)
            module.reset_state()
