"""PyTorch as it is, every weight on the device: the reference for outputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bench.suite.model import load
from bench.suite.result import Traffic
from bench.suite.systems.system import Facts, Opened, Setting, System


@contextmanager
def _open(setting: Setting) -> Iterator[Opened]:
    model = load(setting.shape, setting.weights_path, lambda tensor: tensor.to(setting.device))
    facts = Facts(Traffic(0, "by construction"), weights_peak_bytes=sum(p.nbytes for p in model.parameters()))
    yield Opened(model, lambda: facts)


EAGER = System("eager", "PyTorch eager, resident", _open, shares_process=True, asynchronous=True)
