"""Packs and unpacks many blocks: pieces of 1 MiB, as many at a time as there are CPUs, results in order.

Memory stays within a few pieces, whatever the size of a weight.
"""

from __future__ import annotations

import collections
import ctypes
import itertools
import os
from array import array
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from penstock.errors import WeightsFileError
from penstock.native import core
from penstock.weights.packed_format import BLOCK_RAW_BYTES, KINDS, block_count, block_limits_bytes

# Blocks of one piece: 1 MiB of a weight, which stays in the CPU's cache from reading to writing.
PIECE_BLOCKS = 16
PIECE_RAW_BYTES = PIECE_BLOCKS * BLOCK_RAW_BYTES
_PIECE_PACKED_BYTES = PIECE_BLOCKS * max(block_limits_bytes(kind, BLOCK_RAW_BYTES)[1] for kind in KINDS.values())
_MOST_WORKERS = 12

Job = TypeVar("Job")
Result = TypeVar("Result")


class Slot:
    """The buffers of one piece. They are reused: fresh memory would cost more than packing does."""

    def __init__(self) -> None:
        self._raw = ctypes.create_string_buffer(PIECE_RAW_BYTES)
        self._packed = ctypes.create_string_buffer(_PIECE_PACKED_BYTES)
        self._sizes = (ctypes.c_int64 * PIECE_BLOCKS)()
        self.raw = memoryview(self._raw).cast("B")
        self.packed = memoryview(self._packed).cast("B")

    def pack(self, kind: int, raw_bytes: int) -> array[int]:
        """From raw to packed; returns the size of each block."""
        packed_bytes = core().penstock_pack_blocks(
            kind, self._raw, raw_bytes, self._packed, _PIECE_PACKED_BYTES, self._sizes, 1
        )
        assert packed_bytes >= 0
        return array("q", self._sizes[: block_count(raw_bytes)])

    def unpack(self, kind: int, sizes_bytes: array[int], raw_bytes: int) -> None:
        """From packed to raw."""
        self._sizes[: len(sizes_bytes)] = list(sizes_bytes)
        refused = core().penstock_unpack_blocks(
            kind, self._packed, sum(sizes_bytes), self._sizes, raw_bytes, self._raw, 1
        )
        assert not refused  # the sizes were checked with the table


@dataclass(frozen=True)
class Workers:
    pool: ThreadPoolExecutor
    slots: tuple[Slot, ...]

    def in_order(self, work: Callable[[Slot, Job], Result], jobs: Iterable[Job]) -> Iterator[tuple[Slot, Result]]:
        """Runs `work` on jobs ahead of the consumer, which owns a slot until it asks for the next one."""
        pending: collections.deque[tuple[Slot, Future[Result]]] = collections.deque()
        try:
            for job, slot in zip(jobs, itertools.cycle(self.slots), strict=False):
                if len(pending) == len(self.slots):
                    oldest, future = pending.popleft()
                    yield oldest, future.result()
                pending.append((slot, self.pool.submit(work, slot, job)))
            while pending:
                oldest, future = pending.popleft()
                yield oldest, future.result()
        finally:
            # The next call gets the same slots.
            for _, future in pending:
                if not future.cancel():
                    future.exception()


@contextmanager
def workers() -> Iterator[Workers]:
    count = min(_MOST_WORKERS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(count, thread_name_prefix="penstock-pack") as pool:
        try:
            # One slot for what is being written, and two for each worker, so that none waits for a slower neighbour.
            yield Workers(pool, tuple(Slot() for _ in range(2 * count + 1)))
        finally:
            pool.shutdown(cancel_futures=True)


def read_into(fd: int, view: memoryview, offset_bytes: int, what: str) -> None:
    read_bytes = 0
    while read_bytes < len(view):
        count_bytes = os.preadv(fd, [view[read_bytes:]], offset_bytes + read_bytes)
        if count_bytes == 0:
            raise WeightsFileError(f"{what} was truncated: byte {offset_bytes + read_bytes} is not there")
        read_bytes += count_bytes
