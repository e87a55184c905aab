"""DFloat11: every weight on the device with Huffman-coded exponents, a block at a time decoded before it runs.

Codes, lookup tables, file loading, hooks and kernel are DFloat11's; only the values are put into codes by
bench.dfloat11_encoding, which yields what its compressor would in an hour. Nothing is streamed.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from bench.dfloat11_encoding import encoded_tensors
from bench.suite.model import ITEM_BYTES, load, on_meta
from bench.suite.result import Traffic
from bench.suite.systems.system import Facts, Opened, Setting, System

# A block's weights are one bitstream, as in the models that DFloat11's authors publish.
LINEARS = ("q", "k", "v", "o", "gate", "up", "down")
PATTERNS = {r"layers\.\d+": list(LINEARS)}
ENCODED = "dfloat11.safetensors"


def _make(setting: Setting) -> None:
    """In a process of its own: the device memory that encoding takes is not the system's."""
    if _path(setting).exists():
        return
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as process:
        process.submit(write_encoded, setting).result()


def write_encoded(setting: Setting) -> None:
    from safetensors.torch import save_file

    model = load(setting.shape, setting.weights_path, lambda tensor: tensor.to(setting.device))
    tensors = model.state_dict()
    for index in range(setting.shape.layers):
        block = f"layers.{index}"
        encoded = encoded_tensors([tensors.pop(f"{block}.{name}.weight") for name in LINEARS])
        tensors |= {f"{block}.{name}": tensor for name, tensor in encoded.items()}
    unfinished = _path(setting).with_suffix(".partial")
    save_file({name: tensor.cpu() for name, tensor in tensors.items()}, unfinished)
    unfinished.rename(_path(setting))


@contextmanager
def _open(setting: Setting) -> Iterator[Opened]:
    from dfloat11 import DFloat11Model

    model: nn.Module = on_meta(setting.shape)
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            module.to_empty(device="cpu")  # copied into by the loader, while linear layers lose what they have
    model = DFloat11Model.from_single_file(str(_path(setting)), PATTERNS, model, device=setting.device)
    held = model.state_dict()
    held_bytes = sum(tensor.nbytes for tensor in held.values())
    # One buffer, which every block is decoded into.
    decoded_bytes = max(tensor.numel() for name, tensor in held.items() if name.endswith("sign_mantissa")) * ITEM_BYTES
    facts = Facts(Traffic(0, "by construction"), weights_peak_bytes=held_bytes + decoded_bytes)
    yield Opened(model, lambda: facts)


def _path(setting: Setting) -> Path:
    return setting.folder / ENCODED


DFLOAT11 = System(
    "dfloat11",
    "DFloat11, blocks decoded on the device",
    _open,
    make=_make,
    asynchronous=True,
    packages=("dfloat11", "dahuffman", "cupy", "accelerate", "pkg_resources"),
    needs_cuda="its kernel decodes on a GPU",
)
