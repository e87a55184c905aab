"""Reorders the rows of all states, for beam search."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from penstock.errors import InputError


def check_rows(states: Mapping[str, torch.Tensor], rows: torch.Tensor, dims: Mapping[str, int]) -> None:
    """`dims`: the dimension of each state that its rows lie along."""
    sizes = {name: tensor.shape[dims[name]] if tensor.dim() else 0 for name, tensor in states.items()}
    unfit = [name for name, size in sizes.items() if size != rows.numel()]
    if unfit or rows.dtype != torch.int64 or rows.dim() != 1:
        raise InputError(
            f"rows are {str(rows.dtype).removeprefix('torch.')}{list(rows.shape)}, needs one int64 for each row of "
            f"every state ({', '.join(f'{name} has {sizes[name]}' for name in unfit[:4])})"
        )
    if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < rows.numel():
        raise InputError(f"rows are {rows.tolist()}, each must be from 0 to {rows.numel() - 1}")


def select_rows(states: Mapping[str, torch.Tensor], rows: torch.Tensor, dims: Mapping[str, int]) -> None:
    """Row i of every state becomes the former row rows[i]. Holds one state at a time twice."""
    with torch.no_grad():
        for name, tensor in states.items():
            tensor.copy_(tensor.index_select(dims[name], rows.to(tensor.device)))
