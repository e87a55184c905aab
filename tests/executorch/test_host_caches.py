"""A KV cache whose far side stays in host memory: ExecuTorch holds state in main memory itself, and copies it."""

from __future__ import annotations

import pytest
import torch

from penstock.errors import UnsupportedProgramError
from penstock.executorch import lowering
from tests.export.test_host_states import Cached, K, Q, offloaded


def test_it_is_refused_for_a_gpu_by_name() -> None:
    methods = {"forward": offloaded(Cached(), Q, K)}
    with pytest.raises(UnsupportedProgramError, match="'forward' keeps cache.host_kv_0 in host memory"):
        lowering._signatures(methods, torch.device("cuda"))
    # On the CPU all state is in main memory, and nothing is far.
    assert lowering._signatures(methods, torch.device("cpu"))["forward"].outputs
