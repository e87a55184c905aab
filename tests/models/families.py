"""Small configurations of causal language models, one for each family; weights are drawn so that tokens vary."""

from __future__ import annotations

from typing import Any

import torch

VOCABULARY = 512


def _common(**more: Any) -> dict[str, Any]:
    common: dict[str, Any] = dict(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    return {**common, **more}


_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_WINDOW = dict(head_dim=16, sliding_window=8, layer_types=["sliding_attention", "full_attention"])
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
_LATENT = dict(
    num_key_value_heads=4,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=16,
)
_ROUTED = dict(
    n_routed_experts=4,
    n_shared_experts=1,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
    moe_intermediate_size=32,
    first_k_dense_replace=1,
)
_GPT = dict(vocab_size=VOCABULARY, initializer_range=0.2, pad_token_id=0, bos_token_id=1, eos_token_id=None)
_GPT2 = dict(n_positions=256, n_embd=64, n_layer=2, n_head=4, **_GPT)
_SCAN = dict(mamba_n_groups=1, mamba_d_state=8, mamba_chunk_size=8)

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _common(),
    "mistral": _common(sliding_window=8),
    "ministral": _common(**_WINDOW),
    "qwen2": _common(),
    "qwen3": _common(head_dim=16),
    "gemma": _common(head_dim=16),
    "gemma2": _common(query_pre_attn_scalar=16, **_WINDOW),
    "gemma3_text": _common(query_pre_attn_scalar=16, **_WINDOW),
    "phi": _common(),
    "phi3": _common(rope_parameters=_ROPE),
    "gpt2": _GPT2,
    "gpt_neo": dict(
        max_position_embeddings=256,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=8,
        **_GPT,
    ),
    "gpt_neox": _common(),
    "gptj": {**_GPT2, "rotary_dim": 8},
    "gpt_bigcode": _GPT2,
    "codegen": {**_GPT2, "rotary_dim": 8},
    "opt": dict(
        hidden_size=64,
        ffn_dim=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        word_embed_proj_dim=64,
        init_std=0.2,
        vocab_size=VOCABULARY,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    ),
    "bloom": dict(hidden_size=64, n_layer=2, n_head=4, **_GPT),
    "mpt": dict(d_model=64, n_heads=4, n_layers=2, max_seq_len=256, expansion_ratio=2, **_GPT),
    "falcon": dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, **_GPT),
    "olmo": _common(),
    "olmo2": _common(),
    "olmo3": _common(**_WINDOW),
    "olmoe": _common(num_experts=4, num_experts_per_tok=2),
    "granite": _common(),
    "granitemoe": _common(num_local_experts=4, num_experts_per_tok=2),
    "starcoder2": _common(sliding_window=8),
    "stablelm": _common(),
    "cohere": _common(),
    "cohere2": _common(**_WINDOW),
    "glm": _common(head_dim=16),
    "glm4": _common(head_dim=16),
    "glm4_moe": _common(head_dim=16, **_ROUTED),
    "helium": _common(head_dim=16),
    "nemotron": _common(),
    "persimmon": _common(),
    "smollm3": _common(),
    "seed_oss": _common(head_dim=16),
    "ernie4_5": _common(head_dim=16),
    "exaone4": _common(head_dim=16, **{k: v for k, v in _WINDOW.items() if k != "head_dim"}),
    "arcee": _common(),
    "apertus": _common(),
    "hunyuan_v1_dense": _common(head_dim=16),
    "diffllama": _common(),
    "biogpt": _common(),
    "xglm": dict(
        d_model=64,
        ffn_dim=128,
        num_layers=2,
        attention_heads=4,
        max_position_embeddings=256,
        init_std=0.2,
        **{k: v for k, v in _GPT.items() if k != "initializer_range"},
    ),
    "mixtral": _common(num_local_experts=4, num_experts_per_tok=2),
    "qwen2_moe": _common(shared_expert_intermediate_size=32, **_EXPERTS),
    "qwen3_moe": _common(head_dim=16, decoder_sparse_step=1, **_EXPERTS),
    "phimoe": _common(num_local_experts=4, num_experts_per_tok=2),
    "minimax_m2": _common(head_dim=16, num_local_experts=4, num_experts_per_tok=2),
    "gpt_oss": _common(num_local_experts=4, num_experts_per_tok=2, rope_parameters=_ROPE, **_WINDOW),
    "deepseek_v2": _common(rope_parameters=_ROPE, **_LATENT, **_ROUTED),
    "deepseek_v3": _common(rope_parameters=_ROPE, **_LATENT, **_ROUTED),
    "llama4_text": _common(
        head_dim=16,
        intermediate_size_mlp=128,
        num_local_experts=2,
        num_experts_per_tok=1,
        attention_chunk_size=8,
        interleave_moe_layer_step=2,
    ),
    "lfm2": _common(layer_types=["conv", "full_attention"], conv_L_cache=3, block_ff_dim=128),
    "mamba": dict(hidden_size=64, num_hidden_layers=2, state_size=8, conv_kernel=4, expand=2, **_GPT),
    "mamba2": dict(
        hidden_size=64,
        num_hidden_layers=2,
        state_size=8,
        conv_kernel=4,
        expand=2,
        num_heads=8,
        head_dim=16,
        n_groups=2,
        chunk_size=8,
        **_GPT,
    ),
    "falcon_mamba": dict(hidden_size=64, num_hidden_layers=2, state_size=8, conv_kernel=4, expand=2, **_GPT),
    "qwen3_next": _common(
        head_dim=16,
        shared_expert_intermediate_size=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_conv_kernel_dim=4,
        layer_types=["linear_attention", "full_attention"],
        **_EXPERTS,
    ),
    "jamba": _common(
        num_experts=2,
        num_experts_per_tok=1,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        mamba_d_state=8,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_dt_rank=8,
        use_mamba_kernels=False,
    ),
    "bamba": _common(attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=16, **_SCAN),
    "falcon_h1": _common(head_dim=16, mamba_d_ssm=64, mamba_n_heads=8, mamba_d_head=8, **_SCAN),
    "granitemoehybrid": _common(
        layer_types=["mamba", "attention"],
        mamba_n_heads=8,
        mamba_d_head=16,
        num_local_experts=0,
        shared_intermediate_size=128,
        position_embedding_type=None,
        **_SCAN,
    ),
    "recurrent_gemma": _common(
        lru_width=64, attention_window_size=16, block_types=["recurrent", "recurrent", "attention"], num_hidden_layers=3
    ),
    "rwkv": dict(
        vocab_size=VOCABULARY,
        context_length=256,
        hidden_size=64,
        num_hidden_layers=2,
        attention_hidden_size=64,
        intermediate_size=128,
        bos_token_id=1,
        eos_token_id=None,
    ),
    "gemma3n_text": _common(
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCABULARY,
        num_kv_shared_layers=0,
        altup_num_inputs=2,
        laurel_rank=8,
        activation_sparsity_pattern=[0.0, 0.0],
        **{**_WINDOW, "intermediate_size": [128, 128]},
    ),
    "dots1": _common(head_dim=16, **_ROUTED),
    "doge": _common(),
    "nanochat": _common(),
    "jetmoe": _common(kv_channels=16, num_local_experts=4, num_experts_per_tok=2),
    "ernie4_5_moe": _common(moe_num_experts=4, moe_k=2, moe_intermediate_size=32, moe_num_shared_experts=1),
}


def build(family: str, *, meta: bool = False, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**FAMILIES[family], **changes})
    torch.manual_seed(seed)
    with torch.device("meta" if meta else "cpu"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
