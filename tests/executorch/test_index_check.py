"""Tokens and positions outside what they index, in a process without Python: refused before anything runs, in Module's
words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import penstock
import penstock.executorch
from penstock.errors import InputError
from penstock.executorch.native import NativeModule
from tests.harness import FAST, offloaded
from tests.runtime.modules import EVERYTHING

ROWS, COLUMNS = 7, 6


class Indexing(nn.Module):
    """A table by every second number of an input, counted from the end where they are below zero; columns of a table by
    numbers of 32 bits; and a row of a state by one number alone."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        # Whole numbers, so that no order of sums matters.
        self.table = nn.Parameter(torch.arange(ROWS * COLUMNS).float().reshape(ROWS, COLUMNS))
        self.register_buffer("calls", torch.zeros(4))

    def forward(self, ids: Tensor, columns: Tensor, row: Tensor) -> Tensor:
        self.calls.index_add_(0, row, torch.ones(1))
        rows = self.table[ids[:, 1::2]]
        return rows.sum(-1) + torch.index_select(self.table, 1, columns).sum() + self.calls.sum()


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.tensor([[99, 6, 99, -7], [-99, 0, 99, -1]])
    return ids, torch.tensor([5, 0, 2], dtype=torch.int32), torch.tensor([3])


def changed(which: int, place: tuple[int, ...], value: int) -> tuple[Tensor, ...]:
    found = list(inputs())
    found[which][place] = value
    return tuple(found)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("index") / "model.pte"
    exported = offloaded(Indexing().requires_grad_(False), inputs())
    penstock.executorch.export(exported, path, device="cpu", inductor_configs=FAST)
    return path


@pytest.fixture
def alone(program: Path) -> Iterator[NativeModule]:
    native = NativeModule(str(program), [str(program.with_suffix(".ptd"))], "auto", "index check")
    native.load_method("forward")
    yield native
    native.close()


@pytest.mark.parametrize(
    ("which", "place", "value"),
    [(0, (0, 1), ROWS), (0, (1, 3), -ROWS - 1), (1, (2,), COLUMNS), (1, (0,), -1), (2, (0,), 4), (2, (0,), 1 << 40)],
)
def test_what_module_refuses_is_refused_in_its_words(
    which: int, place: tuple[int, ...], value: int, program: Path, alone: NativeModule
) -> None:
    wrong = changed(which, place, value)
    with penstock.Module(program, EVERYTHING) as module:
        expected = module(*inputs())
        with pytest.raises(InputError) as said:
            module(*wrong)
    assert torch.equal(alone.execute("forward", inputs())[0], expected)
    with pytest.raises(InputError, match=str(value)) as found:
        alone.execute("forward", wrong)
    # Nothing was begun: state is valid, and counts what has run.
    assert torch.equal(alone.execute("forward", inputs())[0], expected + 1)
    # Python adds the signature behind.
    assert str(found.value) == str(said.value).partition("\nexpected: ")[0]


def test_what_is_not_taken_may_be_anything(alone: NativeModule) -> None:
    expected = alone.execute("forward", inputs())[0]
    ids, columns, row = inputs()
    ids[:, ::2] = 1 << 40
    assert torch.equal(alone.execute("forward", (ids, columns, row))[0], expected + 1)
