"""diffusers' group offloading: the next leaf, or the next block, is copied on a second stream while one runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from bench.suite.model import load
from bench.suite.result import Traffic
from bench.suite.systems.system import Facts, Opened, Setting, System


def _open(kind: str) -> Callable[[Setting], AbstractContextManager[Opened]]:
    @contextmanager
    def opened(setting: Setting) -> Iterator[Opened]:
        from diffusers.hooks import apply_group_offloading

        # It pins what is not pinned, which would take the weights' size in RAM a second time.
        model = load(setting.shape, setting.weights_path, lambda tensor: tensor, pinned=True)
        apply_group_offloading(
            model,
            onload_device=torch.device(setting.device),
            offload_device=torch.device("cpu"),
            offload_type=kind,
            num_blocks_per_group=1 if kind == "block_level" else None,
            use_stream=True,
        )
        yield Opened(model, lambda: Facts(Traffic(setting.weight_bytes, "by construction")))

    return opened


_WHY_CUDA = "use_stream needs a device with streams"
LEAF = System(
    "diffusers-leaf",
    "diffusers group offload, leaf, stream",
    _open("leaf_level"),
    packages=("diffusers",),
    needs_cuda=_WHY_CUDA,
)
BLOCK = System(
    "diffusers-block",
    "diffusers group offload, block, stream",
    _open("block_level"),
    packages=("diffusers",),
    needs_cuda=_WHY_CUDA,
)
