"""Which tile each cluster takes, and where its rows lie. Mirrors kernels/split_schedule.h.

An item is a band of `cluster_rows` rows of W times one block of tokens. Bands with any host row belong to the host side
and are dealt round the host-facing clusters; all others are HBM items. A test compiles the header and compares.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

CHUNK = 64  # columns of W in one stage
GRAIN = 16  # rows: the split lies at a multiple of this
ELEMENT_BYTES = 2


@dataclass(frozen=True)
class Item:
    """One tile of work for a cluster."""

    band: int
    token_block: int


@dataclass(frozen=True)
class TileSchedule:
    """The same numbers as the struct SplitSchedule, in its order."""

    split_row: int
    rows: int
    cluster_rows: int
    token_blocks: int
    clusters: int
    host_clusters: int
    helped: int

    @property
    def bands(self) -> int:
        return -(-self.rows // self.cluster_rows)

    @property
    def hbm_bands(self) -> int:
        return min(self.split_row // self.cluster_rows, self.bands)

    @property
    def hbm_items(self) -> int:
        return self.hbm_bands * self.token_blocks

    @property
    def host_items(self) -> int:
        return (self.bands - self.hbm_bands) * self.token_blocks

    def item(self, cluster: int, step: int) -> Item | None:
        """The step-th item of a cluster; None when it is done."""
        helped_items = min(self.host_clusters * self.helped, self.hbm_items)
        if cluster < self.host_clusters:
            item = cluster + step * self.host_clusters
            if item < self.host_items:
                return Item(self.hbm_bands + item // self.token_blocks, item % self.token_blocks)
            own = len(range(cluster, self.host_items, self.host_clusters))
            item = cluster + (step - own) * self.host_clusters
            if item >= helped_items:
                return None
        else:
            item = helped_items + (cluster - self.host_clusters) + step * (self.clusters - self.host_clusters)
            if item >= self.hbm_items:
                return None
        return Item(item // self.token_blocks, item % self.token_blocks)

    def items(self, cluster: int) -> Iterator[Item]:
        """All items of a cluster, in its order."""
        step = 0
        while (item := self.item(cluster, step)) is not None:
            yield item
            step += 1

    def host_bytes(self, depth: int, row: int, count: int, column: int) -> int:
        """Bytes that a load of `count` rows and one chunk of columns requests from the host."""
        host_rows = min(row + count, self.rows) - max(row, self.split_row)
        return max(host_rows, 0) * min(CHUNK, depth - column) * ELEMENT_BYTES
