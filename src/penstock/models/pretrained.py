"""penstock.from_pretrained: from a checkpoint of transformers to a model that runs inside a budget."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from penstock.budget import format_bytes
from penstock.errors import BelowFloorError, ModelError
from penstock.export.target import target_device
from penstock.models.building import build_on_meta, derived_buffers, model_dtype
from penstock.models.compile_time import CompileTime, countdown, past_times, predicted_s, write_time
from penstock.models.engine import Engine
from penstock.models.families import TOKEN_BY_TOKEN
from penstock.models.folder import CheckpointFolder, open_checkpoint
from penstock.models.language_model import attach
from penstock.models.methods import Methods
from penstock.models.state_cache import layer_kinds
from penstock.models.transformers_private import has_experts
from penstock.program import FORMAT_VERSION, read_program
from penstock.runtime.linear_choice import LinearChoice
from penstock.runtime.module import Module
from penstock.runtime.options import Asked, judge, refuse_unknown
from penstock.store.shards import weights_key as shard_key
from penstock.store.store import Store
from penstock.version import VERSION

PROGRAM, WEIGHTS = "model.pt2", "model.ptd"
DEFAULT_CACHE_LENGTH = 4096
# Rows of a decode run: enough for a prompt lookup of the usual size, and cheap beside sending weights over the link.
DECODE_TOKENS = 8
# The longest piece of a prompt. Weights cross the link once per piece: long pieces are cheap, activations are not.
PREFILL_TOKENS = 2048
# The pieces of a recurrent model, whose length torch.export fixes.
CHUNK_TOKENS = 64
# For activations, the CUDA context and torch's libraries.
SPARE_BYTES = 1 << 30


def from_pretrained(
    name: str | os.PathLike[str],
    budget: int | str | None = None,
    *,
    cache_length: int | None = None,
    batch: int = 1,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    trust_remote_code: bool = False,
    prefill_tokens: int | None = None,
    inductor_configs: Mapping[str, Any] | None = None,
    pack: bool = False,
    host_cache: bool = False,
    quiet: bool = False,
    **options: Any,
) -> Any:
    """A causal language model of transformers, of its own class, whose weights stay within `budget` on the device.

    name               a folder with config.json and .safetensors files, or a name such as "org/model" that transformers
                       finds in its cache or on its hub
    budget             device memory for weights, like "8GiB"; by default what is free
    device_memory      instead of a budget, as in penstock.Module: one total for weights, KV cache and activations
    cache_length       how many tokens the KV cache holds (by default 4096, or fewer if the model was made for fewer)
    batch              the most rows that run together: inputs times beams
    device, dtype      where it runs and as what; by default the GPU, and what the checkpoint says
    cache_dir          where programs and weights are kept (by default ~/.cache/penstock)
    trust_remote_code  run Python code that comes with the checkpoint
    prefill_tokens     the longest piece of a prompt that is run at once
    inductor_configs   options of torch._inductor.config for compiling
    pack               keep the weights packed, without loss: fewer bytes cross the link, and more weights stay on the
                       device. The file is written once more
    host_cache         keep the part of the KV cache that device_memory has no room for in host memory. Attention is
                       then ours, for models in which every token sees all before it, and for rows without padding
    quiet              print nothing to standard error. Otherwise a first start reports for minutes what it compiles
    options            those of penstock.Module: placement, calibration, cuda_graph, host_memory, ...
    """
    say: Callable[[str], None] = (lambda line: None) if quiet else _to_standard_error
    target = target_device(device)
    # Check these before minutes of compiling and writing. Models are compiled without our linears.
    refuse_unknown("from_pretrained", options)
    judge(Asked(budget, **options), target, LinearChoice(), is_packed=pack, host_cache=host_cache)
    checkpoint = open_checkpoint(name, trust_remote_code=trust_remote_code)
    kind = model_dtype(checkpoint.config, dtype)
    model = build_on_meta(checkpoint, kind, trust_remote_code=trust_remote_code)
    methods, is_recurrent = _methods(checkpoint, model, cache_length, batch, prefill_tokens)
    if host_cache:
        methods = replace(methods, takes_padding=False, host_cache=True)
    store = Store(None if cache_dir is None else Path(cache_dir))

    # Compilers take seconds to import, and most of the time there is nothing to compile or to write.
    def make_program(folder: Path) -> None:
        from penstock.models.compiling import compile_recipe
        from penstock.models.recipe import Recipe

        recipe = Recipe(checkpoint.name, kind, methods, target, trust_remote_code, dict(inductor_configs or {}))
        layers = int(checkpoint.config.get_text_config().num_hidden_layers)
        total_s = predicted_s(layers, past_times(store.list(), program_key))
        say(
            f"penstock: compiling {type(model).__name__} of {checkpoint.name} for {target}; this is done once "
            f"and takes about {total_s:.0f} s"
        )
        begun_s = time.monotonic()
        with countdown(total_s, say):
            compile_recipe(recipe, folder / PROGRAM, say)
        taken = CompileTime(layers, time.monotonic() - begun_s)
        write_time(folder, taken)
        say(f"penstock: compiled in {taken.seconds:.0f} s")

    program_key = _program_key(checkpoint, methods, kind, target, inductor_configs)
    program_path = store.entry("programs", program_key, make_program, say) / PROGRAM
    program = read_program(program_path)

    def make_weights(folder: Path) -> None:
        from penstock.export.compile import write_weights
        from penstock.models.conversion import converted

        # A packed file is made from an unpacked one, which is then deleted.
        store.require_space(program.weight_bytes * (2 if pack else 1))
        say(f"penstock: writing {format_bytes(program.weight_bytes)} of weights to {store.folder}")
        derived = derived_buffers(checkpoint, kind, trust_remote_code=trust_remote_code)
        write_weights(program, [converted(model, checkpoint.tensors), derived], folder / WEIGHTS, pack=pack)

    # Values do not depend on where and how it was compiled, but on what computed those that no checkpoint holds.
    weights_key = {
        **{part: program_key[part] for part in ("config", "dtype", "torch", "transformers", "penstock")},
        "model": checkpoint.name,
        "shards": shard_key(checkpoint.shards),
        "identity": program.identity,
        **({"packed": True} if pack else {}),
    }
    weights_path = store.entry("weights", weights_key, make_weights, say) / WEIGHTS

    _read_generation_config(model, checkpoint)
    try:
        module = Module(program_path, budget, weights=weights_path, device=device, **options)
    except BelowFloorError as error:
        if options.get("device_memory") is not None:
            raise  # it says how much of the total state and activations take
        raise _below_floor(error, program.state_bytes) from error
    say(f"penstock: {module.summary}")
    engine = Engine(
        module,
        methods,
        name=type(model).__name__,
        is_recurrent=is_recurrent,
        has_experts=has_experts(model),
        store=store,
    )
    return attach(model, engine)


def decode_tokens_of(model: Any, cache_length: int) -> int:
    """Rows of a decode run. Padding would move recurrent state, and activate further experts."""
    if layer_kinds(model.config).is_recurrent or has_experts(model):
        return 1
    return min(DECODE_TOKENS, cache_length)


def _methods(
    checkpoint: CheckpointFolder, model: Any, cache_length: int | None, batch: int, prefill_tokens: int | None
) -> tuple[Methods, bool]:
    """Sizes of the program; and whether the model has layers that cannot go back."""
    trained = getattr(checkpoint.config.get_text_config(), "max_position_embeddings", None)
    length = min(trained or DEFAULT_CACHE_LENGTH, DEFAULT_CACHE_LENGTH) if cache_length is None else cache_length
    for name, given, least in (("cache_length", length, 2), ("batch", batch, 1), ("prefill_tokens", prefill_tokens, 2)):
        if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < least):
            raise ModelError(f"{name} is {given!r:.80}; it must be an int of at least {least}")
    kind = checkpoint.config.model_type
    if prefill_tokens is not None and kind in TOKEN_BY_TOKEN:
        raise ModelError(
            f"prefill_tokens is {prefill_tokens}, and models of the type {kind} run prompts token by token; leave it "
            "out"
        )
    if trained and length > trained:
        raise ModelError(f"cache_length is {length}; {checkpoint.name} was made for up to {trained} positions")
    layers = layer_kinds(model.config)
    decode_tokens = decode_tokens_of(model, length)
    if not layers.scans:
        longest = min(length, prefill_tokens or PREFILL_TOKENS)
        methods = Methods(batch, length, decode_tokens, longest, takes_padding=not layers.is_recurrent)
        return methods, layers.is_recurrent
    longest = 0 if kind in TOKEN_BY_TOKEN else min(length, prefill_tokens or CHUNK_TOKENS)
    return Methods(batch, length, decode_tokens, longest, is_fixed=True, takes_padding=False), True


def _program_key(
    checkpoint: CheckpointFolder,
    methods: Methods,
    dtype: torch.dtype,
    device: torch.device,
    inductor_configs: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Everything that a program depends on, including code that comes with a checkpoint, by its configuration."""
    from transformers import __version__ as transformers_version

    config = {name: value for name, value in checkpoint.config.to_dict().items() if name != "_name_or_path"}
    key = {
        "model": checkpoint.model_class.__name__,
        # As text: JSON itself has no infinity, and some configurations do.
        "config": json.dumps(config, default=str, sort_keys=True),
        "methods": asdict(methods),
        "dtype": str(dtype).removeprefix("torch."),
        "device": device.type,
        "machine": platform.machine(),
        "torch": str(torch.__version__),
        "transformers": transformers_version,
        "penstock": VERSION,
        "format": FORMAT_VERSION,
        "inductor_configs": {name: repr(value) for name, value in sorted((inductor_configs or {}).items())},
    }
    if device.type == "cuda":
        key["gpu"] = torch.cuda.get_device_properties(device).name
    return key


def _read_generation_config(model: Any, checkpoint: CheckpointFolder) -> None:
    """What the checkpoint says about generation, or the model's configuration if the checkpoint has no such file."""
    from transformers import GenerationConfig

    try:
        model.generation_config = GenerationConfig.from_pretrained(checkpoint.name)
    except OSError:
        model.generation_config = GenerationConfig.from_model_config(checkpoint.config)
    # Some checkpoints name a cache of transformers; the cache is Penstock's.
    model.generation_config.cache_implementation = None


def _below_floor(error: BelowFloorError, state_bytes: int) -> BelowFloorError:
    floor_bytes = error.floor_bytes
    return BelowFloorError(
        f"{error}. The KV cache and other state take {format_bytes(state_bytes)} more on the device; with activations "
        f"and torch's own, a GPU needs about {format_bytes(floor_bytes + state_bytes + SPARE_BYTES)} in all",
        budget_bytes=error.budget_bytes,
        floor_bytes=floor_bytes,
    )


def _to_standard_error(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
