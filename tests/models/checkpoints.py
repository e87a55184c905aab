"""Checkpoints of small models with random weights, in shards, as save_pretrained writes them; and a real tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.models.families import VOCABULARY, build

# Compiled fast rather than well: what is tested is the same.
FAST = {"cpp.simdlen": 1, "aot_inductor.compile_wrapper_opt_level": "O0"}

TEXT = [
    "Once upon a time there was a river that ran down from the hills into a long steel pipe.",
    "At the end of the pipe a wheel was turning, and the wheel made light for the whole valley.",
    "Nobody had seen the lake above the dam, but everybody knew how much water it held.",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def save_checkpoint(
    family: str, folder: Path, *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any
) -> Path:
    build(family, dtype=dtype, seed=seed, **changes).save_pretrained(folder, max_shard_size="100KB")
    return folder


def save_tokenizer(folder: Path) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(TEXT, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="left"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


def load_with_transformers(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()
