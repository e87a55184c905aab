"""DeepSpeed ZeRO-Inference: stage 3 with the parameters in pinned host memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from bench.suite.model import load
from bench.suite.result import Traffic
from bench.suite.systems.system import Facts, Opened, Setting, System


@contextmanager
def _open(setting: Setting) -> Iterator[Opened]:
    import deepspeed

    # A group of one process; DeepSpeed asks for the variables a launcher would set.
    for name, value in {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
    }.items():
        os.environ.setdefault(name, value)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu", "pin_memory": True},
            "overlap_comm": True,
            "stage3_prefetch_bucket_size": 2 * setting.shape.hidden * setting.shape.ff,
            "stage3_param_persistence_threshold": setting.shape.hidden,
            "stage3_max_live_parameters": 4 * setting.shape.hidden * setting.shape.ff,
        },
    }
    model = load(setting.shape, setting.weights_path, lambda tensor: tensor)
    engine = deepspeed.initialize(model=model, config=config)[0]
    engine.module.eval()
    yield Opened(engine, lambda: Facts(Traffic(None, "unknown")))


ZERO_INFERENCE = System(
    "deepspeed",
    "DeepSpeed ZeRO-Inference",
    _open,
    packages=("deepspeed",),
    needs_cuda="its host offload is for an accelerator",
)
