"""What prompt lookup saves: passes over the weights for each token, of a model that copies.

    python -m bench.prompt_lookup --work FOLDER [--steps 200]

Random weights never repeat what they were given, so a small Llama is trained first, for a minute or two, to give a text
of random tokens back. Then transformers' generate() runs with and without prompt_lookup_num_tokens on texts that it has
not seen. Tokens must be the same; passes are what the link is busy for.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import penstock

VOCABULARY, HEADER, SEPARATOR = 96, 1, 2
FIRST_WORD = 8
TEXT_TOKENS = 40
LOOKUPS = (None, 2, 4, 7)


def task(rows: int, draws: torch.Generator) -> tuple[Tensor, Tensor]:
    """Prompts [header, text, separator], and the texts that should follow."""
    text = torch.randint(FIRST_WORD, VOCABULARY, (rows, TEXT_TOKENS), generator=draws)
    return torch.cat([torch.full((rows, 1), HEADER), text, torch.full((rows, 1), SEPARATOR)], 1), text


def train(folder: Path, steps: int) -> float:
    """Writes the checkpoint; the share of tokens that it gets right in the end."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=96, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=256, tie_word_embeddings=False, eos_token_id=None,
        pad_token_id=0, bos_token_id=HEADER,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps, pct_start=0.1)
    draws = torch.Generator().manual_seed(1)
    right = 0.0
    for step in range(steps):
        prompts, answers = task(32, draws)
        ids = torch.cat([prompts, answers], 1)
        logits = model(ids[:, :-1]).logits[:, -TEXT_TOKENS:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        right = (logits.argmax(-1) == answers).float().mean().item()
        if step % 100 == 99:
            print(f"step {step + 1}: loss {loss.item():.3f}, {right:.1%} right", flush=True)
    model.save_pretrained(folder)
    return right


def measure(model: Any, lookup: int | None, texts: int) -> dict[str, Any]:
    draws = torch.Generator().manual_seed(7)
    passes = tokens = 0
    answers, seconds = [], 0.0
    for _ in range(texts):
        prompt, _ = task(1, draws)
        before, begun_s = model.stats().runs, time.perf_counter()
        out = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=TEXT_TOKENS, do_sample=False,
            prompt_lookup_num_tokens=lookup,
        )  # fmt: skip
        seconds += time.perf_counter() - begun_s
        # The prompt's own pass gives the first token.
        passes += model.stats().runs - before - 1
        answers.append(out[0, prompt.shape[1] :].tolist())
        tokens += len(answers[-1]) - 1
    return {"tokens_a_pass": tokens / passes, "ms_a_token": seconds / tokens * 1e3, "answers": answers}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(argv)
    folder = given.work / "copier"
    right = None if (folder / "config.json").exists() else train(folder, given.steps)
    model = penstock.from_pretrained(folder, cache_length=256, device="cpu", cache_dir=given.work / "cache", quiet=True)
    model.set_budget(model.floor_bytes)
    rows = []
    plain = None
    for lookup in LOOKUPS:
        found = measure(model, lookup, given.texts)
        plain = plain or found["answers"]
        if found.pop("answers") != plain:
            raise AssertionError(f"with a lookup of {lookup} the tokens are others")
        rows.append({"lookup": lookup or 0, **found})
        print(f"lookup {lookup}: {found['tokens_a_pass']:.2f} tokens a pass", flush=True)
    model.close()
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        record = {"right": right, "torch": torch.__version__, "steps": given.steps, "rows": rows}
        (given.out / "prompt-lookup.json").write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
