"""A checkpoint of transformers: a folder, or a name that transformers finds in its own cache or on its hub."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import CheckpointError, ModelError
from penstock.export.safetensors_file import StoredTensor, read_checkpoint
from penstock.models.families import check_family

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class CheckpointFolder:
    """A checkpoint that was found and not refused. `name` is what the user gave."""

    name: str
    config: Any
    model_class: Any
    # The table of all tensors, and the files that hold them.
    tensors: dict[str, StoredTensor]
    shards: tuple[Path, ...]


def open_checkpoint(name: str | os.PathLike[str], *, trust_remote_code: bool = False) -> CheckpointFolder:
    """Refuses by name what would not run as the model that it is."""
    given = os.fspath(name)
    folder = Path(given)
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(
            f"{given} is not a folder; give the one that holds config.json and the .safetensors files"
        )
    if folder.is_dir():
        _look_into(folder)
    elif not isinstance(name, str) or given.startswith(("/", "./", "../", "~")) or given.count("/") > 1:
        # No name of transformers looks like this, which would spend seconds on asking its hub.
        raise CheckpointError(
            f"there is no folder {given}; give the one that holds config.json and the .safetensors files"
        )
    config = _read_config(given, trust_remote_code)
    model_class = _model_class(given, config, trust_remote_code)
    table = _table(given)
    tensors = read_checkpoint(table)
    return CheckpointFolder(given, config, model_class, tensors, tuple(sorted({t.path for t in tensors.values()})))


def _look_into(folder: Path) -> None:
    if (folder / "adapter_config.json").exists():
        raise ModelError(f"{folder} holds an adapter, not a model: adapters are not supported yet; merge it first")
    if not (folder / "config.json").exists():
        raise CheckpointError(f"{folder} has no config.json; give the folder that save_pretrained wrote")
    if not any(folder.glob("*.safetensors")):
        others = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".gguf", ".h5"))
        said = f" ({', '.join(others[:3])} are not read: loading a pickle runs whatever it says)" if others else ""
        raise CheckpointError(f"{folder} has no .safetensors file{said}; save it again with save_pretrained")


def _read_config(given: str, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(given, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"transformers cannot read the configuration of {given}: {error}") from error


def _model_class(given: str, config: Any, trust_remote_code: bool) -> Any:
    from transformers import AutoModelForCausalLM, __version__
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"{given} is an encoder with a decoder ({kind}); only causal language models are supported yet"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(f"{given} is quantized; only weights as they were trained are supported yet")
    if any(getattr(config, part, None) is not None for part in ("vision_config", "audio_config")):
        raise ModelError(f"{given} takes more than text ({kind}); only causal language models are supported yet")
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        check_family(kind, __version__)
    elif trust_remote_code and "AutoModelForCausalLM" in getattr(config, "auto_map", {}):
        # Code that comes with the checkpoint: nobody has tested it.
        check_family(kind, __version__)
        return AutoModelForCausalLM
    else:
        raise ModelError(f"transformers has no causal language model for {given} ({kind})")
    named = list(getattr(config, "architectures", None) or [])
    if named and model_class.__name__ not in named:
        raise ModelError(
            f"{given} is a {', '.join(named)}; transformers would build a {model_class.__name__}, with weights that "
            "this checkpoint does not have"
        )
    return model_class


def _table(given: str) -> Path:
    """The file that lists all tensors: of a folder, or of a name as transformers finds it."""
    folder = Path(given)
    if folder.is_dir():
        indices = sorted(folder.glob("*.safetensors.index.json"))
        return indices[0] if len(indices) == 1 else folder
    from transformers.utils.hub import cached_file, get_checkpoint_shard_files

    single = cached_file(given, _SINGLE, _raise_exceptions_for_missing_entries=False)
    if single is not None:
        return Path(single)
    index = cached_file(given, _INDEX, _raise_exceptions_for_missing_entries=False)
    if index is None:
        raise CheckpointError(f"{given} has neither {_SINGLE} nor {_INDEX}; other formats are not read")
    get_checkpoint_shard_files(given, index)  # brings them where the index looks for them
    return Path(index)
