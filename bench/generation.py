"""Tokens per second of a language model inside a budget, beside transformers' own offloading at the same device memory.

    python -m bench.generation --shape llama3-8b --out FOLDER --work /fast/disk [--fractions 0.25 0.5 0.75]

Writes a checkpoint with random weights of the shape into --work (once), then runs each system in a process of its own:
greedy, the same prompt, the same number of tokens. A peer gets as much device memory as Penstock was seen to use at
that budget: its max_memory is made smaller until its own measured peak is not above it.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import penstock
from bench.suite.measure import DeviceMeter, measure_link, synchronize

SHAPES: dict[str, dict[str, Any]] = {
    "llama3-8b": dict(
        model_type="llama", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192, tie_word_embeddings=False,
    ),
    "qwen3-14b": dict(
        model_type="qwen3", hidden_size=5120, intermediate_size=17408, num_hidden_layers=40, num_attention_heads=40,
        num_key_value_heads=8, head_dim=128, vocab_size=151936, max_position_embeddings=40960,
        tie_word_embeddings=False,
    ),
    "tiny": dict(
        model_type="llama", hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=512, max_position_embeddings=256, tie_word_embeddings=False,
    ),
}  # fmt: skip
SHARD_BYTES = 1 << 30
# A prime, so that no rows of a weight are equal; and how far weights begin from one another.
NOISE_VALUES, NOISE_STEP = 67_108_859, 7_654_321
# Of a first process: compiling. Of the others: 10 tokens of the slowest peer.
TIMEOUT_S = 580
# Of a peer: CUDA's context and libraries, the KV cache, and the layer that is being copied in.
BESIDE_WEIGHTS_BYTES = 1 << 30
# A peak that is lower by no more is as good as equal.
CLOSE = 0.03
SYSTEMS = ("penstock", "packed", "device_map", "pinned")
# Penstock itself, with the weights as they are, and packed.
OURS = ("penstock", "packed")


def write_checkpoint(shape: str, layers: int | None, folder: Path) -> None:
    """In shards, values drawn: what they are does not matter for time, and all systems read the same."""
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    if (folder / "config.json").exists():
        return
    fields = dict(SHAPES[shape], **({} if layers is None else {"num_hidden_layers": layers}))
    config = AutoConfig.for_model(fields.pop("model_type"), **fields, dtype="bfloat16", eos_token_id=None)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config.architectures = [type(model).__name__]
    folder.mkdir(parents=True, exist_ok=True)
    # Drawn once and cut from: drawing eight billion numbers would take longer than anything that is measured.
    noise = (torch.randn(NOISE_VALUES, generator=torch.Generator().manual_seed(0)) * 0.02).to(torch.bfloat16)
    at = 0
    placed: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}

    def close_shard() -> None:
        name = f"model-{len(set(placed.values())):05d}.safetensors"
        save_file(shard, folder / name)
        placed.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, tensor in model.state_dict().items():
        if "norm" in name:
            shard[name] = torch.ones(tensor.shape, dtype=torch.bfloat16)
        else:
            at = (at + NOISE_STEP) % NOISE_VALUES
            repeats = -(-(at + tensor.numel()) // NOISE_VALUES)
            shard[name] = noise.repeat(repeats)[at : at + tensor.numel()].reshape(tensor.shape).clone()
        if sum(each.nbytes for each in shard.values()) > SHARD_BYTES:
            close_shard()
    if shard:
        close_shard()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    config.save_pretrained(folder)


# ------------------------------------------------------------------------------------------------- in a process


def open_model(job: dict[str, Any]) -> Any:
    folder, device = job["checkpoint"], job["device"]
    if job["system"] in OURS:
        return penstock.from_pretrained(
            folder, job["budget_bytes"], cache_length=job["cache_length"], device=device, cache_dir=job["cache_dir"],
            pack=job["system"] == "packed", quiet=True,
        )  # fmt: skip
    from transformers import AutoModelForCausalLM

    if job["system"] == "device_map":
        limits = {0: job["max_memory_bytes"], "cpu": 1 << 40}
        return AutoModelForCausalLM.from_pretrained(folder, device_map="auto", max_memory=limits, dtype=torch.bfloat16)
    return pinned_model(folder, job["max_memory_bytes"], device)


def pinned_model(folder: str, resident_bytes: int, device: str) -> Any:
    """accelerate as its hooks do best: whole layers resident while they fit, the others copied from pinned memory."""
    from accelerate import dispatch_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    index = torch.device(device).index or 0
    places: dict[str, int | str] = {}
    left = resident_bytes
    for name, module in model.named_modules():
        is_unit = type(module).__name__.endswith("DecoderLayer") or (
            not list(module.children()) and "layers." not in name
        )
        if not is_unit or not name:
            continue
        nbytes = sum(parameter.nbytes for parameter in module.parameters())
        places[name] = index if nbytes <= left else "cpu"
        left -= nbytes if places[name] == index else 0
    for name, parameter in model.named_parameters():
        if any(places.get(prefix) == "cpu" and name.startswith(prefix + ".") for prefix in places):
            parameter.data = parameter.data.pin_memory()
    return dispatch_model(model, device_map=places, main_device=index)


def load_libraries() -> None:
    """What a program that uses transformers has loaded anyway: both load the greater part of themselves when asked."""
    import transformers

    for library, name in ((transformers, "AutoModelForCausalLM"), (penstock, "from_pretrained")):
        getattr(library, name)


def work(job: dict[str, Any]) -> dict[str, Any]:
    device = job["device"]
    on_cuda = device.startswith("cuda")
    meter = DeviceMeter(device) if on_cuda else None
    begun_s = time.perf_counter()
    load_libraries()
    import_s = time.perf_counter() - begun_s
    begun_s = time.perf_counter()
    model = open_model(job)
    opened_s = time.perf_counter() - begun_s
    ids = torch.randint(3, 500, (1, job["prompt"]), generator=torch.Generator().manual_seed(1))
    ids = ids.to(model.device)

    def generate(count: int) -> tuple[float, list[int]]:
        synchronize(device)
        begin_s = time.perf_counter()
        with torch.no_grad():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
        synchronize(device)
        return time.perf_counter() - begin_s, out[0, ids.shape[1] :].tolist()

    first_s, _ = generate(1)
    first_token_s = time.perf_counter() - begun_s
    peak_bytes = None
    if meter is not None:
        with meter:
            generate(2)
        peak_bytes = meter.peak_bytes()
    short_s, _ = generate(1)
    long_s, tokens = generate(job["tokens"] + 1)
    found = {
        "system": job["system"],
        "ms_a_token": (long_s - short_s) / job["tokens"] * 1e3,
        "import_s": import_s,
        "open_s": opened_s,
        "first_token_s": first_token_s,
        "prompt_s": short_s,
        "first_call_s": first_s,
        "peak_bytes": peak_bytes,
        "tokens": tokens,
    }
    if job["system"] in OURS:
        plan = model._engine.module.plan
        weights = {weight.name: weight.nbytes for weight in model._engine.module.program.weights}
        found |= {
            # Tables that are gathered from: a row at a time crosses the link.
            "in_place_bytes": sum(weights[name] for name in plan.direct_weights),
            "budget_bytes": model.budget_bytes,
            "floor_bytes": model.floor_bytes,
            "weight_bytes": model.weight_bytes,
            "state_bytes": model.state_bytes,
            "link_bytes_per_s": model.link_bytes_per_s,
            "bytes_streamed_a_run": model.last_run.bytes_streamed,
        }
        model.close()
    return found


# ------------------------------------------------------------------------------------------------------ in all


def run(job: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.generation", "--worker", json.dumps(job)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return {"system": job["system"], "failed": f"not done after {TIMEOUT_S} s"}
    if done.returncode:
        return {"system": job["system"], "failed": (done.stderr.strip().splitlines() or [f"rc {done.returncode}"])[-1]}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def within(job: dict[str, Any], peak_bytes: int | None) -> dict[str, Any]:
    """A peer at the same measured peak: of up to three tries the fastest that is not above `peak_bytes`. Their limits
    count weights alone; each is moved by what the last try's peak was off."""
    if peak_bytes is None:
        return run({**job, "max_memory_bytes": 1 << 40})
    tries: list[dict[str, Any]] = []
    limit = max(peak_bytes - BESIDE_WEIGHTS_BYTES, 0)
    for _ in range(3):
        tries.append(run({**job, "max_memory_bytes": limit}) | {"max_memory_bytes": limit})
        off_bytes = peak_bytes - tries[-1].get("peak_bytes", peak_bytes)
        if 0 <= off_bytes <= CLOSE * peak_bytes:
            break
        limit = max(limit + off_bytes - (64 << 20), 0)
    fitting = [row for row in tries if row.get("peak_bytes", 0) <= peak_bytes]
    if not fitting:
        return tries[-1] | {"note": "its peak stayed above the budget's"}
    return min(fitting, key=lambda row: row.get("ms_a_token", float("inf")))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama3-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--fractions", type=float, nargs="+", default=[0.25, 0.5, 0.75])
    parser.add_argument("--peer-fractions", type=float, nargs="+", help="of the others; by default the same")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--tokens", type=int, default=24, help="that are timed")
    parser.add_argument("--peer-tokens", type=int, default=6, help="of the others, which take seconds for each")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--cache-length", type=int, default=2048)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--work", type=Path, default=Path("generation-work"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.worker:
        print(json.dumps(work(json.loads(given.worker))))
        return
    checkpoint = given.work / (given.shape if given.layers is None else f"{given.shape}-{given.layers}")
    write_checkpoint(given.shape, given.layers, checkpoint)
    weight_bytes = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    common = {
        "checkpoint": str(checkpoint), "device": given.device, "cache_length": given.cache_length,
        "cache_dir": str(given.work / "cache"), "prompt": given.prompt, "tokens": given.tokens,
    }  # fmt: skip
    record: dict[str, Any] = {
        "shape": given.shape, "layers": given.layers, "weight_bytes": weight_bytes,
        "link_bytes_per_s": measure_link(given.device),
        "device": torch.cuda.get_device_name() if given.device.startswith("cuda") else "cpu",
        "torch": torch.__version__, "python": platform.python_version(), "rows": [], "options": common,
    }  # fmt: skip
    ours: dict[float, dict[str, Any]] = {}
    peaks: dict[float, int | None] = {}

    def add(fraction: float, row: dict[str, Any]) -> None:
        wanted = ours[fraction].get("tokens")
        found = row.get("tokens", [])
        row |= {"fraction": fraction, "same_tokens": bool(found) and found == (wanted or [])[: len(found)]}
        record["rows"].append(row)
        print(line(row, weight_bytes), flush=True)
        if given.out is not None:
            given.out.mkdir(parents=True, exist_ok=True)
            (given.out / f"generation-{checkpoint.name}.json").write_text(json.dumps(record, indent=1))

    # Ours first: the first of them compiles, and the others begin with its caches. Peers get the memory of the last.
    for system in [system for system in OURS if system in given.systems] or OURS[:1]:
        for fraction in given.fractions:
            row = run({**common, "system": system, "budget_bytes": int(weight_bytes * fraction)})
            ours.setdefault(fraction, row)
            peaks[fraction] = row.get("peak_bytes")
            add(fraction, row)
    for fraction in given.peer_fractions or given.fractions:
        for system in given.systems:
            if system not in OURS:
                job = {**common, "system": system, "tokens": given.peer_tokens}
                add(fraction, within(job, peaks[fraction]))


def line(row: dict[str, Any], weight_bytes: int) -> str:
    if "failed" in row:
        return f"{row['fraction']:.0%} {row['system']}: {row['failed']}"
    peak = "" if row["peak_bytes"] is None else f", peak {row['peak_bytes'] / 1e9:.2f} GB"
    bound = ""
    # Of weights as they are: packed ones are not bound by it.
    if row["system"] == "penstock" and row.get("link_bytes_per_s"):
        bound_ms = max(0, weight_bytes - row["in_place_bytes"] - row["budget_bytes"]) / row["link_bytes_per_s"] * 1e3
        bound = f" (bound {bound_ms:.1f})"
    return (
        f"{row['fraction']:.0%} {row['system']}: {row['ms_a_token']:.1f} ms a token{bound}, "
        f"{1e3 / row['ms_a_token']:.2f} tokens/s{peak}, first token after {row['first_token_s']:.1f} s, "
        f"{'same tokens' if row['same_tokens'] else 'other tokens'}"
    )


if __name__ == "__main__":
    main()
