"""What a process holds, as the kernel counts it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tests.threads import thread_count


@dataclass(frozen=True)
class Footprint:
    descriptors: int
    threads: int
    # Of files and devices. Those of no file are the allocator's, which joins and splits them as it likes.
    mappings: int
    # Of them, libraries that were unpacked to be loaded, and deleted since.
    unpacked_mappings: int
    anonymous_mappings: int
    # The heap, and what loading has written into libraries.
    anonymous_bytes: int
    temporary_files: int


def footprint(temporary: Path | None = None) -> Footprint:
    # The sixth word is the file's name, or in brackets what the kernel calls the heap, a stack and its own pages.
    maps = Path("/proc/self/maps").read_text().splitlines()
    files = [line for line in maps if "/" in line]
    rollup = Path("/proc/self/smaps_rollup").read_text()
    anonymous_kib = sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Anonymous:"))
    return Footprint(
        # The listing itself takes one.
        descriptors=len(list(Path("/proc/self/fd").iterdir())) - 1,
        threads=thread_count(),
        mappings=len(files),
        unpacked_mappings=sum(".wrapper.so" in line for line in files),
        anonymous_mappings=len(maps) - len(files),
        anonymous_bytes=anonymous_kib * 1024,
        temporary_files=0 if temporary is None else sum(len(files) for _, _, files in os.walk(temporary)),
    )
