"""Scratch memory of the GPU's matrix libraries: torch keeps one per thread and stream until all are cleared."""

from __future__ import annotations

import threading

import torch

_lock = threading.Lock()
_addressed = False


def keep_workspaces() -> None:
    """Keep them from now on, until the process ends: a graph addresses the one of the stream it was captured on."""
    global _addressed
    with _lock:
        _addressed = True


def release_device_memory() -> None:
    """Gives back what tuning left on the GPU: the workspaces, unless graphs may address them, and torch's cache."""
    with _lock:
        if not _addressed:
            torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
