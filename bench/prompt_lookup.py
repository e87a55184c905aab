"""What prompt lookup saves: passes over the weights for each token.

    python -m bench.prompt_lookup --work FOLDER [--steps 200] [--out FOLDER]
    python -m bench.prompt_lookup --work FOLDER --checkpoint FOLDER --budget 8GiB [--out FOLDER]

Without a checkpoint a small Llama is trained first, for a minute or two, to give a text of random tokens back, since
random weights never repeat what they were given. It then does so with texts that it has not seen.

A checkpoint may have any weights: a logits processor makes the model write what a perfect one would answer, namely
Python source as it stands in the prompt, or edited (bench/code_edits.py). What is looked up, compared and thrown away,
and what each pass takes, is as it would be. transformers' generate() runs with and without prompt_lookup_num_tokens.
Tokens must be the same; passes are what the link is busy for.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import penstock
from bench.code_edits import code_edits
from bench.suite.measure import synchronize

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


@dataclass(frozen=True)
class Task:
    name: str
    prompt: Tensor
    answer_tokens: int
    # What a model that knows the answer would write; None: the model knows it itself.
    answer: Tensor | None = None


def copying(texts: int) -> list[Task]:
    draws = torch.Generator().manual_seed(7)
    return [Task("copying", task(1, draws)[0], TEXT_TOKENS) for _ in range(texts)]


def measure(model: Any, lookup: int | None, tasks: Sequence[Task]) -> dict[str, Any]:
    passes = tokens = 0
    answers, seconds = [], 0.0
    for one in tasks:
        prompt = one.prompt.to(model.device)
        before, begun_s = model.stats().runs, time.perf_counter()
        out = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=one.answer_tokens, do_sample=False,
            prompt_lookup_num_tokens=lookup,
            logits_processor=[] if one.answer is None else [writes(one.answer, prompt.shape[1])],
        )  # fmt: skip
        synchronize(str(model.device))
        seconds += time.perf_counter() - begun_s
        # The prompt's own pass gives the first token.
        passes += model.stats().runs - before - 1
        answers.append(out[0, prompt.shape[1] :].tolist())
        tokens += len(answers[-1]) - 1
        if one.answer is not None and answers[-1] != one.answer.tolist():
            raise AssertionError(f"{one.name}: it wrote something else")
    return {
        "tokens": tokens,
        "tokens_a_pass": tokens / passes,
        "ms_a_token": seconds / tokens * 1e3,
        "answers": answers,
    }


def writes(answer: Tensor, prompt_tokens: int) -> Callable[[Tensor, Tensor], Tensor]:
    def force(input_ids: Tensor, scores: Tensor) -> Tensor:
        at = input_ids.shape[1] - prompt_tokens
        forced = scores.clone()
        # Candidates may reach beyond the end. Other tokens stay possible: transformers drops candidates that are not.
        if at < len(answer):
            forced[:, answer[at]] += 1e4
        return forced

    return force


def compare(model: Any, tasks: Sequence[Task]) -> list[dict[str, Any]]:
    """Rows for each kind of task, in their order; the same tokens in all of them."""
    rows = []
    for name in dict.fromkeys(one.name for one in tasks):
        some = [one for one in tasks if one.name == name]
        plain = None
        for lookup in LOOKUPS:
            found = measure(model, lookup, some)
            plain = plain or found["answers"]
            if found.pop("answers") != plain:
                raise AssertionError(f"{name}: with a lookup of {lookup} the tokens are others")
            rows.append({"task": name, "lookup": lookup or 0, **found})
            figures = f"{found['tokens_a_pass']:.2f} tokens a pass, {found['ms_a_token']:.1f} ms a token"
            print(f"{name}, lookup {lookup}: {figures}", flush=True)
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--budget")
    parser.add_argument("--cache-length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(argv)
    right = None
    if given.checkpoint is None:
        folder, length, device = given.work / "copier", 256, "cpu"
        right = None if (folder / "config.json").exists() else train(folder, given.steps)
        tasks = copying(given.texts)
    else:
        folder, length, device = given.checkpoint, given.cache_length, None
        tasks = [
            Task(name, prompt[None], len(answer), answer)
            for name, prompt, answer in code_edits(given.work / "tokenizer")
        ]
    model = penstock.from_pretrained(
        folder, given.budget, cache_length=length, device=device, cache_dir=given.work / "cache", quiet=True
    )
    if given.budget is None:
        model.set_budget(model.floor_bytes)
    record = {
        "right": right,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if model.device.type == "cuda" else "cpu",
        "checkpoint": given.checkpoint.name if given.checkpoint else None,
        "budget_bytes": model.budget_bytes,
        "weight_bytes": model.weight_bytes,
        "rows": compare(model, tasks),
    }
    model.close()
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "prompt-lookup.json").write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
