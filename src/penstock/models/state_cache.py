"""The KV cache and recurrent state of a language model as buffers of the model: what torch.export takes for state.

transformers' models read and write a Cache. Here its tensors belong to the model, and every row of a batch has its own
position: `start[b]` says where the tokens of row b go. So rows may be at different positions.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    LinearAttentionAndStaticFullAttentionLayer,
    LinearAttentionAndStaticSlidingWindowAttentionLayer,
    LinearAttentionLayer,
    StaticCache,
    StaticLayer,
    StaticSlidingWindowLayer,
    get_layer_types_and_kwargs,
)

from penstock.errors import ModelError
from penstock.kv.ops import APPEND
from penstock.kv.split import BLOCK_POSITIONS

# Layers without attention that keep no recurrent state: a convolution's few last inputs, or nothing.
_WITHOUT_LOOP = ("conv", "moe", "mlp")


class _Rows:
    """An attention layer that keeps every position: the mask does the sliding, and no code branches on a length."""

    start: Tensor
    keys: Tensor
    values: Tensor
    is_initialized: bool

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)  # type: ignore[attr-defined]
        batch, _heads, count, _size = key_states.shape
        rows = torch.arange(batch, device=key_states.device)[:, None]
        places = self.start[:, None] + torch.arange(count, device=key_states.device)
        self.keys[rows, :, places] = key_states.transpose(1, 2)
        self.values[rows, :, places] = value_states.transpose(1, 2)
        return self.keys, self.values

    def get_seq_length(self) -> Tensor:
        """The length of each row. Models that count positions by it are given positions instead."""
        return self.start


class AttentionLayer(_Rows, StaticLayer):
    def __init__(self, slots: int, *, is_sliding: bool = False) -> None:
        super().__init__(max_cache_len=slots)
        self.is_sliding = is_sliding


class HostLayer(_Rows, StaticLayer):
    """Keys and values on both sides of the link. Where the sides meet is chosen when the program is loaded; for
    tracing, any block of positions will do."""

    device_kv: Tensor
    host_kv: Tensor

    def __init__(self, slots: int) -> None:
        super().__init__(max_cache_len=slots)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        batch, heads, _count, size = key_states.shape
        if value_states.shape != key_states.shape:
            raise ModelError(
                f"its keys are {list(key_states.shape)} and its values {list(value_states.shape)}; host_cache=True is "
                "for models in which both are alike"
            )
        near = BLOCK_POSITIONS if self.max_cache_len > BLOCK_POSITIONS else 0
        self.device_kv = key_states.new_zeros((2, batch, heads, near, size))
        self.host_kv = key_states.new_zeros((2, batch, heads, self.max_cache_len - near, size))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Returns both sides; host_attention attends to them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        batch, _heads, count, _size = key_states.shape
        counts = torch.full((batch,), count, dtype=torch.int64, device=key_states.device)
        APPEND(self.device_kv, self.host_kv, key_states, value_states, self.start, counts)
        return self.device_kv, self.host_kv


class HybridLayer(_Rows, LinearAttentionAndStaticFullAttentionLayer):
    def __init__(self, slots: int, *, number_of_states: int, is_sliding: bool = False) -> None:
        super().__init__(max_cache_len=slots, number_of_states=number_of_states)
        self.is_sliding = is_sliding


def _own(layer: Any, slots: int, *, host: bool) -> Any:
    """Our layer for one of transformers'."""
    kind = type(layer)
    if host:
        if kind is not StaticLayer:
            raise ModelError(f"its cache has layers of the kind {kind.__name__}; host_cache=True is for full attention")
        return HostLayer(slots)
    if kind is StaticLayer or kind is StaticSlidingWindowLayer:
        return AttentionLayer(slots, is_sliding=kind is StaticSlidingWindowLayer)
    hybrid = (LinearAttentionAndStaticFullAttentionLayer, LinearAttentionAndStaticSlidingWindowAttentionLayer)
    if kind in hybrid:
        return HybridLayer(slots, number_of_states=layer.number_of_states, is_sliding=kind is hybrid[1])
    if kind is LinearAttentionLayer:
        return layer
    raise ModelError(f"its cache has layers of the kind {kind.__name__}, which Penstock does not know")


@dataclass(frozen=True)
class LayerKinds:
    """What a configuration says about its cache, without a forward."""

    # Whether layers run over every token they are given, padding too, and cannot go back. Attention can be kept from
    # seeing padding and tokens that were taken back; a convolution or a recurrence cannot.
    is_recurrent: bool
    # Whether some layers go through the tokens in a loop, whose length torch.export fixes.
    scans: bool


def layer_kinds(config: Any) -> LayerKinds:
    types, _ = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
    layers = StaticCache(config=config, max_cache_len=2).layers
    linear = [kind for kind, layer in zip(types, layers, strict=True) if isinstance(layer, LinearAttentionLayer)]
    return LayerKinds(bool(linear), any(kind not in _WITHOUT_LOOP for kind in linear))


@dataclass(frozen=True)
class CacheTensor:
    """One tensor of one layer."""

    layer: int
    field: str  # an attribute of the layer
    number: int | None = None  # of a state, if the attribute is a table of states

    @property
    def name(self) -> str:
        return f"cache_{self.layer}_{self.field}" + ("" if self.number is None else f"_{self.number}")

    def read(self, layers: Sequence[Any]) -> Tensor:
        value = getattr(layers[self.layer], self.field)
        tensor: Tensor = value if self.number is None else value[self.number]
        return tensor

    def write(self, layers: Sequence[Any], tensor: Tensor) -> None:
        if self.number is None:
            setattr(layers[self.layer], self.field, tensor)
        else:
            getattr(layers[self.layer], self.field)[self.number] = tensor


class StateCache:
    """A model's cache after one forward: which tensors it has, and how to give it others."""

    def __init__(self, cache: Cache) -> None:
        self._layers = cache.layers

    @cached_property
    def parts(self) -> tuple[CacheTensor, ...]:
        return tuple(_parts(self._layers))

    def tensors(self) -> dict[str, Tensor]:
        return {part.name: part.read(self._layers) for part in self.parts}

    def filled(self, tensors: Sequence[Tensor], start: Tensor) -> Cache:
        """A cache that holds these tensors, in the order of `parts`, and goes on from `start` in each row."""
        layers = []
        for layer in self._layers:
            fresh = copy.copy(layer)
            for name, value in vars(layer).items():
                if isinstance(value, dict):
                    setattr(fresh, name, dict(value))
            if isinstance(fresh, _Rows):
                fresh.start = start
            if isinstance(fresh, LinearAttentionLayer):
                # Before the first token the state is zeros: with them, going on and beginning are the same.
                fresh.has_previous_state = dict.fromkeys(fresh.has_previous_state, True)
            layers.append(fresh)
        for part, tensor in zip(self.parts, tensors, strict=True):
            part.write(layers, tensor)
        return _RowCache(layers, start)

    def read(self, cache: Cache) -> list[Tensor]:
        return [part.read(cache.layers) for part in self.parts]


class _RowCache(Cache):
    def __init__(self, layers: list[Any], start: Tensor) -> None:
        super().__init__(layers=layers)
        self._start = start

    def get_query_offset(self, layer_idx: int = 0) -> Tensor:
        return self._start

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        return self._start


def empty_cache(config: Any, slots: int, batch: int, device: torch.device, *, host: bool = False) -> Cache:
    """For the first forward, in which layers learn their shapes."""
    made = StaticCache(config=config, max_cache_len=slots)
    layers = [_own(layer, slots, host=host) for layer in made.layers]
    start = torch.zeros(batch, dtype=torch.int64, device=device)
    for layer in layers:
        if isinstance(layer, _Rows):
            layer.start = start
    return _RowCache(layers, start)


def _parts(layers: Sequence[Any]) -> Iterator[CacheTensor]:
    for number, layer in enumerate(layers):
        if isinstance(layer, _Rows) and layer.is_initialized:
            for field in ("device_kv", "host_kv") if isinstance(layer, HostLayer) else ("keys", "values"):
                yield CacheTensor(number, field)
        if isinstance(layer, LinearAttentionLayer):
            for field in ("conv_states", "recurrent_states"):
                for state, tensor in getattr(layer, field).items():
                    if tensor is not None:
                        yield CacheTensor(number, field, state)
