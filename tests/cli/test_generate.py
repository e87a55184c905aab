"""`penstock generate` over a stand-in for from_pretrained: what reaches stdout and stderr, and how it ends."""

from __future__ import annotations

import builtins
import io
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.cli.answer import TokenStream, safe_text
from penstock.cli.exit_codes import INTERRUPTED, USAGE
from penstock.errors import BudgetError
from tests.cli.checkpoints import SCRIPT, Scripted, load_tokenizer, make_checkpoint, scripted
from tests.cli.conftest import Cli

pytestmark = pytest.mark.models


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("generate") / "checkpoint")


class Loads:
    """Stands in for penstock.from_pretrained, and remembers how it was called."""

    def __init__(self, model: Scripted) -> None:
        self.model = model
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.generated: list[dict[str, Any]] = []
        given = model.generate

        def generate(**options: Any) -> Any:
            self.generated.append(options)
            return given(**options)

        model.generate = generate

    def __call__(self, *arguments: Any, **options: Any) -> Scripted:
        self.calls.append((arguments, options))
        return self.model


@pytest.fixture
def loads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Loads:
    found = Loads(scripted(folder))
    monkeypatch.setattr(penstock, "from_pretrained", found, raising=False)
    return found


def test_the_text_and_the_last_line(cli: Cli, folder: Path, loads: Loads) -> None:
    told = cli("generate", folder, "hello there", "--budget", "8GiB", "--cache-length", 64, "--dtype", "bfloat16")
    assert (told.code, told.stdout) == (0, f"{SCRIPT}\n")
    last = told.stderr.splitlines()[-1]
    tokens = len(loads.model.script)
    assert last.startswith(f"{tokens} tokens, ") and "tokens/s" in last and "over the link" in last
    assert "of the measured 25.00 GB/s" in last and "budget 500 B, floor 100 B" in last
    ((given, budget), options) = loads.calls[0]
    assert (given, budget) == (folder, "8GiB") and options["cache_length"] == 64
    assert str(options["dtype"]) == "torch.bfloat16"
    assert loads.model.closed


def test_json(cli: Cli, folder: Path, loads: Loads) -> None:
    told = cli("generate", folder, "hello there", "--json")
    assert told.document["text"] == SCRIPT and not told.document["stopped"]
    speed = told.document["speed"]
    assert speed["tokens"] == len(loads.model.script) and speed["bytes_streamed"] == speed["tokens"] * 500
    assert SCRIPT in told.stderr, "it streams all the same"


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ((), {}),
        (("--greedy",), {"do_sample": False}),
        (("--temperature", "0"), {"do_sample": False}),
        (("--temperature", "0.5"), {"do_sample": True, "temperature": 0.5}),
        (("--top-k", "5", "--top-p", "0.9", "--seed", "3"), {"do_sample": True, "top_k": 5, "top_p": 0.9}),
        (("--prompt-lookup", "3"), {"prompt_lookup_num_tokens": 3}),
    ],
)
def test_how_tokens_are_drawn(cli: Cli, folder: Path, loads: Loads, options: tuple[str, ...], wanted: Any) -> None:
    """What no option says is left to the checkpoint's generation_config."""
    assert cli("generate", folder, "hello", "--max-new-tokens", 4, *options).code == 0
    names = ("do_sample", "temperature", "top_k", "top_p", "prompt_lookup_num_tokens")
    assert {name: loads.generated[0][name] for name in names if name in loads.generated[0]} == wanted
    assert loads.generated[0]["max_new_tokens"] == 4


@pytest.mark.parametrize(
    "options",
    [
        ("--greedy", "--top-k", "3"),
        ("--temperature", "0", "--top-p", "0.5"),
        ("--greedy", "--seed", "0"),
        ("--temperature", "0", "--seed", "1"),
        ("--host-cache",),
        ("--host-cache", "--budget", "1GiB"),
        ("--budget", "1GiB", "--device-memory", "2GiB"),
    ],
    ids=" ".join,
)
def test_options_that_contradict_one_another(cli: Cli, folder: Path, options: tuple[str, ...]) -> None:
    assert cli("generate", folder, "hello", *options).code == USAGE


def test_stdin(cli: Cli, folder: Path, loads: Loads, monkeypatch: pytest.MonkeyPatch) -> None:
    for raw, code in ((b"hello there", 0), (b"\xff", 12), (b"", 12)):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))
        told = cli("generate", folder, "-")
        assert told.code == code and "Traceback" not in told.stderr
    monkeypatch.setattr(sys, "stdin", None)
    assert cli("generate", folder, "-").code == 12


def test_ctrl_c_ends_the_answer(cli: Cli, folder: Path, loads: Loads) -> None:
    forward = loads.model.forward

    def interrupted(*arguments: Any, **options: Any) -> Any:
        if len(loads.model.calls) == 2:
            signal.raise_signal(signal.SIGINT)
        return forward(*arguments, **options)

    loads.model.forward = interrupted
    told = cli("generate", folder, "hello there", "--json")
    assert told.code == INTERRUPTED and told.document["stopped"]
    assert told.document["speed"]["tokens"] == 3, "the token under way is the last"
    assert SCRIPT.startswith(told.document["text"]) and "3 tokens" in told.stderr.splitlines()[-1]
    assert loads.model.closed


def test_the_second_ctrl_c_does_not_wait(cli: Cli, folder: Path, loads: Loads) -> None:
    def stuck(*arguments: Any, **options: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    loads.model.forward = stuck
    told = cli("generate", folder, "hello there")
    assert told.code == INTERRUPTED and told.stderr.splitlines()[-1] == "penstock: interrupted"
    assert loads.model.closed


def test_escape_sequences_are_shown_and_not_sent(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Loads(scripted(folder, "red \x1b[31m\ttab\r\nline\x07"))
    monkeypatch.setattr(penstock, "from_pretrained", found, raising=False)
    told = cli("generate", folder, "hello")
    assert told.stdout == "red \\x1b[31m\ttab\nline\\x07\n"


def test_safe_text_keeps_joiners() -> None:
    assert safe_text("👩\u200d👧\u202e") == "👩\u200d👧\\u202e"


def test_a_character_of_several_tokens_comes_as_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = load_tokenizer(folder)
    import torch

    stream = TokenStream(tokenizer)
    stream.put(torch.tensor([[1, 2]]))
    shown = []
    for token in tokenizer("x\u20ac!", add_special_tokens=False).input_ids:
        stream.put(torch.tensor([token]))
        shown.append(capsys.readouterr().out)
    stream.end()
    assert [text for text in shown if text] == ["x", "\u20ac", "!"] and capsys.readouterr().out == ""


def test_a_full_cache(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = len(load_tokenizer(folder)("hello there").input_ids)
    monkeypatch.setattr(penstock, "from_pretrained", Loads(scripted(folder, cache_length=prompt + 2)), raising=False)
    told = cli("generate", folder, "hello there")
    assert told.code == 0 and "the KV cache is full" in told.stderr and "--cache-length" in told.stderr
    monkeypatch.setattr(penstock, "from_pretrained", Loads(scripted(folder, cache_length=prompt)), raising=False)
    told = cli("generate", folder, "hello there")
    assert told.code == 12 and f"--cache-length {prompt + 100}" in told.stderr


def test_failures_are_one_line(cli: Cli, folder: Path, loads: Loads, tmp_path: Path) -> None:
    assert cli("generate", tmp_path / "nowhere", "hello").code == 6
    assert cli("generate", tmp_path, "hello").code == 6
    (tmp_path / "config.json").write_text("{}")
    assert cli("generate", tmp_path, "hello").code == 6, "no tokenizer"
    assert cli("generate", folder, "a\udcffb").code == 12

    def fail(**options: Any) -> None:
        raise ValueError("two\nlines")

    loads.model.generate = fail
    told = cli("generate", folder, "hello")
    assert told.code == 11 and "two lines" in told.stderr and told.stderr.count("\n") == 1


def test_errors_of_loading_keep_their_code(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise BudgetError("too small")

    monkeypatch.setattr(penstock, "from_pretrained", refuse, raising=False)
    assert cli("generate", folder, "hello").code == 10


@pytest.mark.parametrize("command", ["generate", "chat", "estimate"])
def test_without_transformers(cli: Cli, folder: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "transformers":
            raise ModuleNotFoundError("No module named 'transformers'")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    told = cli(command, folder, *(["hello"] if command == "generate" else []))
    assert told.code == 1 and "pip install 'penstock[transformers]'" in told.stderr and told.stderr.count("\n") == 1


def test_an_old_transformers(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "4.57.1")
    told = cli("generate", folder, "hello")
    assert told.code == 1 and "5.17 or newer" in told.stderr
