"""What the kernel is compiled for, by the compute capability of a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.direct.failures import KernelDeviceError

# Hopper introduced the copy engine, clusters and barriers that count bytes.
OLDEST_CAPABILITY = (9, 0)
_HOPPER = (9, 0)
# Majors where one read sends the same bytes to several CTAs of a cluster. 12.x has the instruction too, but the
# assembler advises against it there as substantially slower.
_SHARING_MAJORS = (9, 10, 11)


@dataclass(frozen=True)
class Architecture:
    """One compiler target, and which parts of the kernel it gets."""

    target: str
    # For matrix products: Hopper's own, or the single-warp ones that every newer GPU has.
    instructions: Literal["wgmma", "mma_sync"]
    # Whether CTAs share tiles. If not, tokens are taken in turns.
    clusters: bool

    @property
    def warpgroup_flop_per_s(self) -> float:
        """The sustained rate at which the consumers of 64 rows multiply, measured on an H200. For estimates."""
        return 3.15e12 if self.instructions == "wgmma" else 1.2e12


def architecture_of(major: int, minor: int) -> Architecture:
    """The fastest build for this GPU. Refuses GPUs that have none."""
    if (major, minor) < OLDEST_CAPABILITY:
        raise KernelDeviceError(
            f"split linear is built for compute capability {capability_text(OLDEST_CAPABILITY)} and newer, and this "
            f"GPU has {major}.{minor}: older GPUs have neither the copy engine nor the clusters it is made of. Weights "
            "can be streamed instead"
        )
    if (major, minor) == _HOPPER:
        return Architecture("sm_90a", "wgmma", clusters=True)
    return mma_sync_on(major, minor)


def mma_sync_on(major: int, minor: int) -> Architecture:
    """The build that any of these GPUs can run, even one that has a faster build."""
    # Compiled for exactly the GPU it runs on: multicast is fast only in such code.
    return Architecture(f"sm_{major}{minor}a", "mma_sync", clusters=major in _SHARING_MAJORS)


def capability_text(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
