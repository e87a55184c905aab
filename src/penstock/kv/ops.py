# mypy: disable-error-code="no-untyped-call"
"""The custom ops of the split KV cache. Importing this module registers them.

kv_append  writes the keys and values of new tokens to the side that each position belongs to
kv_attend  attention of the new tokens over both sides

device_kv is [2, batch, kv_heads, positions, head_dim], keys before values, on the device of the query; host_kv is the
same with a number of positions of its own, in host memory: a CPU tensor over memory that is registered with the GPU,
or, in a compiled program, a tensor of the GPU at the address where it finds that memory (penstock.kv.mapped_tensor).
Either may have no positions at all; if both have some, the device has whole blocks of penstock.kv.split, and the output
has the same bits at every such split. Sequence b holds starts[b] positions before the step and gets the first counts[b]
of its tokens. The tokens after those are padding: neither written nor attended to, and their output is zero.

On the CPU a sequence that does not fit is refused by name. On a GPU that would take a wait for the device in every
layer, so there nothing is written beyond the cache, and that sequence's output is NaN. HostKVCache.begin refuses it
before that.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from penstock.errors import ToolchainError
from penstock.kv import reference
from penstock.kv.failures import KVCacheInputError
from penstock.kv.split import BLOCK_POSITIONS, meets_on_a_border

# How far an output may be from exact attention over the same keys and values, relative to the mean of their absolute
# values under the same weights. A weight is rounded to the dtype before it meets its value, and the output once more:
# two roundings of half a unit in the last place, which is 2**-8 for 8 significant bits (bf16), 2**-11 for 11 (fp16).
TOLERANCE = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2**-16}
DTYPES = tuple(TOLERANCE)
# Bytes of one key. Tiles of larger keys do not fit into a multiprocessor's shared memory.
MOST_HEAD_BYTES = 512

_LIBRARY = torch.library.Library("penstock", "FRAGMENT")
_LIBRARY.define(
    "kv_append(Tensor(a!) device_kv, Tensor(b!) host_kv, Tensor k, Tensor v, Tensor starts, Tensor counts) -> ()"
)
_LIBRARY.define(
    "kv_attend(Tensor q, Tensor device_kv, Tensor host_kv, Tensor starts, Tensor counts, float scale, "
    "int host_programs) -> Tensor"
)

APPEND = torch.ops.penstock.kv_append.default
ATTEND = torch.ops.penstock.kv_attend.default


def _check(tokens: Tensor, device_kv: Tensor, host_kv: Tensor, starts: Tensor, counts: Tensor) -> None:
    """Checks shapes and dtypes only, so that it works for fake tensors too."""
    most = MOST_HEAD_BYTES // tokens.element_size()
    if tokens.dim() != 4 or not 1 <= tokens.shape[3] <= most:
        raise KVCacheInputError(
            f"tokens have shape {tuple(tokens.shape)}; they must be (batch, heads, tokens, head_dim), with a "
            f"head_dim of at most {most} for {tokens.dtype}"
        )
    batch, heads, _, head_dim = tokens.shape
    if tokens.dtype not in DTYPES or device_kv.dtype != tokens.dtype or host_kv.dtype != tokens.dtype:
        raise KVCacheInputError(
            f"tokens are {tokens.dtype}, the KV cache {device_kv.dtype} on the device and {host_kv.dtype} on the host; "
            f"all three must be the same, one of {', '.join(map(str, DTYPES))}"
        )
    for name, kv in (("device", device_kv), ("host", host_kv)):
        if kv.dim() != 5 or kv.shape[0] != 2 or kv.shape[1] != batch or kv.shape[4] != head_dim:
            raise KVCacheInputError(
                f"the KV cache's {name} side is {tuple(kv.shape)}; tokens of shape {tuple(tokens.shape)} need "
                f"(2, {batch}, kv_heads, positions, {head_dim})"
            )
        if not kv.is_contiguous():
            raise KVCacheInputError(f"the KV cache's {name} side has strides {kv.stride()}; it must be contiguous")
    if not meets_on_a_border(device_kv.shape[3], host_kv.shape[3]):
        raise KVCacheInputError(
            f"the KV cache has {device_kv.shape[3]} positions on the device and {host_kv.shape[3]} on the host; the "
            f"first must be a multiple of {BLOCK_POSITIONS}, or all of them"
        )
    if host_kv.shape[2] != device_kv.shape[2] or heads % device_kv.shape[2]:
        raise KVCacheInputError(
            f"{heads} heads over {device_kv.shape[2]} kv_heads on the device and {host_kv.shape[2]} on the host; "
            "both sides must have the same number, and it must divide the heads"
        )
    for name, numbers in (("starts", starts), ("counts", counts)):
        if numbers.shape != (batch,) or numbers.dtype not in (torch.int32, torch.int64):
            raise KVCacheInputError(
                f"{name} is {numbers.dtype} of shape {tuple(numbers.shape)}; it must be int32 or int64, one number for "
                f"each of {batch} sequences"
            )


def _check_append(device_kv: Tensor, host_kv: Tensor, k: Tensor, v: Tensor, starts: Tensor, counts: Tensor) -> None:
    _check(k, device_kv, host_kv, starts, counts)
    if k.shape != v.shape or v.dtype != k.dtype or k.shape[1] != device_kv.shape[2]:
        raise KVCacheInputError(
            f"keys are {tuple(k.shape)} of {k.dtype} and values {tuple(v.shape)} of {v.dtype}; both must be "
            f"(batch, {device_kv.shape[2]}, tokens, head_dim) of the same dtype"
        )


def _append(device_kv: Tensor, host_kv: Tensor, k: Tensor, v: Tensor, starts: Tensor, counts: Tensor) -> None:
    _check_append(device_kv, host_kv, k, v, starts, counts)
    reference.append(device_kv, host_kv, k, v, starts, counts)


def _attend(
    q: Tensor, device_kv: Tensor, host_kv: Tensor, starts: Tensor, counts: Tensor, scale: float, host_programs: int
) -> Tensor:
    _check(q, device_kv, host_kv, starts, counts)
    return reference.attend(q, device_kv, host_kv, starts, counts, scale, host_programs)


def _append_cuda(device_kv: Tensor, host_kv: Tensor, k: Tensor, v: Tensor, starts: Tensor, counts: Tensor) -> None:
    _check_append(device_kv, host_kv, k, v, starts, counts)
    _check_places(k, device_kv, host_kv, starts, counts)
    # Triton launches on the current device, wherever the tensors are.
    with torch.cuda.device(k.device):
        _launches().append(device_kv, host_kv, k, v, starts, counts)


def _attend_cuda(
    q: Tensor, device_kv: Tensor, host_kv: Tensor, starts: Tensor, counts: Tensor, scale: float, host_programs: int
) -> Tensor:
    _check(q, device_kv, host_kv, starts, counts)
    _check_places(q, device_kv, host_kv, starts, counts)
    with torch.cuda.device(q.device):
        out: Tensor = _launches().attend(q, device_kv, host_kv, starts, counts, scale, host_programs)
    return out


def _check_places(tokens: Tensor, device_kv: Tensor, host_kv: Tensor, starts: Tensor, counts: Tensor) -> None:
    """A kernel that follows a pointer into memory it cannot read takes the whole context down."""
    for name, tensor in (("device_kv", device_kv), ("starts", starts), ("counts", counts)):
        if tensor.device != tokens.device:
            raise KVCacheInputError(f"{name} is on {tensor.device}, the tokens on {tokens.device}")
    # The GPU can read a tensor of its own device: mapped host memory, or in a test real device memory. A CPU tensor
    # must be memory that the GPU can read.
    if host_kv.numel() and host_kv.device != tokens.device and not host_kv.is_pinned():
        raise KVCacheInputError(f"host_kv is on {host_kv.device} in memory that is not registered with {tokens.device}")


def _launches() -> ModuleType:
    """Imported when first used: it needs triton, which the CPU does without."""
    try:
        from penstock.kv import launch
    except ImportError as error:
        raise ToolchainError(f"attention over a split KV cache on a GPU needs triton: {error}") from error
    return launch


def _attend_fake(
    q: Tensor, device_kv: Tensor, host_kv: Tensor, starts: Tensor, counts: Tensor, scale: float, host_programs: int
) -> Tensor:
    _check(q, device_kv, host_kv, starts, counts)
    return torch.empty_like(q, memory_format=torch.contiguous_format)


_LIBRARY.impl("kv_append", _append, "CPU")
_LIBRARY.impl("kv_attend", _attend, "CPU")
_LIBRARY.impl("kv_append", _append_cuda, "CUDA")
_LIBRARY.impl("kv_attend", _attend_cuda, "CUDA")
torch.library.register_fake("penstock::kv_append", _check_append, lib=_LIBRARY)
torch.library.register_fake("penstock::kv_attend", _attend_fake, lib=_LIBRARY)
