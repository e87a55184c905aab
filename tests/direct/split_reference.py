"""The split linear in plain torch on the CPU, with the kernel's interface and order: tiles of rows, chunks of columns.

Head and rest are two tensors, and a tile that lies on both sides is gathered from both, as the kernel does it. Every
tile goes through the same calls on buffers of the same shape, wherever its rows came from: so the bits do not depend on
the split. They are not the GPU's bits: the tensor cores add within a chunk in an order of their own.
"""

from __future__ import annotations

import torch

from penstock.direct.launch_shape import check_sizes
from penstock.direct.schedule import CHUNK
from penstock.direct.tile_shape import choose_tile


def split_linear_reference(
    x: torch.Tensor, prefix: torch.Tensor | None, rest: torch.Tensor | None, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x (T, K), prefix (H, K), rest (N - H, K), bias (N,): y (T, N) in x's dtype, summed in 32 bits."""
    tokens, depth = x.shape
    prefix_rows = 0 if prefix is None else prefix.shape[0]
    rows = prefix_rows + (0 if rest is None else rest.shape[0])
    check_sizes(tokens, rows, depth, prefix_rows)
    tile = choose_tile(tokens)
    y = x.new_empty(tokens, rows)
    for row in range(0, rows, tile.tile_rows):
        sums = torch.zeros(tokens, tile.tile_rows, dtype=torch.float32)
        for column in range(0, depth, CHUNK):
            # What lies outside of the matrices is zero, as the copy engine fills it.
            w_slot, x_slot = torch.zeros(tile.tile_rows, CHUNK), torch.zeros(tokens, CHUNK)
            width = min(CHUNK, depth - column)
            x_slot[:, :width] = x[:, column : column + width]
            for side, first in ((prefix, 0), (rest, prefix_rows)):
                if side is None:
                    continue
                from_row, to_row = max(row, first), min(row + tile.tile_rows, first + side.shape[0])
                if from_row < to_row:
                    part = side[from_row - first : to_row - first, column : column + width]
                    w_slot[from_row - row : to_row - row, :width] = part
            sums += x_slot @ w_slot.T
        count = min(tile.tile_rows, rows - row)
        if bias is not None:
            sums[:, :count] += bias[row : row + count].float()
        y[:, row : row + count] = sums[:, :count].to(x.dtype)
    return y
