"""The shape of one CTA's work and of a cluster, from the number of tokens alone.

Nothing here may depend on where the split lies: results are bit-identical at every split because the tiles, and their
order over K, are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from penstock.direct.failures import KernelInputError
from penstock.direct.schedule import CHUNK, ELEMENT_BYTES

# Tokens of one CTA: the sizes that the kernel has products for.
TILE_TOKENS = (8, 16, 32, 64, 128, 192, 256)
# CTAs that share a tile of W. More than 8 is beyond the portable size of a cluster and needs a function attribute.
TOKEN_CTAS = (1, 2, 4, 8, 16)
PORTABLE_CLUSTER_CTAS = 8
# Hopper's limit for one block; 227 KiB.
SHARED_LIMIT_BYTES = 232_448
# Stages of W that get room before anything else does; a tile without room for that many needs 2 to work at all.
ENOUGH_W_STAGES, LEAST_STAGES = 4, 2
# Enough to keep HBM busy with fewer SMs than there are; more would only lengthen the set-up.
MOST_W_STAGES = 24
ROW_BYTES = CHUNK * ELEMENT_BYTES
OUT_STRIDE_BYTES = 64 * ELEMENT_BYTES + 16
BARRIER_BYTES = 8
# The kernel rounds the start of shared memory up to the swizzle's period.
SWIZZLE_PERIOD_BYTES = 1024


@dataclass(frozen=True)
class TileShape:
    """One CTA: `tile_warpgroups` x 64 rows of W times `tile_tokens` tokens. One cluster: token_ctas x row_ctas CTAs."""

    tile_tokens: int
    tile_warpgroups: int
    token_ctas: int
    row_ctas: int
    # More than one only if a cluster cannot hold all tokens: host rows then cross the link once for each block.
    token_blocks: int
    w_stages: int
    x_stages: int

    @property
    def tile_rows(self) -> int:
        return 64 * self.tile_warpgroups

    @property
    def cluster_ctas(self) -> int:
        return self.token_ctas * self.row_ctas

    @property
    def cluster_rows(self) -> int:
        return self.tile_rows * self.row_ctas

    @property
    def threads(self) -> int:
        return 128 * (1 + self.tile_warpgroups)

    @property
    def w_slot_bytes(self) -> int:
        return self.tile_rows * ROW_BYTES

    @property
    def x_slot_bytes(self) -> int:
        return self.tile_tokens * ROW_BYTES

    @property
    def w_box_rows(self) -> int:
        """Rows of the slice that one CTA copies for all that share the tile."""
        return self.tile_rows // self.token_ctas

    @property
    def x_box_rows(self) -> int:
        return self.tile_tokens // self.row_ctas

    @property
    def shared_bytes(self) -> int:
        out_bytes = self.tile_warpgroups * min(self.tile_tokens, 32) * OUT_STRIDE_BYTES
        x_bytes = self.x_stages * (self.x_slot_bytes + 2 * BARRIER_BYTES)
        w_bytes = self.w_stages * (self.w_slot_bytes + 2 * BARRIER_BYTES)
        return SWIZZLE_PERIOD_BYTES + out_bytes + x_bytes + w_bytes


def choose_tile(
    tokens: int,
    *,
    multicast: bool = True,
    most_token_ctas: int = TOKEN_CTAS[-1],
    shared_limit_bytes: int = SHARED_LIMIT_BYTES,
) -> TileShape:
    """The tile for this many tokens.

    `multicast=False` takes the tokens in turns instead of sharing tiles of W in a cluster: with Hopper's shared memory
    the tile stays the same. `most_token_ctas` is for a GPU that has no room for larger clusters.
    """
    if tokens < 1:
        raise KernelInputError(f"split linear got {tokens} tokens and needs at least 1")
    tile_tokens, token_ctas = _tokens_of(tokens, most_token_ctas, TILE_TOKENS[-1])
    if not multicast:
        token_ctas = 1

    def candidates() -> Iterator[TileShape]:
        yield from _bare_tiles(tokens, tile_tokens, token_ctas, multicast)
        for size, sharing in _smaller_sizes(tokens, tile_tokens, most_token_ctas, multicast):
            yield from _bare_tiles(tokens, size, sharing, multicast)

    for wanted in (ENOUGH_W_STAGES, LEAST_STAGES):
        for bare in candidates():
            room = (shared_limit_bytes - bare.shared_bytes) // (bare.w_slot_bytes + 2 * BARRIER_BYTES)
            if room >= wanted:
                return replace(bare, w_stages=min(room, MOST_W_STAGES))
    smallest = min((replace(bare, w_stages=LEAST_STAGES) for bare in candidates()), key=lambda tile: tile.shared_bytes)
    raise KernelInputError(
        f"shared memory of {shared_limit_bytes:,} bytes is too little for split linear: its smallest tile, "
        f"{smallest.tile_rows} rows of the weight and {smallest.tile_tokens} tokens, needs {smallest.shared_bytes:,}"
    )


def _bare_tiles(tokens: int, tile_tokens: int, token_ctas: int, multicast: bool) -> Iterator[TileShape]:
    """Tiles without stages of W: with as many stages of x as are useful, then fewer, then the same with half the rows.

    Rows are given up before tokens: however few rows a tile has, host rows cross the link equally often. Both are
    shared in slices of multiples of eight, the rows of a swizzle atom.
    """
    # Where x is read as fast as W, two CTAs share it; with several token CTAs each has tokens of its own.
    row_ctas = 2 if token_ctas == 1 and tile_tokens >= 32 and multicast else 1
    most_x_stages = 8 if tile_tokens <= 32 else 6 if tile_tokens == 64 else 4
    for warpgroups in (2, 1) if tile_tokens >= 128 else (1,):
        if 64 * warpgroups % (8 * token_ctas):
            continue
        for x_stages in range(most_x_stages, LEAST_STAGES - 1, -1):
            yield TileShape(
                tile_tokens=tile_tokens,
                tile_warpgroups=warpgroups,
                token_ctas=token_ctas,
                row_ctas=row_ctas,
                token_blocks=-(-tokens // (tile_tokens * token_ctas)),
                w_stages=0,
                x_stages=x_stages,
            )


def _smaller_sizes(tokens: int, tile_tokens: int, most_token_ctas: int, multicast: bool) -> Iterator[tuple[int, int]]:
    """Tokens of a CTA, and CTAs, if shared memory has no room for the best tile."""
    most_sharing = min(most_token_ctas, 64 // 8)  # of a tile with only 64 rows
    for most in [size for size in reversed(TILE_TOKENS) if size < tile_tokens]:
        if not multicast:
            # In turns: any number of turns will do, so take the fewest, then the size that leaves the least empty.
            yield min(TILE_TOKENS[: TILE_TOKENS.index(most) + 1], key=lambda size: (-(-tokens // size), size)), 1
        else:
            yield _tokens_of(tokens, most_sharing, most)


def _tokens_of(tokens: int, most_token_ctas: int, most_tile_tokens: int) -> tuple[int, int]:
    """Tokens of a CTA, and CTAs: the smallest product that holds all tokens; of equals, the fewest CTAs."""
    usable = [size for size in TILE_TOKENS if size <= most_tile_tokens]
    for tile_tokens in usable:
        if tokens <= tile_tokens:
            return tile_tokens, 1
    sizes = [count for count in TOKEN_CTAS if count <= most_token_ctas]
    fits = [(t * c, c, t) for t in usable for c in sizes if t * c >= tokens]
    if not fits:
        return usable[-1], sizes[-1]
    _, token_ctas, tile_tokens = min(fits)
    return tile_tokens, token_ctas
