"""`penstock chat`: a conversation with a checkpoint, inside a budget."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.output import (
    console,
    facts,
    json_option,
    line,
    only_json_on_stdout,
    print_json,
    to_json,
    write_stdout,
)
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
from penstock.cli.units import short_bytes
from penstock.errors import CheckpointError, InputError, PenstockError, StickyDeviceError

if TYPE_CHECKING:
    from penstock.cli.answer import Answer, Speed
    from penstock.cli.conversation import Conversation

_PROMPT = "> "
_LEAVING = "Ctrl-D or /exit leaves. Ctrl-C stops an answer."
_HELP = """\
/stats          tokens, speed, budget and cache
/reset          forget the conversation and begin anew
/budget 4GiB    give the weights another amount of device memory
/help           this text
/exit           leave; so does Ctrl-D
//text          a message that begins with a slash
Ctrl-C stops an answer; what was written of it stays in the conversation."""


@dataclass(frozen=True)
class ChatReport:
    folder: Path
    messages: tuple[dict[str, str], ...]
    # Of the last answer; None if there was none.
    speed: Speed | None
    tokens: int
    bytes_streamed: int


@click.command(short_help="Talk to a checkpoint.")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--max-new-tokens", type=click.IntRange(min=1), help="Of one answer. Default: as many as fit.")
@model_options
@sampling_options
@json_option
def chat(
    folder: Path,
    max_new_tokens: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Talk to the transformers checkpoint in FOLDER, line by line. It must have a chat template.

    The conversation stays on one KV cache, so only what is new is computed. /help lists the commands. Ctrl-C stops an
    answer, Ctrl-D leaves. With --json the chat goes to stderr, and the conversation to stdout at the end.

    \b
    penstock chat ./Llama-3.1-8B-Instruct --budget 8GiB
    penstock chat ./Llama-3.1-8B-Instruct --budget 8GiB --cache-length 16384 --temperature 0.7
    """
    chosen = Sampling.taken_from(options)
    check_memory(options)
    check_folder(folder)
    with only_json_on_stdout(as_json):
        transformers = import_transformers("chat")
        tokenizer = load_tokenizer(transformers, folder, options["trust_remote_code"])
        _check_template(tokenizer, folder)
        model = load_model(folder, options)
        try:
            if chosen.seed is not None:
                transformers.set_seed(chosen.seed)
            from penstock.cli.conversation import Conversation

            talk = Talk(model, Conversation(transformers, model, tokenizer, max_new_tokens), chosen.arguments())
            with _plain_interrupts():
                talk.run()
            report = talk.report(folder)
        finally:
            model.close()
        if report.speed is not None:
            line(console(stderr=True), str(report.speed))
    if as_json:
        print_json(to_json(report))


class Talk:
    """Reads lines and does what they say, until there are no more."""

    def __init__(self, model: Any, conversation: Conversation, options: dict[str, Any]) -> None:
        self._model = model
        self._conversation = conversation
        self._options = options
        self._last: Answer | None = None
        self._tokens = 0

    def run(self) -> None:
        if sys.stdin is not None and sys.stdin.isatty():
            _say(f"{_LEAVING} /help lists what else can be typed.")
        while True:
            try:
                text = _read_line()
                if text is None:
                    return
                if text.startswith("/") and not text.startswith("//"):
                    if not self._command(text):
                        return
                elif text.strip():
                    self._turn(text.removeprefix("/") if text.startswith("//") else text)
            except KeyboardInterrupt:
                _say(f"\n{_LEAVING}")
            except StickyDeviceError:
                raise  # nothing on this device will work any more
            except PenstockError as error:
                _say(str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}")

    def report(self, folder: Path) -> ChatReport:
        return ChatReport(
            folder=folder,
            messages=tuple(self._conversation.messages),
            speed=None if self._last is None else self._last.speed,
            tokens=self._tokens,
            bytes_streamed=self._model.stats().bytes_streamed,
        )

    def _turn(self, text: str) -> None:
        from penstock.cli.answer import StopAsked

        try:
            with StopAsked() as stop:
                found = self._conversation.turn(text, stop, **self._options)
                self._last = found
                self._tokens += found.speed.tokens
        except KeyboardInterrupt:  # the second one: the answer did not end soon enough
            write_stdout("\n")
            _say("The answer was dropped, and your message with it. The conversation before them is as it was.")
            return
        write_stdout("\n")
        if found.stopped:
            _say("Stopped. What was written stays in the conversation.")
        elif self._conversation.is_full(found):
            _say(
                f"The KV cache is full: it has room for {self._model.cache_length} tokens. The answer ends here. "
                "/reset begins anew; a larger --cache-length makes more room."
            )

    def _command(self, text: str) -> bool:
        """Whether the talk goes on."""
        name, _, rest = text.strip().partition(" ")
        if name == "/exit":
            return False
        if name == "/help":
            _say(_HELP)
        elif name == "/reset":
            self._conversation.reset()
            _say("The conversation begins anew.")
        elif name == "/stats":
            self._show_stats()
        elif name == "/budget":
            if rest.strip():
                self._model.set_budget(rest.strip())
            _say(f"The budget is {short_bytes(self._model.budget_bytes)}.")
        else:
            _say(f"There is no {name}; /help lists what there is. // sends a message that begins with a slash.")
        return True

    def _show_stats(self) -> None:
        model, totals = self._model, self._model.stats()
        pairs: list[tuple[str, object]] = [] if self._last is None else [("last answer", self._last.speed)]
        pairs += [
            ("all answers", f"{self._tokens} tokens in {totals.runs} runs"),
            ("streamed", f"{short_bytes(totals.bytes_streamed)} in all, {self._last_run_text()}"),
            ("budget", f"{short_bytes(model.budget_bytes)} of {short_bytes(model.weight_bytes)} of weights"),
            ("floor", short_bytes(model.floor_bytes)),
            ("KV cache", f"{self._conversation.held_tokens} of {model.cache_length} tokens, {self._state_text()}"),
        ]
        facts(console(), "", pairs)

    def _last_run_text(self) -> str:
        last = self._model.last_run
        return "no run yet" if last is None else f"{short_bytes(last.bytes_streamed)} in the last run"

    def _state_text(self) -> str:
        return short_bytes(self._model.state_bytes)


def _check_template(tokenizer: Any, folder: Path) -> None:
    if not tokenizer.chat_template:
        raise CheckpointError(
            f"{folder} has no chat template, so it is a base model or its files are incomplete: take the checkpoint's "
            "instruct version, put a chat_template.jinja into the folder, or use `penstock generate`"
        )
    try:
        import jinja2  # noqa: F401  # transformers imports it when the first message is sent
    except ImportError as error:
        raise PenstockError("chat templates need jinja2: pip install 'penstock[transformers]'") from error


def _read_line() -> str | None:
    """The next line without its line end; None at the end of the file."""
    if sys.stdin is None:
        return None
    try:
        if sys.stdin.isatty() and sys.stdout.isatty():
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  # input() edits lines with it from now on
            return check_text(input(_PROMPT), "the line")
        text = sys.stdin.buffer.readline().decode()
    except EOFError:
        write_stdout("\n")
        return None
    except UnicodeDecodeError as error:
        raise InputError("the line is not UTF-8") from error
    return check_text(text.rstrip("\r\n"), "the line") if text else None


def _say(text: str) -> None:
    line(console(stderr=True), text)


@contextmanager
def _plain_interrupts() -> Iterator[None]:
    """Ctrl-C only raises KeyboardInterrupt here. The handler of other commands takes it for their end."""
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, earlier)
