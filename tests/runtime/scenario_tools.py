"""What scenarios are made of: their list, what they look at, and what they are refused with."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

from penstock.errors import PenstockError
from penstock.plan.plan import Plan
from tests.runtime.session_harness import PAGE, Model, RunFailed

SOFT_PAGES = "/memfd:penstock"  # how the system names the soft driver's device memory
PART_BYTES = 256 << 10  # the smallest size of copies whose rate is measured
TICK_NS = 1000  # of the soft driver's clock, where it is set: one copy or one kernel

# Orders in which the soft driver runs the nodes of a graph.
COPIES_FIRST, KERNELS_FIRST = 0, 1

SCENARIOS: dict[str, Callable[[Path], None]] = {}


def scenario(body: Callable[[Path], None]) -> Callable[[Path], None]:
    SCENARIOS[body.__name__] = body
    return body


def memory(address: int, nbytes: int) -> bytes:
    return ctypes.string_at(address, nbytes)


def refused(action: Callable[[], object], kind: type[PenstockError]) -> PenstockError:
    """What it was refused with."""
    error: PenstockError | None = None
    try:
        action()
    except RunFailed as failed:
        error = failed.error
    except PenstockError as raised:
        error = raised
    assert type(error) is kind, error
    assert error is not None
    return error


def streamed(model: Model, plan: Plan, method: int = 0) -> dict[int, bytes]:
    """By copy, the bytes that it brings."""
    pieces = [copy.piece for copy in plan.methods[method].copies]
    return {
        index: model.content[piece.weight][piece.weight_offset_bytes :][: piece.nbytes]
        for index, piece in enumerate(pieces)
    }


def device_pages() -> list[bytes]:
    """Of all soft drivers of this process, as they are mapped."""
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if SOFT_PAGES in line and " rw" in line]
    ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
    return [memory(page, PAGE) for begin, end in ranges for page in range(begin, end, PAGE)]


def in_device_memory(parts: dict[int, bytes]) -> set[int]:
    """Which of the parts lie anywhere in the device memory of this process's soft drivers."""
    held = b"".join(device_pages())
    # Each page by itself: of a copy that was overwritten in part the rest may lie there.
    return {key for key, part in parts.items() if any(part[at : at + PAGE] in held for at in range(0, len(part), PAGE))}
