"""diffusers' group offloading: the next leaf, or the next block, is copied on a second stream while one runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from bench.suite.model import load
from bench.suite.result import Traffic
from bench.suite.systems.system import Facts, Opened, Setting, System


def _open(kind: str, *, buffer_beside: bool = False) -> Callable[[Setting], AbstractContextManager[Opened]]:
    @contextmanager
    def opened(setting: Setting) -> Iterator[Opened]:
        from diffusers.hooks import apply_group_offloading

        # It pins what is not pinned, which would take the weights' size in RAM a second time.
        model = load(setting.shape, setting.weights_path, lambda tensor: tensor, pinned=True)
        if buffer_beside:
            model.register_buffer("beside", torch.zeros(1))
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


def _system(name: str, title: str, open: Callable[[Setting], AbstractContextManager[Opened]]) -> System:
    return System(
        name,
        f"diffusers group offload, {title}, stream",
        open,
        shares_process=True,
        packages=("diffusers",),
        needs_cuda="use_stream needs a device with streams",
    )


LEAF = _system("diffusers-leaf", "leaf", _open("leaf_level"))
BLOCK = _system("diffusers-block", "block", _open("block_level"))
# It installs what copies ahead, and what waits for the copies, only where the model has something beside its blocks.
# This model has nothing, and as it is its output is wrong; with one unused buffer it should be right.
BLOCK_BESIDE = _system("diffusers-block-beside", "block and a buffer beside", _open("block_level", buffer_beside=True))
