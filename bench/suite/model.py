"""The model that every system runs: the blocks of a Llama-style decoder over hidden states, without a vocabulary.

No system gets other weights than those of one file, which is written once, piece by piece, from a seed.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DTYPE = torch.bfloat16
ITEM_BYTES = 2
SEED = 0
# Values drawn before the noise repeats. A prime, so that rows and tensors of even sizes never start at the same value.
NOISE_VALUES = 16_777_213


@dataclass(frozen=True)
class ModelShape:
    hidden: int
    ff: int
    layers: int
    heads: int
    kv_heads: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


def llama3_8b(layers: int) -> ModelShape:
    return ModelShape(hidden=4096, ff=14336, layers=layers, heads=32, kv_heads=8)


def small(layers: int) -> ModelShape:
    """For machines without a GPU: the same graph, in kilobytes."""
    return ModelShape(hidden=128, ff=256, layers=layers, heads=4, kv_heads=2)


class Block(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        kv = shape.kv_heads * shape.head_dim
        self.attn_norm = nn.RMSNorm(shape.hidden, dtype=DTYPE)
        self.q = nn.Linear(shape.hidden, shape.hidden, bias=False, dtype=DTYPE)
        self.k = nn.Linear(shape.hidden, kv, bias=False, dtype=DTYPE)
        self.v = nn.Linear(shape.hidden, kv, bias=False, dtype=DTYPE)
        self.o = nn.Linear(shape.hidden, shape.hidden, bias=False, dtype=DTYPE)
        self.mlp_norm = nn.RMSNorm(shape.hidden, dtype=DTYPE)
        self.gate = nn.Linear(shape.hidden, shape.ff, bias=False, dtype=DTYPE)
        self.up = nn.Linear(shape.hidden, shape.ff, bias=False, dtype=DTYPE)
        self.down = nn.Linear(shape.ff, shape.hidden, bias=False, dtype=DTYPE)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, hidden = x.shape
        h = self.attn_norm(x)
        q = self.q(h).view(batch, tokens, self.shape.heads, self.shape.head_dim).transpose(1, 2)
        k = self.k(h).view(batch, tokens, self.shape.kv_heads, self.shape.head_dim).transpose(1, 2)
        v = self.v(h).view(batch, tokens, self.shape.kv_heads, self.shape.head_dim).transpose(1, 2)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=tokens > 1, enable_gqa=True)
        x = x + self.o(attention.transpose(1, 2).reshape(batch, tokens, hidden))
        h = self.mlp_norm(x)
        added: Tensor = self.down(F.silu(self.gate(h)) * self.up(h))
        return x + added


class Decoder(nn.Module):
    """forward(x[1, tokens, hidden]) -> [1, tokens, hidden]."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(shape) for _ in range(shape.layers)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def on_meta(shape: ModelShape) -> Decoder:
    with torch.device("meta"):
        return Decoder(shape).eval().requires_grad_(False)


def inputs(shape: ModelShape, tokens: int, device: str) -> Tensor:
    # Drawn on the CPU, so that every device gets the same values.
    generator = torch.Generator().manual_seed(SEED + 1)
    return torch.randn(1, tokens, shape.hidden, generator=generator).to(DTYPE).to(device)


def write_weights(shape: ModelShape, path: Path) -> None:
    """A safetensors file with seeded values."""
    tensors = {name: tuple(tensor.shape) for name, tensor in on_meta(shape).state_dict().items()}
    write_noise(tensors, shape.hidden, path)


def write_noise(tensors: Mapping[str, tuple[int, ...]], hidden: int, path: Path) -> None:
    """Tensors of these shapes in a safetensors file, vectors near one; holds one block of noise and nothing else."""
    table, offset = {}, 0
    for name, size in tensors.items():
        end = offset + math.prod(size) * ITEM_BYTES
        table[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [offset, end]}
        offset = end
    header = json.dumps(table).encode()
    header += b" " * (-len(header) % 8)
    generator = torch.Generator().manual_seed(SEED)
    # Keeps the sum over a row near one, so that a wrong weight shows in the output at every size.
    noise = torch.randn(NOISE_VALUES, generator=generator) * (1.28 / math.sqrt(hidden))
    values, around_one = noise.to(DTYPE), (noise + 1).to(DTYPE)
    unfinished = path.with_suffix(".partial")
    with unfinished.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        position = 0
        for size in tensors.values():
            source, left = (around_one if len(size) == 1 else values), math.prod(size)
            while left:
                count = min(left, NOISE_VALUES - position)
                file.write(source[position : position + count].view(torch.uint8).numpy().data)
                left -= count
                position = (position + count) % NOISE_VALUES
    unfinished.rename(path)


def stored_tensors(path: Path) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """Name, shape and offset in the file."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        table = json.loads(file.read(length))
    for name, entry in table.items():
        yield name, tuple(entry["shape"]), 8 + length + entry["data_offsets"][0]


def load(shape: ModelShape, path: Path, place: Callable[[Tensor], Tensor], *, pinned: bool = False) -> Decoder:
    """The model with its weights; `place` turns each, read into host memory, into the tensor the model shall hold.

    Read straight to where they stay, one after the other: there is never a second copy of them all in RAM.
    """
    model = on_meta(shape)
    placed: dict[str, Tensor] = {}
    with path.open("rb", buffering=0) as file:
        for name, size, offset in stored_tensors(path):
            tensor = torch.empty(size, dtype=DTYPE, pin_memory=pinned)
            read_into(tensor, file.fileno(), offset)
            placed[name] = place(tensor)
    model.load_state_dict(placed, assign=True)
    return model.requires_grad_(False)


def read_into(tensor: Tensor, descriptor: int, offset: int) -> None:
    view = tensor.view(-1).view(torch.uint8).numpy().data
    done = 0
    while done < len(view):  # one call reads at most 2 GiB
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if count == 0:
            raise EOFError(f"the weights file ends {len(view) - done} bytes before the end of a tensor")
        done += count
