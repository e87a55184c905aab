"""Inputs and outputs as files: .pt, .npz, .safetensors."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from penstock.cli.curve_picture import MissingPackageError
from penstock.cli.pretrained import one_line
from penstock.errors import InputError, OutputPathError
from penstock.export.safetensors_file import DTYPES, read_checkpoint, stored_pieces
from penstock.regular_file import open_regular

SUFFIXES = (".pt", ".npz", ".safetensors")


def load_tensors(path: Path) -> Any:
    """From a .pt, whatever torch reads without running any code of it; from other files, tensors by name."""
    try:
        # torch's and numpy's readers raise all kinds of exceptions on damaged files.
        with open_regular(path, InputError) as file:
            if path.suffix == ".pt":
                return torch.load(file, map_location="cpu", weights_only=True)
            return _load_npz(file) if path.suffix == ".npz" else _load_safetensors(path)
    except MissingPackageError:
        raise
    except Exception as error:
        if isinstance(error, InputError):
            raise
        if path.suffix == ".pt":
            raise InputError(
                f"the inputs {path} cannot be read; write them with torch.save: {one_line(error)}"
            ) from error
        raise InputError(f"the inputs {path} cannot be read: {one_line(error)}") from error


def dump_tensors(path: Path, result: Any, named: Mapping[str, torch.Tensor]) -> bytes:
    """A .pt holds the result with its nesting; other files hold its tensors by name."""
    if path.suffix == ".pt":
        buffer = io.BytesIO()
        torch.save(result, buffer)
        return buffer.getvalue()
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}
    return _npz(path, plain) if path.suffix == ".npz" else _safetensors(path, plain)


def _numpy() -> Any:
    try:
        import numpy

        return numpy
    except ModuleNotFoundError as error:
        raise MissingPackageError("an .npz needs numpy: pip install numpy, or use a .pt or .safetensors") from error


def _load_npz(file: io.FileIO) -> dict[str, torch.Tensor]:
    with _numpy().load(file, allow_pickle=False) as arrays:
        return {name: torch.from_numpy(arrays[name].copy()) for name in arrays.files}


def _npz(path: Path, tensors: Mapping[str, torch.Tensor]) -> bytes:
    buffer = io.BytesIO()
    try:
        _numpy().savez(buffer, **{name: tensor.numpy() for name, tensor in tensors.items()})
    except TypeError as error:
        raise OutputPathError(f"{path}: numpy cannot hold this: {error}; use a .pt or .safetensors") from error
    return buffer.getvalue()


def _load_safetensors(path: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, stored in read_checkpoint(path).items():
        pieces = b"".join(bytes(piece) for piece in stored_pieces(stored, range(len(stored.shape))))
        dtype = getattr(torch, stored.dtype)
        flat = torch.frombuffer(bytearray(pieces), dtype=dtype) if pieces else torch.empty(0, dtype=dtype)
        found[name] = flat.reshape(stored.shape)
    return found


def _safetensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> bytes:
    names = {f"torch.{dtype}": name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {}
    parts: list[bytes] = []
    end_bytes = 0
    for name, tensor in tensors.items():
        if str(tensor.dtype) not in names:
            raise OutputPathError(f"{path}: safetensors has no {tensor.dtype}, which {name!r} has; use a .pt")
        content = bytes(torch.empty(0, dtype=torch.uint8).set_(tensor.clone().untyped_storage()).tolist())
        begin_bytes, end_bytes = end_bytes, end_bytes + len(content)
        header[name] = {
            "dtype": names[str(tensor.dtype)],
            "shape": list(tensor.shape),
            "data_offsets": [begin_bytes, end_bytes],
        }
        parts.append(content)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(parts)
