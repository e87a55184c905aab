"""Model types that were tried, and those that are known not to work.

Each type in TESTED gives transformers' own tokens in tests/models. A type that is in neither list is refused unless you
say that you want to try it: a model can keep state where nobody sees it, or count positions in its own way, and be
silently wrong.
"""

from __future__ import annotations

import os

from penstock.errors import ModelError

UNTESTED_VARIABLE = "PENSTOCK_UNTESTED_MODEL"

# fmt: off
TESTED = frozenset({
    "apertus", "arcee", "bamba", "biogpt", "bloom", "codegen", "cohere", "cohere2", "deepseek_v2", "deepseek_v3",
    "diffllama", "doge", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "falcon", "falcon_h1", "falcon_mamba",
    "gemma", "gemma2", "gemma3_text", "gemma3n_text", "glm", "glm4", "glm4_moe", "gpt_bigcode", "gpt_neox",
    "gpt_oss", "gpt2", "gptj", "granite", "granitemoe", "granitemoehybrid", "helium", "hunyuan_v1_dense", "jamba",
    "lfm2", "llama", "llama4_text", "mamba", "mamba2", "minimax_m2", "ministral", "mistral", "mixtral",
    "nanochat", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt", "persimmon", "phi", "phi3", "phimoe", "qwen2",
    "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "seed_oss", "smollm3", "stablelm", "starcoder2",
})
# fmt: on

# Versions of transformers, whose code the models are. Every family was tried with both, but for exporting with 5.17.
OLDEST, NEWEST = (5, 17), (5, 22)
# Families that were wrong with an older version.
SINCE = {"doge": (5, 22)}

# Why each is refused.
REFUSED = {
    "gpt_neo": "it masks its local layers by the number of keys, which is always the cache's length here",
    "jetmoe": "it counts on the host how many tokens went to which expert, which cannot be exported",
    "mpt": "it builds its mask from a length that must be known while it is traced",
    "recurrent_gemma": "it keeps recurrent state in its modules, where Penstock cannot see it",
    "rwkv": "it keeps its state in a form of its own, which is no cache of transformers",
    "xglm": "it builds its positions from a length that must be known while it is traced",
}

# Their own code restarts the recurrence in every call of more than one token.
TOKEN_BY_TOKEN = frozenset({"jamba", "mamba", "falcon_mamba"})


def check_family(model_type: str, transformers_version: str) -> None:
    version = tuple(int(part) for part in transformers_version.split(".")[:2])
    if model_type in REFUSED:
        raise ModelError(f"models of the type {model_type!r} are not supported: {REFUSED[model_type]}")
    if version < SINCE.get(model_type, OLDEST):
        oldest = ".".join(map(str, SINCE.get(model_type, OLDEST)))
        raise ModelError(
            f"models of the type {model_type!r} need transformers {oldest} or newer, and {transformers_version} is "
            "installed"
        )
    if os.environ.get(UNTESTED_VARIABLE) == "1":
        return
    if version > NEWEST:
        raise ModelError(
            f"transformers {transformers_version} was not tested with Penstock; "
            f"{'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))} were. To try it, set {UNTESTED_VARIABLE}=1, "
            "and compare tokens with transformers' own"
        )
    if model_type not in TESTED:
        raise ModelError(
            f"models of the type {model_type!r} were not tested with Penstock. To try one, set {UNTESTED_VARIABLE}=1, "
            "and compare its tokens with transformers' own"
        )
