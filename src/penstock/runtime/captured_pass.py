"""One method at one shape of its inputs as a CUDA graph, the copies of weights included."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from penstock.runtime.session import Session
from penstock.torch_private.loader import CompiledMethod

# What identifies a graph of a method: everything else about its inputs is fixed by its signature.
Shapes = tuple[torch.Size, ...]


class CapturedPass:
    """The constructor captures, which runs nothing on the device. The same call must have run before, to load every
    library and kernel. `states` keep their addresses; what the program writes into inputs `written` is copied back.

    The core captures and launches, not torch.cuda.CUDAGraph: after a failed capture, the latter leaves torch's random
    numbers as if the capture were still on.
    """

    def __init__(
        self,
        session: Session,
        compiled: CompiledMethod,
        method_index: int,
        *,
        states: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        written: Sequence[int],
        stream: torch.cuda.Stream,
        pool: torch.cuda.MemPool,
    ) -> None:
        self._inputs = [_Kept(tensor) for tensor in inputs]
        self._written = tuple(written)
        with torch.cuda.stream(stream), torch.cuda.use_mem_pool(pool):
            session.begin_capture(method_index, stream.cuda_stream)
            try:
                outputs = compiled([*states, *(kept.tensor for kept in self._inputs)])
            except BaseException as error:
                real = session.abort()
                if real is not None:
                    raise real from error
                raise
            self.number = session.end_capture()
        self._outputs = outputs

    def replay(
        self, session: Session, inputs: Sequence[torch.Tensor], turn: AbstractContextManager[None]
    ) -> list[torch.Tensor]:
        """Within the session's replay. Outputs are copies, because the next replay overwrites the graph's memory."""
        with torch.no_grad():
            for kept, tensor in zip(self._inputs, inputs, strict=True):
                kept.take(tensor)
            with turn:
                session.launch()
            for index in self._written:
                inputs[index].copy_(self._inputs[index].tensor)
            return [output.clone() for output in self._outputs]


class _Kept:
    """The memory from which the graph reads an input, with the layout of `like`."""

    def __init__(self, like: torch.Tensor) -> None:
        self._span = 0
        if like.numel():
            self._span = 1 + sum((size - 1) * step for size, step in zip(like.shape, like.stride(), strict=True))
        # Leave inference mode even if the caller is in it: a tensor made inside it could not be written outside.
        with torch.inference_mode(False):
            self._memory = torch.empty(self._span, dtype=like.dtype, device=like.device)
            self.tensor = self._memory.as_strided(like.shape, like.stride())
        self._plain = self.tensor.is_contiguous()

    def take(self, tensor: torch.Tensor) -> None:
        if self._plain:
            self.tensor.copy_(tensor)
        else:
            # Copy the memory it spans as it is: an expanded tensor has fewer elements in memory than in its shape.
            self._memory.copy_(tensor.as_strided((self._span,), (1,)))
