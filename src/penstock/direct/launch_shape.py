"""How a launch divides the GPU between HBM and the host: pure arithmetic, from sizes to a schedule.

Congestion control is two numbers: how many clusters face the host, and how many slots of W each keeps under way. All
others read HBM and never ask the host. What the host side needs follows from the link: enough bytes in flight to
cover its latency, and enough SMs to multiply what arrives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.direct.failures import KernelInputError
from penstock.direct.schedule import ELEMENT_BYTES, GRAIN, Schedule
from penstock.direct.tile_shape import TileShape


@dataclass(frozen=True)
class Limits:
    """What a calibration of one GPU and its link sets. The defaults are an H200 on PCIe 5 x16."""

    # CTAs with rows of their own that face the host: two to four reached the link's limit.
    host_ctas: int = 4
    # Bytes of W asked of the host and not yet arrived, all clusters together: two CTAs of 64 KiB reached the limit too.
    host_inflight_bytes: int = 256 << 10
    link_bytes_per_s: float = 51.4e9
    hbm_bytes_per_s: float = 3.6e12
    # What one SM multiplies, sustained; and how much faster than the link the host side should be able to.
    sm_flop_per_s: float = 4.5e12
    compute_margin: float = 1.5

    def __str__(self) -> str:
        return (
            f"{self.host_ctas} blocks face the host with {self.host_inflight_bytes >> 10} KiB under way, "
            f"{self.link_bytes_per_s / 1e9:.1f} GB/s"
        )


@dataclass(frozen=True)
class LaunchShape:
    """Everything that a launch is made of, addresses aside."""

    tile: TileShape
    schedule: Schedule
    tokens: int
    depth: int
    host_w_stages: int

    @property
    def blocks(self) -> int:
        return self.schedule.clusters * self.tile.cluster_ctas

    @property
    def host_bytes(self) -> int:
        """What crosses the link: each host row once for each block of tokens."""
        host_rows = max(self.schedule.rows - self.schedule.split_row, 0)
        return host_rows * self.depth * ELEMENT_BYTES * self.tile.token_blocks


def check_sizes(tokens: int, rows: int, depth: int, head_rows: int) -> None:
    """Refuses what the kernel cannot compute, by name."""
    if tokens < 1 or rows < 1 or depth < 1:
        raise KernelInputError(f"split linear got T={tokens}, N={rows}, K={depth} and needs at least 1 of each")
    if depth % 8:
        raise KernelInputError(
            f"split linear got K={depth}: rows of {depth * ELEMENT_BYTES} bytes, and the copy engine needs strides "
            "that are multiples of 16 bytes, so K must be a multiple of 8"
        )
    if not 0 <= head_rows <= rows or (head_rows % GRAIN and head_rows != rows):
        raise KernelInputError(
            f"split linear got a head of {head_rows} rows of {rows}: it must be a multiple of {GRAIN}, or all rows"
        )


def launch_shape(
    tokens: int,
    rows: int,
    depth: int,
    head_rows: int,
    tile: TileShape,
    most_clusters: int,
    limits: Limits | None,
) -> LaunchShape:
    """`most_clusters`: how many clusters of this tile the GPU holds at once. `limits=None`: no congestion control."""
    check_sizes(tokens, rows, depth, head_rows)
    if most_clusters < 1:
        raise KernelInputError(
            f"the GPU holds {most_clusters} clusters of {tile.cluster_ctas} CTAs with {tile.shared_bytes:,} bytes of "
            "shared memory each; split linear needs at least 1"
        )
    bands = -(-rows // tile.cluster_rows)
    # With nothing on the host even what lies beyond the last row counts as head: there is no tail to read it from.
    split_row = head_rows if head_rows < rows else bands * tile.cluster_rows
    bare = Schedule(split_row, rows, tile.cluster_rows, tile.token_blocks, 1, 0, 0)
    clusters = min(most_clusters, bare.hbm_items + bare.host_items)
    if limits is None:
        host_clusters = clusters if bare.host_items else 0
        helped = -(-bare.hbm_items // host_clusters) if host_clusters else 0
        host_w_stages = tile.w_stages
    else:
        host_clusters = _host_clusters(bare, tile, clusters, limits)
        helped = _helped(bare, tile, depth, clusters, host_clusters, limits)
        host_w_stages = _host_w_stages(tile, host_clusters, limits)
    schedule = Schedule(split_row, rows, tile.cluster_rows, tile.token_blocks, clusters, host_clusters, helped)
    return LaunchShape(tile, schedule, tokens, depth, host_w_stages)


def _host_clusters(bare: Schedule, tile: TileShape, clusters: int, limits: Limits) -> int:
    """As few as keep the link busy: by requests, and by arithmetic at the rate at which weights arrive."""
    if not bare.host_items:
        return 0
    by_requests = math.ceil(limits.host_ctas / tile.row_ctas)
    cluster_tokens = tile.tile_tokens * tile.token_ctas
    needed_flop_per_s = limits.link_bytes_per_s / ELEMENT_BYTES * 2 * cluster_tokens
    by_arithmetic = math.ceil(limits.compute_margin * needed_flop_per_s / (limits.sm_flop_per_s * tile.cluster_ctas))
    left_for_hbm = 1 if bare.hbm_items and clusters > 1 else 0
    most = min(bare.host_items, clusters - left_for_hbm)
    fewest = min(max(by_requests, by_arithmetic), most)
    # Up to twice as many, if the last round is fuller then: a single cluster at the end would leave the link half idle.
    return min(range(fewest, min(2 * fewest, most) + 1), key=lambda count: -bare.host_items % count)


def _host_w_stages(tile: TileShape, host_clusters: int, limits: Limits) -> int:
    if tile.serial:
        return 1
    # CTAs that share a tile of W ask for it once. While the link is what is waited for, consumers keep the slot of the
    # last chunk until the next has come: that one is not in flight.
    per_stage = max(host_clusters, 1) * tile.row_ctas * tile.w_slot_bytes
    return min(max(limits.host_inflight_bytes // per_stage, 1) + 1, tile.w_stages)


def _helped(bare: Schedule, tile: TileShape, depth: int, clusters: int, host_clusters: int, limits: Limits) -> int:
    """How many HBM items each host cluster takes afterwards, so that both sides are expected to end together."""
    if not host_clusters:
        return 0
    if host_clusters == clusters:
        return -(-bare.hbm_items // host_clusters)
    item_bytes = tile.cluster_rows * depth * ELEMENT_BYTES
    item_flop = 2 * tile.cluster_rows * depth * tile.tile_tokens * tile.token_ctas
    compute_s = item_flop / (limits.sm_flop_per_s * tile.cluster_ctas)
    hbm_item_s = max(item_bytes * clusters / limits.hbm_bytes_per_s, compute_s)
    host_rows = bare.rows - bare.split_row
    host_s = max(
        host_rows * depth * ELEMENT_BYTES * tile.token_blocks / limits.link_bytes_per_s,
        -(-bare.host_items // host_clusters) * compute_s,
    )

    def longest_s(helped: int) -> float:
        left = max(bare.hbm_items - helped * host_clusters, 0)
        return max(host_s + helped * hbm_item_s, -(-left // (clusters - host_clusters)) * hbm_item_s)

    most = -(-bare.hbm_items // host_clusters)
    best, best_s = 0, longest_s(0)
    for helped in range(1, most + 1):
        taken_s = longest_s(helped)
        if taken_s >= best_s:
            # The HBM side gets shorter in steps, the host side longer at once.
            if host_s + helped * hbm_item_s > best_s:
                break
            continue
        best, best_s = helped, taken_s
    return best
