"""What a checkpoint will take, from its config.json alone: the model is built and run once on meta tensors, which have
shapes and no bytes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from penstock.cli.pretrained import one_line
from penstock.errors import CheckpointError, UnsupportedProgramError
from penstock.models.pretrained import DECODE_TOKENS, decode_tokens_of
from penstock.models.transformers_private import build_model
from penstock.plan.floor import Floor, floor_bytes
from penstock.plan.in_place import read_directly_by_default, stand_ins
from penstock.schedule import Access, Schedule, Step
from penstock.weight import ITEM_BYTES, Weight

_METHOD = "forward"
# Length of the cache that the model is run with. Sizes at other lengths are computed from it.
_TRIED_LENGTH = 1009
# Under these names layers keep one state for all earlier tokens together. It has the same size at any length.
_WITHOUT_LENGTH = frozenset({"conv_states", "recurrent_states"})
_EXPERTS = re.compile(r"(^|\.)experts(\.|$)")
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "top_k_experts")


@dataclass(frozen=True)
class Experts:
    """The experts of a mixture of experts."""

    nbytes: int
    experts: int
    per_token: int

    @property
    def routed_bytes(self) -> int:
        """Bytes of the experts that one token is routed to."""
        return self.nbytes * self.per_token // self.experts


class CheckpointSize:
    """Bytes of weights, of the KV cache at any length, and an estimate of the floor."""

    def __init__(self, transformers: ModuleType, config: Any, dtype: torch.dtype, *, trust_remote_code: bool) -> None:
        self.config = config
        self.text_config = config.get_text_config(decoder=True)
        self.dtype = dtype
        model = _meta_model(transformers, config, dtype, trust_remote_code)
        self.class_name = type(model).__name__
        # A tied weight is one tensor under several names. This keeps the first.
        self._names = {id(tensor): name for name, tensor in reversed(list(_tensors(model)))}
        self.weights = {name: _weight(name, tensor) for name, tensor in _tensors(model) if self._is_first(name, tensor)}
        self.parameters = sum(tensor.numel() for tensor in model.parameters())
        self._decode_tokens = decode_tokens_of(model, DECODE_TOKENS)
        self._cache = transformers.StaticCache(config=config, max_cache_len=_TRIED_LENGTH)
        self.schedule = self._run(model)

    @property
    def weight_bytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights.values())

    @property
    def bytes_by_dtype(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for weight in self.weights.values():
            found[weight.dtype] = found.get(weight.dtype, 0) + weight.nbytes
        return found

    @property
    def read_bytes(self) -> int:
        """Bytes of all weights that a token is computed with, except tables of which only rows are read."""
        names = {access.weight for access in self.schedule.accesses if not read_directly_by_default(access)}
        return sum(self.weights[name].nbytes for name in names)

    @property
    def max_length(self) -> int | None:
        """The longest conversation by the configuration; None if it names no limit."""
        found = getattr(self.text_config, "max_position_embeddings", None)
        return found if isinstance(found, int) and found > 0 else None

    def cache_bytes(self, length: int) -> int:
        """The cache that from_pretrained keeps for one conversation of `length` tokens. Sliding layers keep every
        position, and the padding of a last decode run has positions of its own."""
        positions = length + min(self._decode_tokens, length) - 1
        return sum(
            nbytes if name in _WITHOUT_LENGTH else nbytes // layer.max_cache_len * positions
            for layer in self._cache.layers
            for name, nbytes in _layer_bytes(layer)
        )

    def floor(self, page_bytes: int) -> Floor:
        """By plan/floor.py, with one step per matrix in the order of the modules. The compiler's steps may differ."""
        schedules, weights = stand_ins([self.schedule], self.weights, read_directly_by_default)
        return floor_bytes(schedules, weights, granularity_bytes=page_bytes)

    @property
    def experts(self) -> Experts | None:
        nbytes = sum(weight.nbytes for name, weight in self.weights.items() if _EXPERTS.search(name))
        experts, per_token = _first(self.text_config, _EXPERT_COUNTS), _first(self.text_config, _EXPERTS_PER_TOKEN)
        if not nbytes or experts is None or per_token is None or per_token >= experts:
            return None
        return Experts(nbytes, experts, per_token)

    def _is_first(self, name: str, tensor: torch.Tensor) -> bool:
        return self._names[id(tensor)] == name

    def _run(self, model: torch.nn.Module) -> Schedule:
        accesses: list[Access] = []
        steps: list[Step] = []

        def note(module: torch.nn.Module, *_: Any) -> None:
            gathered = isinstance(module, torch.nn.Embedding)
            pending: list[int] = []
            for tensor in module.parameters(recurse=False):
                accesses.append(Access(len(accesses), self._names[id(tensor)], gathered=gathered))
                pending.append(accesses[-1].number)
                if tensor.dim() > 1:
                    steps.append(Step(type(module).__name__, tuple(pending)))
                    pending = []
            if pending and steps and module_has_matrix(module):
                # A bias is read by the step that multiplies.
                steps[-1] = Step(steps[-1].kernel, (*steps[-1].accesses, *pending))
            elif pending:
                steps.append(Step(type(module).__name__, tuple(pending)))

        hooks = [module.register_forward_pre_hook(note) for module in model.modules()]
        ids = torch.zeros((1, 2), dtype=torch.int64, device="meta")
        # Mamba's own models name this argument differently.
        name = "cache_params" if "mamba" in self.class_name.lower() else "past_key_values"
        try:
            with torch.no_grad():
                model(input_ids=ids, use_cache=True, **{name: self._cache})
        except Exception as error:  # models raise whatever they like
            raise UnsupportedProgramError(
                f"{self.class_name} cannot be run with a static KV cache, so nothing can be said about it: "
                f"{one_line(error)}"
            ) from error
        for hook in hooks:
            hook.remove()
        return Schedule(_METHOD, tuple(accesses), tuple(steps))


def module_has_matrix(module: torch.nn.Module) -> bool:
    return any(tensor.dim() > 1 for tensor in module.parameters(recurse=False))


def read_config(transformers: ModuleType, folder: Path, trust_remote_code: bool) -> Any:
    try:
        return transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # a damaged file raises any of a dozen kinds
        raise CheckpointError(f"{folder}: config.json cannot be used: {one_line(error)}") from error


def config_dtype(config: Any) -> torch.dtype | None:
    """The dtype that the checkpoint was saved in; None if the configuration does not say."""
    for one in (config, config.get_text_config(decoder=True)):
        found = getattr(one, "dtype", None)
        if isinstance(found, torch.dtype):
            return found
    return None


def _meta_model(transformers: ModuleType, config: Any, dtype: torch.dtype, trust_remote_code: bool) -> torch.nn.Module:
    named = (getattr(config, "architectures", None) or [""])[0]
    kind = getattr(transformers, named, None) if named else None
    try:
        with torch.device("meta"):
            built_as = transformers.AutoModelForCausalLM if kind is None else kind
            model: torch.nn.Module = build_model(built_as, config, dtype, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise CheckpointError(f"no model can be built from config.json: {one_line(error)}") from error
    # This way to run experts works on meta tensors of every dtype. Models without experts refuse it.
    with contextlib.suppress(AttributeError, ValueError):
        model.set_experts_implementation("batched_mm")  # type: ignore[operator]
    return model.eval()


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Stored tensors, under each of their names. Those that a checkpoint does not store are computed, and small."""
    stored = model.state_dict(keep_vars=True)
    yield from stored.items()


def _weight(name: str, tensor: torch.Tensor) -> Weight:
    shape = tuple(tensor.shape)
    return Weight(name, str(tensor.dtype).removeprefix("torch."), shape, tuple(range(len(shape))))


def _layer_bytes(layer: Any) -> Iterator[tuple[str, int]]:
    for name, value in vars(layer).items():
        held: Mapping[Any, Any] = value if isinstance(value, dict) else {None: value}
        for tensor in held.values():
            # Without dimensions it is a counter.
            if isinstance(tensor, torch.Tensor) and tensor.dim() > 1:
                yield name, tensor.numel() * ITEM_BYTES[str(tensor.dtype).removeprefix("torch.")]


def _first(config: Any, names: tuple[str, ...]) -> int | None:
    for name in names:
        with contextlib.suppress(AttributeError):
            found = getattr(config, name)
            if isinstance(found, int) and found > 0:
                return found
    return None
