"""`penstock chat` at a real pseudo-terminal, and its conversation over a real KV cache."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import penstock
from penstock.cli import chat
from penstock.cli.answer import StopAsked
from penstock.cli.conversation import Conversation
from penstock.errors import InputError, RuntimeFailure
from tests.cli.checkpoints import REWRITING, SCRIPT, Scripted, load_tokenizer, make_checkpoint, scripted
from tests.cli.conftest import Cli

pytestmark = pytest.mark.models

ROOT = Path(__file__).parents[2]
NEVER = -1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("chat") / "checkpoint")


class Terminal:
    """The other end of a child's terminal: what a person types and sees."""

    def __init__(self, descriptor: int, ready: int, process: subprocess.Popen[bytes]) -> None:
        self._descriptor = descriptor
        self._ready = ready
        self.process = process
        self.seen = ""
        self._unread = ""

    def read_until(self, wanted: str) -> str:
        """What came up to there, which is not looked at again."""
        while wanted not in self._unread:
            assert self._more(), f"it ended before {wanted!r}: {self.seen}"
        before, _, self._unread = self._unread.partition(wanted)
        return before

    def read_rest(self) -> str:
        while self._more():
            pass
        return self._unread

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def type_line(self, text: str) -> None:
        """At the prompt. Waits for the echo, so that what follows is the answer to it."""
        self.read_until("> ")
        self.type(text + "\r")
        self.read_until(f"{text}\n")

    def wait_until_ready(self) -> None:
        assert os.read(self._ready, 1) == b".", self.seen

    def _more(self) -> bool:
        try:
            new = os.read(self._descriptor, 4096)
        except OSError:  # EIO: the child has closed its end
            return False
        text = new.decode(errors="replace").replace("\r\n", "\n")
        self.seen += text
        self._unread += text
        return bool(new)


@contextmanager
def terminal(folder: Path, *options: str, call: int = NEVER) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    ready, told = os.pipe()
    arguments = [str(told), str(call), "chat", str(folder), *options]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.cli.chat_driver", *arguments],
        cwd=ROOT,
        env={**os.environ, "TERM": "dumb", "INPUTRC": os.devnull, "COLUMNS": "160"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        pass_fds=(told,),
        start_new_session=True,
        # Its own terminal, so that Ctrl-C there reaches it.
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(theirs)
    os.close(told)
    try:
        person = Terminal(ours, ready, process)
        # What libraries say while they are imported may look like a prompt; the greeting comes after it.
        person.read_until("typed.\n")
        yield person
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(ready)


def test_a_conversation_at_a_terminal(folder: Path) -> None:
    with terminal(folder, "--budget", "8GiB") as person:
        person.type_line("hello there")
        assert person.read_until("\n") == SCRIPT
        person.type_line("/stats")
        shown = person.read_until("tokens, 64 B")
        assert "last answer" in shown and "tokens/s" in shown and "500 B of 1000 B of weights" in shown
        assert re.search(r"KV cache +\d+ of 128", shown)
        person.type_line("/budget 700")
        person.read_until("The budget is 700 B.")
        person.type_line("/budget 4XB")
        person.read_until("BudgetError: '4XB' is not 700")
        person.type_line("/nonsense")
        person.read_until("There is no /nonsense")
        person.type_line("/help")
        person.read_until("begins with a slash")
        person.type_line("/reset")
        person.read_until("begins anew.")
        person.type_line("/stats")
        person.read_until("0 of 128 tokens")
        person.type_line("//slash")
        assert person.read_until("\n") == SCRIPT
        person.type_line("/exit")
        person.read_rest()
        assert person.process.wait() == 0
    assert "Traceback" not in person.seen and "\x1b" not in person.seen.replace("\x1b[?2004", "")


def test_ctrl_c_stops_the_answer_and_not_the_program(folder: Path) -> None:
    with terminal(folder, call=3) as person:
        person.type_line("hello there")
        person.wait_until_ready()
        person.type("\x03")
        written = person.read_until("Stopped.").replace("^C", "").strip()
        assert written and written != SCRIPT and SCRIPT.startswith(written)
        # What was written stays in the history, and the next turn builds upon it.
        person.type_line("go on")
        assert person.read_until("\n") == SCRIPT
        person.read_until("> ")
        person.type("\x04")
        assert "tokens/s" in person.read_rest()
        assert person.process.wait() == 0
    assert "Traceback" not in person.seen


def test_ctrl_c_at_the_prompt_says_how_to_leave(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Not through a terminal: a signal between the prompt and the read behind it waits there for a key."""
    lines: list[str | None] = [None, "interrupt"]

    def read_line() -> str | None:
        line = lines.pop()
        if line is not None:
            raise KeyboardInterrupt
        return None

    monkeypatch.setattr(chat, "_read_line", read_line)
    nothing: Any = None
    chat.Talk(nothing, nothing, {}).run()
    assert "Ctrl-D or /exit leaves." in capfd.readouterr().err and not lines


def test_lines_from_a_pipe(folder: Path) -> None:
    ready, told = os.pipe()
    arguments = [str(told), str(NEVER), "chat", str(folder), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.cli.chat_driver", *arguments],
        cwd=ROOT,
        input=b"hello there\n\n\xff\nhow are you\n",
        capture_output=True,
        pass_fds=(told,),
    )
    os.close(ready)
    os.close(told)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [message["content"] for message in document["messages"]] == ["hello there", SCRIPT, "how are you", SCRIPT]
    assert document["tokens"] > 2 and b"not UTF-8" in done.stderr and SCRIPT.encode() in done.stderr


def test_a_checkpoint_without_a_template_is_refused(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penstock, "from_pretrained", pytest.fail, raising=False)
    told = cli("chat", make_checkpoint(tmp_path / "base", template=None))
    assert told.code == 6 and "chat_template.jinja" in told.stderr and "penstock generate" in told.stderr


def test_the_second_ctrl_c_drops_the_answer(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program goes on, and what was said before is still there."""
    model = scripted(folder)
    forward, lines = model.forward, iter(["hello there", "how are you", "go on", None])

    def read_line() -> str | None:
        text = next(lines)
        model.forward = stuck if text == "how are you" else forward
        return text

    def stuck(*arguments: Any, **options: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(penstock, "from_pretrained", lambda *arguments, **options: model, raising=False)
    monkeypatch.setattr("penstock.cli.chat._read_line", read_line)
    told = cli("chat", folder, "--json")
    assert told.code == 0 and "The answer was dropped" in told.stderr
    assert [message["content"] for message in told.document["messages"]] == ["hello there", SCRIPT, "go on", SCRIPT]
    assert model.closed


# ------------------------------------------------------------------------------------------------------- the KV cache


def conversation(folder: Path, template: str | None = None, **options: Any) -> tuple[Conversation, Scripted, Any]:
    model, tokenizer = scripted(folder, **options), load_tokenizer(folder)
    if template is not None:
        tokenizer.chat_template = template
    return Conversation(transformers, model, tokenizer, None), model, tokenizer


def turn(talk: Conversation, text: str) -> Any:
    with StopAsked() as stop:
        return talk.turn(text, stop)


def assert_cache_is_right(talk: Conversation, model: Scripted) -> None:
    """It holds what running its tokens from the beginning gives."""
    fresh = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=torch.tensor([talk._held]), past_key_values=fresh)
    assert talk._cache.get_seq_length() == len(talk._held)
    for ours, wanted in zip(talk._cache.layers, fresh.layers, strict=True):
        torch.testing.assert_close(ours.keys, wanted.keys)
        torch.testing.assert_close(ours.values, wanted.values)


def test_only_new_tokens_are_run(folder: Path) -> None:
    talk, model, _ = conversation(folder)
    turn(talk, "hello there")
    held = talk.held_tokens
    model.calls.clear()
    turn(talk, "how are you")
    ids = talk.token_ids(talk.messages[:-1])
    # The end of the answer was drawn and not run before.
    assert model.calls[0] == len(ids) - held and set(model.calls[1:]) == {1} and model.caches == 1
    assert_cache_is_right(talk, model)


@pytest.mark.parametrize("croppable", [True, False])
def test_a_template_that_rewrites_earlier_text(folder: Path, croppable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    talk, model, _ = conversation(folder, REWRITING)
    turn(talk, "hello there")
    held = list(talk._held)
    if not croppable:
        monkeypatch.setattr(transformers.DynamicCache, "is_croppable", False)
    model.calls.clear()
    turn(talk, "how are you")
    ids = talk.token_ids(talk.messages[:-1])
    common = next(place for place, (a, b) in enumerate(zip(held, ids, strict=False)) if a != b)
    assert 0 < common < len(held)
    assert (model.caches, model.calls[0]) == ((1, len(ids) - common) if croppable else (2, len(ids)))
    assert_cache_is_right(talk, model)


def test_no_room(folder: Path) -> None:
    talk, model, _ = conversation(folder, cache_length=24)
    found = turn(talk, "hello there")
    assert not talk.is_full(found)
    before, held = list(talk.messages), list(talk._held)
    with pytest.raises(InputError, match=r"room for 24.*Nothing was lost.*/reset.*--cache-length"):
        turn(talk, "a dog ran over the hill and far away")
    assert talk.messages == before and talk._held == held
    talk.reset()
    turn(talk, "hello there")
    assert_cache_is_right(talk, model)


def test_an_answer_that_fills_the_cache(folder: Path) -> None:
    talk, model, _ = conversation(folder, cache_length=10**6)
    room = len(talk.token_ids([{"role": "user", "content": "hello there"}])) + 3
    model.cache_length = room
    found = turn(talk, "hello there")
    assert talk.is_full(found) and len(found.ids) == room and SCRIPT.startswith(found.text)


def test_a_failure_leaves_the_history_as_it_was(folder: Path) -> None:
    talk, model, _ = conversation(folder)
    turn(talk, "hello there")
    before, generate = list(talk.messages), model.generate

    def fail(**options: Any) -> None:
        raise RuntimeError("out of memory")

    model.generate = fail
    with pytest.raises(RuntimeFailure, match="out of memory"):
        turn(talk, "how are you")
    assert talk.messages == before and talk.held_tokens == 0 and model.caches == 2
    model.generate = generate
    turn(talk, "how are you")
    assert_cache_is_right(talk, model)
