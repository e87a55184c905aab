"""How a tensor's bytes lie: dim orders instead of strides (a .ptd stores no strides)."""

from __future__ import annotations

from collections.abc import Sequence


def overlaps(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two index tuples may share an address (an expanded tensor, say)."""
    extent = 1  # elements spanned by the dims seen so far, innermost first
    for stride, size in sorted((st, sz) for sz, st in zip(sizes, strides, strict=True) if sz != 1):
        if stride < extent:
            return True
        extent = stride * (size - 1) + extent
    return False


def canonical(sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """The order of dims from the outermost to the innermost, as the memory has them.

    Overlapping memory has no such order and is stored spelled out, in plain row-major order. So is an empty tensor.
    """
    if any(size == 0 for size in sizes) or overlaps(sizes, strides):
        return tuple(range(len(sizes)))
    # Dims of size 1 carry arbitrary strides; sorting is stable, so equal strides keep their order.
    return tuple(sorted(range(len(sizes)), key=lambda d: -strides[d]))


def contiguous_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
