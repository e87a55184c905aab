"""Which reads of a weight take only some of its rows, by index: those can be read where the weight lies."""

from __future__ import annotations

import torch
from torch.fx import Node

from penstock.torch_private.graph import arguments, op_name


def is_gathered(weight: Node) -> bool:
    """Whether every reader takes rows of the first dimension by index, and fewer in all than there are.

    Only of the weight as it lies: rows of a permuted view are no rows in memory.
    """
    readers = list(weight.users)
    if not readers or not all(_takes_rows(reader, weight) for reader in readers):
        return False
    table = weight.meta["val"]
    taken = [reader.meta["val"].numel() for reader in readers]
    # A dynamic number of rows is one of tokens: few, where a table is worth the trouble.
    known = sum(numel for numel in taken if isinstance(numel, int))
    return bool(known < table.numel())


def _takes_rows(reader: Node, weight: Node) -> bool:
    name, given = op_name(reader.target), arguments(reader)
    if name == "aten::embedding":
        return given["weight"] is weight and given["indices"] is not weight
    if name == "aten::index_select":
        return given["self"] is weight and given["index"] is not weight and given["dim"] == 0
    return name == "aten::index" and given["self"] is weight and _is_first_only(given["indices"])


def _is_first_only(indices: list[Node | None]) -> bool:
    """Of the weight's dimensions only the first is indexed, and by numbers: a mask is as long as the table."""
    first, *others = indices
    return first is not None and first.meta["val"].dtype is not torch.bool and not any(others)
