"""A checkpoint's tensors under the model's names and in its shapes, converted as transformers converts them at load.

Most are used as they lie in the file. Some have other names, and experts of a mixture lie one by one where the model
has them stacked. transformers' own operations make those when they are written, one at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from penstock.export.checkpoint import MadeTensor, Source
from penstock.export.safetensors_file import StoredTensor, stored_tensor


def converted(model: Any, stored: Mapping[str, StoredTensor]) -> dict[str, Source]:
    """By the model's names. Tensors that the model does not have are left out; the writer reports missing ones."""
    wanted: dict[str, Tensor] = model.state_dict()
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    found: dict[str, Source] = {}
    gathered: dict[str, tuple[Any, list[tuple[str, str, StoredTensor]]]] = {}
    for source in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(source, renamings, converters, model.base_model_prefix, wanted)
        if name not in wanted and source in wanted:
            name, pattern = source, None
        if name not in wanted:
            continue
        if pattern is None:
            found[name] = _as_wanted(stored[source], wanted[name])
        else:
            converter = by_pattern[pattern]
            gathered.setdefault(name, (converter, []))[1].append((source, pattern, stored[source]))
    for name, (converter, sources) in gathered.items():
        found.update(_conversion(model, wanted, name, converter, sources))
    return found


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _as_wanted(stored: StoredTensor, wanted: Tensor) -> Source:
    if stored.dtype == _dtype_name(wanted):
        return stored

    def cast() -> Tensor:
        return stored_tensor(stored).to(wanted.dtype)

    return MadeTensor(_dtype_name(wanted), stored.shape, cast)


def _conversion(
    model: Any,
    wanted: Mapping[str, Tensor],
    first: str,
    converter: Any,
    sources: list[tuple[str, str, StoredTensor]],
) -> dict[str, Source]:
    """The tensors that one conversion gives; several if it splits one. Each of those runs it again: they are few."""

    def convert() -> dict[str, Tensor]:
        own = copy.deepcopy(converter)
        for source, pattern, stored in sources:
            own.add_tensor(first, source, pattern, _loader(stored, wanted[first].dtype))
        made = own.convert(first, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def one(name: str) -> Callable[[], Tensor]:
        return lambda: convert()[name].to(wanted[name].dtype)

    # The names, without reading: the same conversion over tensors without values.
    names = _names(model, wanted, first, converter, sources)
    return {
        name: MadeTensor(_dtype_name(wanted[name]), shape, one(name)) for name, shape in names.items() if name in wanted
    }


def _names(
    model: Any, wanted: Mapping[str, Tensor], first: str, converter: Any, sources: list[tuple[str, str, StoredTensor]]
) -> dict[str, tuple[int, ...]]:
    own = copy.deepcopy(converter)
    for source, pattern, stored in sources:
        empty = torch.empty(stored.shape, dtype=wanted[first].dtype, device="meta")
        own.add_tensor(first, source, pattern, lambda empty=empty: empty)
    made = own.convert(first, model=model, config=model.config)
    return {name: tuple((value[0] if isinstance(value, list) else value).shape) for name, value in made.items()}


def _loader(stored: StoredTensor, dtype: torch.dtype) -> Callable[[], Tensor]:
    return lambda: stored_tensor(stored).to(dtype)
