"""accelerate: each module's weights are copied in right before it runs and dropped after, on one stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from bench.suite.model import load
from bench.suite.result import Traffic
from bench.suite.systems.system import Facts, Opened, Setting, System

_WHY_CUDA = "it would copy from the CPU to the CPU"


def _open(*, pinned: bool, half_resident: bool) -> Callable[[Setting], AbstractContextManager[Opened]]:
    @contextmanager
    def opened(setting: Setting) -> Iterator[Opened]:
        from accelerate import cpu_offload, dispatch_model

        model = load(setting.shape, setting.weights_path, lambda tensor: tensor, pinned=pinned)
        device = torch.device(setting.device)
        device_index = device.index or 0
        if half_resident:
            # A map rather than max_memory, which keeps room for the largest layer aside and so gives less than half.
            half = setting.shape.layers // 2
            places = {f"layers.{i}": device_index if i < half else "cpu" for i in range(setting.shape.layers)}
            resident_bytes = sum(p.nbytes for layer in model.layers[:half] for p in layer.parameters())
            dispatched = dispatch_model(model, device_map=places, main_device=device_index)
        else:
            resident_bytes = 0
            dispatched = cpu_offload(model, execution_device=device)
        streamed_bytes = setting.weight_bytes - resident_bytes
        yield Opened(dispatched, lambda: Facts(Traffic(streamed_bytes, "by construction")))

    return opened


DEFAULT = System(
    "accelerate",
    "accelerate cpu_offload",
    _open(pinned=False, half_resident=False),
    shares_process=True,
    packages=("accelerate",),
    needs_cuda=_WHY_CUDA,
)
PINNED = System(
    "accelerate-pinned",
    "accelerate cpu_offload, pinned",
    _open(pinned=True, half_resident=False),
    shares_process=True,
    packages=("accelerate",),
    needs_cuda=_WHY_CUDA,
)
HALF = System(
    "accelerate-half",
    "accelerate dispatch_model, pinned, half resident",
    _open(pinned=True, half_resident=True),
    shares_process=True,
    packages=("accelerate",),
    needs_cuda=_WHY_CUDA,
)
