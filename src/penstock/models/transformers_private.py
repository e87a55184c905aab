"""All private interfaces of transformers that we use. pyproject.toml bounds its version, and tests/models try each."""

from __future__ import annotations

from typing import Any

import torch


def build_model(model_class: Any, config: Any, dtype: torch.dtype, *, trust_remote_code: bool) -> Any:
    """The model as from_pretrained builds it, on the default device: by the class's own, private from_config."""
    if hasattr(model_class, "_from_config"):
        return model_class._from_config(config, dtype=dtype)
    return model_class.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)


def dtype_plan(model: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Tensors that a model keeps in float32 whatever its dtype, by patterns of their names."""
    return dict(model._get_dtype_plan(dtype)) if hasattr(model, "_get_dtype_plan") else {}


def is_model(module: Any) -> bool:
    return hasattr(module, "_init_weights")


def initialize(model: Any, module: torch.nn.Module) -> None:
    """What transformers does for a module whose values no checkpoint has."""
    model._init_weights(module)


def has_experts(model: Any) -> bool:
    return bool(model._can_set_experts_implementation())
