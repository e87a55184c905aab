"""A small checkpoint with a real tokenizer, and a stand-in for penstock.from_pretrained that needs no compiler."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from penstock.errors import BudgetError
from penstock.runtime.session import Stats

TEMPLATE = (
    "<s>{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Only the first four letters of what was answered earlier are kept.
REWRITING = TEMPLATE.replace("{{ m.content }}", "{{ m.content[:4] if m.role == 'assistant' else m.content }}")
SENTENCES = ["the cat sat on the mat", "a dog ran over the hill and far away", "hello there, how are you today?"]
SCRIPT = "the cat sat on the mat"
CACHE_LENGTH = 128
LINK = 25e9
WEIGHT_BYTES = 1000


def make_checkpoint(folder: Path, template: str | None = TEMPLATE) -> Path:
    folder.mkdir(exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = template
    fast.save_pretrained(folder)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(fast),
        max_position_embeddings=256,
        bos_token_id=fast.bos_token_id,
        eos_token_id=fast.eos_token_id,
        architectures=["LlamaForCausalLM"],
        dtype=torch.float32,
    )
    config.save_pretrained(folder)
    return folder


def load_tokenizer(folder: Path) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(folder)


class Scripted(LlamaForCausalLM):
    """A real model with a real cache, whose next token is that of a script. After the script comes the end."""

    def set_up(self, script: Sequence[int], cache_length: int) -> None:
        self.script = [*script, self.config.eos_token_id]
        self.cache_length = cache_length
        # How many tokens were run, by call.
        self.calls: list[int] = []
        self.place = -1
        self.floor_bytes, self.budget_bytes, self.state_bytes, self.weight_bytes = 100, 500, 64, WEIGHT_BYTES
        self.link_bytes_per_s: float | None = LINK
        self.closed = False
        self.caches = 0

    def forward(self, input_ids: Any = None, **rest: Any) -> Any:
        out = super().forward(input_ids=input_ids, **rest)
        self.calls.append(input_ids.shape[1])
        self.place = 0 if input_ids.shape[1] > 1 else self.place + 1
        out.logits[:, -1, self.script[min(self.place, len(self.script) - 1)]] += 1e4
        return out

    def stats(self) -> Stats:
        runs = len(self.calls)
        streamed = runs * (WEIGHT_BYTES - self.budget_bytes)
        return Stats(runs, streamed, 0, runs, 0, 0, 0)

    @property
    def last_run(self) -> Stats:
        return Stats(1, WEIGHT_BYTES - self.budget_bytes, 0, 1, 0, 0, 0)

    def new_cache(self) -> DynamicCache:
        self.caches += 1
        return DynamicCache(config=self.config)

    def set_budget(self, text: str) -> None:
        if text != "700":
            raise BudgetError(f"{text!r} is not 700")
        self.budget_bytes = 700

    def close(self) -> None:
        self.closed = True


def scripted(folder: Path, script: str = SCRIPT, cache_length: int = CACHE_LENGTH) -> Scripted:
    torch.manual_seed(0)
    model = Scripted(LlamaConfig.from_pretrained(folder)).eval()
    model.set_up(load_tokenizer(folder)(script, add_special_tokens=False).input_ids, cache_length)
    return model
