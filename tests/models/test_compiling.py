"""Methods compiled side by side, in processes of their own."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.errors import CompileError, ModelError
from penstock.models import compiling
from penstock.models.methods import Methods
from penstock.models.recipe import Recipe
from penstock.program import read_program
from tests.models.checkpoints import FAST, load_with_transformers, save_checkpoint

METHODS = Methods(batch=1, cache_length=16, decode_tokens=2, prefill_tokens=8)


def _recipe(folder: Path, **changes: Any) -> Recipe:
    made = {"dtype": torch.float32, "methods": METHODS, "device": torch.device("cpu"), "inductor_configs": FAST}
    return Recipe(str(folder), **{**made, **changes})


def test_they_give_the_same_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one process: the same methods, weights and floor; and it runs."""
    folder = save_checkpoint("qwen3", tmp_path / "checkpoint", num_hidden_layers=1)
    programs, said = {}, []
    for name, fewest in (("one", 1000), ("each", 1)):
        monkeypatch.setattr(compiling, "FEWEST_CORES", fewest)
        compiling.compile_recipe(_recipe(folder), tmp_path / f"{name}.pt2", said.append)
        programs[name] = read_program(tmp_path / f"{name}.pt2")
    assert said == ["penstock: prefill is compiled", "penstock: decode is compiled"]
    one, each = programs["one"], programs["each"]
    assert (one.weights, one.states, one.identity, one.floor_bytes) == (
        each.weights,
        each.states,
        each.identity,
        each.floor_bytes,
    )
    assert [method.schedule for method in one.methods] == [method.schedule for method in each.methods]
    weights = load_with_transformers(folder)
    tensors = {**weights.state_dict(), **dict(weights.named_buffers())}
    penstock.export.compile.write_weights(each, tensors, tmp_path / "each.ptd")
    ids = torch.tensor([[5, 9, 14]])
    with penstock.Module(tmp_path / "each.pt2", each.floor_bytes) as module, torch.no_grad():
        mask = torch.ones(1, METHODS.slots, dtype=torch.int64)
        got = module.run_method("prefill", ids, torch.zeros(1, dtype=torch.int64), mask)
        assert torch.allclose(got[:, 0], weights(ids).logits[:, -1], atol=1e-4)


def test_a_process_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "FEWEST_CORES", 1)
    folder = save_checkpoint("llama", tmp_path / "checkpoint", num_hidden_layers=1)
    recipe = _recipe(folder)

    def refuse(self: Recipe, only: str | None = None) -> Any:
        return {}

    # The parent's own export is not what is tried here.
    monkeypatch.setattr(Recipe, "exported", refuse)
    monkeypatch.setattr(compiling, "compile_program", lambda programs, path, compile_with, **_: compile_with("decode"))
    (folder / "config.json").unlink()
    with pytest.raises(penstock.PenstockError, match="has no config.json"):
        compiling.compile_recipe(recipe, tmp_path / "model.pt2", print)


def test_a_process_that_is_killed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "FEWEST_CORES", 1)
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def kill_at_once(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*arguments, **options))
        started[-1].send_signal(signal.SIGKILL)
        return started[-1]

    monkeypatch.setattr(compiling.subprocess, "Popen", kill_at_once)
    folder = save_checkpoint("llama", tmp_path / "checkpoint", num_hidden_layers=1)
    with pytest.raises(CompileError, match="'prefill': the process that compiled it ended with -9 and left no result"):
        compiling.compile_recipe(_recipe(folder), tmp_path / "model.pt2", print)
    assert not (tmp_path / "model.pt2").exists()
    assert all(process.poll() is not None for process in started), "none outlives the failure"


def _asks(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x if x.sum() > 0 else -x


def _counts(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x if x.shape[1] == 4 or x.shape[1] % 2 else x[:, : torch._C.missing]


@pytest.mark.parametrize(("forward", "text"), [(_asks, "does not run with a cache"), (_counts, "does not export with")])
def test_what_stands_in_the_way_is_told_with_its_line(
    forward: Any, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file and the line of the model's own code."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    folder = save_checkpoint("llama", tmp_path / "checkpoint", num_hidden_layers=1)
    monkeypatch.setattr(forward, "__code__", forward.__code__.replace(co_filename="/somewhere/modeling_llama.py"))
    monkeypatch.setattr(LlamaMLP, "forward", forward)
    with pytest.raises(ModelError, match=rf"{text} .*modeling_llama.py, line \d+ \({forward.__name__}\)"):
        _recipe(folder).exported("decode")
