"""`penstock generate`: continues a text with a checkpoint, inside a budget."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.exit_codes import INTERRUPTED, OK
from penstock.cli.output import console, json_option, line, only_json_on_stdout, print_json, to_json, write_stdout
from penstock.cli.pretrained import (
    Sampling,
    check_folder,
    check_memory,
    check_text,
    import_transformers,
    load_model,
    load_tokenizer,
    model_options,
    sampling_options,
)
from penstock.errors import InputError

if TYPE_CHECKING:
    from penstock.cli.answer import Answer, Speed


@dataclass(frozen=True)
class GenerateReport:
    folder: Path
    prompt_tokens: int
    # Without the prompt.
    text: str
    # Ctrl-C ended it.
    stopped: bool
    speed: Speed


@click.command(short_help="Continue a text with a checkpoint.")
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("prompt")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=100, show_default=True)
@model_options
@sampling_options
@json_option
def generate(
    folder: Path,
    prompt: str,
    max_new_tokens: int,
    as_json: bool,
    **options: Any,
) -> int:
    """Continue PROMPT with the transformers checkpoint in FOLDER. A PROMPT of - is read from stdin.

    Tokens are written as they come. The last line, on stderr, says how fast they came. The checkpoint's
    generation_config decides whether tokens are sampled, and how, unless an option says otherwise. Ctrl-C ends the
    text.

    \b
    penstock generate ./Llama-3.1-8B "Once upon a time" --budget 8GiB
    penstock generate ./Llama-3.1-8B - --budget 8GiB --max-new-tokens 500 --temperature 0.7 --seed 1 < prompt.txt
    penstock generate ./Llama-3.1-8B "Once upon a time" --greedy --json
    """
    chosen = Sampling.taken_from(options)
    check_memory(options)
    text = _read_stdin() if prompt == "-" else check_text(prompt, "PROMPT")
    check_folder(folder)
    with only_json_on_stdout(as_json):
        transformers = import_transformers("generate")
        tokenizer = load_tokenizer(transformers, folder, options["trust_remote_code"])
        ids = list(tokenizer(text).input_ids)
        if not ids:
            raise InputError("the prompt has no token; give some text")
        model = load_model(folder, options)
        try:
            found = _answer(transformers, model, tokenizer, ids, max_new_tokens, chosen)
        finally:
            model.close()
        line(console(stderr=True), str(found.speed))
    if as_json:
        print_json(to_json(GenerateReport(folder, len(ids), found.text, found.stopped, found.speed)))
    return INTERRUPTED if found.stopped else OK


def _answer(
    transformers: Any, model: Any, tokenizer: Any, ids: list[int], max_new_tokens: int, chosen: Sampling
) -> Answer:
    from penstock.cli.answer import StopAsked, answer

    room = model.cache_length - len(ids)
    if room < 1:
        raise InputError(
            f"the prompt has {len(ids)} tokens and the KV cache has room for {model.cache_length}, which leaves none "
            f"for an answer; give --cache-length {len(ids) + max_new_tokens}, or a shorter prompt"
        )
    if chosen.seed is not None:
        transformers.set_seed(chosen.seed)
    with StopAsked() as stop:
        options = {**chosen.arguments(), "max_new_tokens": min(room, max_new_tokens)}
        found = answer(transformers, model, tokenizer, ids, stop, **options)
    write_stdout("\n")
    if room < max_new_tokens and len(found.ids) >= model.cache_length:
        said = f"the KV cache is full: it has room for {model.cache_length} tokens. --cache-length makes it larger"
        line(console(stderr=True), said)
    return found


def _read_stdin() -> str:
    if sys.stdin is None:
        raise InputError("the prompt is to be read from stdin, which is closed")
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise InputError(f"stdin is not UTF-8 at byte {error.start}") from error
