"""How a launch divides the GPU between HBM and the host: pure arithmetic, from sizes to a schedule.

Congestion control is two numbers: how many clusters face the host, and how many slots of W each keeps in flight. All
other clusters read HBM and never the host. The link decides what the host side needs: enough bytes in flight to cover
its latency, and enough SMs to multiply what arrives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from penstock.direct.failures import KernelInputError
from penstock.direct.schedule import ELEMENT_BYTES, GRAIN, TileSchedule
from penstock.direct.tile_shape import TileShape

# The share of the calibrated bytes in flight that still reaches the link's rate: 192 KiB of 256 do.
INFLIGHT_NEEDED = 0.75
# An estimate for fewer host clusters is believed only if it is below this share of the usual time.
WORTH_IT = 0.98


@dataclass(frozen=True)
class Limits:
    """Set by a calibration of one GPU and its link. The defaults are those of an H200 on PCIe 5 x16."""

    # CTAs with rows of their own that face the host: two to four reached the link's limit.
    host_ctas: int = 4
    # Bytes of W in flight from the host, all clusters together: two CTAs of 64 KiB reached the limit too.
    host_inflight_bytes: int = 256 << 10
    link_bytes_per_s: float = 51.4e9
    hbm_bytes_per_s: float = 3.6e12
    # How much faster than the link the host side should be able to multiply.
    compute_margin: float = 2.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            is_whole = field.name in ("host_ctas", "host_inflight_bytes")
            is_number = isinstance(value, int if is_whole else (int, float)) and not isinstance(value, bool)
            if not is_number or not 0 < value < math.inf:
                kind = "whole number" if is_whole else "number"
                raise ValueError(f"{field.name} is {value!r:.80}; it must be a {kind} above 0")

    def __str__(self) -> str:
        return (
            f"{self.host_ctas} blocks face the host with {self.host_inflight_bytes >> 10} KiB under way, "
            f"{self.link_bytes_per_s / 1e9:.1f} GB/s"
        )


@dataclass(frozen=True)
class LaunchShape:
    """Everything that a launch needs, except addresses."""

    tile: TileShape
    schedule: TileSchedule
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


def check_sizes(tokens: int, rows: int, depth: int, prefix_rows: int) -> None:
    """Refuses what the kernel cannot compute, by name."""
    if tokens < 1 or rows < 1 or depth < 1:
        raise KernelInputError(f"split linear got T={tokens}, N={rows}, K={depth} and needs at least 1 of each")
    if depth % 8:
        raise KernelInputError(
            f"split linear got K={depth}: rows of {depth * ELEMENT_BYTES} bytes, and the copy engine needs strides "
            "that are multiples of 16 bytes, so K must be a multiple of 8"
        )
    if not 0 <= prefix_rows <= rows or (prefix_rows % GRAIN and prefix_rows != rows):
        raise KernelInputError(
            f"split linear got a prefix of {prefix_rows} rows of {rows}: it must be a multiple of {GRAIN}, or all rows"
        )


def launch_shape(
    tokens: int,
    rows: int,
    depth: int,
    prefix_rows: int,
    tile: TileShape,
    most_clusters: int,
    limits: Limits | None,
    warpgroup_flop_per_s: float,
) -> LaunchShape:
    """`most_clusters`: how many clusters of this tile the GPU holds at once. `limits=None`: no congestion control.

    `warpgroup_flop_per_s`: the rate at which the consumers of 64 rows multiply, in the build that is launched.
    """
    check_sizes(tokens, rows, depth, prefix_rows)
    if most_clusters < 1:
        raise KernelInputError(
            f"the GPU holds {most_clusters} clusters of {tile.cluster_ctas} CTAs with {tile.shared_bytes:,} bytes of "
            "shared memory each; split linear needs at least 1"
        )
    bands = -(-rows // tile.cluster_rows)
    # With nothing on the host, even rows beyond the last count as prefix: there is no rest to read them from.
    split_row = prefix_rows if prefix_rows < rows else bands * tile.cluster_rows
    bare = TileSchedule(split_row, rows, tile.cluster_rows, tile.token_blocks, 1, 0, 0)
    clusters = min(most_clusters, bare.hbm_items + bare.host_items)
    if limits is None:
        host_clusters = clusters if bare.host_items else 0
        helped = -(-bare.hbm_items // host_clusters) if host_clusters else 0
        host_w_stages = tile.w_stages
    else:
        host_clusters, helped = _shares(bare, tile, depth, clusters, limits, warpgroup_flop_per_s)
        host_w_stages = _host_w_stages(tile, host_clusters, limits)
    schedule = TileSchedule(split_row, rows, tile.cluster_rows, tile.token_blocks, clusters, host_clusters, helped)
    return LaunchShape(tile, schedule, tokens, depth, host_w_stages)


def _shares(
    bare: TileSchedule, tile: TileShape, depth: int, clusters: int, limits: Limits, warpgroup_flop_per_s: float
) -> tuple[int, int]:
    """How many clusters face the host, and how many HBM items each of them takes afterwards."""
    if not bare.host_items:
        return 0, 0
    cluster_flop_per_s = warpgroup_flop_per_s * tile.tile_warpgroups * tile.cluster_ctas
    pace = _Pace.of(bare, tile, depth, clusters, limits, cluster_flop_per_s)
    left_for_hbm = 1 if bare.hbm_items and clusters > 1 else 0
    most = min(bare.host_items, clusters - left_for_hbm)
    # Enough clusters for the link: for its requests, and for arithmetic at the rate at which weights arrive.
    by_requests = math.ceil(limits.host_ctas / tile.row_ctas)
    cluster_tokens = tile.tile_tokens * tile.token_ctas
    needed_flop_per_s = limits.link_bytes_per_s / ELEMENT_BYTES * 2 * cluster_tokens
    by_arithmetic = math.ceil(limits.compute_margin * needed_flop_per_s / cluster_flop_per_s)
    fewest = min(max(by_requests, by_arithmetic), most)
    # Up to twice as many if the last round is fuller then: a single cluster at the end would leave the link half idle.
    usual = min(range(fewest, min(2 * fewest, most) + 1), key=lambda count: -bare.host_items % count)
    helped, usual_s = pace.best_help(usual)
    if by_arithmetic <= by_requests:
        return usual, helped
    # Where arithmetic takes longer than the link, clusters that wait for the link are missing on the HBM side. So try
    # fewer of them, as long as their requests still cover the link's latency.
    cluster_inflight_bytes = tile.row_ctas * tile.w_slot_bytes * max(tile.w_stages - 1, 1)
    covering = math.ceil(INFLIGHT_NEEDED * limits.host_inflight_bytes / cluster_inflight_bytes)
    fewer = [(pace.best_help(count), count) for count in range(min(covering, usual), usual)]
    if fewer:
        (other_helped, other_s), count = min(fewer, key=lambda one: (one[0][1], -one[1]))
        if other_s < WORTH_IT * usual_s:
            return count, other_helped
    return usual, helped


@dataclass(frozen=True)
class _Pace:
    """How long the sides are expected to take."""

    hbm_items: int
    host_items: int
    clusters: int
    # Time of one item: from HBM with all clusters at work; over the link, alone on it; and the arithmetic of either.
    hbm_item_s: float
    link_item_s: float
    compute_s: float

    @classmethod
    def of(
        cls, bare: TileSchedule, tile: TileShape, depth: int, clusters: int, limits: Limits, cluster_flop_per_s: float
    ) -> _Pace:
        item_bytes = tile.cluster_rows * depth * ELEMENT_BYTES
        item_flop = 2 * tile.cluster_rows * depth * tile.tile_tokens * tile.token_ctas
        compute_s = item_flop / cluster_flop_per_s
        host_bytes = (bare.rows - bare.split_row) * depth * ELEMENT_BYTES * tile.token_blocks
        return cls(
            bare.hbm_items,
            bare.host_items,
            clusters,
            max(item_bytes * clusters / limits.hbm_bytes_per_s, compute_s),
            host_bytes / bare.host_items / limits.link_bytes_per_s,
            compute_s,
        )

    def host_s(self, host_clusters: int) -> float:
        rounds, rest = divmod(self.host_items, host_clusters)
        whole_s = rounds * max(host_clusters * self.link_item_s, self.compute_s)
        return whole_s + (max(rest * self.link_item_s, self.compute_s) if rest else 0)

    def best_help(self, host_clusters: int) -> tuple[int, float]:
        """How many HBM items each host cluster takes afterwards, so that both sides end together; and when they end."""
        most = -(-self.hbm_items // host_clusters)
        host_s = self.host_s(host_clusters)
        if host_clusters == self.clusters:
            return most, host_s + most * self.hbm_item_s

        def longest_s(helped: int) -> float:
            left = max(self.hbm_items - helped * host_clusters, 0)
            hbm_s = -(-left // (self.clusters - host_clusters)) * self.hbm_item_s
            return max(host_s + helped * self.hbm_item_s, hbm_s)

        best, best_s = 0, longest_s(0)
        for helped in range(1, most + 1):
            if host_s + helped * self.hbm_item_s >= best_s:
                break
            # Of equals take the first: help that gains nothing only disturbs.
            if longest_s(helped) < best_s:
                best, best_s = helped, longest_s(helped)
        return best, best_s


def _host_w_stages(tile: TileShape, host_clusters: int, limits: Limits) -> int:
    # CTAs that share a tile of W request it once. While everything waits for the link, consumers keep the slot of the
    # last chunk until the next chunk has arrived, so that slot is not in flight.
    per_stage = max(host_clusters, 1) * tile.row_ctas * tile.w_slot_bytes
    return min(max(limits.host_inflight_bytes // per_stage, 1) + 1, tile.w_stages)
