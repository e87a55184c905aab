"""`penstock generate` and `penstock chat` on a real model: the stand-in of tests/cli is not there."""

from __future__ import annotations

import io
import json
from functools import partial
from pathlib import Path

import pytest

import penstock
from penstock.cli.main import main
from tests.models.checkpoints import FAST, load_with_transformers, save_checkpoint, save_tokenizer

PROMPT = "Once upon a time there was a river"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = save_checkpoint("llama", tmp_path_factory.mktemp("llama"))
    save_tokenizer(made)
    return made


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch, cache_dir: Path) -> list[str]:
    fast = partial(penstock.from_pretrained, inductor_configs=FAST, prefill_tokens=32)
    monkeypatch.setattr(penstock, "from_pretrained", fast, raising=False)
    return ["--device", "cpu", "--cache-length", "128", "--cache-dir", str(cache_dir)]


def test_generate(folder: Path, options: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    wanted = load_with_transformers(folder).generate(**inputs, max_new_tokens=12, do_sample=False)
    text = tokenizer.decode(wanted[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    for memory in (("--budget", "auto"), ("--budget", "300KiB"), ("--device-memory", "1GiB")):
        code = main(
            [
                "generate",
                str(folder),
                PROMPT,
                *memory,
                "--greedy",
                "--max-new-tokens",
                "12",
                "--json",
                *options,
            ]
        )
        said = capfd.readouterr()
        assert code == 0, said.err
        assert text.strip() in json.loads(said.out)["text"]
    assert "Traceback" not in said.err


def test_below_the_floor_is_one_line(folder: Path, options: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(folder), PROMPT, "--budget", "1KiB", *options]) != 0
    said = capfd.readouterr().err
    assert "Traceback" not in said and "a GPU needs about" in said


def test_chat(
    folder: Path, options: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two turns on one cache: the second runs its own tokens only."""
    lines = "How much water is there?\n/stats\nAnd behind the dam?\n/exit\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    code = main(["chat", str(folder), "--greedy", "--max-new-tokens", "6", "--json", *options])
    said = capfd.readouterr()
    assert code == 0, said.err
    talk = json.loads(said.out)
    assert [message["role"] for message in talk["messages"]] == ["user", "assistant"] * 2
    assert "Traceback" not in said.err
