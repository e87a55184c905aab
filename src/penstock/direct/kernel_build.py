"""Builds of the split linear kernel: one for each tile and dtype, compiled when first needed, loaded on one device."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.direct.architecture import Architecture, architecture_of
from penstock.direct.driver_calls import DriverCalls
from penstock.direct.nvrtc import cubin_of, cuda_major_of_torch, load_nvrtc
from penstock.direct.source import read_source
from penstock.direct.tile_shape import PORTABLE_CLUSTER_CTAS, TileShape

SOURCE = "split_linear.cu"


@dataclass(frozen=True)
class Variant:
    """What the kernel is compiled for, and with."""

    architecture: Architecture
    tile_tokens: int
    tile_warpgroups: int
    bf16: bool
    bounded_waits: bool

    @property
    def options(self) -> tuple[str, ...]:
        values = {
            "TILE_TOKENS": self.tile_tokens,
            "TILE_WARPGROUPS": self.tile_warpgroups,
            "ELEMENT_BF16": int(self.bf16),
            "BOUNDED_WAITS": int(self.bounded_waits),
            "MMA_SYNC": int(self.architecture.instructions == "mma_sync"),
            "CLUSTERS": int(self.architecture.clusters),
        }
        return tuple(f"-D{name}={value}" for name, value in values.items())


@dataclass(frozen=True)
class LoadedKernel:
    """A function that can be launched, and how much of it fits on the device at once."""

    function: int
    most_clusters: int


class KernelBuilds:
    """All builds on one device."""

    def __init__(self, driver: DriverCalls, ordinal: int) -> None:
        self.limits = driver.limits(ordinal)
        self.architecture = architecture_of(self.limits.major, self.limits.minor)
        self._driver = driver
        self._modules: dict[Variant, int] = {}
        self._kernels: dict[tuple[Variant, TileShape], LoadedKernel] = {}

    def kernel(self, tile: TileShape, architecture: Architecture, *, bf16: bool, bounded_waits: bool) -> LoadedKernel:
        """Call it inside the device's context."""
        variant = Variant(architecture, tile.tile_tokens, tile.tile_warpgroups, bf16, bounded_waits)
        key = (variant, tile)
        if key not in self._kernels:
            # Allow all the shared memory that there is: tiles of one build share the function, and their rings may
            # differ in length.
            allowed = (self.limits.shared_limit_bytes, tile.cluster_ctas, PORTABLE_CLUSTER_CTAS)
            function = self._driver.function(self._module(variant), "split_linear", *allowed)
            fitting = self._driver.most_clusters(function, tile.threads, tile.shared_bytes, tile.cluster_ctas)
            self._kernels[key] = LoadedKernel(function, fitting)
        return self._kernels[key]

    def _module(self, variant: Variant) -> int:
        if variant not in self._modules:
            nvrtc = load_nvrtc(cuda_major_of_torch())
            target = variant.architecture.target
            cubin = cubin_of(nvrtc, read_source(SOURCE), target, variant.options)
            self._modules[variant] = self._driver.load(cubin)
        return self._modules[variant]

    def unload(self) -> None:
        self._kernels.clear()
        while self._modules:
            self._driver.unload(self._modules.popitem()[1])
