"""The KV cache of a model, as a module to put into it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.kv import ops
from penstock.kv.failures import KVCacheFullError, KVCacheInputError
from penstock.kv.host_block import host_tensor
from penstock.kv.split import CacheShape, StepTraffic, split_within, step_traffic

# Where both sides take about equally long (docs/direct.md), fewer leave the link idle between their loads. More were
# faster at one share and slower at the next, because they get in the way of those that read device memory.
HOST_PROGRAMS = 16


@dataclass(frozen=True, eq=False)
class Step:
    """What every layer needs to know about one step: sequence b holds starts[b] positions and gets counts[b] more."""

    starts: Tensor
    counts: Tensor
    traffic: StepTraffic


class HostKVCache(nn.Module):
    """Keys and values of all layers: the first positions of each sequence on the device, the others in host memory.

    The device side takes `device_bytes`, at most `device_cap_bytes`, for the life of the cache; the host side
    `host_bytes`. In a compiled program the cap is the default at load; `device_memory=` chooses the split anew.

    Calling the cache appends the keys and values of one layer's new tokens and returns their causal attention over
    everything the layer holds, within `penstock.kv.ops.TOLERANCE` of the exact one: 2**-7 for bf16. The result has the
    same bits wherever the sides meet.

    Moving the module to another device moves the near side and leaves the far one in host memory.
    """

    def __init__(
        self,
        *,
        layers: int,
        batch: int,
        kv_heads: int,
        head_dim: int,
        max_length: int,
        device_cap_bytes: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        host_programs: int = HOST_PROGRAMS,
    ) -> None:
        super().__init__()
        if dtype not in ops.DTYPES:
            raise KVCacheInputError(f"a KV cache of {dtype}; it must be one of {', '.join(map(str, ops.DTYPES))}")
        if host_programs < 1:
            raise KVCacheInputError(f"host_programs is {host_programs}; at least one program must read the host side")
        self.shape = CacheShape(layers, batch, kv_heads, head_dim, dtype.itemsize)
        self.split = split_within(self.shape, max_length=max_length, device_cap_bytes=device_cap_bytes)
        self.device_cap_bytes = device_cap_bytes
        self.dtype = dtype
        self.host_programs = host_programs
        self._lengths = [0] * batch
        place = torch.device(device)
        side = (2, batch, kv_heads, self.split.device_positions, head_dim)
        for layer in range(layers):
            # State, not weights: kept out of the state dict and checkpoints.
            self.register_buffer(f"kv_{layer}", torch.zeros(side, dtype=dtype, device=place), persistent=False)
            self.register_buffer(f"host_kv_{layer}", self._host_tensor(place), persistent=False)

    @property
    def device(self) -> torch.device:
        return self.get_buffer("kv_0").device

    @property
    def device_bytes(self) -> int:
        return self.shape.batch * self.split.device_positions * self.shape.position_bytes

    @property
    def host_bytes(self) -> int:
        return self.shape.batch * self.split.host_positions * self.shape.position_bytes

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(self._lengths)

    def begin(self, counts: int | Sequence[int]) -> Step:
        """Makes room for `counts` new tokens of each sequence, in all layers. If one does not fit, nothing changes."""
        new = [counts] * self.shape.batch if isinstance(counts, int) else list(counts)
        if len(new) != self.shape.batch or min(new) < 0:
            raise KVCacheInputError(f"counts are {new}; a cache of {self.shape.batch} sequences needs one number each")
        for sequence, (held, count) in enumerate(zip(self._lengths, new, strict=True)):
            if held + count > self.split.capacity:
                raise KVCacheFullError(
                    f"sequence {sequence} of the KV cache would be {held + count} positions long; it holds "
                    f"{self.split.capacity}, {self.split.device_positions} of them on the device",
                    sequence=sequence,
                    length=held + count,
                    capacity=self.split.capacity,
                )
        # One copy for all layers, from pageable memory, so that the host may change its numbers right away.
        starts, amounts = torch.tensor([self._lengths, new], dtype=torch.int32).to(self.device)
        traffic = step_traffic(self.shape, self.split, self._lengths, new)
        self._lengths = [held + count for held, count in zip(self._lengths, new, strict=True)]
        return Step(starts, amounts, traffic)

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forgets what lies beyond `lengths`: zeros start over, one less takes a token back."""
        if len(lengths) != self.shape.batch or any(
            not 0 <= new <= held for new, held in zip(lengths, self._lengths, strict=True)
        ):
            raise KVCacheInputError(f"lengths {list(lengths)} are not prefixes of {self._lengths}")
        self._lengths = list(lengths)

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, counts: Tensor) -> Tensor:
        """`q` is [batch, heads, tokens, head_dim], `k` and `v` the same with kv_heads."""
        device_kv, host_kv = self.get_buffer(f"kv_{layer}"), self.get_buffer(f"host_kv_{layer}")
        ops.APPEND(device_kv, host_kv, k, v, starts, counts)
        scale = self.shape.head_dim**-0.5
        attended: Tensor = ops.ATTEND(q, device_kv, host_kv, starts, counts, scale, self.host_programs)
        return attended

    def _host_tensor(self, device: torch.device) -> Tensor:
        side = (2, self.shape.batch, self.shape.kv_heads, self.split.host_positions, self.shape.head_dim)
        return host_tensor(side, self.dtype, device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> HostKVCache:
        moved = fn(torch.empty(0, dtype=self.dtype, device=self.device))
        if moved.dtype != self.dtype:
            raise KVCacheInputError(
                f"a KV cache of {self.dtype} cannot become one of {moved.dtype}: its cap would hold another number of "
                "positions; build it with that dtype"
            )
        if moved.device == self.device:
            return self
        if self.device.type == "cuda":
            # The host copies the far side, and does not wait for kernels that still write to it.
            torch.cuda.synchronize(self.device)
        for layer in range(self.shape.layers):
            far = self._host_tensor(moved.device)
            # To and from meta there is nothing to copy.
            if "meta" not in (far.device.type, self.get_buffer(f"host_kv_{layer}").device.type):
                far.copy_(self.get_buffer(f"host_kv_{layer}"))
            setattr(self, f"kv_{layer}", fn(self.get_buffer(f"kv_{layer}")))
            setattr(self, f"host_kv_{layer}", far)
        return self
