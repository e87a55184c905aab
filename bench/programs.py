"""Programs that a benchmark compiles for itself: a model on meta, its weights noise in a file.

Made once per folder: what is there is taken as it is.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import penstock
from bench.suite.model import write_noise


@dataclass(frozen=True)
class Recipe:
    """`make` and `example` are functions of a module, so that another process finds them."""

    make: Callable[..., nn.Module]
    arguments: tuple[int, ...]
    example: Callable[..., tuple[Tensor, ...]]
    # The first dimension of the only input may be anything from one to the other.
    dynamic: tuple[int, int] | None
    hidden: int


def prepare(folder: Path, recipe: Recipe, device: str, split_linear: Sequence[bool]) -> list[Path]:
    """The program without and with linears that may be split, side by side, each with its weights file."""
    folder.mkdir(parents=True, exist_ok=True)
    made_from = {"model": recipe.make.__name__, "arguments": list(recipe.arguments), "device": device}
    stamp = folder / "made-from.json"
    if stamp.exists() and json.loads(stamp.read_text()) != made_from:
        raise SystemExit(f"{folder} holds programs of {stamp.read_text()}; give another folder for {made_from}")
    stamp.write_text(json.dumps(made_from))
    weights = folder / "weights.safetensors"
    if not weights.exists():
        tensors = {name: tuple(tensor.shape) for name, tensor in _on_meta(recipe).state_dict().items()}
        write_noise(tensors, recipe.hidden, weights)
    paths = [folder / ("split.pt2" if split else "library.pt2") for split in split_linear]
    left = [(path, split) for path, split in zip(paths, split_linear, strict=True) if not path.exists()]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=max(1, len(left)), mp_context=context) as processes:
        for done in [processes.submit(_compile, recipe, path, weights, device, split) for path, split in left]:
            done.result()
    return paths


def _on_meta(recipe: Recipe) -> nn.Module:
    with torch.device("meta"):
        return recipe.make(*recipe.arguments).to(torch.bfloat16).eval().requires_grad_(False)


def _compile(recipe: Recipe, path: Path, weights: Path, device: str, split_linear: bool) -> None:
    with torch.no_grad(), torch.device("meta"):
        example = recipe.example(*recipe.arguments)
    shapes = None
    if recipe.dynamic is not None:
        shapes = ({0: torch.export.Dim("first", min=recipe.dynamic[0], max=recipe.dynamic[1])},)
    with torch.no_grad():
        program = torch.export.export(_on_meta(recipe), example, dynamic_shapes=shapes)
    offloaded = penstock.apply_weight_offload(program)
    penstock.compile(offloaded, path, device=device, weights=weights, split_linear=split_linear, overwrite=True)
