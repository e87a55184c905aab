"""Host memory: how much this process may use, what pinning a weights file takes of it, and bringing a file in.

Needs no torch until the native core is called.
"""

from __future__ import annotations

import ctypes
import functools
import os
import resource
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import HostMemoryError, WeightsChangedError, WeightsFileError
from penstock.runtime.interrupts import deliver_interrupt

GIB = 1 << 30
_PAGE_BYTES = resource.getpagesize()

# One registration of 512 GiB or more has been reported to fail; far below that, the number of calls costs nothing.
REGISTRATION_LIMIT_BYTES = 64 * GIB

# Between two slices progress is shown and an interrupt is seen.
_PREFAULT_SLICE_BYTES = 256 << 20

# File systems whose files are memory: nothing is brought in when their pages are pinned.
_MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "hugetlbfs"})


@dataclass(frozen=True)
class Limit:
    """How many more bytes can be pinned, and what says so."""

    available_bytes: int
    source: str


def memory_limit_bytes(root: Path = Path("/"), *, pinned_file_bytes: int | None = None) -> Limit:
    """The smallest of the machine's and of every cgroup limit above this process. `root` holds proc/ and sys/.

    File cache counts as available. Pinning a weights file pins pages of the file cache: those that are cached already
    are part of what the cgroup has in use, and pinning them adds nothing; the others push out cache of other files.
    Either way the bytes that must remain are those in use less the file cache. (Pages of the file that another cgroup
    brought in are charged there; counting them here errs on the safe side.) What cannot be pushed out is cache that is
    pinned: the kernel still lists it as file cache, so what this process has pinned is taken off.
    """
    pinned = _pinned.total_bytes() if pinned_file_bytes is None else pinned_file_bytes
    limits = [_machine_limit(root, pinned)]
    limits += [limit for folder, files in _cgroup_folders(root) if (limit := _cgroup_limit(folder, files, pinned))]
    return min(limits, key=lambda limit: limit.available_bytes)


def check_host_memory(needed_bytes: int, purpose: str, root: Path = Path("/")) -> None:
    """Refuse, before anything is pinned, what would exceed the limit. `purpose` reads on from "for"."""
    limit = memory_limit_bytes(root)
    if needed_bytes > limit.available_bytes:
        raise HostMemoryError(
            f"{needed_bytes} bytes of host memory are needed for {purpose}, and {limit.available_bytes} are available "
            f"by {limit.source}; give host_memory= a cap of at most {limit.available_bytes} bytes, "
            "or raise the limit"
        )


class PinnedFile:
    """A weights file that this process holds pinned, so that later checks know of it. Made when it is registered."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        status = Path(path).stat()
        self._key: tuple[int, int] | None = (status.st_dev, status.st_ino)
        # What lies on a memory file system is no file cache, and was never counted as available.
        _pinned.add(self._key, 0 if _is_memory_file(status.st_dev, Path("/")) else status.st_size)

    def release(self) -> None:
        """May be called twice."""
        key, self._key = self._key, None
        if key is not None:
            _pinned.remove(key)

    def __del__(self) -> None:
        # Where the owner's own finalizer was interrupted.
        if getattr(self, "_key", None) is not None:
            self.release()


def bytes_to_pin(path: str | os.PathLike[str], root: Path = Path("/")) -> int:
    """What registering this file takes of the limit: its size, less what is there for good already."""
    status = Path(path).stat()
    if _pinned.holds((status.st_dev, status.st_ino)):
        return 0
    if _is_memory_file(status.st_dev, root):
        return max(0, status.st_size - status.st_blocks * 512)
    return status.st_size


def chunk_ends(
    extents: Iterable[tuple[int, int]], file_bytes: int, limit_bytes: int = REGISTRATION_LIMIT_BYTES
) -> tuple[int, ...]:
    """Where each registered chunk ends, in whole pages; `extents` are (offset, length) of the weights in the file.

    No weight lies in two chunks, since a copy that spans two registrations fails. A chunk exceeds the limit only where
    a weight (or several that share pages) does, and then holds nothing else.
    """
    if limit_bytes < _PAGE_BYTES:
        raise ValueError(f"a chunk of at most {limit_bytes} bytes is smaller than a page of {_PAGE_BYTES} bytes")
    whole = _page_up(file_bytes)
    spans = _page_spans(extents, file_bytes)
    ends: list[int] = []
    start = at = 0
    while whole - start > limit_bytes:
        end = (start + limit_bytes) // _PAGE_BYTES * _PAGE_BYTES
        while at < len(spans) and spans[at][1] <= end:
            at += 1
        if at < len(spans) and spans[at][0] < end:
            # The limit falls into a weight: end before it, or after it where it begins the chunk.
            end = spans[at][0] if spans[at][0] > start else spans[at][1]
        ends.append(end)
        start = end
    if start < whole:
        ends.append(whole)
    return tuple(ends)


def prefault_with_progress(path: str | os.PathLike[str], *, threads: int | None = None) -> int:
    """Bring a whole file into the page cache; the bytes that were touched.

    A bar is shown where standard error is a terminal, unless tqdm's own TQDM_DISABLE says otherwise.
    """
    from tqdm import tqdm

    core = host_core()
    file = ctypes.c_void_p()
    if core.penstock_host_file_open(os.fsencode(path), ctypes.byref(file)):
        raise WeightsFileError(core.penstock_host_error().decode())
    try:
        total: int = core.penstock_host_file_bytes(file)
        touched = 0
        with tqdm(
            total=total,
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            desc=f"reading {Path(path).name}",
            disable=None,
        ) as bar:
            for offset in range(0, total, _PREFAULT_SLICE_BYTES):
                done = ctypes.c_int64()
                length = min(_PREFAULT_SLICE_BYTES, total - offset)
                workers = threads or min(16, os.cpu_count() or 1)
                if core.penstock_host_file_prefault(file, offset, length, workers, ctypes.byref(done)):
                    raise WeightsChangedError(core.penstock_host_error().decode())
                touched += done.value
                bar.update(done.value)
                deliver_interrupt()
    finally:
        core.penstock_host_file_close(file)
    return touched


_P, _I32, _I64, _PTR = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.POINTER

HOST_FUNCTIONS: dict[str, tuple[object, list[object]]] = {
    "penstock_host_error": (ctypes.c_char_p, []),
    "penstock_host_file_open": (_I32, [ctypes.c_char_p, _PTR(_P)]),
    "penstock_host_file_close": (None, [_P]),
    "penstock_host_file_data": (_P, [_P]),
    "penstock_host_file_bytes": (_I64, [_P]),
    "penstock_host_file_check": (_I32, [_P]),
    "penstock_host_file_prefault": (_I32, [_P, _I64, _I64, _I32, _PTR(_I64)]),
    "penstock_host_guarded_copy": (_I32, [_P, _P, ctypes.c_size_t]),
    "penstock_host_guarded_touch": (_I32, [_P, ctypes.c_size_t]),
    "penstock_host_register": (_I32, [_P, _P, _PTR(_I64), _I64, _PTR(_P)]),
    "penstock_host_unregister": (None, [_P]),
    "penstock_host_staging_create": (_I32, [_P, _P, _I64, _I32, _I32, _PTR(_P)]),
    "penstock_host_staging_destroy": (None, [_P]),
    "penstock_host_staging_follow": (_I32, [_P, _P, _I64, _P, _I64]),
    "penstock_host_staging_copy_next": (_I32, [_P, _I64, _I64, ctypes.c_uint64, _P]),
    "penstock_host_staging_copy_now": (_I32, [_P, _I64, _I64, ctypes.c_uint64, _P]),
    "penstock_host_staging_host_bytes": (_I64, [_P]),
    "penstock_host_staging_bytes_read": (_I64, [_P]),
}


def declare_host_functions(library: ctypes.CDLL) -> None:
    for name, (result, arguments) in HOST_FUNCTIONS.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments


@functools.cache
def host_core() -> ctypes.CDLL:
    """The native core with the types of its host functions."""
    from penstock.native import core

    library = core()
    declare_host_functions(library)
    return library


class _Pinned:
    """Files held pinned by this process, each counted once however often it is registered: its pages are the same."""

    def __init__(self) -> None:
        # A garbage collection inside it may close a module, which releases its own file.
        self._lock = threading.RLock()
        self._files: dict[tuple[int, int], tuple[int, int]] = {}

    def add(self, key: tuple[int, int], nbytes: int) -> None:
        with self._lock:
            count, known_bytes = self._files.get(key, (0, 0))
            self._files[key] = (count + 1, max(nbytes, known_bytes))

    def remove(self, key: tuple[int, int]) -> None:
        with self._lock:
            count, nbytes = self._files.pop(key)
            if count > 1:
                self._files[key] = (count - 1, nbytes)

    def holds(self, key: tuple[int, int]) -> bool:
        with self._lock:
            return key in self._files

    def total_bytes(self) -> int:
        with self._lock:
            return sum(nbytes for _, nbytes in self._files.values())


_pinned = _Pinned()


@dataclass(frozen=True)
class _CgroupFiles:
    """What the two versions of cgroups call the same things."""

    # More than one may limit: above memory.high nothing is killed, but with pinned pages everything crawls.
    limits: tuple[str, ...]
    usage: str
    cache_fields: tuple[str, ...]


_V2 = _CgroupFiles(("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file"))
_V1 = _CgroupFiles(("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))


def _machine_limit(root: Path, pinned_bytes: int) -> Limit:
    path = root / "proc/meminfo"
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise HostMemoryError(f"how much host memory is available cannot be told: {path}: {error.strerror}") from error
    for line in lines:
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            available = int(value.split()[0]) * 1024
            return Limit(max(0, available - pinned_bytes), f"MemAvailable in {path} ({available} bytes)")
    raise HostMemoryError(f"how much host memory is available cannot be told: {path} has no line MemAvailable")


def _cgroup_folders(root: Path) -> list[tuple[Path, _CgroupFiles]]:
    """Every cgroup folder above this process, its own first; a limit anywhere on the way holds."""
    table = root / "proc/self/cgroup"
    if not table.exists():
        return []
    mount = root / "sys/fs/cgroup"
    folders: list[tuple[Path, _CgroupFiles]] = []
    for line in table.read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            base, files = mount, _V2
        elif "memory" in controllers.split(","):
            base, files = mount / "memory", _V1
        else:
            continue
        own = Path(os.path.normpath("/" + path.lstrip("/"))).relative_to("/")
        # In a container the path may be the host's, of which only the mount point itself is visible.
        folders += [(base / step, files) for step in (own, *own.parents) if (base / step).is_dir()]
    return folders


def _cgroup_limit(folder: Path, files: _CgroupFiles, pinned_bytes: int) -> Limit | None:
    found = [(int(text), folder / name) for name in files.limits if (text := _read(folder / name)) not in ("", "max")]
    usage = _read(folder / files.usage)
    if not found or not usage:
        return None
    limit, path = min(found)
    fields = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
    cache = sum(int(fields.get(name, 0)) for name in files.cache_fields)
    kept = max(0, int(usage) - max(0, cache - pinned_bytes))
    return Limit(max(0, limit - kept), f"{path} ({limit} bytes, of which {kept} are in use and cannot be reclaimed)")


def _read(path: Path) -> str:
    """Empty when there is no such file: the root cgroup of a machine has no limits."""
    return path.read_text().strip() if path.exists() else ""


def _is_memory_file(device: int, root: Path) -> bool:
    table = root / "proc/self/mountinfo"
    name = f"{os.major(device)}:{os.minor(device)}"
    for line in table.read_text().splitlines() if table.exists() else ():
        fields = line.split()
        if fields[2] == name:
            return fields[fields.index("-") + 1] in _MEMORY_FILE_SYSTEMS
    return False


def _page_up(nbytes: int) -> int:
    return -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES


def _page_spans(extents: Iterable[tuple[int, int]], file_bytes: int) -> list[tuple[int, int]]:
    """The pages of the weights as (start, end), those that share a page as one."""
    spans: list[tuple[int, int]] = []
    for offset, length in sorted(extents):
        if offset < 0 or length < 0 or offset + length > file_bytes:
            raise ValueError(f"bytes {offset} to {offset + length} do not lie in a file of {file_bytes} bytes")
        if not length:
            continue
        start, end = offset // _PAGE_BYTES * _PAGE_BYTES, _page_up(offset + length)
        if spans and start < spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], end))
        else:
            spans.append((start, end))
    return spans
