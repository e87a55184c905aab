"""The bytes of tensors, in pieces: never a whole copy of anything large."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import torch

PIECE_BYTES = 16 << 20


def tensor_pieces(tensor: torch.Tensor, dim_order: Sequence[int]) -> Iterator[memoryview]:
    """The tensor's bytes in storage order, in pieces of at most PIECE_BYTES (or one element)."""
    for slab in _slabs(tensor.detach().permute(tuple(dim_order))):
        plain = slab.resolve_conj().resolve_neg().cpu().contiguous()
        count = plain.numel() * plain.element_size()
        if count:
            # The address stays valid as long as `plain` does, which is until the consumer asks for the next piece.
            whole = memoryview((ctypes.c_char * count).from_address(plain.data_ptr())).cast("B")
            for start in range(0, count, PIECE_BYTES):
                yield whole[start : start + PIECE_BYTES]


def _slabs(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Parts that can be made contiguous one at a time without a large copy."""
    count = tensor.numel() * tensor.element_size()
    plain = tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    if plain or count <= PIECE_BYTES or tensor.dim() == 0:
        yield tensor
        return
    row_bytes = count // tensor.shape[0]
    if row_bytes > PIECE_BYTES:
        for row in tensor:
            yield from _slabs(row)
    else:
        rows = max(1, PIECE_BYTES // row_bytes)
        for start in range(0, tensor.shape[0], rows):
            yield tensor[start : start + rows]


def has_value(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "meta" and type(tensor).__name__ != "FakeTensor"


def is_zero(tensor: torch.Tensor) -> bool:
    """Whether every byte is zero: what a fresh allocation can stand in for. (A float -0.0 is not.)"""
    zeros = bytes(PIECE_BYTES)
    # As bytes: memoryviews are compared element by element, at a hundredth of the speed.
    return all(bytes(piece) == zeros[: piece.nbytes] for piece in tensor_pieces(tensor, range(tensor.dim())))


def equal_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same bytes, whatever their strides."""
    order = range(a.dim())
    return equal_pieces(tensor_pieces(a, order), tensor_pieces(b, order))


def equal_pieces(a: Iterator[memoryview], b: Iterator[memoryview]) -> bool:
    """Whether two sequences hold the same bytes, wherever they are cut. Pieces are never empty."""
    nothing = memoryview(b"")
    left = right = nothing
    while True:
        left, right = left or next(a, nothing), right or next(b, nothing)
        count = min(left.nbytes, right.nbytes)
        if not count:
            return not left and not right
        if bytes(left[:count]) != bytes(right[:count]):
            return False
        left, right = left[count:], right[count:]
