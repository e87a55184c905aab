"""The loop that users copy: at the floor it gives the tokens that it gives with everything resident."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from examples import generate as example
from examples.decoder import build
from examples.generate import generate, sample
from examples.host_cache import HostCachedDecoder

import penstock
from penstock.budget import format_bytes
from tests.runtime.modules import DECODER

PROMPT = [5, 17, 200, 3, 9]


def _tokens(path: Path, budget: int | str, **options: Any) -> tuple[list[int], penstock.runtime.session.Stats]:
    with penstock.Module(path, budget=budget) as module:
        made = list(generate(module, PROMPT, tokens=16, **options))
        # Once more with the same module: nothing of the last text is left.
        assert list(generate(module, PROMPT, tokens=16, **options)) == made
        return made, module.stats()


@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {"temperature": 0.9, "top_k": 50, "seed": 3}], ids=["likeliest", "sampled"]
)
def test_tokens_at_the_floor_are_those_of_everything_resident(decoder: Path, options: dict[str, Any]) -> None:
    with penstock.Module(decoder, budget="1GiB") as module:
        floor_bytes = module.floor_bytes
    found, streaming = _tokens(decoder, floor_bytes, **options)
    wanted, resident = _tokens(decoder, "1GiB", **options)
    assert found == wanted
    assert len(found) == 16 and len(set(found)) > 1
    assert streaming.bytes_streamed > 0 and resident.bytes_streamed == 0
    assert streaming.runs == resident.runs == 32


def test_a_seed_decides_what_is_sampled(decoder: Path) -> None:
    options = {"temperature": 2.0, "top_k": 100}
    assert _tokens(decoder, "1GiB", seed=1, **options)[0] != _tokens(decoder, "1GiB", seed=2, **options)[0]


def test_a_stop_token_ends_the_text(decoder: Path) -> None:
    made = _tokens(decoder, "1GiB", temperature=0.0)[0]
    stop = made[2]
    short = _tokens(decoder, "1GiB", temperature=0.0, stop=frozenset([stop]))[0]
    assert short == made[: made.index(stop) + 1]


def test_more_than_the_cache_holds_is_refused(decoder: Path) -> None:
    with penstock.Module(decoder, budget="1GiB") as module:
        fits = DECODER.max_len - len(PROMPT) + 1
        assert len(list(generate(module, PROMPT, tokens=fits, temperature=0))) == fits
        with pytest.raises(ValueError, match=f"5 tokens and {fits + 1} more.*the cache has {DECODER.max_len}"):
            list(generate(module, PROMPT, tokens=fits + 1))
        with pytest.raises(ValueError, match="needs one at least"):
            list(generate(module, [], tokens=1))


def test_sampling_keeps_to_the_likeliest_k_and_to_their_odds() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0, 2.0])
    generator = torch.Generator().manual_seed(0)

    def drawn(**options: Any) -> list[int]:
        return [sample(logits, generator, **options) for _ in range(500)]

    assert set(drawn(temperature=0, top_k=4)) == {1}
    assert set(drawn(temperature=1.0, top_k=1)) == {1}
    assert set(drawn(temperature=1.0, top_k=2)) == {1, 3}
    # More of them than there are is all of them.
    assert set(drawn(temperature=5.0, top_k=9)) == {0, 1, 2, 3}
    odds = drawn(temperature=1.0, top_k=2).count(1) / 500
    assert abs(odds - torch.sigmoid(torch.tensor(1.0)).item()) < 0.1
    colder = drawn(temperature=0.25, top_k=2).count(1) / 500
    assert colder > 0.95


def test_the_default_model_without_compiling_it(
    decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Everything of the command but the compiler, whose part is that of the decoder compiled before."""
    given: dict[str, Any] = {}

    def compile(programs: Any, path: Path, **options: Any) -> Any:
        given.update(programs=programs, path=path, **options)
        return SimpleNamespace(program_path=decoder)

    monkeypatch.setattr(penstock, "compile", compile)
    monkeypatch.setattr(example, "CONFIG", dataclasses.replace(DECODER, layers=1))
    out = tmp_path / "out"
    example.main(["--out", str(out), "--device", "cpu", "--budget", "1GiB", "--tokens", "6", "--temperature", "0"])
    assert set(given["programs"]) == {"prefill", "decode"}
    assert (given["path"], given["device"]) == (out / "model.pt2", "cpu")
    line = capsys.readouterr().out.splitlines()[0]
    with penstock.Module(decoder, budget="1GiB") as module:
        assert [int(n) for n in line.split()] == list(generate(module, [1, 2, 3, 4], tokens=6, temperature=0))


# ------------------------------------------------------------------------------------------ a cache on both sides

SPLIT = dataclasses.replace(DECODER, layers=1, max_len=200)
LONG_PROMPT = [(n * n + 5) % 293 for n in range(60)]
POSITION_BYTES = 2 * SPLIT.kv_heads * SPLIT.head_dim * SPLIT.dtype.itemsize


class Eager:
    """As much of a Module as the loop uses, over a model that nothing exported."""

    device = torch.device("cpu")

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        states = [SimpleNamespace(name=n, shape=b.shape) for n, b in model.named_buffers() if b.dim() > 1]
        self.program = SimpleNamespace(states=states)

    def run_method(self, name: str, *arguments: torch.Tensor) -> torch.Tensor:
        assert (name == "decode") == (arguments[0].shape[1] == 1)
        return self._model(*arguments)


def _greedy(module: Any, tokens: int = 12) -> list[int]:
    return list(generate(module, LONG_PROMPT, tokens=tokens, temperature=0))


@pytest.fixture(scope="module")
def plain_tokens() -> list[int]:
    tokens = _greedy(Eager(build(SPLIT, cached=True)))
    assert len(set(tokens)) > 1
    return tokens


@pytest.mark.parametrize("near", [0, 64, 128, SPLIT.max_len])
def test_the_same_tokens_wherever_the_cache_is_cut(plain_tokens: list[int], near: int) -> None:
    cap = near * POSITION_BYTES + 64 * POSITION_BYTES - 1  # one byte less than another block
    model = HostCachedDecoder(build(SPLIT, cached=False), cap)
    module = Eager(model)
    assert _greedy(module) == plain_tokens
    assert _greedy(module) == plain_tokens, "nothing of the last text is left"
    assert model.cache.kv_0.nbytes == near * POSITION_BYTES <= cap
    assert model.cache.host_kv_0.nbytes == (SPLIT.max_len - near) * POSITION_BYTES
    assert example.cache_positions(module.program) == SPLIT.max_len


@pytest.mark.slow
def test_a_compiled_decoder_with_a_cache_on_both_sides(
    plain_tokens: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(example, "CONFIG", SPLIT)
    cap = 64 * POSITION_BYTES + 100
    words = ["--out", str(tmp_path), "--device", "cpu", "--tokens", "12", "--temperature", "0", "--budget", "1GiB"]
    prompt = ["--prompt", " ".join(map(str, LONG_PROMPT)), "--max-len", str(SPLIT.max_len)]
    example.main([*words, *prompt, "--kv-device-bytes", str(cap)])
    printed = capsys.readouterr().out.splitlines()
    assert " ".join(map(str, plain_tokens)) in printed
    near, far = 64 * POSITION_BYTES, (SPLIT.max_len - 64) * POSITION_BYTES
    assert f"KV cache: {format_bytes(near)} on the device's side, {format_bytes(far)} on the host's" in printed
    with penstock.Module(tmp_path / "model.pt2", budget="1GiB") as module:
        assert _greedy(module) == plain_tokens
        assert module.device_state_bytes == near <= cap
        kept = module.read_state("cache.kv_0")
        assert kept.shape[3] == SPLIT.max_len and kept[:, :, :, 64:].any(), "the text went beyond the near side"
        # Half of a text, then the state of another: the rest follows from that state alone.
        module.reset_state()
        assert not module.read_state("cache.kv_0").any()
        module.write_state("cache.kv_0", kept)
        position = len(LONG_PROMPT) + 8
        logits = module.run_method("decode", torch.tensor([[plain_tokens[8]]]), torch.tensor([position]))
        assert int(logits[0].argmax()) == plain_tokens[9]
