"""The poison session itself: it must fail when the record is wrong, or every test that leans on it proves nothing."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from penstock.errors import PenstockError, ScheduleError, WeightEscapesError, WeightWrittenError
from penstock.schedule import Schedule, Step
from penstock.verify.module import PoisonedModule
from penstock.verify.poison import PoisonSession
from tests.harness import compiled, offloaded


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


@pytest.fixture(scope="module")
def model() -> Chain:
    torch.manual_seed(0)
    return Chain()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, model: Chain) -> Path:
    folder = tmp_path_factory.mktemp("chain")
    return compiled(folder, offloaded(model, (torch.randn(3, 16),))).program_path


def with_schedule(path: Path, schedule: Schedule) -> PoisonedModule:
    module = PoisonedModule(path)
    (method,) = module.program.methods
    changed = dataclasses.replace(method, schedule=schedule)
    module.program = dataclasses.replace(module.program, methods=(changed,))
    return module


def recorded(path: Path) -> Schedule:
    return PoisonedModule(path).program.methods[0].schedule


def test_retiring_at_the_first_of_two_readers_gives_poison(tmp_path: Path) -> None:
    class Twice(nn.Module):
        """One weight that two kernels read, with a library call between them."""

        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(8, 8, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            z = torch.view_as_complex(self.w)
            y = torch.relu(x @ x)
            return torch.view_as_real(y.to(torch.complex64) @ z)

    x = torch.randn(8, 8)
    result = compiled(tmp_path, offloaded(Twice(), (x,)))
    schedule = recorded(result.program_path)
    (access,) = schedule.accesses
    first, last = schedule.first_step[access.number], schedule.last_step[access.number]
    assert last > first
    assert torch.isfinite(PoisonedModule(result.program_path)(x)).all()
    early = tuple(
        Step(step.kernel, step.accesses if index <= first else ()) for index, step in enumerate(schedule.steps)
    )
    found = with_schedule(result.program_path, dataclasses.replace(schedule, steps=early))(x)
    assert torch.isnan(found).any()


def test_swapped_accesses_are_noticed_at_the_first(path: Path) -> None:
    schedule = recorded(path)
    a, b, *rest = schedule.accesses
    module = with_schedule(path, dataclasses.replace(schedule, accesses=(b, a, *rest)))
    with pytest.raises(ScheduleError, match=f"position 0: recorded access {b.number}, fetched access {a.number}"):
        module(torch.randn(3, 16))


def test_missing_and_surplus_records_are_noticed(path: Path) -> None:
    schedule = recorded(path)
    module = with_schedule(path, dataclasses.replace(schedule, accesses=schedule.accesses[:-1]))
    with pytest.raises(ScheduleError, match="after the last recorded one"):
        module(torch.randn(3, 16))
    more = (*schedule.steps, Step("never", ()))
    module = with_schedule(path, dataclasses.replace(schedule, steps=more))
    with pytest.raises(ScheduleError, match=f"ended {len(schedule.steps)} of {len(more)} recorded steps"):
        module(torch.randn(3, 16))


def test_a_session_recovers_after_a_failed_run(path: Path, model: Chain) -> None:
    module = PoisonedModule(path)
    x = torch.randn(3, 16)
    torch.testing.assert_close(module(x), model(x))
    session = module.sessions["forward"]
    with pytest.raises(ScheduleError, match="made 0 of"):
        session.run(list)
    torch.testing.assert_close(module(x), model(x))


class Scratch(nn.Module):
    """Writes into a copy of a weight, and returns another weight: both safe only because of what compile inserts."""

    def __init__(self) -> None:
        super().__init__()
        self.written = nn.Parameter(torch.randn(6, 4))
        self.returned = nn.Parameter(torch.randn(6, 4))

    def forward(self, x: torch.Tensor, index: torch.Tensor, which: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        copy = self.written.clone()
        copy[index] = x
        return (copy * 2).sum(), self.returned.t()


ARGUMENTS = (torch.randn(2, 4), torch.tensor([1, 4]), torch.tensor(0))


def without_guards(monkeypatch: pytest.MonkeyPatch, *checks: str) -> None:
    from penstock.export import derive
    from penstock.torch_private.inductor import GuardLentWeights

    monkeypatch.setattr(GuardLentWeights, "__call__", lambda self, graph: None)
    for check in checks:
        monkeypatch.setattr(derive, check, lambda *arguments: None)


def test_without_guards_the_derivation_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_guards(monkeypatch)
    with pytest.raises((WeightWrittenError, WeightEscapesError)):
        compiled(tmp_path, offloaded(Scratch(), ARGUMENTS))
    assert not list(tmp_path.iterdir())


def test_without_guards_and_checks_the_session_notices_the_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_guards(monkeypatch, "_refuse_writes", "_refuse_escapes")
    monkeypatch.setattr(Scratch, "forward", lambda self, x, index, which: write_into_copy(self, x, index))
    module = PoisonedModule(compiled(tmp_path, offloaded(Scratch(), ARGUMENTS)).program_path)
    with pytest.raises(ScheduleError, match="wrote into the weight of access"):
        module(*ARGUMENTS)


def read_and_return(model: Scratch, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    transposed = model.returned.t()
    return transposed, x @ transposed


def write_into_copy(model: Scratch, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    copy = model.written.clone()
    copy[index] = x
    return (copy * 2).sum()


def test_without_guards_and_checks_the_session_notices_the_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_guards(monkeypatch, "_refuse_escapes")
    # Read by a step as well: a weight that only the output reads has no reader at all, which is refused elsewhere.
    monkeypatch.setattr(Scratch, "forward", lambda self, x, index, which: read_and_return(self, x))
    monkeypatch.setattr("penstock.export.method.check_wrapper", lambda source, schedule: None)
    from penstock.export import offload

    # One fetch for both uses, as a pass without this care would make.
    monkeypatch.setattr(offload, "_is_view", lambda node: False)
    module = PoisonedModule(compiled(tmp_path, offloaded(Scratch(), ARGUMENTS)).program_path)
    with pytest.raises(WeightEscapesError, match="output 0"):
        module(*ARGUMENTS)


def test_a_fetch_outside_of_a_session_fails(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    method = PoisonedModule(path).compiled("forward")
    with pytest.raises(RuntimeError):
        method([torch.randn(3, 16)])
    assert "outside of a session" in capfd.readouterr().err


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_after_any_error_the_session_is_not_the_thread_s_any_more(
    path: Path, error: type[BaseException], capfd: pytest.CaptureFixture[str]
) -> None:
    module = PoisonedModule(path)
    module(torch.randn(3, 16))
    (session,) = module.sessions.values()

    def stopped() -> list[torch.Tensor]:
        raise error("in the middle")

    with pytest.raises(error, match="in the middle"):
        session.run(stopped)
    with pytest.raises(RuntimeError):
        module.compiled("forward")([torch.randn(3, 16)])
    assert "outside of a session" in capfd.readouterr().err


def test_two_modules_in_two_threads(path: Path, model: Chain) -> None:
    """Each thread has its own session: what one fetches, the other never sees."""
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            module = PoisonedModule(path)
            for i in range(20):
                x = torch.randn(3, 16, generator=torch.Generator().manual_seed(seed * 100 + i))
                torch.testing.assert_close(module(x), model(x))
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_bytes_on_a_device_are_refused(path: Path) -> None:
    module = PoisonedModule(path)
    weights = {name: tensor.to("meta") for name, tensor in module._weights.items()}
    with pytest.raises(PenstockError, match="host"):
        PoisonSession(module.program.methods[0].schedule, weights)
