"""A model of transformers whose forward runs on Penstock. It keeps its own class and its own generate()."""

from __future__ import annotations

import inspect
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.generation.configuration_utils import GenerationMode
from transformers.modeling_outputs import CausalLMOutputWithPast

from penstock.errors import InputError, ModelError, NotCopyableError
from penstock.models.engine import Engine
from penstock.models.token_cache import TokenCache
from penstock.runtime.session import Stats

# Arguments that a caller may pass. They are refused because they would have no effect.
_UNKNOWN = ("inputs_embeds", "labels", "output_attentions", "output_hidden_states")


class OnPenstock:
    """A mixin in front of a class of transformers. The parameters stay on meta."""

    _engine: Engine
    dtype: torch.dtype

    # ------------------------------------------------------------------------------------------ what transformers asks

    @property
    def device(self) -> torch.device:
        return self._engine.module.device

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: TokenCache | None = None,
        cache_params: TokenCache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **keywords: Any,
    ) -> CausalLMOutputWithPast:
        self._refuse(input_ids, logits_to_keep, keywords)
        assert input_ids is not None
        cache = past_key_values if past_key_values is not None else cache_params
        if cache is None:
            cache = self.new_cache()
        if not isinstance(cache, TokenCache):
            raise InputError(f"past_key_values is a {type(cache).__name__}; make one with model.new_cache()")
        count = input_ids.shape[1]
        wanted_logits = min(count, logits_to_keep or count)
        logits = self._engine.run(cache, input_ids, attention_mask, position_ids, wanted_logits)
        out = CausalLMOutputWithPast(logits=logits, past_key_values=cache)
        if "cache_params" in self._base_arguments():
            out["cache_params"] = cache
        return out

    def _refuse(self, input_ids: Tensor | None, logits_to_keep: Any, keywords: dict[str, Any]) -> None:
        name = self._engine.name
        for given in _UNKNOWN:
            value = keywords.get(given)
            if value is not None and value is not False:
                raise ModelError(f"{name} on Penstock does not take {given}: it gives logits for input_ids")
        if input_ids is None:
            raise InputError("input_ids are missing")
        if keywords.get("return_dict") is False:
            raise ModelError(f"{name} on Penstock does not take return_dict=False: call to_tuple() on what it returns")
        if not isinstance(logits_to_keep, int) or logits_to_keep < 0:
            raise ModelError(
                f"logits_to_keep is {logits_to_keep!r:.80}; it must be the number of last tokens whose logits you "
                "want, or 0 for all"
            )

    def _base_arguments(self) -> frozenset[str]:
        raise NotImplementedError  # by the class that attach() makes

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """transformers calls this once for each generate(), before anything is run."""
        engine = self._engine
        if generation_mode == GenerationMode.ASSISTED_GENERATION and (engine.is_recurrent or engine.has_experts):
            why = (
                "its recurrent state cannot be taken back" if engine.is_recurrent else "candidates wake further experts"
            )
            raise ModelError(f"{engine.name} does not take prompt lookup or an assistant: {why}")
        if generation_config.use_cache is False:
            raise ModelError(f"{engine.name} on Penstock always uses its cache; leave use_cache=False out")
        if generation_config.cache_implementation is not None:
            raise ModelError(
                f"cache_implementation is {generation_config.cache_implementation!r}; the cache is Penstock's"
            )
        if max_cache_length > engine.methods.cache_length:
            raise InputError(
                f"up to {max_cache_length + 1} tokens were asked for, and the cache holds "
                f"{engine.methods.cache_length}; ask for fewer (max_new_tokens), or load with a larger cache_length"
            )
        rows = batch_size * max(generation_config.num_beams, generation_config.num_return_sequences)
        if rows > engine.methods.batch:
            raise InputError(
                f"{rows} rows (inputs times beams or returned sequences); the program was compiled for up to "
                f"{engine.methods.batch}: load with batch={rows}"
            )
        for name in ("past_key_values", "cache_params"):
            given = model_kwargs.get(name)
            if given is not None:
                if not isinstance(given, TokenCache):
                    raise InputError(f"{name} is a {type(given).__name__}; make one with model.new_cache()")
                return
        name = "cache_params" if "cache_params" in self._base_arguments() else "past_key_values"
        model_kwargs[name] = self.new_cache()

    # ------------------------------------------------------------------------------------------------- what is ours

    def new_cache(self) -> TokenCache:
        """An empty cache, one at a time. Pass it to generate() as past_key_values to go on with it in the next call."""
        return TokenCache(self._engine)

    @property
    def cache_length(self) -> int:
        """How many tokens the KV cache holds."""
        return self._engine.methods.cache_length

    @property
    def floor_bytes(self) -> int:
        return self._engine.module.floor_bytes

    @property
    def budget_bytes(self) -> int:
        return self._engine.module.budget_bytes

    @property
    def weight_bytes(self) -> int:
        return self._engine.module.weight_bytes

    @property
    def state_bytes(self) -> int:
        """KV cache and recurrent state: outside the budget."""
        return self._engine.module.state_bytes

    @property
    def device_state_bytes(self) -> int:
        """The part of `state_bytes` on the device: all of it, except with host_cache=True."""
        return self._engine.module.device_state_bytes

    @property
    def last_run(self) -> Stats:
        return self._engine.module.last_run

    def stats(self) -> Stats:
        """Totals since the model was loaded."""
        return self._engine.module.stats()

    @property
    def link_bytes_per_s(self) -> float | None:
        return self._engine.module.link_bytes_per_s

    def set_budget(self, budget: int | str) -> None:
        self._engine.module.set_budget(budget)

    def close(self) -> None:
        self._engine.close()

    def to(self, *arguments: Any, **keywords: Any) -> Any:
        """Accepts only the place and dtype that it already has; a pipeline asks for those."""
        wanted = [*arguments, *keywords.values()]
        here = (self.device, self.device.type, str(self.device), self.device.index, self.dtype)
        if all(each in here or each == torch.device(self.device.type) for each in wanted):
            return self
        return self._apply()

    def _apply(self, *_: Any, **__: Any) -> NoReturn:
        """cuda(), cpu(), half() and the like come here."""
        raise ModelError(
            f"{self._engine.name} stays where and what it was loaded as; load it with other device= or dtype="
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise NotCopyableError(f"{self._engine.name} is loaded and cannot be copied or pickled; load it once more")


def attach(model: Any, engine: Engine) -> Any:
    """Makes the forward of `model`, which is on meta, run on the engine."""
    base = type(model)
    arguments = frozenset(inspect.signature(base.forward).parameters)

    class Attached(OnPenstock, base):  # type: ignore[misc, valid-type]
        def _base_arguments(self) -> frozenset[str]:
            return arguments

    Attached.__name__, Attached.__qualname__, Attached.__module__ = base.__name__, base.__qualname__, base.__module__
    model._engine = engine
    model.__class__ = Attached
    return model.eval().requires_grad_(False)
