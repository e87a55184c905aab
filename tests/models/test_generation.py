"""Families compiled, and transformers' own generate() over them: its tokens and its scores, at the floor and above."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.comparison import compare_generation

# One of each kind: dense, windows, chunks, learned positions, ALiBi, experts, latent attention, sinks, recurrent, both.
COMPILED = [
    *("bloom", "deepseek_v3", "falcon_h1", "gemma3_text", "gpt2", "gpt_oss", "lfm2", "llama4_text", "mamba2"),
    *("mixtral", "opt", "phi3", "qwen3_moe"),
]


@pytest.mark.parametrize("family", COMPILED)
def test_generation_is_that_of_transformers(family: str, tmp_path: Path) -> None:
    assert compare_generation(family, tmp_path, "cpu").bytes_streamed > 0
