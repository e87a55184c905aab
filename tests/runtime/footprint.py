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
    mappings: int
    # Of the mappings, libraries that were unpacked to be loaded, and deleted since.
    unpacked_mappings: int
    # Of no file: the heap, and what loading has written into libraries.
    anonymous_bytes: int
    temporary_files: int


def footprint(temporary: Path | None = None) -> Footprint:
    maps = Path("/proc/self/maps").read_text().splitlines()
    rollup = Path("/proc/self/smaps_rollup").read_text()
    anonymous_kib = sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Anonymous:"))
    return Footprint(
        # The listing itself takes one.
        descriptors=len(list(Path("/proc/self/fd").iterdir())) - 1,
        threads=thread_count(),
        mappings=len(maps),
        unpacked_mappings=sum(".wrapper.so" in line for line in maps),
        anonymous_bytes=anonymous_kib * 1024,
        temporary_files=0 if temporary is None else sum(len(files) for _, _, files in os.walk(temporary)),
    )
