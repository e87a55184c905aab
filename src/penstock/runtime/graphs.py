"""The captured passes of a module, by method and by the shapes of the inputs."""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from penstock.runtime.captured_pass import CapturedPass, Shapes
from penstock.runtime.session import Session
from penstock.torch_private.workspaces import keep_workspaces

# Each pass holds its inputs and outputs: a decoder's growing context must not fill the memory.
REMEMBERED_PASSES = 64


class ReplayTurns:
    """Serializes graph launches of all modules: each begins on the device when the one before it has ended there."""

    def __init__(self, ended: torch.cuda.Event) -> None:
        # Held from the wait to the record: another thread's launch in between would not wait for this one.
        self._launching = threading.Lock()
        self._ended = ended

    @contextmanager
    def turn(self, stream: torch.cuda.Stream) -> Iterator[None]:
        with self._launching:
            stream.wait_event(self._ended)
            try:
                yield
            finally:
                self._ended.record(stream)


@dataclass(frozen=True)
class CaptureStream:
    """The stream on which all modules of a device capture, one at a time, while they hold `lock`.

    torch keeps a workspace for each thread and stream that matrix products ran on (32 MiB on a large GPU) until the
    process ends. So there is only one stream. Modules captured by one thread share that workspace, and two replays at
    once would both write it, so they take turns.
    """

    stream: torch.cuda.Stream
    lock: threading.Lock
    replays: ReplayTurns


@functools.cache
def capture_stream(device_index: int) -> CaptureStream:
    keep_workspaces()
    stream = torch.cuda.Stream(device_index)  # type: ignore[no-untyped-call]
    return CaptureStream(stream, threading.Lock(), ReplayTurns(torch.cuda.Event()))  # type: ignore[no-untyped-call]


class Graphs:
    """Replays run one after another, so all graphs share the memory of their intermediate results."""

    def __init__(self, device: torch.device) -> None:
        self.capture_stream = capture_stream(device.index or 0)
        with torch.cuda.device(device):
            self.pool = torch.cuda.MemPool()
        self._passes: OrderedDict[tuple[int, Shapes], CapturedPass] = OrderedDict()

    def __len__(self) -> int:
        return len(self._passes)

    def find(self, method_index: int, shapes: Shapes) -> CapturedPass | None:
        found = self._passes.get((method_index, shapes))
        if found is not None:
            self._passes.move_to_end((method_index, shapes))
        return found

    def add(self, session: Session, method_index: int, shapes: Shapes, captured: CapturedPass) -> None:
        if len(self._passes) == REMEMBERED_PASSES:
            # The memory that the evicted pass computes in may still be in use.
            session.drain()
            _, given_up = self._passes.popitem(last=False)
            session.drop_capture(given_up.number)
        self._passes[method_index, shapes] = captured

    def clear(self) -> None:
        """The session has dropped their graphs, and nothing of theirs is at work."""
        self._passes.clear()

    def close(self) -> None:
        """Gives the graphs' memory back to torch, even if somebody still holds this object."""
        self.clear()
        del self.pool
