"""A code of three levels for the exponents of bf16 weights, beside the one that docs/format.md has: its encoder.

Blocks are the same 65,536 raw bytes, and tiles the same 1,024 values, of which number 256r + 8l + a belongs to lane l;
the last tile is filled up with its last value. A block has the parts

    table     16                 0, the exponents of the first level's codes 1 to 3; u32: groups of the second level;
                                 0, the exponents of the second level's codes 1 to 7
    starts    4(T + 1), to 16    u16, u16 for each tile: codes of the second level, and escapes, before it; then of all
    planes    256T               two of 32 u32 for each tile: bit 4a + r of word l in plane p is bit p of the code
    rests     1024T              sign and mantissa of each value
    groups    12 each            32 codes of the second level: three words, of which word p has bit p of each code
    escapes   one each, to 16    exponents of the values whose code is 0 in both levels

Code 0 of the first level means that the value has one of the second. What order these have differs by kernel: that of
values, where bit 4a + r of a group's words is code 8r + a (`ranks`), or by lanes and in a lane by bits, where bit n is
code n (`deposit`). Both take the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

BLOCK_TILES = 32
TILE_VALUES = 1024
HEADER_BYTES = 16
UNIT_BYTES = 16
FIRST_CODES, SECOND_CODES = 3, 7
ORDERS = ("ranks", "deposit")


@dataclass(frozen=True)
class Encoded:
    """A packed tensor of bf16: its blocks, where they begin and where the last ends."""

    values: int
    content: Tensor
    begins_bytes: tuple[int, ...]

    @property
    def raw_bytes(self) -> int:
        return 2 * self.values

    @property
    def packed_bytes(self) -> int:
        return self.begins_bytes[-1]

    @property
    def ratio(self) -> float:
        return self.packed_bytes / self.raw_bytes


def encoded(tensor: Tensor, order: str) -> Encoded:
    """On the tensor's device."""
    values = tensor.contiguous().view(torch.int16).flatten()
    whole = values.numel() // (BLOCK_TILES * TILE_VALUES) * BLOCK_TILES * TILE_VALUES
    blocks: list[Tensor] = []
    if whole:
        blocks += _blocks(values[:whole].view(-1, BLOCK_TILES * TILE_VALUES), order)
    if whole < values.numel():
        last = values[whole:]
        missing = -last.numel() % TILE_VALUES
        blocks += _blocks(torch.cat([last, last[-1:].expand(missing)])[None], order)
    begins_bytes = tuple(accumulate((block.numel() for block in blocks), initial=0))
    return Encoded(values.numel(), torch.cat(blocks), begins_bytes)


def _blocks(values: Tensor, order: str) -> list[Tensor]:
    """Of rows of as many values each, a block for each row."""
    count, tiles = values.shape[0], values.shape[1] // TILE_VALUES
    device = values.device
    bits = values.to(torch.int32)
    exponents = ((bits >> 7) & 0xFF).to(torch.uint8)
    rests = (((bits >> 8) & 0x80) | (bits & 0x7F)).to(torch.uint8)
    del bits
    rows = torch.arange(count, device=device)[:, None]
    in_row = exponents.to(torch.int64) + rows * 256
    histogram = torch.bincount(in_row.flatten(), minlength=256 * count).view(count, 256)
    # Of equals the smaller, so that the same weight always gives the same bytes.
    ranking = histogram.argsort(dim=1, descending=True, stable=True)
    tables = [ranking[:, :FIRST_CODES], ranking[:, FIRST_CODES : FIRST_CODES + SECOND_CODES]]
    first, second = (_codes(table)[in_row] for table in tables)
    del in_row

    planes = _planes(_by_lane(first.view(count, tiles, 4, 32, 8)).view(count, tiles, 32, 32), 2)
    if order == "deposit":
        first, second, exponents = (
            _by_lane(each.view(count, tiles, 4, 32, 8)).reshape(count, -1) for each in (first, second, exponents)
        )
    goes_on = first == 0
    escaped = goes_on & (second == 0)
    starts = torch.zeros(count, tiles + 1, 2, dtype=torch.int64, device=device)
    for part, chosen in enumerate((goes_on, escaped)):
        starts[:, 1:, part] = chosen.view(count, tiles, -1).sum(dim=2).cumsum(dim=1)
    codes, escapes = starts[:, -1, 0], starts[:, -1, 1]
    groups = (codes + 31) // 32
    # Where each block's codes begin among all, less how many there are before: what its codes are moved by.
    moved = 32 * (groups.cumsum(0) - groups) - (codes.cumsum(0) - codes)
    at = torch.arange(int(codes.sum()), device=device) + moved.repeat_interleave(codes)
    dense = torch.zeros(int(groups.sum()) * 32, dtype=torch.uint8, device=device)
    dense[at] = second[goes_on]
    if order == "ranks":
        dense = dense.view(-1, 4, 8).transpose(1, 2)
    grouped = _planes(dense.reshape(-1, 1, 32), 3).flatten()
    escape_bytes = exponents[escaped]

    head = torch.zeros(count, HEADER_BYTES, dtype=torch.uint8, device=device)
    head[:, 1:4], head[:, 9:16] = tables[0].to(torch.uint8), tables[1].to(torch.uint8)
    head[:, 4:8] = _little_endian(groups, 4)
    directory = torch.zeros(count, -(-4 * (tiles + 1) // UNIT_BYTES) * UNIT_BYTES, dtype=torch.uint8, device=device)
    directory[:, : 4 * (tiles + 1)] = _little_endian(starts, 2).reshape(count, -1)
    fixed = torch.cat([head, directory, planes.reshape(count, -1), rests], dim=1)
    group_parts = grouped.split((groups * 12).tolist())
    escape_parts = escape_bytes.split(escapes.tolist())
    padding = torch.zeros(UNIT_BYTES, dtype=torch.uint8, device=device)
    return [
        torch.cat([*parts, padding[: -sum(part.numel() for part in parts) % UNIT_BYTES]])
        for parts in zip(fixed, group_parts, escape_parts, strict=True)
    ]


def _codes(table: Tensor) -> Tensor:
    """By 256 times the row and the exponent: its place in the table, from 1; 0 for none."""
    codes = torch.zeros(table.shape[0], 256, dtype=torch.uint8, device=table.device)
    places = torch.arange(1, table.shape[1] + 1, dtype=torch.uint8, device=table.device)
    return codes.scatter_(1, table, places.expand(table.shape)).flatten()


def _by_lane(values: Tensor) -> Tensor:
    """Of (..., r, l, a): for each lane its values by bits 4a + r."""
    return values.permute(0, 1, 3, 4, 2).contiguous()


def _planes(codes: Tensor, count: int) -> Tensor:
    """Of (..., words, 32 codes): so many planes of words, as bytes (..., planes, words, 4)."""
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=codes.device)
    eights = codes.view(*codes.shape[:-1], 4, 8)
    planes = [(((eights >> plane) & 1) * weights).sum(dim=-1, dtype=torch.uint8) for plane in range(count)]
    return torch.stack(planes, dim=-3)


def _little_endian(numbers: Tensor, width_bytes: int) -> Tensor:
    return torch.stack([(numbers >> (8 * byte)) & 0xFF for byte in range(width_bytes)], dim=-1).to(torch.uint8)
