"""What `generate` and `chat` share: options, and the checkpoint's tokenizer and model loaded by them."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import click

from penstock.cli.units import FiniteRange, bytes_option
from penstock.errors import CheckpointError, InputError, PenstockError
from penstock.models.families import OLDEST

_INSTALL = "pip install 'penstock[transformers]'"
DTYPES = ("bfloat16", "float16", "float32")

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


def model_options(command: Decorated) -> Decorated:
    for option in reversed(
        (
            click.option("--budget", help="Device memory for weights: 8GiB, or auto. Default: auto."),
            bytes_option(
                "--device-memory", help="Instead of --budget: one total for weights, KV cache and activations."
            ),
            click.option(
                "--host-cache", is_flag=True, help="With --device-memory: keep the rest of the KV cache in host memory."
            ),
            click.option("--cache-length", type=click.IntRange(min=1), help="Tokens that the KV cache has room for."),
            click.option("--device", help="cuda, cuda:1 or cpu. Default: a GPU if there is one."),
            click.option("--dtype", type=click.Choice(DTYPES), help="Default: the checkpoint's."),
            click.option("--cache-dir", type=click.Path(path_type=Path), help="Where compiled programs are kept."),
            click.option(
                "--pack", is_flag=True, help="Keep weights packed, without loss: faster where they do not fit."
            ),
            click.option("--trust-remote-code", is_flag=True, help="Run Python code that comes with the checkpoint."),
        )
    ):
        command = option(command)
    return command


def sampling_options(command: Decorated) -> Decorated:
    for option in reversed(
        (
            click.option("--temperature", type=FiniteRange(min=0), help="0 is the same as --greedy."),
            click.option("--top-k", type=click.IntRange(min=1), help="Sample from this many of the likeliest tokens."),
            click.option(
                "--top-p",
                type=FiniteRange(min=0, max=1, min_open=True),
                help="Sample from the likeliest tokens that add up to this probability.",
            ),
            click.option(
                "--seed", type=click.IntRange(0, 2**63 - 1), help="Seed for sampling: the same text each time."
            ),
            click.option("--greedy", is_flag=True, help="Always the likeliest token."),
            click.option(
                "--prompt-lookup",
                type=click.IntRange(min=1),
                help="Guess up to this many tokens at a time from the prompt.",
            ),
        )
    ):
        command = option(command)
    return command


@dataclass(frozen=True)
class Sampling:
    """Sampling by the options. What no option says is left to the checkpoint's generation_config."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    greedy: bool = False
    prompt_lookup: int | None = None

    @classmethod
    def taken_from(cls, options: dict[str, Any]) -> Sampling:
        """Takes those of sampling_options out of a command's options."""
        return cls(**{field.name: options.pop(field.name) for field in fields(cls)})

    def __post_init__(self) -> None:
        drawn = {"--temperature": self.temperature, "--top-k": self.top_k, "--top-p": self.top_p}
        given = [name for name, value in drawn.items() if value is not None]
        if self.greedy and given:
            raise click.UsageError(f"--greedy does not sample, so {given[0]} has no effect; give one of them")
        if self.temperature == 0 and len(given) > 1:
            raise click.UsageError(f"--temperature 0 does not sample, so {given[1]} has no effect; give one of them")
        if self.seed is not None and (self.greedy or self.temperature == 0):
            how = "--greedy" if self.greedy else "--temperature 0"
            raise click.UsageError(f"{how} does not sample, so --seed has no effect; give one of them")

    def arguments(self) -> dict[str, Any]:
        """The arguments of generate(). Beams cannot be streamed, so there is one."""
        found: dict[str, Any] = {"num_beams": 1}
        if self.greedy or self.temperature == 0:
            found["do_sample"] = False
        else:
            drawn = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
            given = {name: value for name, value in drawn.items() if value is not None}
            found |= {"do_sample": True, **given} if given else {}
        if self.prompt_lookup is not None:
            found["prompt_lookup_num_tokens"] = self.prompt_lookup
        return found


def check_memory(options: Mapping[str, Any]) -> None:
    """Refuses options of memory that exclude or need one another; from_pretrained would, by its own names for them."""
    if options["host_cache"] and options["device_memory"] is None:
        raise click.UsageError("--host-cache belongs to --device-memory, which is not given")
    if options["budget"] is not None and options["device_memory"] is not None:
        raise click.UsageError("--budget and --device-memory both limit device memory; give one")


def import_transformers(command: str) -> ModuleType:
    """The package, with its warnings turned off: each would be a line in the middle of an answer."""
    try:
        import transformers
    except ImportError as error:
        raise PenstockError(f"`penstock {command}` needs transformers ({error}): {_INSTALL}") from error
    version = importlib.metadata.version("transformers")
    if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        raise PenstockError(f"transformers is {version}, and must be {wanted} or newer: {_INSTALL}")
    transformers.logging.set_verbosity_error()
    found: ModuleType = transformers
    return found


def check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; give the folder of a checkpoint, with its config.json")
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json, so it is not the folder of a checkpoint")


def load_tokenizer(transformers: ModuleType, folder: Path, trust_remote_code: bool) -> Any:
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # a damaged file raises any of a dozen kinds
        raise CheckpointError(f"{folder}: the tokenizer cannot be loaded: {one_line(error)}") from error


def load_model(folder: Path, options: Mapping[str, Any]) -> Any:
    """`options` are those of model_options. from_pretrained takes them under the same names."""
    import torch

    import penstock

    load: Any = penstock.from_pretrained
    budget, dtype = options["budget"], options["dtype"]
    others = {name: value for name, value in options.items() if name != "budget"}
    return load(folder, budget, **{**others, "dtype": None if dtype is None else getattr(torch, dtype)})


def check_text(text: str, source: str) -> str:
    """Refuses half a surrogate pair: it stands for a byte that is not UTF-8, and no tokenizer takes it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{source} is not UTF-8 at character {error.start}") from error
    return text


def one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
