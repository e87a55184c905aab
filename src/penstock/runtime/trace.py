"""A trace of runs, as Chrome and Perfetto read it: one lane for copies, one for steps, on the device's own clock."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from penstock.runtime.interrupts import HeldInterrupts
from penstock.runtime.session import Span

_PROCESS = 1
_THREADS = {"compute": 1, "copy": 2}


class Trace:
    """Records until it is closed, or until something newer records; closing writes its file. Closing twice writes once.

    `stop` ends the recording, and `name` gives a span's method and what it is called under the plan that it ran with.
    """

    def __init__(self, path: Path, stop: Callable[[], list[Span]], name: Callable[[Span], tuple[str, str]]) -> None:
        self.path = path
        self._stop = stop
        self._name = name
        self._document: dict[str, object] | None = None
        self.is_closed = False

    def keep(self, spans: list[Span]) -> None:
        """No more will be recorded: the file is written from these."""
        self._document = trace_document(spans, self._name)

    def close(self) -> None:
        with HeldInterrupts():
            if self.is_closed:
                return
            self.is_closed = True
            try:
                if self._document is None:
                    self.keep(self._stop())
            finally:
                # They hold the module, which would then go with the next collection and not with its last reference.
                del self._stop, self._name
            self.path.write_text(json.dumps(self._document))

    def __enter__(self) -> Trace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def trace_document(spans: Sequence[Span], name: Callable[[Span], tuple[str, str]]) -> dict[str, object]:
    """`name` gives a span's method and what it is called: a weight, or a kernel."""
    events: list[dict[str, object]] = [
        {"ph": "M", "pid": _PROCESS, "name": "process_name", "args": {"name": "penstock"}},
        *(
            {"ph": "M", "pid": _PROCESS, "tid": tid, "name": "thread_name", "args": {"name": lane}}
            for lane, tid in _THREADS.items()
        ),
    ]
    for span in spans:
        method, title = name(span)
        duration_ns = span.end_ns - span.begin_ns
        arguments: dict[str, object] = {"run": span.run, "method": method, "index": span.index}
        if span.lane == "copy":
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
