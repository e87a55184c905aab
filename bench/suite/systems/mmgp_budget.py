"""mmgp: blocks loaded within a budget from pinned memory, the next while one runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bench.suite.model import load
from bench.suite.result import Traffic
from bench.suite.systems.system import Facts, Opened, Setting, System

# It takes twice its budget when it copies ahead.
BUDGET_FRACTION = 0.1


@contextmanager
def _open(setting: Setting) -> Iterator[Opened]:
    from mmgp import offload

    model = load(setting.shape, setting.weights_path, lambda tensor: tensor)
    manager = offload.all(
        {"transformer": model},
        pinnedMemory=True,
        quantizeTransformer=False,
        budgets={"transformer": max(1, int(BUDGET_FRACTION * setting.weight_bytes) >> 20)},
        asyncTransfers=True,
        verboseLevel=0,
    )
    try:
        yield Opened(model, lambda: Facts(Traffic(None, "unknown")))
    finally:
        manager.release()


MMGP = System("mmgp", "mmgp, 10% budget", _open, packages=("mmgp",), needs_cuda="it only copies to a GPU")
