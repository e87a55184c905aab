"""The shape of one CTA's work and of a cluster, from the number of tokens alone.

Nothing here may depend on where the split lies: the same tiles in the same order over K are what makes results equal
bit for bit at every split.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.direct.failures import KernelInputError
from penstock.direct.schedule import CHUNK, ELEMENT_BYTES

# Tokens of one CTA: what the kernel has products for.
TILE_TOKENS = (8, 16, 32, 64, 128, 192, 256)
# CTAs that share a tile of W. More than 8 is beyond the portable size of a cluster and needs a function attribute.
TOKEN_CTAS = (1, 2, 4, 8, 16)
PORTABLE_CLUSTER_CTAS = 8
# Hopper's limit for one block; 227 KiB.
SHARED_LIMIT_BYTES = 232_448
# Enough that HBM is busy with fewer SMs than there are; more would only lengthen the set-up.
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
    # More than one only where a cluster cannot hold all tokens: host rows then cross the link once for each.
    token_blocks: int
    w_stages: int
    x_stages: int
    # Each product completes before the next slot is awaited: what rings of one slot need.
    serial: bool = False

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
        return _fixed_bytes(self) + self.w_stages * (self.w_slot_bytes + 2 * BARRIER_BYTES)


def _fixed_bytes(tile: TileShape) -> int:
    out_bytes = tile.tile_warpgroups * min(tile.tile_tokens, 32) * OUT_STRIDE_BYTES
    return SWIZZLE_PERIOD_BYTES + out_bytes + tile.x_stages * (tile.x_slot_bytes + 2 * BARRIER_BYTES)


def choose_tile(
    tokens: int,
    *,
    multicast: bool = True,
    serial: bool = False,
    row_ctas: int | None = None,
    most_token_ctas: int = TOKEN_CTAS[-1],
    shared_limit_bytes: int = SHARED_LIMIT_BYTES,
) -> TileShape:
    """The tile for this many tokens.

    `multicast=False` takes the tokens in turns instead of sharing tiles of W in a cluster, and `serial` one slot per
    ring: both give the same bits, slower, and are for comparing and for finding faults. `most_token_ctas` is for a GPU
    that has no room for larger clusters.
    """
    if tokens < 1:
        raise KernelInputError(f"split linear got {tokens} tokens and needs at least 1")
    tile_tokens, token_ctas = _tokens_of(tokens, most_token_ctas)
    if not multicast or serial:
        token_ctas = 1
    if row_ctas is None:
        # Where x is read as fast as W, two CTAs share it; with several token CTAs each has tokens of its own.
        row_ctas = 2 if token_ctas == 1 and tile_tokens >= 32 and multicast and not serial else 1
    if row_ctas < 1 or tile_tokens % (8 * row_ctas) or token_ctas * row_ctas > TOKEN_CTAS[-1]:
        raise KernelInputError(
            f"row_ctas is {row_ctas}: tiles of {tile_tokens} tokens are shared in slices that are multiples of 8, in "
            f"clusters of at most {TOKEN_CTAS[-1]} CTAs of which {token_ctas} share a tile of W"
        )
    bare = TileShape(
        tile_tokens=tile_tokens,
        tile_warpgroups=2 if tile_tokens >= 128 else 1,
        token_ctas=token_ctas,
        row_ctas=row_ctas,
        token_blocks=-(-tokens // (tile_tokens * token_ctas)),
        w_stages=1,
        x_stages=1 if serial else 8 if tile_tokens <= 32 else 6 if tile_tokens == 64 else 4,
        serial=serial,
    )
    room = (shared_limit_bytes - _fixed_bytes(bare)) // (bare.w_slot_bytes + 2 * BARRIER_BYTES)
    w_stages = min(room, 1 if serial else MOST_W_STAGES)
    if w_stages < (1 if serial else 2):
        raise KernelInputError(
            f"shared memory of {shared_limit_bytes:,} bytes holds {w_stages} stages of {bare.w_slot_bytes:,} bytes of "
            f"the weight beside x: split linear needs 2 with tiles of {tile_tokens} tokens"
        )
    return replace(bare, w_stages=w_stages)


def _tokens_of(tokens: int, most_token_ctas: int) -> tuple[int, int]:
    """Tokens of a CTA, and CTAs: the least that holds all tokens; of equals, the fewest CTAs."""
    for tile_tokens in TILE_TOKENS:
        if tokens <= tile_tokens:
            return tile_tokens, 1
    sizes = [count for count in TOKEN_CTAS if count <= most_token_ctas]
    fits = [(t * c, c, t) for t in TILE_TOKENS for c in sizes if t * c >= tokens]
    if not fits:
        return TILE_TOKENS[-1], sizes[-1]
    _, token_ctas, tile_tokens = min(fits)
    return tile_tokens, token_ctas
