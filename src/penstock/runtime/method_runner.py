"""One method, ready to be called: from a caller's arguments through the compiled code to the caller's results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from penstock.budget import format_bytes
from penstock.errors import (
    ActivationMemoryError,
    CaptureError,
    DeviceMemoryError,
    PackageError,
    PenstockError,
    RuntimeFailure,
    StickyDeviceError,
)
from penstock.program import Method
from penstock.runtime.captured_pass import CapturedPass
from penstock.runtime.graphs import Graphs
from penstock.runtime.inputs import InputBinding
from penstock.runtime.outputs import OutputBinding
from penstock.runtime.session import Session
from penstock.runtime.state import StateStore
from penstock.torch_private.loader import CompiledMethod


class OomCounter:
    """Counts how often torch's allocator found no memory. Compiled code turns that, too, into a generic failure."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known = self._count()

    def _count(self) -> int:
        if self._device.type != "cuda":
            return 0
        return int(torch.cuda.memory_stats(self._device).get("num_ooms", 0))

    def is_new(self) -> bool:
        """Whether there was one since the last time this was asked."""
        before, self._known = self._known, self._count()
        return self._known > before


class MethodRunner:
    """The constructor loads, and so runs, native code from the file."""

    def __init__(
        self,
        path: Path,
        index: int,
        method: Method,
        device: torch.device,
        oom_counter: OomCounter,
        *,
        check_indices: bool,
    ) -> None:
        self._index = index
        self._method = method
        self._device = device
        self._oom_counter = oom_counter
        try:
            self.compiled = CompiledMethod(path, method.name, -1 if device.index is None else device.index)
        except (RuntimeError, OSError) as error:
            raise PackageError(
                f"{path}: the compiled code of method {method.name!r} cannot be loaded: {error}"
            ) from error
        self._inputs = InputBinding(method, device, written=method.signature.written, check_indices=check_indices)
        self._outputs = OutputBinding(method)

    def run(
        self,
        session: Session,
        state: StateStore,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        graphs: Graphs | None = None,
    ) -> Any:
        states, inputs = state.tensors(self._method), self._inputs.flat(arguments, keywords)
        if self._device.type == "cpu":
            return self._outputs.nested(self._compute(session, state, [*states, *inputs], 0), [*states, *inputs])
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream(self._device).cuda_stream
            if graphs is not None:
                shapes = tuple([tensor.shape for tensor in inputs])
                captured = graphs.find(self._index, shapes)
                if captured is not None:
                    return self._outputs.built(self._replay(session, state, graphs, captured, inputs))
            outputs = self._compute(session, state, [*states, *inputs], stream)
            if graphs is not None:
                graphs.add(session, self._index, shapes, self._capture(session, state, graphs, states, inputs))
            return self._outputs.nested(outputs, [*states, *inputs])

    def _capture(
        self,
        session: Session,
        state: StateStore,
        graphs: Graphs,
        states: list[torch.Tensor],
        inputs: list[torch.Tensor],
    ) -> CapturedPass:
        # While a graph is captured, torch's allocator cannot give back what it holds unused.
        torch.cuda.empty_cache()
        try:
            with graphs.capture_stream.lock:
                return CapturedPass(
                    session,
                    self.compiled,
                    self._index,
                    states=states,
                    inputs=inputs,
                    written=self._inputs.written,
                    stream=graphs.capture_stream.stream,
                    pool=graphs.pool,
                )
        except (DeviceMemoryError, StickyDeviceError) as error:
            self._invalidate(state, error)
            raise
        except (RuntimeError, PenstockError) as error:
            self._invalidate(state, error)
            if isinstance(explained := self._explained(error), ActivationMemoryError):
                raise explained from error
            raise CaptureError(
                f"method {self._method.name!r} ran, but cannot be captured into a CUDA graph, because it does what a "
                "graph cannot do again by itself, such as waiting for a value on the host; load it without "
                f"cuda_graph=True ({error})"
            ) from error

    def _compute(
        self, session: Session, state: StateStore, inputs: list[torch.Tensor], stream: int
    ) -> list[torch.Tensor]:
        session.begin(self._index, stream)
        return self._finish(session, state, lambda: self.compiled(inputs), session.end)

    def _replay(
        self, session: Session, state: StateStore, graphs: Graphs, captured: CapturedPass, inputs: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        stream = torch.cuda.current_stream(self._device)
        session.begin_replay(captured.number, stream.cuda_stream)
        turn = graphs.capture_stream.replays.turn(stream)
        return self._finish(session, state, lambda: captured.replay(session, inputs, turn), session.end_replay)

    def _finish(
        self,
        session: Session,
        state: StateStore,
        work: Callable[[], list[torch.Tensor]],
        end: Callable[[], None],
    ) -> list[torch.Tensor]:
        """Brings a run that has begun to its end, or gives it up."""
        if self._method.states:
            state.mark_invalid(f"method {self._method.name!r} did not end")
        try:
            outputs = work()
        except BaseException as error:
            # Generated code turns a failure of the core into a generic one; the core has kept the real one.
            real = session.abort()
            self._invalidate(state, real or error)
            if real is not None:
                raise real from error
            if isinstance(error, RuntimeError):
                raise self._explained(error) from error
            raise
        try:
            end()
        except PenstockError as error:
            self._invalidate(state, error)
            raise
        if self._method.states:
            state.mark_valid()
        return outputs

    def _invalidate(self, state: StateStore, error: BaseException) -> None:
        if self._method.states:
            state.mark_invalid(f"method {self._method.name!r} failed: {error}")

    def _explained(self, error: Exception) -> RuntimeFailure:
        name = self._method.name
        if isinstance(error, torch.OutOfMemoryError) or self._oom_counter.is_new():
            return ActivationMemoryError(
                f"method {name!r} ran out of device memory for its own buffers: it needs about "
                f"{format_bytes(self._method.activation_example_bytes)} for inputs like those of the export; "
                f"set_budget() with less, or free device memory ({error})"
            )
        return RuntimeFailure(f"method {name!r} failed inside its compiled code: {error}")
