"""Which numbers an input may hold is found out exactly: each range's ends run in the model itself, and beyond them it
refuses, too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from penstock.export.index_ranges import index_ranges
from penstock.program import IndexRange
from tests.harness import offloaded

ROWS = 12
IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])


class Table(nn.Module):
    def __init__(self, read: Callable[[Table, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(ROWS, 4))
        self.register_buffer("cache", torch.zeros(2, 8, 4))
        self.read = read

    def forward(self, ids: Tensor) -> Tensor:
        return self.read(self, ids)


def _put(model: Table, ids: Tensor) -> Tensor:
    model.cache[:, ids[0]] = model.weight[:3]
    return model.cache.clone()


def _copied_then_read(model: Table, ids: Tensor) -> Tensor:
    model.cache.index_copy_(1, ids[0], model.weight[:3].expand(2, 3, 4))
    return model.cache.index_select(1, ids[0])


def rows(low: int = 0, high: int = ROWS, region: tuple[tuple[int, int | None, int], ...] = ()) -> IndexRange:
    return IndexRange(low, high, "weight", 0, ROWS, region)


ALL = (0, None, 1)
FIRST_ROW = ((0, 1, 1), ALL)

CASES: dict[str, tuple[Callable[[Table, Tensor], Tensor], IndexRange]] = {
    "embedding": (lambda m, ids: nn.functional.embedding(ids, m.weight), rows()),
    "embedding_bag": (lambda m, ids: nn.functional.embedding_bag(ids, m.weight), rows()),
    "index": (lambda m, ids: m.weight[ids], rows(-ROWS)),
    "index_select": (lambda m, ids: m.weight.index_select(0, ids.flatten()), rows()),
    "gather": (lambda m, ids: m.weight.gather(0, ids), rows()),
    "scatter": (lambda m, ids: m.weight.scatter(0, ids, 1.0), rows()),
    "scatter_add": (lambda m, ids: m.weight.scatter_add(0, ids, m.weight[:2, :3]), rows()),
    "index_add": (lambda m, ids: m.weight.index_add(0, ids.flatten(), m.weight[:6]), rows()),
    "index_put": (_put, IndexRange(-8, 8, "cache", 1, 8, FIRST_ROW)),
    "index_copy": (_copied_then_read, IndexRange(0, 8, "cache", 1, 8, FIRST_ROW)),
    "a view of the table": (lambda m, ids: m.weight.t()[:, ids], IndexRange(-ROWS, ROWS, "weight", 1, ROWS)),
    "something computed": (lambda m, ids: (m.weight * 2)[ids], IndexRange(-ROWS, ROWS, "mul", 0, ROWS)),
    "an offset": (lambda m, ids: m.weight[ids + 2 - 1], rows(-ROWS - 1, ROWS - 1)),
    "an offset with a factor": (
        lambda m, ids: nn.functional.embedding(torch.sub(ids, 1, alpha=3), m.weight),
        rows(3, ROWS + 3),
    ),
    "views": (lambda m, ids: m.weight[ids.t().reshape(6, 1).expand(6, 2)], rows(-ROWS)),
    "a cast": (lambda m, ids: nn.functional.embedding(ids.to(torch.int32), m.weight), rows()),
    "a slice": (lambda m, ids: m.weight[ids[:, 1:]], rows(-ROWS, region=(ALL, (1, None, 1)))),
    "a slice from the end": (lambda m, ids: m.weight[ids[:, :-1]], rows(-ROWS, region=(ALL, (0, -1, 1)))),
    "every other": (lambda m, ids: m.weight[ids[:, ::2]], rows(-ROWS, region=(ALL, (0, None, 2)))),
    "the last row": (lambda m, ids: m.weight[ids[-1]], rows(-ROWS, region=((-1, None, 1), ALL))),
    "a slice of a turned view": (
        lambda m, ids: m.weight[ids.transpose(0, 1).unsqueeze(1)[1:]],
        rows(-ROWS, region=(ALL, (1, None, 1))),
    ),
    "part of a column": (lambda m, ids: m.weight[ids[:, 2][1:]], rows(-ROWS, region=((1, None, 1), (2, 3, 1)))),
}


def part_of(ids: Tensor, found: IndexRange) -> Tensor:
    return ids[tuple(slice(*part) for part in found.region)]


def ranges_of(
    read: Callable[[Table, Tensor], Tensor], ids: Tensor = IDS, dynamic_shapes: object = None
) -> tuple[IndexRange, ...]:
    return index_ranges(offloaded(Table(read), (ids,), dynamic_shapes)).get("ids", ())


@pytest.mark.parametrize("name", CASES)
def test_the_range_is_exact(name: str) -> None:
    read, expected = CASES[name]
    (found,) = ranges_of(read)
    if name == "something computed":
        assert "mul" in found.table  # the compiler's own name
        expected = IndexRange(expected.low, expected.high, found.table, 0, ROWS)
    assert found == expected
    model = Table(read).requires_grad_(False)
    for value in (found.low, found.high - 1):
        ids = torch.full_like(IDS, 2**40)  # what lies outside the region may be anything
        part_of(ids, found).fill_(value)
        model(ids)
    for value in (found.low - 1, found.high):
        ids = IDS.clone()
        part_of(ids, found).fill_(value)
        with pytest.raises((IndexError, RuntimeError)):
            model(ids)


UNKNOWN: dict[str, Callable[[Table, Tensor], Tensor]] = {
    "clamped": lambda m, ids: m.weight[ids.clamp(0, ROWS - 1)],
    "a remainder": lambda m, ids: m.weight[ids % ROWS],
    "chosen": lambda m, ids: m.weight[torch.where(ids < ROWS, ids, 0)],
    "cut to a byte": lambda m, ids: m.weight[ids.to(torch.uint8).to(torch.int64) % ROWS],
    "cut to a byte and padded": lambda m, ids: nn.functional.pad(m.weight, (0, 0, 0, 256))[ids.to(torch.uint8).long()],
    "sliced after a reshape": lambda m, ids: m.weight[ids.reshape(3, 2)[1:]],
    "sliced twice": lambda m, ids: m.weight[ids[:, 1:][:, 1:]],
    "no index at all": lambda m, ids: m.weight.sum() + ids,
    "only its sum": lambda m, ids: m.weight[ids.sum() % 3],
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_cannot_be_told_is_not_refused(name: str) -> None:
    assert ranges_of(UNKNOWN[name]) == ()


def test_of_a_dynamic_number_of_tokens() -> None:
    found = ranges_of(lambda m, ids: m.weight[ids.unsqueeze(-1)], IDS, ({1: Dim("length", max=64)},))
    assert found == (rows(-ROWS),)


def test_of_a_table_of_dynamic_size_nothing_is_known() -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, table: Tensor, ids: Tensor) -> Tensor:
            return (table * self.scale)[ids]

    program = offloaded(Rows(), (torch.ones(5, 4), IDS), ({0: Dim("rows")}, None))
    assert index_ranges(program) == {}


def test_of_several_tables_only_the_strictest_are_kept() -> None:
    def read(model: Table, ids: Tensor) -> Tensor:
        return model.weight[ids].sum() + model.cache.sum(0)[ids].sum() + model.weight[ids[0]].sum()

    (found,) = ranges_of(read)
    assert (found.low, found.high, found.region) == (-8, 8, ())

    def apart(model: Table, ids: Tensor) -> Tensor:
        return model.weight[ids].sum() + nn.functional.embedding(ids[0], model.weight).sum()

    assert ranges_of(apart) == (rows(-ROWS), rows(0, ROWS, FIRST_ROW))


def test_a_mask_and_a_float_are_no_indices() -> None:
    assert ranges_of(lambda m, ids: m.weight[:2, :3] * ids, torch.ones(2, 3)) == ()
    masked = torch.ones(ROWS, dtype=torch.bool)
    assert ranges_of(lambda m, ids: torch.where(ids[:, None], m.weight, 0.0), masked) == ()
