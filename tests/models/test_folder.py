"""What is read from a checkpoint, and what is refused before anything is built."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import CheckpointError, ModelError, PenstockError
from penstock.models.folder import open_checkpoint
from tests.models.checkpoints import save_checkpoint


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("llama", tmp_path_factory.mktemp("saved"))


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "checkpoint"))


def _change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_shards(folder: Path) -> None:
    found = open_checkpoint(folder)
    assert found.model_class.__name__ == "LlamaForCausalLM" and found.config.model_type == "llama"
    assert len(found.shards) > 1 and set(found.shards) == set(folder.glob("*.safetensors"))
    assert "model.layers.0.self_attn.q_proj.weight" in found.tensors


def _lack_a_shard(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[1].unlink()


def _only_pickles(folder: Path) -> None:
    for path in (*folder.glob("*.safetensors"), *folder.glob("*.index.json")):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")


def _adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")


def _no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def _config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: _change_config(folder, **changes)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (_lack_a_shard, CheckpointError, "names files that are not there: model-00002-of"),
        (_only_pickles, CheckpointError, "pytorch_model.bin are not read: loading a pickle runs whatever it says"),
        (_adapter, ModelError, "holds an adapter, not a model"),
        (_no_config, CheckpointError, "has no config.json"),
        (_broken_config, CheckpointError, "transformers cannot read the configuration"),
        (_config(quantization_config={"quant_method": "gptq", "bits": 4}), ModelError, "is quantized"),
        (
            _config(model_type="t5", architectures=["T5ForConditionalGeneration"]),
            ModelError,
            "an encoder with a decoder",
        ),
        (_config(model_type="rwkv", architectures=["RwkvForCausalLM"]), ModelError, "'rwkv' are not supported"),
        (_config(model_type="reformer", is_decoder=True), ModelError, "'reformer' were not tested with Penstock"),
        (_config(model_type="vit"), ModelError, "transformers has no causal language model for"),
        (_config(vision_config={"hidden_size": 8}), ModelError, "takes more than text"),
        # Built as what it is not, it would run with weights that nobody has trained.
        (_config(architectures=["LlamaForSequenceClassification"]), ModelError, "is a LlamaForSequenceClassification"),
        (
            _config(architectures=["LlamaModel"]),
            ModelError,
            "is a LlamaModel; transformers would build a LlamaForCausalLM",
        ),
    ],
)
def test_what_is_refused(folder: Path, change: Callable[[Path], None], error: type[PenstockError], text: str) -> None:
    change(folder)
    with pytest.raises(error, match=text):
        open_checkpoint(folder)


def test_a_file_is_no_folder(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a folder; give the one that holds config.json"):
        open_checkpoint(folder / "config.json")


def test_code_of_the_checkpoint_is_not_run_unless_asked_for(folder: Path) -> None:
    _change_config(folder, model_type="homemade", auto_map={"AutoConfig": "code.Config"}, architectures=["Homemade"])
    (folder / "code.py").write_text("raise SystemExit('was run')")
    with pytest.raises(CheckpointError, match="transformers cannot read the configuration"):
        open_checkpoint(folder)


def test_a_name_is_found_in_the_cache_of_transformers(saved: Path, tmp_path: Path) -> None:
    """Offline: as a download would have left it there."""
    home = tmp_path / "hub" / "models--org--small"
    snapshot = home / "snapshots" / ("0" * 40)
    shutil.copytree(saved, snapshot)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("0" * 40)
    code = (
        "from penstock.models.folder import open_checkpoint\n"
        "found = open_checkpoint('org/small')\n"
        "print(found.model_class.__name__, len(found.shards), len(found.tensors))\n"
        "from penstock.errors import PenstockError\n"
        "try:\n    open_checkpoint('org/absent')\nexcept PenstockError as error:\n    print(type(error).__name__)"
    )
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    here = open_checkpoint(saved)
    assert done.stdout.split() == ["LlamaForCausalLM", str(len(here.shards)), str(len(here.tensors)), "CheckpointError"]


@pytest.mark.parametrize("name", ["./none", "../none", "~/none", "some/folder/none", "/none", Path("none")], ids=str)
def test_a_path_that_is_not_there_is_not_looked_up(name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.models.folder._read_config", _must_not_be_asked)
    with pytest.raises(CheckpointError, match=rf"^there is no folder {re.escape(str(name))}; give the one"):
        open_checkpoint(name)


def _must_not_be_asked(*arguments: object) -> None:
    raise AssertionError("transformers was asked for it")
