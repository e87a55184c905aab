"""The model itself, without values; and the values that no checkpoint holds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ModelError
from penstock.models.folder import CheckpointFolder
from penstock.models.transformers_private import build_model, dtype_plan, initialize, is_model
from penstock.torch_private.module_tables import has_buffers_of_its_own_making, replace_tensor, tensors

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def model_dtype(config: Any, dtype: str | torch.dtype | None) -> torch.dtype:
    """What was asked for, else what the checkpoint says, else float32: as transformers does."""
    wanted = getattr(config, "dtype", None) if dtype is None else dtype
    name = str(wanted or "float32").removeprefix("torch.")
    if name not in _DTYPES:
        raise ModelError(f"dtype is {name!r}; it must be one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def build_on_meta(checkpoint: CheckpointFolder, dtype: torch.dtype, *, trust_remote_code: bool = False) -> Any:
    """The model as from_pretrained builds it, with all its tensors on meta."""
    with torch.device("meta"):
        model = build_model(checkpoint.model_class, checkpoint.config, dtype, trust_remote_code=trust_remote_code)
    _place(model, dtype)
    return model.eval()


def _place(model: Any, dtype: torch.dtype) -> None:
    """Moves everything to meta, whatever device the model's code named. Some models keep some tensors in float32
    whatever their dtype, and transformers loads them that way."""
    plan = dtype_plan(model, dtype)
    for path, module in model.named_modules():
        for name, tensor in list(tensors(module)):
            full = f"{path}.{name}" if path else name
            kept = next((k for p, k in plan.items() if re.search(p.replace("*", r"\d+"), full)), tensor.dtype)
            if tensor.device.type != "meta" or tensor.dtype != kept:
                replace_tensor(module, name, tensor.detach().to("meta", kept))


def derived_buffers(
    checkpoint: CheckpointFolder, dtype: torch.dtype, *, trust_remote_code: bool = False
) -> dict[str, Tensor]:
    """Buffers that follow from the configuration (rotary tables, scales), computed by the model's own code.

    Builds the model once more on the CPU, except for its parameters: each goes to meta as soon as it is registered.
    """
    with parameters_on_meta(), torch.device("cpu"):
        model = build_model(checkpoint.model_class, checkpoint.config, dtype, trust_remote_code=trust_remote_code)
    with torch.no_grad():
        _compute_tables(model, model)
    persistent = set(model.state_dict())
    return {name: buffer for name, buffer in model.named_buffers() if name not in persistent}


def _compute_tables(module: nn.Module, owner: Any) -> None:
    """Does what transformers does after loading: most models then compute their tables once more, in full precision."""
    owner = module if is_model(module) else owner
    for child in module.children():
        _compute_tables(child, owner)
    if has_buffers_of_its_own_making(module):
        initialize(owner, module)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Inside, modules keep the parameters that they are given on meta."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
