"""`penstock estimate`: against real models and the caches they get, and beside what the compiler makes of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    BambaConfig,
    DeepseekV3Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    Mamba2Config,
    MistralConfig,
    Qwen3MoeConfig,
)

from penstock.cli.checkpoint_size import CheckpointSize
from penstock.cli.children import ChildFailure
from penstock.cli.estimate import _budget
from penstock.models.pretrained import decode_tokens_of
from penstock.models.stateful import make_stateful
from penstock.plan.pages import soft_page_bytes
from tests.cli.conftest import Cli
from tests.harness import compiled, offloaded
from tests.zoo import hf

pytestmark = pytest.mark.models

TINY = dict(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=256,
    max_position_embeddings=8192,
)
MOE = dict(moe_intermediate_size=32, num_experts_per_tok=2)
FAMILIES: dict[str, Any] = {
    "llama": LlamaConfig(**TINY),
    "llama tied": LlamaConfig(**TINY, tie_word_embeddings=True),
    "gemma3, mixed sliding": Gemma3TextConfig(**{**TINY, "num_hidden_layers": 7}, sliding_window=16, head_dim=32),
    "mistral, sliding": MistralConfig(**TINY, sliding_window=16),
    "mamba2": Mamba2Config(
        hidden_size=64, num_hidden_layers=2, vocab_size=256, num_heads=8, head_dim=16, state_size=16, n_groups=1
    ),
    "bamba, hybrid": BambaConfig(
        **TINY,
        attn_layer_indices=[1],
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_d_state=16,
        mamba_n_groups=1,
        mamba_expand=2,
    ),
    "qwen3 moe": Qwen3MoeConfig(**TINY, **MOE, num_experts=4, head_dim=16),
    "gpt-oss": GptOssConfig(**TINY, num_local_experts=4, head_dim=16, num_experts_per_tok=2),
    "deepseek, keys wider than values": DeepseekV3Config(
        **{**TINY, "num_key_value_heads": 4},
        **MOE,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        first_k_dense_replace=1,
    ),
}


def size_of(config: Any, dtype: torch.dtype = torch.float32) -> CheckpointSize:
    return CheckpointSize(transformers, config, dtype, trust_remote_code=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_against_a_real_model(family: str) -> None:
    config = FAMILIES[family]
    size = size_of(config)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    assert size.class_name == type(model).__name__
    assert size.parameters == sum(one.numel() for one in model.parameters())
    stored = {one.data_ptr(): one.numel() * one.element_size() for one in model.state_dict().values() if one.numel()}
    assert size.weight_bytes == sum(stored.values()) == sum(size.bytes_by_dtype.values())
    for length in (8, 40, 300):
        # As from_pretrained has it: the tensors of the model that is exported.
        with torch.device("meta"):
            stateful = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        positions = length + decode_tokens_of(stateful, length) - 1
        tensors = make_stateful(stateful, slots=positions, batch=1).tensors()
        assert size.cache_bytes(length) == sum(tensor.nbytes for tensor in tensors.values()) > 0, length


def test_only_rows_of_a_table_are_read_unless_it_is_tied() -> None:
    table = 256 * 64 * 4
    apart, tied = size_of(FAMILIES["llama"]), size_of(FAMILIES["llama tied"])
    assert apart.read_bytes == apart.weight_bytes - table
    assert tied.read_bytes == tied.weight_bytes == apart.weight_bytes - table


def test_experts() -> None:
    found = size_of(FAMILIES["qwen3 moe"]).experts
    assert found is not None and (found.experts, found.per_token) == (4, 2)
    assert found.nbytes == 4 * 4 * 3 * 64 * 32 * 4 and found.routed_bytes == found.nbytes // 2
    assert size_of(FAMILIES["llama"]).experts is None


@pytest.mark.slow
def test_the_floor_beside_that_of_a_compiled_program(tmp_path: Path) -> None:
    """It is an estimate: what the compiler fuses is not known. Of a plain decoder it is near. (Of a mixture it was 19%
    above: there the compiler read experts by row.)"""
    case = hf.llama()
    program = compiled(tmp_path, offloaded(case.module, case.args, case.dynamic_shapes)).program
    size = size_of(LlamaConfig(**hf.LLAMA_SMALL, tie_word_embeddings=False))
    assert size.floor(soft_page_bytes(size.weight_bytes)).floor_bytes == pytest.approx(program.floor_bytes, rel=0.05)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=32768,
        dtype=torch.bfloat16,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def budgets(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["what"]: row for row in document["budgets"]}


@pytest.mark.usefixtures("no_gpu")
def test_an_8b(cli: Cli, folder: Path) -> None:
    told = cli("estimate", folder, "--gpu-memory", "12GiB", "--compute-bandwidth", "1TB/s", "--json").document
    assert told["model"] == "LlamaForCausalLM" and told["parameters"] == 8030261248
    assert told["bytes_by_dtype"] == {"bfloat16": 16060522496} and told["weight_bytes"] == 16060522496
    assert [row["length"] for row in told["cache"]] == [2048, 4096, 8192, 16384, 32768]
    # Seven positions more: the padding of a decode run.
    assert all(row["nbytes"] == (row["length"] + 7) * 131072 for row in told["cache"])
    assert told["link_bytes_per_s"] == 25e9 and "assumed" in told["link_source"]
    # It needs the two largest neighbours at least: here the last layer's down_proj and the head.
    assert told["floor_bytes"] >= (4096 * 14336 + 4096 * 128256) * 2
    assert told["gpu"]["enough"] and told["gpu"]["left_bytes"] < 12 << 30
    read = told["read_bytes_per_token"]
    assert read == 16060522496 - 4096 * 128256 * 2
    rows = budgets(told)
    half = rows["50% of what is read"]
    assert half["tokens_per_s"] == pytest.approx(25e9 / (read - half["budget_bytes"]))
    assert rows["all that is read"]["tokens_per_s"] == pytest.approx(1e12 / read)
    assert told["smallest_gpu_bytes"] > told["floor_bytes"]
    assert not cli("estimate", folder, "--gpu-memory", "1GiB", "--json").document["gpu"]["enough"]
    exact = cli("estimate", folder, "--gpu-memory", told["smallest_gpu_bytes"], "--json").document["gpu"]
    short = cli("estimate", folder, "--gpu-memory", told["smallest_gpu_bytes"] - 1, "--json").document["gpu"]
    assert exact["enough"] and not short["enough"]


@pytest.mark.usefixtures("no_gpu")
def test_what_it_shows(cli: Cli, folder: Path) -> None:
    told = cli("estimate", folder, "--gpu-memory", "12GiB")
    assert told.code == 0
    for text in ("8.03 billion", "14.96 GiB of bfloat16", "an estimate", "25.00 GB/s, assumed", "it fits", "GiB GPU"):
        assert text in told.stdout, text
    assert "it does not fit" in cli("estimate", folder, "--gpu-memory", "1GiB").stdout


@pytest.mark.usefixtures("no_gpu")
def test_a_mixture_says_what_a_token_reads(cli: Cli, tmp_path: Path) -> None:
    FAMILIES["qwen3 moe"].save_pretrained(tmp_path)
    told = cli("estimate", tmp_path, "--dtype", "bfloat16", "--json").document
    experts = told["experts"]
    assert experts["read_bytes_per_token"] == told["read_bytes_per_token"] - experts["nbytes"] // 2
    assert all(row["routed_tokens_per_s"] >= row["tokens_per_s"] for row in told["budgets"] if row["tokens_per_s"])
    assert "upper bound" in cli("estimate", tmp_path).stdout


def test_experts_in_slots_are_asked_for_more_often_than_others() -> None:
    """As often as plans take it: of four the first slot has 74% of what is asked for, and the second 15%."""
    size = size_of(FAMILIES["qwen3 moe"])
    assert size.experts is not None
    experts, link = size.experts.nbytes, 25e9
    for part, misses in ((0.0, 1.0), (1 / 8, 1 - 0.37), (1 / 4, 1 - 0.74), (1 / 2, 1 - 0.89)):
        row = _budget(size, "", size.read_bytes - experts + int(part * experts), link, None)
        assert row.routed_tokens_per_s == pytest.approx(link / (experts / 2 * misses), rel=1e-3)
    assert _budget(size, "", size.read_bytes, link, None).routed_tokens_per_s is None


def test_the_link(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FAMILIES["llama"].save_pretrained(tmp_path)

    def told(*options: object) -> tuple[float, str]:
        found = cli("estimate", tmp_path, "--json", *options).document
        return found["link_bytes_per_s"], found["link_source"]

    assert told("--link", "12.5GB/s") == (12.5e9, "as given")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("penstock.cli.doctor_checks.ask_child", lambda code, timeout_s: {"bytes_per_s": 55e9})
    assert told() == (55e9, "measured on this machine")

    def fail(code: str, timeout_s: float) -> None:
        raise ChildFailure("out of memory")

    monkeypatch.setattr("penstock.cli.doctor_checks.ask_child", fail)
    rate, source = told()
    assert rate == 25e9 and "assumed" in source and "out of memory" in source


@pytest.mark.usefixtures("no_gpu")
def test_refusals(cli: Cli, tmp_path: Path) -> None:
    assert cli("estimate", tmp_path).code == 6
    for text in ("{", "[]", "{}", '{"model_type": "no-such-model"}', '{"model_type": "llama", "hidden_size": "x"}'):
        (tmp_path / "config.json").write_text(text)
        told = cli("estimate", tmp_path)
        assert told.code == 6 and told.stderr.count("\n") == 1, told.stderr
    (tmp_path / "config.json").unlink()
    transformers.T5Config(d_model=64, num_layers=2, num_heads=4, d_kv=16, vocab_size=256).save_pretrained(tmp_path)
    assert cli("estimate", tmp_path).code in (3, 6)
    FAMILIES["llama"].save_pretrained(tmp_path)
    assert cli("estimate", tmp_path, "--cache-length", 10**6).code == 12


@pytest.mark.parametrize(
    ("former", "sentence"),
    [
        ("--link-gb-per-s", "use --link, as in --link 25GB/s"),
        ("--memory-gb-per-s", "use --compute-bandwidth, as in --compute-bandwidth 1TB/s"),
    ],
)
def test_former_options_are_told_the_new_ones(cli: Cli, tmp_path: Path, former: str, sentence: str) -> None:
    told = cli("estimate", tmp_path, former, 25)
    assert told.code == 2 and sentence in told.stderr
