"""What the kernel is compiled for, by the compute capability of a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.direct.failures import KernelDeviceError

# The copy engine, clusters and barriers that count bytes came with it.
OLDEST_CAPABILITY = (9, 0)
_HOPPER = (9, 0)
# Where CTAs of a cluster are sent the same bytes by one read. 12.x has the instruction too, and the assembler advises
# against it there: substantially slower, it says.
_SHARING_MAJORS = (9, 10, 11)


@dataclass(frozen=True)
class Architecture:
    """One target of the compiler, and what of the kernel it gets."""

    target: str
    # Of matrix products: Hopper's own, or those of a single warp that every newer GPU has.
    instructions: Literal["wgmma", "mma_sync"]
    # Whether CTAs share tiles. If not, tokens are taken in turns.
    clusters: bool

    @property
    def warpgroup_flop_per_s(self) -> float:
        """What the consumers of 64 rows multiply, sustained, measured on an H200: for estimates."""
        return 3.15e12 if self.instructions == "wgmma" else 1.2e12


def architecture_of(major: int, minor: int) -> Architecture:
    """The fastest build there is for this GPU; refuses those that can have none."""
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
    """The build that any of these GPUs can run, also one that has a faster one."""
    # Compiled for the very GPU it runs on: multicast is fast in such code alone.
    return Architecture(f"sm_{major}{minor}a", "mma_sync", clusters=major in _SHARING_MAJORS)


def capability_text(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
