"""A trace of runs, as Chrome and Perfetto read it, on the device's own clock. It has lanes for copies, for steps, and
for what packed weights take of the link before they are decoded."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

from penstock.errors import OutputPathError
from penstock.runtime.interrupts import HeldInterrupts
from penstock.runtime.recorder import Recording
from penstock.runtime.session import TraceSpan

_PROCESS = 1
_THREADS = {"compute": 1, "copy": 2, "link": 3}


class Recorded(Protocol):
    """What a trace needs from its module."""

    def _stop_trace(self, recording: Recording) -> list[TraceSpan]: ...

    def _span_name(self, span: TraceSpan) -> tuple[str, str]:
        """A span's method, and the span's name under the plan that it ran with."""
        ...


def writable(path: str | os.PathLike[str]) -> Path:
    """Makes the path absolute: the process may be elsewhere when the file is written. Refuses a path that cannot be
    written now, because the recording would be lost."""
    found = Path(path).absolute()
    if not found.parent.is_dir():
        raise OutputPathError(f"the trace {found} cannot be written: the folder {found.parent} does not exist")
    if found.is_dir():
        raise OutputPathError(f"the trace {found} cannot be written: it is a folder")
    return found


class Trace:
    """Records until it is closed, or until something newer records; closing writes its file. Closing twice writes once.

    The module holds the trace, not the reverse: a module goes with its last reference, and then closes its traces.
    """

    def __init__(self, path: Path, module: weakref.ref[Recorded]) -> None:
        self.path = path
        self._module = module
        self.recording: Recording | None = None
        self._document: dict[str, object] | None = None
        self.is_closed = False

    def keep(self, spans: list[TraceSpan], module: Recorded | None = None) -> None:
        """Ends the recording: the file is written from these spans."""
        module = module or self._module()
        assert module is not None
        self._document = trace_document(spans, module._span_name)

    def close(self, module: Recorded | None = None) -> None:
        """A module that goes passes itself as `module`: nobody else can reach it then."""
        with HeldInterrupts():
            if self.is_closed:
                return
            self.is_closed = True
            module = module or self._module()
            if self._document is None:
                assert module is not None and self.recording is not None  # a module that went has closed it
                self.keep(module._stop_trace(self.recording), module)
            try:
                self.path.write_text(json.dumps(self._document))
            except OSError as error:
                raise OutputPathError(f"the trace {self.path} cannot be written: {error}") from error

    def __enter__(self) -> Trace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def trace_document(spans: Sequence[TraceSpan], name: Callable[[TraceSpan], tuple[str, str]]) -> dict[str, object]:
    """`name` gives a span's method and what it is called: a weight, or a kernel."""
    events: list[dict[str, object]] = [
        {"ph": "M", "pid": _PROCESS, "name": "process_name", "args": {"name": "penstock"}},
        *(
            {"ph": "M", "pid": _PROCESS, "tid": tid, "name": "thread_name", "args": {"name": lane}}
            for lane, tid in _THREADS.items()
            if lane != "link" or any(span.lane == lane for span in spans)
        ),
    ]
    for span in spans:
        method, title = name(span)
        duration_ns = span.end_ns - span.begin_ns
        arguments: dict[str, object] = {"run": span.run, "method": method, "index": span.index}
        if span.lane != "compute":
            arguments["bytes"] = span.nbytes
            arguments["GB_per_s"] = round(span.nbytes / duration_ns, 3) if duration_ns else None
        events.append(
            {
                "ph": "X",
                "pid": _PROCESS,
                "tid": _THREADS[span.lane],
                "cat": span.lane,
                "name": title,
                "ts": span.begin_ns / 1e3,  # the format counts in microseconds
                "dur": duration_ns / 1e3,
                "args": arguments,
            }
        )
    return {"displayTimeUnit": "ns", "traceEvents": events}
