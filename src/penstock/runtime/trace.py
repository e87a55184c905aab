"""A trace of runs, as Chrome and Perfetto read it: one lane for copies, one for steps, on the device's own clock."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from penstock.runtime.session import Span

_PROCESS = 1
_THREADS = {"compute": 1, "copy": 2}


class Trace:
    """Records until it is closed, then writes its file. Closing twice writes once."""

    def __init__(self, path: Path, stop: Callable[[], list[Span]], name: Callable[[Span], tuple[str, str]]) -> None:
        self.path = path
        self._stop: Callable[[], list[Span]] | None = stop
        self._name = name

    def close(self) -> None:
        if self._stop is None:
            return
        stop, self._stop = self._stop, None
        self.path.write_text(json.dumps(trace_document(stop(), self._name)))

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
