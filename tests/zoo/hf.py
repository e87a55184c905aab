"""Random small transformers models, wrapped so that forward takes and returns plain tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
)

from . import Case, freeze

BATCH, SEQ, VOCAB = 2, 8, 256


class CausalLM(nn.Module):
    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, use_cache=False).logits


class Encoder(nn.Module):
    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        out = self.model(input_ids=input_ids, attention_mask=attention_mask)
        return out.last_hidden_state, out.pooler_output


class Vision(nn.Module):
    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        out = self.model(pixel_values=pixel_values)
        return out.last_hidden_state, out.pooler_output


class Seq2Seq(nn.Module):
    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, decoder_input_ids=decoder_input_ids, use_cache=False).logits


def _build(model_class: type, config: Any, dtype: torch.dtype, device: str, seed: int) -> PreTrainedModel:
    # Through the default dtype and not `.to(dtype)`, which would also round the rotary frequencies.
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.random.fork_rng(devices=[]), torch.device(device):
            torch.manual_seed(seed)
            return model_class(config)
    finally:
        torch.set_default_dtype(previous)


def _ids(seq: int, batch: int = BATCH, vocab: int = VOCAB, device: str = "cpu") -> Tensor:
    # Fixed, not random: the same input in every process.
    return torch.arange(batch * seq, device=device).reshape(batch, seq) * 7 % vocab


LLAMA_SMALL = dict(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=VOCAB,
    max_position_embeddings=64,
)
# Only ever built on the meta device.
LLAMA_8B = dict(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
    max_position_embeddings=8192,
    rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
)
QWEN3_MOE_SMALL = dict(
    hidden_size=64,
    intermediate_size=128,
    moe_intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=4,
    num_experts_per_tok=2,
    norm_topk_prob=True,
    vocab_size=VOCAB,
    max_position_embeddings=64,
)


def llama(
    *, tied: bool = False, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0, **overrides: Any
) -> Case:
    config = LlamaConfig(**{**LLAMA_SMALL, **overrides}, tie_word_embeddings=tied, use_cache=False)
    model = _build(LlamaForCausalLM, config, dtype, device, seed)
    seq = Dim("seq", min=2, max=config.max_position_embeddings)
    ids = _ids(SEQ, vocab=config.vocab_size, device=device)
    return Case(freeze(CausalLM(model)), (ids,), ({1: seq},))


def qwen3_moe(
    *, dtype: torch.dtype = torch.float32, seed: int = 0, experts: str = "batched_mm", **overrides: Any
) -> Case:
    """`experts` picks transformers' expert implementation.

    "eager" loops over the experts that were hit, which export cannot trace. "batched_mm" gathers the weights of the
    chosen experts; "grouped_mm" passes the whole 3-D weight to one operator.
    """
    config = Qwen3MoeConfig(**{**QWEN3_MOE_SMALL, **overrides}, use_cache=False)
    model = _build(Qwen3MoeForCausalLM, config, dtype, "cpu", seed)
    model.set_experts_implementation(experts)
    seq = Dim("seq", min=2, max=config.max_position_embeddings)
    return Case(freeze(CausalLM(model)), (_ids(SEQ),), ({1: seq},))


def bert(*, dtype: torch.dtype = torch.float32, seed: int = 0) -> Case:
    config = BertConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=VOCAB,
        max_position_embeddings=64,
    )
    mask = torch.ones(BATCH, SEQ, dtype=torch.int64)
    mask[1, SEQ // 2 :] = 0
    return Case(freeze(Encoder(_build(BertModel, config, dtype, "cpu", seed))), (_ids(SEQ), mask))


def vit(*, dtype: torch.dtype = torch.float32, seed: int = 0) -> Case:
    config = ViTConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
    )
    # Cloned: export makes a symbol for the base of an argument that is a view.
    pixels = torch.linspace(-1, 1, BATCH * 3 * 32 * 32, dtype=dtype).reshape(BATCH, 3, 32, 32).clone()
    return Case(freeze(Vision(_build(ViTModel, config, dtype, "cpu", seed))), (pixels,))


def t5(*, dtype: torch.dtype = torch.float32, seed: int = 0) -> Case:
    """One embedding table under four names (shared, both embed_tokens, lm_head)."""
    config = T5Config(
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        vocab_size=VOCAB,
        decoder_start_token_id=0,
        use_cache=False,
    )
    model = _build(T5ForConditionalGeneration, config, dtype, "cpu", seed)
    return Case(freeze(Seq2Seq(model)), (_ids(SEQ), _ids(SEQ // 2)))
