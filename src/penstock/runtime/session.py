"""The native session: runs a plan, or the least-recently-used policy, over a weights file."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from penstock.errors import PenstockError
from penstock.native import ON_BYTES, PREPARE_LINEAR, core
from penstock.runtime.driver import Driver
from penstock.runtime.failures import exception, last_exception
from penstock.runtime.interrupts import HeldInterrupts
from penstock.runtime.progress import Progress
from penstock.runtime.records import Numbers
from penstock.runtime.registration_probe import RegistrationProbe


@dataclass(frozen=True)
class Stats:
    """Counters of one run or since load. S7: bytes and copies equal the plan's prediction."""

    runs: int
    bytes_streamed: int
    bytes_hit: int
    copies: int
    # Time for which the compute stream waited for copies. Nothing is timed inside a graph: the total excludes replays,
    # and the value of one run is None if that run was a replay.
    stall_ns: int | None
    # Under placement="lru": calls of the memory pool, and the host time they took.
    pool_calls: int
    pool_ns: int
    # Runs that were launched as a CUDA graph.
    replays: int = 0
    # Weights that kernels read in host memory, whole or except for their prefix: all bytes that they could have read. A
    # gather reads only some rows.
    bytes_in_place: int = 0
    # Packed weights: the bytes that were decoded, counted unpacked. bytes_streamed is what went over the link.
    bytes_decoded: int = 0
    # Experts with slots, counted by the device once for each call that asks for one: those that were in a slot, those
    # that were not, and the bytes of the latter that crossed the link.
    expert_hits: int = 0
    expert_misses: int = 0
    expert_bytes: int = 0


@dataclass(frozen=True)
class TraceSpan:
    """One copy or one step on the device's clock, from the start of the trace."""

    lane: str
    run: int
    method_index: int
    # The step, or the copy (under placement="lru": the weight).
    index: int
    nbytes: int
    begin_ns: int
    end_ns: int


@dataclass(frozen=True)
class LinkSample:
    """A number of copies, one after the other, and the bytes that they take over the link together."""

    copies: int
    nbytes: int
    ns: int

    @property
    def bytes_per_s(self) -> float:
        return self.nbytes * 1e9 / self.ns

    @property
    def piece_bytes(self) -> float:
        return self.nbytes / self.copies


@dataclass(frozen=True)
class FileSource:
    """The weights file as the core gets it. The core decides how its bytes reach the device, and checks memory."""

    path: Path
    # Offset and size of each weight in the file, in the order in which plans number weights.
    extents: tuple[tuple[int, int], ...]
    # Size of the pinned buffers that weights pass through; None: the file is registered as it is mapped.
    cap_bytes: int | None
    # What else is held in host memory: state, and the soft driver's device memory, which is host memory too.
    extra_bytes: int


# Holds proc/ and sys/, which tell the limits of memory.
HOST_ROOT = Path("/")


class _OpenRequest(ctypes.Structure):
    """As in include/penstock_core.h."""

    _fields_ = [
        ("path", ctypes.c_char_p),
        ("extents", ctypes.c_void_p),
        ("extent_count", ctypes.c_int64),
        ("host_cap_bytes", ctypes.c_int64),
        ("extra_host_bytes", ctypes.c_int64),
        ("packed", ctypes.c_void_p),
        ("packed_count", ctypes.c_int64),
        ("root", ctypes.c_char_p),
        ("probe", ctypes.c_void_p),
        ("on_bytes", ON_BYTES),
        ("lru", ctypes.c_int32),
        ("device_index", ctypes.c_int32),
        ("poison", ctypes.c_int32),
    ]


class _Summary(ctypes.Structure):
    """As in include/penstock_core.h."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("device", ctypes.c_char_p),
        ("floor_bytes", ctypes.c_int64),
        ("budget_bytes", ctypes.c_int64),
        ("origin", ctypes.c_int64),
        ("copying_bytes", ctypes.c_int64),
        ("methods", ctypes.POINTER(ctypes.c_char_p)),
        ("method_count", ctypes.c_int64),
        ("remarks", ctypes.POINTER(ctypes.c_char_p)),
        ("remark_count", ctypes.c_int64),
    ]


def _texts(texts: Sequence[str]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * len(texts))(*(os.fsencode(text) for text in texts))


_LANES = {0: "compute", 1: "copy", 2: "link"}
# How many numbers each record that the core hands over has.
_LINK_NUMBERS = 3
_SPAN_NUMBERS = 7
_EXPERT_NUMBERS = 3
_LOGGED_NUMBERS = 3


class _Preparation:
    """The callback that gives the core a recipe. It lives as long as the core may call it."""

    def __init__(self, prepare: Callable[[int, int], None]) -> None:
        self._errors: list[Exception] = []
        self.pointer = PREPARE_LINEAR(_guarded(prepare, self._errors))

    def take_error(self) -> Exception | None:
        return self._errors.pop() if self._errors else None


def _guarded(prepare: Callable[[int, int], None], errors: list[Exception]) -> Callable[[int, int], int]:
    def call(case: int, recipe: int) -> int:
        try:
            prepare(case, recipe)
        except Exception as error:  # reported by Session.abort: the code in between knows no exceptions
            errors[:] = [error]
            return 1
        return 0

    return call


def flat(extents: Sequence[tuple[int, int]]) -> Numbers:
    numbers = [number for extent in extents for number in extent]
    return (ctypes.c_int64 * len(numbers))(*numbers)


def counters(handle: int | None) -> tuple[Stats, Stats]:
    """Counters of a session's last run, and since it was made. Waits for the device."""
    # As PenstockCounters in include/penstock_core.h.
    last, total = (ctypes.c_int64 * len(fields(Stats)))(), (ctypes.c_int64 * len(fields(Stats)))()
    if core().penstock_session_counters(handle, last, total):
        raise last_exception()
    run = Stats(*last)
    return replace(run, stall_ns=None) if run.replays else run, Stats(*total)


class Session:
    """Not thread-safe. Everything raises one of Penstock's errors."""

    def __init__(self, driver: Driver, handle: int) -> None:
        """Takes ownership of `handle`, a session of the core."""
        self._handle: int | None = handle
        self._core, self._pid, self._driver = core(), os.getpid(), driver  # which outlives it
        self._preparation: _Preparation | None = None

    @classmethod
    def opened(
        cls,
        driver: Driver,
        source: FileSource,
        *,
        lru: bool,
        device_index: int,
        poison: bool,
        packed: Numbers | None = None,
        probe: RegistrationProbe | None = None,
    ) -> Session:
        """Opens a weights file. One that gets registered is first brought into memory, which an interrupt cancels.

        `probe`: the probe of registering it, if one was begun."""
        progress = Progress(source.path)
        request = _OpenRequest(
            path=os.fsencode(source.path),
            extents=ctypes.cast(flat(source.extents), ctypes.c_void_p),
            extent_count=len(source.extents),
            host_cap_bytes=-1 if source.cap_bytes is None else source.cap_bytes,
            extra_host_bytes=source.extra_bytes,
            packed=None if packed is None else ctypes.cast(packed, ctypes.c_void_p),
            packed_count=0 if packed is None else len(packed),
            root=os.fsencode(HOST_ROOT),
            probe=None if probe is None else probe.handle,
            on_bytes=progress.on_bytes,
            lru=int(lru),
            device_index=device_index,
            poison=int(poison),
        )
        with progress:
            handle = core().penstock_open(driver.handle, ctypes.byref(request))
        if not handle:
            raise last_exception()
        return cls(driver, handle)

    @property
    def host_bytes(self) -> int:
        """Bytes of the file, or of staging buffers."""
        return int(self._core.penstock_session_host_bytes(self.handle))

    @property
    def handle(self) -> int:
        if self._handle is None:
            raise PenstockError("the session is closed")
        return self._handle

    def install(self, numbers: Numbers) -> None:
        self._check(self._core.penstock_session_install(self.handle, numbers, len(numbers)))

    def offer_linear(self, prepare: Callable[[int, int], None]) -> None:
        """From now on a kernel computes all linears on a GPU, so that a result has the same bits wherever the rows lie.

        `prepare` gets the addresses of a LinearCase and of the LinearRecipe to fill (penstock.direct.recipes).
        """
        offered = _Preparation(prepare)
        self._check(self._core.penstock_session_offer_linear(self.handle, offered.pointer))
        self._preparation = offered

    def begin(self, method_index: int, stream: int) -> None:
        """Must be followed by end() or abort(). If begin raises, even for an interrupt, no run is left open."""
        self._begin(lambda: self._core.penstock_session_begin(self.handle, method_index, stream))

    def end(self) -> None:
        self._check(self._core.penstock_session_end(self.handle))

    def abort(self) -> PenstockError | None:
        """Gives the run up and returns the core's own failure, if there is one. Called while the error that generated
        code made of that failure is handled."""
        failure = self._core.penstock_session_failure(self.handle)
        text = self._core.penstock_session_failure_text(self.handle).decode()
        self._core.penstock_session_abort(self.handle)
        cause = self._preparation.take_error() if self._preparation is not None else None
        if cause is not None:
            text = f"{text}: {cause}"
            reduced = sys.exc_info()[1]
            if reduced is not None:
                reduced.__cause__ = cause
        return exception(failure, text) if failure else None

    def begin_capture(self, method_index: int, stream: int) -> None:
        """From here until end_capture or abort, work on `stream` does not run: it becomes a graph."""
        self._begin(lambda: self._core.penstock_session_begin_capture(self.handle, method_index, stream))

    def end_capture(self) -> int:
        """Returns the number for replays, valid until the capture is dropped or another plan is installed."""
        capture = ctypes.c_int64()
        self._check(self._core.penstock_session_end_capture(self.handle, ctypes.byref(capture)))
        return capture.value

    def drop_capture(self, capture: int) -> None:
        self._check(self._core.penstock_session_drop_capture(self.handle, capture))

    def begin_replay(self, capture: int, stream: int) -> None:
        """Must be followed by launch() and end_replay(), or by abort()."""
        self._begin(lambda: self._core.penstock_session_begin_replay(self.handle, capture, stream))

    def launch(self) -> None:
        self._check(self._core.penstock_session_launch(self.handle))

    def end_replay(self) -> None:
        self._check(self._core.penstock_session_end_replay(self.handle))

    def drain(self) -> None:
        self._check(self._core.penstock_session_drain(self.handle))

    def stats(self) -> tuple[Stats, Stats]:
        """Counters of the last run, and since the session was made. Waits for the device."""
        return counters(self.handle)

    def memory(self) -> tuple[int, int]:
        """Device bytes held for weights: now, and at most."""
        held, peak = ctypes.c_int64(), ctypes.c_int64()
        self._check(self._core.penstock_session_memory(self.handle, ctypes.byref(held), ctypes.byref(peak)))
        return held.value, peak.value

    def expert_counts(self) -> list[tuple[int, int, int]]:
        """Calls, hits and misses of each bank of the present plan. Waits for the device."""
        return [(calls, hits, misses) for calls, hits, misses in self._counted_experts()]

    def _counted_experts(self) -> list[list[int]]:
        def read(handle: int, out: object, capacity: int) -> int:
            count = int(self._core.penstock_session_expert_counts(handle, out, capacity))
            if count < 0:
                raise last_exception()
            return count

        return self._records(_EXPERT_NUMBERS, read)

    def expert_hits(self, bank: int, slots: Sequence[int]) -> list[tuple[int, int, int]]:
        """For each number of slots: hits among the uses that the bank has logged, the number of uses, and of calls."""
        wanted, found = (ctypes.c_int64 * len(slots))(*slots), (ctypes.c_int64 * (_LOGGED_NUMBERS * len(slots)))()
        self._check(self._core.penstock_session_expert_hits(self.handle, bank, wanted, len(slots), found))
        return [(found[at], found[at + 1], found[at + 2]) for at in range(0, len(found), _LOGGED_NUMBERS)]

    def link(self) -> list[LinkSample]:
        """Measured with real weights when the plan was installed: first copies as they will be made, then copies of
        each size. Empty if nothing is ever copied."""
        records = self._records(_LINK_NUMBERS, self._core.penstock_session_link)
        return [LinkSample(*record) for record in records]

    def summary(self, *, name: str, device: str, methods: Sequence[str], remarks: Sequence[str], **amounts: int) -> str:
        """What the session was set up to do, in one line. `amounts`: the other fields of PenstockSummary."""
        asked = _Summary(
            name=os.fsencode(name),
            device=device.encode(),
            methods=_texts(methods),
            method_count=len(methods),
            remarks=_texts(remarks),
            remark_count=len(remarks),
            **amounts,
        )
        text = self._core.penstock_session_summary(self.handle, ctypes.byref(asked))
        if text is None:
            raise last_exception()
        return os.fsdecode(text)

    def start_trace(self) -> None:
        self._check(self._core.penstock_session_start_trace(self.handle))

    def stop_trace(self) -> list[TraceSpan]:
        self._check(self._core.penstock_session_stop_trace(self.handle))
        records = self._records(_SPAN_NUMBERS, self._core.penstock_session_spans)
        return [TraceSpan(_LANES[lane], *numbers) for lane, *numbers in records]

    def close(self) -> None:
        """A run that was not ended is given up."""
        with HeldInterrupts():
            handle, self._handle = self._handle, None
            if handle is not None:
                self._core.penstock_session_destroy(handle)

    def __del__(self) -> None:
        # In case the owner's own finalizer was interrupted.
        if self._handle is not None and os.getpid() == self._pid:
            self.close()

    def forget(self) -> None:
        """After a fork: the handle belongs to the parent, and its threads are not here."""
        self._handle = None

    def _begin(self, begin: Callable[[], int]) -> None:
        begun = False
        try:
            with HeldInterrupts():
                self._check(begin())
                begun = True
        except BaseException:
            # An interrupt was pending: the caller will not end the run.
            if begun:
                self._core.penstock_session_abort(self.handle)
            raise

    def _records(self, numbers: int, read: Callable[[int, object, int], int]) -> list[list[int]]:
        """Asks `read` for the count, then for all records."""
        count = read(self.handle, None, 0)
        found = (ctypes.c_int64 * (count * numbers))()
        read(self.handle, found, count)
        return [found[at : at + numbers] for at in range(0, count * numbers, numbers)]

    def _check(self, status: int) -> None:
        if status:
            raise last_exception()
