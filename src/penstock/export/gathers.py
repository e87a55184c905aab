"""Finds the reads of a weight that take only some of its rows, by index: those rows can be read in place."""

from __future__ import annotations

import torch
from torch.fx import Node

from penstock.torch_private.graph import arguments, op_name


def is_gathered(weight: Node) -> bool:
    """Whether every reader takes rows of the first dimension by index, and fewer in total than the weight has.

    Only rows of the weight as it is stored count: rows of a permuted view are not rows in memory.
    """
    readers = list(weight.users)
    if not readers or any(row_index(reader, weight) is None for reader in readers):
        return False
    table = weight.meta["val"]
    taken = [reader.meta["val"].numel() for reader in readers]
    # A dynamic number of rows is a number of tokens: few, where a table is worth the trouble.
    known = sum(numel for numel in taken if isinstance(numel, int))
    return bool(known < table.numel())


def row_index(reader: Node, weight: Node) -> Node | None:
    """The index by which the reader takes rows of the weight's first dimension; None if it does something else."""
    name, given = op_name(reader.target), arguments(reader)
    if name == "aten::embedding" and given["weight"] is weight:
        index = given["indices"]
    elif name == "aten::index_select" and given["self"] is weight and given["dim"] == 0:
        index = given["index"]
    elif name == "aten::index" and given["self"] is weight:
        # Only the first dimension, and by numbers: a mask is as long as the table.
        index, *others = given["indices"]
        if any(others) or index is None or index.meta["val"].dtype is torch.bool:
            return None
    else:
        return None
    return index if index is not weight else None
