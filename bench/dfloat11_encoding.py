"""Weights as DFloat11 stores them, made by whole tensors.

DFloat11's own compressor goes over the values in a Python loop, at about a microsecond each: an hour for 7 GB. Its
codes and lookup tables are taken as it makes them; only that loop is done here by tensor operations, and yields the
same bytes (tests/bench/test_dfloat11.py compares them).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

GAP_BITS = 5
WORD_BITS = 32
# Encoded at once, so that what is needed beside the result stays below a gigabyte.
PIECE_VALUES = 1 << 23


@dataclass(frozen=True)
class Bitstream:
    """Codes one after the other, and where each thread and each block of threads begins in them."""

    data: Tensor
    # By thread: bits from the begin of its bytes to the first code that begins there, five bits each.
    gaps: Tensor
    # By block: the number of its first value; then that of all values.
    positions: Tensor


def encoded_tensors(weights: Sequence[Tensor]) -> dict[str, Tensor]:
    """What DFloat11's loader looks for in a module whose bf16 weights these are, in host memory.

    They are encoded on the device that they are on.
    """
    from dfloat11 import dfloat11, dfloat11_utils

    values = torch.cat([weight.flatten() for weight in weights])
    _, counts = dfloat11_utils.get_codec(values)
    _, _, table = dfloat11_utils.get_32bit_codec(counts)
    low, high = values.view(torch.uint8).view(-1, 2).unbind(1)
    stream = encode((high << 1) | (low >> 7), table, dfloat11.bytes_per_thread, dfloat11.threads_per_block[0])
    ends = torch.tensor([weight.numel() for weight in weights]).cumsum(0)
    return {
        "luts": dfloat11_utils.get_luts(table),
        "encoded_exponent": stream.data.cpu(),
        "sign_mantissa": ((high & 0x80) | (low & 0x7F)).cpu(),
        "output_positions": stream.positions.to(torch.int32).cpu().view(torch.uint8),
        "gaps": stream.gaps.cpu(),
        # A copy: a view would be saved with the whole it is a view of.
        "split_positions": ends[:-1].clone(),
    }


def encode(
    exponents: Tensor, table: Mapping[Any, tuple[int, int]], bytes_per_thread: int, threads_per_block: int
) -> Bitstream:
    """`table` has each exponent's bits and code, and under a key that is no number those of the end."""
    device = exponents.device
    lengths, codes = (torch.zeros(256, dtype=torch.int64, device=device) for _ in range(2))
    for symbol, (length, code) in table.items():
        if isinstance(symbol, int):
            lengths[symbol], codes[symbol] = length, code
    total_bits = int((torch.bincount(exponents, minlength=256) * lengths).sum())
    thread_bits = 8 * bytes_per_thread
    block_bits = thread_bits * threads_per_block
    # The last code may reach into a further word, and so may the end's.
    words = torch.zeros(total_bits // WORD_BITS + 3, dtype=torch.int64, device=device)
    gaps, positions = [], []
    values, bits = 0, 0
    before = torch.tensor([-1], device=device)
    for piece in exponents.split(PIECE_VALUES):
        symbols = piece.long()
        ends = bits + lengths[symbols].cumsum(0)
        begins = ends - lengths[symbols]
        _put(words, begins, codes[symbols], lengths[symbols])
        previous = torch.cat([before, begins[:-1]])
        gaps.append(begins[begins // thread_bits != previous // thread_bits] % thread_bits)
        positions.append((begins // block_bits != previous // block_bits).nonzero().flatten() + values)
        values, bits, before = values + piece.numel(), int(ends[-1]), begins[-1:]
    if bits % 8:
        # The last byte is filled up with the code of the end, as far as that goes.
        length, code = next(entry for symbol, entry in table.items() if not isinstance(symbol, int))
        end = torch.tensor([bits], device=device)
        _put(words, end, torch.tensor([code], device=device), torch.tensor([length], device=device))
        gaps.append(end[end // thread_bits != before // thread_bits] % thread_bits)
        positions.append(torch.full_like(end, values)[end // block_bits != before // block_bits])
    positions.append(torch.tensor([values], device=device))
    data = words.to(torch.int32).view(torch.uint8).view(-1, 4).flip(1).flatten()[: -(-bits // 8)]
    threads = threads_per_block * -(-len(data) // (threads_per_block * bytes_per_thread))
    return Bitstream(data.clone(), _packed(torch.cat(gaps), threads), torch.cat(positions))


def _put(words: Tensor, begins: Tensor, codes: Tensor, lengths: Tensor) -> None:
    """Adds codes of up to 32 bits where nothing is yet; the words hold 32 bits each, the first one highest."""
    placed = codes << (2 * WORD_BITS - begins % WORD_BITS - lengths)
    mask = (1 << WORD_BITS) - 1
    words.index_add_(0, begins // WORD_BITS, (placed >> WORD_BITS) & mask)
    words.index_add_(0, begins // WORD_BITS + 1, placed & mask)


def _packed(gaps: Tensor, threads: int) -> Tensor:
    all_gaps = torch.zeros(threads, dtype=torch.uint8, device=gaps.device)
    all_gaps[: len(gaps)] = gaps.to(torch.uint8)
    shifts = torch.arange(GAP_BITS - 1, -1, -1, dtype=torch.uint8, device=gaps.device)
    bits = ((all_gaps[:, None] >> shifts) & 1).flatten()
    bits = torch.cat([bits, bits.new_zeros(-len(bits) % 8)]).view(-1, 8)
    return (bits << torch.arange(7, -1, -1, dtype=torch.uint8, device=gaps.device)).sum(1).to(torch.uint8)
