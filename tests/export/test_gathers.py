"""Which accesses are taken for gathers: those that read rows of a weight by index, and few enough."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from penstock.export.weightless import make_weightless
from tests.harness import offloaded

ROWS, WIDTH = 50, 8
TOKENS = torch.arange(5)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(ROWS, WIDTH))


class Embedding(Table):
    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.embedding(tokens, self.table)


class Tied(Table):
    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.embedding(tokens, self.table).relu() @ self.table.t()


class Select(Table):
    def forward(self, tokens: Tensor) -> Tensor:
        return torch.index_select(self.table, 0, tokens)


class SelectColumns(Table):
    def forward(self, tokens: Tensor) -> Tensor:
        return torch.index_select(self.table, 1, tokens)


class Index(Table):
    def forward(self, tokens: Tensor) -> Tensor:
        return self.table[tokens] * 2


class IndexElements(Table):
    def forward(self, tokens: Tensor) -> Tensor:
        return self.table[tokens, tokens]


class IndexColumns(Table):
    def forward(self, tokens: Tensor) -> Tensor:
        return self.table[:, tokens]


class Transposed(Table):
    def forward(self, tokens: Tensor) -> Tensor:
        return self.table.t()[tokens]


class Mask(Table):
    def forward(self, tokens: Tensor) -> Tensor:
        chosen = torch.zeros(ROWS, dtype=torch.bool).index_fill(0, tokens, True)
        return self.table[chosen].sum(0)


class Experts(nn.Module):
    """One matrix for each expert; a token's is found by its number."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(ROWS, WIDTH, WIDTH))

    def forward(self, routed: Tensor) -> Tensor:
        x = routed[:, None, None].to(torch.float32).expand(-1, 1, WIDTH)
        return torch.bmm(x, self.experts[routed])


class TwoReaders(Table):
    """Rows are taken twice, of one weight that is read once."""

    def forward(self, tokens: Tensor) -> Tensor:
        rows = self.table[tokens]
        return rows.relu() + rows.tanh()


def gathers(model: nn.Module, tokens: Tensor = TOKENS, dynamic: bool = False) -> list[bool]:
    shapes = ({0: Dim("tokens")},) if dynamic else None
    program = make_weightless(offloaded(model, (tokens,), shapes), torch.device("cpu"), frozenset())
    return [number in program.gathered for number in sorted(program.weight_of)]


@pytest.mark.parametrize("model", [Embedding, Select, Index, Experts, TwoReaders])
def test_rows_by_index(model: type[nn.Module]) -> None:
    assert gathers(model()) == [True]


def test_a_tied_weight_is_gathered_in_one_access_and_read_whole_in_the_other() -> None:
    assert gathers(Tied()) == [True, False]


@pytest.mark.parametrize("model", [SelectColumns, IndexElements, IndexColumns, Transposed, Mask])
def test_what_is_no_row_by_index(model: type[nn.Module]) -> None:
    assert gathers(model()) == [False]


def test_as_many_rows_as_there_are_is_all_of_it() -> None:
    assert gathers(Embedding(), torch.arange(ROWS - 1)) == [True]
    assert gathers(Embedding(), torch.arange(ROWS)) == [False]


def test_a_dynamic_number_of_rows_is_taken_for_few() -> None:
    assert gathers(Embedding(), dynamic=True) == [True]
