"""Tiling and scheduling without a GPU: every result once, every host byte once, no more requests than allowed."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.direct.architecture import architecture_of
from penstock.direct.failures import KernelInputError
from penstock.direct.launch_shape import LaunchShape, Limits, check_sizes, launch_shape
from penstock.direct.schedule import CHUNK, GRAIN, Item
from penstock.direct.tile_shape import SHARED_LIMIT_BYTES, TILE_TOKENS, TOKEN_CTAS, TileShape, choose_tile

TOKENS = st.one_of(st.integers(1, 300), st.integers(1, 4096), st.sampled_from((1, 8, 64, 512, 2048, 4096)))
SMALL_SHARED_BYTES = 101_376
# Of one warpgroup.
HOPPER = architecture_of(9, 0).warpgroup_flop_per_s
FLOP_PER_S = st.floats(1e11, 1e13)
LIMITS = st.one_of(
    st.none(),
    st.builds(
        Limits,
        host_ctas=st.integers(1, 16),
        host_inflight_bytes=st.integers(1, 1 << 22),
        link_bytes_per_s=st.floats(1e9, 1e12),
    ),
)


@st.composite
def shapes(draw: st.DrawFn) -> LaunchShape:
    tokens, rows = draw(TOKENS), draw(st.integers(1, 3000))
    depth = 8 * draw(st.integers(1, 40))
    prefix_rows = draw(st.one_of(st.sampled_from((0, rows)), st.integers(0, rows // GRAIN).map(lambda n: n * GRAIN)))
    tile = choose_tile(tokens, multicast=draw(st.booleans()))
    return launch_shape(
        tokens, rows, depth, prefix_rows, tile, draw(st.integers(1, 140)), draw(LIMITS), draw(FLOP_PER_S)
    )


def all_items(shape: LaunchShape) -> list[tuple[int, Item]]:
    return [(c, item) for c in range(shape.schedule.clusters) for item in shape.schedule.items(c)]


@given(shapes())
@settings(max_examples=300, deadline=None)
def test_every_result_is_computed_once(shape: LaunchShape) -> None:
    schedule, tile = shape.schedule, shape.tile
    taken = Counter(item for _, item in all_items(shape))
    assert taken == Counter(Item(b, t) for b in range(schedule.bands) for t in range(schedule.token_blocks))
    # The bands and blocks of tokens, cut into CTAs, cover all rows and all tokens, each once.
    assert schedule.bands * tile.cluster_rows >= schedule.rows > (schedule.bands - 1) * tile.cluster_rows
    block_tokens = tile.tile_tokens * tile.token_ctas
    assert schedule.token_blocks * block_tokens >= shape.tokens > (schedule.token_blocks - 1) * block_tokens
    assert tile.tile_rows * tile.row_ctas == tile.cluster_rows
    assert tile.w_box_rows * tile.token_ctas == tile.tile_rows and tile.w_box_rows % 8 == 0
    assert tile.x_box_rows * tile.row_ctas == tile.tile_tokens and tile.x_box_rows % 8 == 0


@given(shapes())
@settings(max_examples=200, deadline=None)
def test_host_bytes(shape: LaunchShape) -> None:
    """Counted as the kernel counts, slice by slice; and by whoever is allowed to ask."""
    schedule, tile = shape.schedule, shape.tile
    prefix_rows = min(schedule.split_row, schedule.rows)
    asked = 0
    for cluster, item in all_items(shape):
        of_item = sum(
            schedule.host_bytes(shape.depth, item.band * tile.cluster_rows + row, tile.w_box_rows, column)
            for row in range(0, tile.cluster_rows, tile.w_box_rows)
            for column in range(0, shape.depth, CHUNK)
        )
        assert (of_item > 0) == (item.band >= schedule.hbm_bands)
        assert not of_item or cluster < schedule.host_clusters
        asked += of_item
    assert asked == shape.host_bytes == (schedule.rows - prefix_rows) * shape.depth * 2 * schedule.token_blocks
    if shape.tokens <= 4096 and tile.token_ctas > 1:
        assert schedule.token_blocks == 1


@given(shapes())
@settings(max_examples=200, deadline=None)
def test_a_box_never_leaves_its_side(shape: LaunchShape) -> None:
    """A box reads one tensor: a slice wholly on a side, or 16 rows of a slice that straddles."""
    schedule, tile = shape.schedule, shape.tile
    for row in range(0, schedule.bands * tile.cluster_rows, tile.w_box_rows):
        end = row + tile.w_box_rows
        if end <= schedule.split_row or row >= schedule.split_row:
            continue
        assert tile.w_box_rows % GRAIN == 0 and schedule.split_row % GRAIN == 0 and row % GRAIN == 0


@given(shapes())
@settings(max_examples=200, deadline=None)
def test_limits_hold(shape: LaunchShape) -> None:
    schedule, tile = shape.schedule, shape.tile
    assert tile.shared_bytes <= SHARED_LIMIT_BYTES
    assert 1 <= shape.host_w_stages <= tile.w_stages
    assert min(tile.w_stages, shape.host_w_stages, tile.x_stages) >= 2
    assert 0 <= schedule.host_clusters <= schedule.clusters
    assert schedule.clusters <= schedule.hbm_items + schedule.host_items
    assert tile.cluster_ctas <= 16 and tile.token_ctas in TOKEN_CTAS and tile.tile_tokens in TILE_TOKENS


@pytest.mark.parametrize("tokens", [1, 8, 64, 512, 2048])
def test_requests_in_flight_are_those_that_were_set(tokens: int) -> None:
    """On a GPU of 132 SMs, at every ratio: enough to cover the link's latency, and not more."""
    tile = choose_tile(tokens)
    for prefix_rows in range(0, 7168, 112):
        shape = launch_shape(tokens, 7168, 7168, prefix_rows, tile, 132 // tile.cluster_ctas, Limits(), HOPPER)
        # Consumers keep one slot while they wait for the next.
        inflight = shape.schedule.host_clusters * tile.row_ctas * tile.w_slot_bytes * (shape.host_w_stages - 1)
        assert inflight <= 256 << 10, (prefix_rows, shape)
        # A single tile of the widest kind has no room for more than five slots.
        assert inflight >= (128 << 10 if shape.schedule.host_items > 1 else 64 << 10), (prefix_rows, shape)
        if tokens > 512 and shape.host_bytes < 7168 * 7168 // 2:
            continue  # arithmetic takes longer than the link
        # The last round is nearly as full as the others.
        idle = -shape.schedule.host_items % shape.schedule.host_clusters
        assert idle <= max(1, shape.schedule.host_items // 6), (prefix_rows, shape)


def test_some_clusters_are_left_to_hbm() -> None:
    """However many may face the host; but a single cluster does both."""
    greedy = Limits(host_ctas=1000)
    for clusters in (1, 2, 50):
        schedule = launch_shape(8, 7168, 7168, 3584, choose_tile(8), clusters, greedy, HOPPER).schedule
        assert schedule.host_clusters == max(clusters - 1, 1)
        assert (schedule.helped > 0) == (clusters == 1)


def test_who_is_done_helps_where_it_pays() -> None:
    """Much arithmetic, little on the host: with help the last cluster is done sooner than HBM's alone would be."""
    tile = choose_tile(2048)
    schedule = launch_shape(2048, 14336, 4096, 13904, tile, 16, Limits(), HOPPER).schedule
    most = max(len(list(schedule.items(cluster))) for cluster in range(schedule.clusters))
    assert schedule.helped > 0 and most < -(-schedule.hbm_items // (schedule.clusters - schedule.host_clusters))


@pytest.mark.parametrize(("rows", "depth"), [(7168, 7168), (14336, 4096), (4096, 14336)])
def test_who_waits_for_the_link_is_not_missed(rows: int, depth: int) -> None:
    """Where arithmetic takes longer than the link: as many rounds of tiles as with everything in device memory."""
    tile, clusters = choose_tile(2048), 15
    resident_rounds = -(-rows // tile.cluster_rows // clusters)
    for host_bands in range(1, -(-rows // tile.cluster_rows // 8)):
        prefix_rows = rows - host_bands * tile.cluster_rows
        shape = launch_shape(2048, rows, depth, prefix_rows, tile, clusters, Limits(), HOPPER)
        schedule, limits = shape.schedule, Limits()
        item_s = 2 * tile.cluster_rows * depth * 2048 / (2 * HOPPER * tile.cluster_ctas)
        link_s = shape.host_bytes / limits.link_bytes_per_s
        taken = [len(list(schedule.items(cluster))) for cluster in range(schedule.clusters)]
        # A cluster that faces the host cannot be done with its share of it before the link is.
        helping_s = link_s + schedule.helped * item_s
        assert max(taken) <= resident_rounds, (host_bands, schedule)
        assert helping_s <= max(resident_rounds * item_s, link_s) * 1.001, (host_bands, schedule)


def test_slower_arithmetic_needs_more_to_face_the_host() -> None:
    """Tokens in turns, one warpgroup: as many clusters as multiply what arrives as fast as it does."""
    tile = choose_tile(2048, multicast=False, shared_limit_bytes=SMALL_SHARED_BYTES)
    slow = architecture_of(12, 0).warpgroup_flop_per_s
    few, many = (
        launch_shape(2048, 7168, 7168, 3584, tile, 132, Limits(), flop_per_s).schedule.host_clusters
        for flop_per_s in (HOPPER, slow)
    )
    arriving_flop_per_s = Limits().link_bytes_per_s * tile.tile_tokens
    assert few < many and slow * many >= arriving_flop_per_s


def test_no_congestion_control() -> None:
    tile = choose_tile(8)
    shape = launch_shape(8, 7168, 7168, 3584, tile, 132, None, HOPPER)
    assert (shape.schedule.host_clusters, shape.host_w_stages) == (shape.schedule.clusters, tile.w_stages)


def test_tiles_do_not_depend_on_the_split() -> None:
    """choose_tile is not told; what is left is that the launch keeps it, and K is not cut."""
    for tokens in (1, 100, 3000):
        tile = choose_tile(tokens)
        for prefix_rows in range(0, 513, 16):
            assert launch_shape(tokens, 512, 72, prefix_rows, tile, 100, Limits(), HOPPER).tile == tile


def test_variants_keep_the_tile() -> None:
    """Without multicast the products have the same shape, so the bits are the same."""
    for tokens in (1, 17, 100, 300, 600, 2048, 4096):
        usual, alone = choose_tile(tokens), choose_tile(tokens, multicast=False)
        assert usual.tile_tokens == alone.tile_tokens and usual.tile_rows == alone.tile_rows
        assert alone.cluster_ctas == 1


@pytest.mark.parametrize(
    ("tokens", "tile_tokens", "token_ctas"),
    [
        *((1, 8, 1), (9, 16, 1), (64, 64, 1), (65, 128, 1), (129, 192, 1), (256, 256, 1), (257, 192, 2), (512, 256, 2)),
        *((600, 192, 4), (1024, 256, 4), (2048, 256, 8), (2049, 192, 16), (4096, 256, 16), (5000, 256, 16)),
    ],
)
def test_tokens(tokens: int, tile_tokens: int, token_ctas: int) -> None:
    tile = choose_tile(tokens)
    assert (tile.tile_tokens, tile.token_ctas) == (tile_tokens, token_ctas)
    assert tile.token_blocks == (1 if tokens <= 4096 else 2)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((1, 64, 12, 0), "K=12.*multiple of 8"),
        ((1, 64, 8, 8), "8 rows of 64.*multiple of 16"),
        ((1, 64, 8, 80), "80 rows of 64"),
        ((0, 64, 8, 0), "T=0"),
        ((1, 0, 8, 0), "N=0"),
    ],
)
def test_refused_sizes(sizes: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(KernelInputError, match=message):
        check_sizes(*sizes)


# Up to this many tokens: tokens, warpgroups, CTAs along the tokens, CTAs along the rows, stages of W, stages of x.
HOPPER_TILES = {
    8: (8, 1, 1, 1, 24, 8),
    16: (16, 1, 1, 1, 24, 8),
    32: (32, 1, 1, 2, 23, 8),
    64: (64, 1, 1, 2, 21, 6),
    128: (128, 2, 1, 2, 9, 4),
    192: (192, 2, 1, 2, 7, 4),
    256: (256, 2, 1, 2, 5, 4),
    **{192 * ctas: (192, 2, ctas, 1, 7, 4) for ctas in (2, 4, 8, 16)},
    **{256 * ctas: (256, 2, ctas, 1, 5, 4) for ctas in (2, 4, 8, 16)},
}


def numbers(tile: TileShape) -> tuple[int, ...]:
    return (
        *(tile.tile_tokens, tile.tile_warpgroups, tile.token_ctas, tile.row_ctas),
        *(tile.w_stages, tile.x_stages),
    )


@pytest.mark.parametrize("field", [field.name for field in fields(Limits)])
@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan, True, "4", None])
def test_limits_that_no_gpu_has_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value!r}; it must be a (whole )?number above 0"):
        Limits(**{field: value})


def test_whole_numbers_of_limits_are_whole() -> None:
    with pytest.raises(ValueError, match="host_ctas is 2.5; it must be a whole number above 0"):
        Limits(host_ctas=2.5)  # type: ignore[arg-type]


def test_hopper_keeps_its_tiles() -> None:
    """Those that were measured: what GPUs with less shared memory need must not move them."""
    for tokens in range(1, 4097):
        wanted = HOPPER_TILES[min(most for most in HOPPER_TILES if most >= tokens)]
        tile = choose_tile(tokens)
        assert (numbers(tile), tile.token_blocks) == (wanted, 1), tokens
        alone, stages = choose_tile(tokens, multicast=False), wanted[4:]
        # Without the barriers of others there is as much room, and tokens take turns.
        assert numbers(alone) == (*wanted[:2], 1, 1, *stages), tokens


def test_little_shared_memory() -> None:
    """99 KiB for a block: every number of tokens gets a tile that fits, with enough of W under way."""
    for tokens in range(1, 4097):
        tile = choose_tile(tokens, multicast=False, shared_limit_bytes=SMALL_SHARED_BYTES)
        assert tile.shared_bytes <= SMALL_SHARED_BYTES, tokens
        assert tile.w_stages >= 4 and tile.x_stages >= 2 and tile.cluster_ctas == 1, tokens
        assert tile.tile_tokens in TILE_TOKENS and tile.tile_warpgroups == 1, tokens
        # The host's rows cross no more often than the largest tile that fits makes them.
        assert tile.token_blocks == -(-tokens // (192 if tokens > 128 else 128)), tokens
        assert tile.tile_tokens * tile.token_blocks >= tokens, tokens


@given(TOKENS, st.integers(20_672, SHARED_LIMIT_BYTES), st.booleans())
@settings(max_examples=300, deadline=None)
def test_any_shared_memory(tokens: int, limit_bytes: int, multicast: bool) -> None:
    """Down to the least: what is chosen fits, and is shared in whole eights."""
    tile = choose_tile(tokens, multicast=multicast, shared_limit_bytes=limit_bytes)
    assert tile.shared_bytes <= limit_bytes
    assert min(tile.w_stages, tile.x_stages) >= 2
    assert tile.w_box_rows * tile.token_ctas == tile.tile_rows and tile.w_box_rows % 8 == 0
    assert tile.x_box_rows * tile.row_ctas == tile.tile_tokens and tile.x_box_rows % 8 == 0
    assert tile.cluster_ctas <= (16 if multicast else 1)
    assert tile.tile_tokens * tile.token_ctas * tile.token_blocks >= tokens


def test_slices_are_whole_eights_with_any_shared_memory() -> None:
    """Where 16 CTAs would share 64 rows, four would be left for each: half a swizzle atom."""
    for tokens in (300, 1025, 2049, 4096, 5000):
        for limit_bytes in range(25_000, SHARED_LIMIT_BYTES, 5_000):
            tile = choose_tile(tokens, shared_limit_bytes=limit_bytes)
            assert tile.w_box_rows % 8 == 0 and tile.x_box_rows % 8 == 0, (tokens, limit_bytes)


def test_smaller_clusters() -> None:
    """Where a GPU has no room for 16 CTAs side by side, tokens are taken in turns and the host's bytes say so."""
    tile = choose_tile(4096, most_token_ctas=8)
    assert (tile.tile_tokens, tile.token_ctas, tile.token_blocks) == (256, 8, 2)
    shape = launch_shape(4096, 512, 64, 256, tile, 16, Limits(), HOPPER)
    assert shape.host_bytes == 2 * 256 * 64 * 2


def test_refused_launches() -> None:
    with pytest.raises(KernelInputError, match="20,671 bytes .* 64 rows of the weight and 8 tokens, needs 20,672"):
        choose_tile(256, shared_limit_bytes=20_671)
    with pytest.raises(KernelInputError, match="0 clusters of 8 CTAs"):
        launch_shape(2048, 64, 64, 0, choose_tile(2048), 0, Limits(), HOPPER)
