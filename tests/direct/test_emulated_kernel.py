"""The kernel's own text over emulated instructions: every result, every host byte, no order of events that hangs it."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.direct.launch_shape import Limits, launch_shape
from penstock.direct.tile_shape import TileShape, choose_tile
from tests.direct.emulation import AT_ONCE, AT_RANDOM, LATE, Emulated, Emulator, whole_numbers

# Few slots, so that every slot is used many times. The third has a cluster in both directions at once.
DECODE = replace(choose_tile(5), w_stages=3, x_stages=2)
SHARED_X = replace(choose_tile(20), w_stages=3, x_stages=2)
BOTH_SHARED = TileShape(16, 2, 2, 2, 1, 3, 2)
WIDE = replace(choose_tile(300), w_stages=2, x_stages=2)
SMALL_SHARED_BYTES = 101_376
FLOP_PER_S = 3e12


def run(
    emulator: Emulator,
    tokens: int,
    rows: int,
    depth: int,
    prefix_rows: int,
    *,
    biased: bool = True,
    y_stride: int | None = None,
    copies_land: int = AT_RANDOM,
    seed: int = 0,
    limits: Limits | None = Limits(),  # noqa: B008 - frozen
    most_clusters: int = 3,
) -> Emulated:
    """One run, compared with exact arithmetic: the results, what was not to be written, and the host's bytes."""
    tile = replace(emulator.tile, token_blocks=-(-tokens // (emulator.tile.tile_tokens * emulator.tile.token_ctas)))
    shape = launch_shape(tokens, rows, depth, prefix_rows, tile, most_clusters, limits, FLOP_PER_S)
    x, weight = whole_numbers(tokens, depth, seed=seed), whole_numbers(rows, depth, seed=seed + 1)
    bias = whole_numbers(rows, seed=seed + 2) if biased else None
    left = emulator.run(shape, x, weight, bias, y_stride=y_stride, copies_land=copies_land, seed=seed)
    assert left.failure == ""
    wanted = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert torch.equal(left.y[:tokens, :rows], wanted.to(torch.bfloat16))
    assert left.y[tokens:].isnan().all() and left.y[:, rows:].isnan().all()
    assert left.host_bytes_counted == left.host_bytes_read == shape.host_bytes
    assert left.host_bytes_read == (rows - prefix_rows) * depth * 2 * tile.token_blocks
    return left


@pytest.fixture(scope="module", params=[False, True], ids=["wgmma", "mma_sync"])
def mma_sync(request: pytest.FixtureRequest) -> bool:
    """Either way of multiplying, under the same kernel."""
    return bool(request.param)


@pytest.fixture(scope="module")
def decode(tmp_path_factory: pytest.TempPathFactory, machine: Path, mma_sync: bool) -> Emulator:
    return Emulator(tmp_path_factory.mktemp("decode"), machine, DECODE, mma_sync=mma_sync)


@pytest.fixture(scope="module")
def shared_x(tmp_path_factory: pytest.TempPathFactory, machine: Path, mma_sync: bool) -> Emulator:
    return Emulator(tmp_path_factory.mktemp("shared_x"), machine, SHARED_X, mma_sync=mma_sync)


@pytest.fixture(scope="module")
def both_shared(tmp_path_factory: pytest.TempPathFactory, machine: Path, mma_sync: bool) -> Emulator:
    return Emulator(tmp_path_factory.mktemp("both_shared"), machine, BOTH_SHARED, mma_sync=mma_sync)


@pytest.mark.parametrize("prefix_rows", [0, 16, 64, 112, 192, 203])
def test_decode(decode: Emulator, prefix_rows: int) -> None:
    """Ragged rows, columns and tokens; splits inside and between tiles; every way for copies to land."""
    for copies_land, depth in itertools.product((AT_RANDOM, AT_ONCE, LATE), (8, 200)):
        run(decode, 5, 203, depth, prefix_rows, copies_land=copies_land, seed=prefix_rows)


def test_decode_writes_only_its_rows(decode: Emulator) -> None:
    """Rows of y that are wider than N, 16-byte stores or not, and without a bias."""
    for rows, y_stride in ((200, 208), (200, 201), (203, 208), (64, 64)):
        run(decode, 8, rows, 72, 48, y_stride=y_stride, biased=False)


def test_more_tokens_than_a_cluster_holds(decode: Emulator) -> None:
    """Tokens in turns: right, and the host's bytes are counted as often as they cross."""
    run(decode, 21, 130, 72, 64)


@pytest.mark.parametrize("limits", [None, Limits(), Limits(host_ctas=1, host_inflight_bytes=1)])
def test_x_is_shared(shared_x: Emulator, limits: Limits | None) -> None:
    for prefix_rows, seed in itertools.product((0, 48, 144, 300), (1, 2)):
        run(shared_x, 20, 300, 136, prefix_rows, limits=limits, seed=seed)


@pytest.mark.parametrize("prefix_rows", [0, 80, 256, 272, 600])
def test_both_are_shared(both_shared: Emulator, prefix_rows: int) -> None:
    """Four CTAs: pairs share W, pairs share x. The second item of a cluster follows through the same rings."""
    for copies_land in (AT_RANDOM, AT_ONCE, LATE):
        run(both_shared, 29, 600, 136, prefix_rows, copies_land=copies_land, seed=prefix_rows, most_clusters=2)


def test_wide_tiles(tmp_path: Path, machine: Path, mma_sync: bool) -> None:
    """The largest kind of tile, as chosen, two warpgroups of consumers and a cluster along the tokens."""
    emulator = Emulator(tmp_path, machine, WIDE, mma_sync=mma_sync)
    assert (WIDE.tile_tokens, WIDE.tile_warpgroups, WIDE.token_ctas) == (192, 2, 2)
    run(emulator, 300, 130, 72, 48)


def test_cluster_of_16(tmp_path: Path, machine: Path) -> None:
    """Slices of 8 rows, half of the split's grain; as many peers as there are bits in a multicast mask."""
    run(Emulator(tmp_path, machine, TileShape(8, 2, 16, 1, 1, 3, 2)), 121, 300, 136, 48)


@pytest.mark.parametrize("tokens", [64, 100, 150])
def test_tiles_for_little_shared_memory(tmp_path: Path, machine: Path, tokens: int) -> None:
    """As a GPU of 12.x gets them, stages too: many tokens to few rows, each CTA alone."""
    tile = choose_tile(tokens, multicast=False, shared_limit_bytes=SMALL_SHARED_BYTES)
    assert tile.tile_rows == 64 and tile.cluster_ctas == 1
    run(Emulator(tmp_path, machine, tile, mma_sync=True), tokens + 64, 130, 72 * tile.w_stages, 48)


# Each is a fault that a kernel of this kind is known for; none may pass.
FAULTS = {
    "peers are not told that a slot is free": (
        "if (lane < p.token_ctas) arrive_at(at.w_empty + 8 * w_slot, (u32)(at.row_rank * p.token_ctas + lane));",
        "if (lane == 0) arrive_at(at.w_empty + 8 * w_slot, cluster_rank());",
    ),
    "the barrier counts only the own consumers": (
        "init_barrier(at.w_empty + 8 * slot, p.token_ctas * kConsumerWarps);",
        "init_barrier(at.w_empty + 8 * slot, kConsumerWarps);",
    ),
    "a slot is released while its product is at work": (
        "await_products<1>();\n      if (column > 0) release(p, at, w_before, x_before);",
        "if (column > 0) release(p, at, w_before, x_before);",
    ),
    "a product starts over with every chunk": ("column > 0 || k > 0", "k > 0"),
    "the parity of a slot is never turned": ("slot = 0, parity ^= 1", "slot = 0"),
    "a straddling tile reads the host's rows by their number in the whole": (
        "host ? row + part - split_row : row + part",
        "row + part",
    ),
    "the last CTA does not wait for its peers": ("// A CTA that ends early", "return;\n  //"),
    "bytes of the own slice only": ("arrive_expecting(full, kXSlotBytes);", "arrive_expecting(full, kXSlotBytes / 2);"),
}


# The same for what is done by mma.sync.
MMA_SYNC_FAULTS = {
    "no swizzle": ("return straight ^ ((straight >> 3) & 0x70);", "return straight;"),
    "the swizzle of a shorter row": ("((straight >> 3) & 0x70)", "((straight >> 3) & 0x30)"),
    "rows and tokens are exchanged": (
        "const u32 tokens = lane_address(b, lane / 16 * 8 + lane % 8, lane / 8 % 2);",
        "const u32 tokens = lane_address(b ? a : b, lane / 16 * 8 + lane % 8, lane / 8 % 2);",
    ),
    "matrices of W in the order of x": (
        "lane_address(a, 16 * warp + lane % 16, lane / 16)",
        "lane_address(a, 16 * warp + lane / 16 * 8 + lane % 8, lane / 8 % 2)",
    ),
    "matrices of x in the order of W": (
        "lane_address(b, lane / 16 * 8 + lane % 8, lane / 8 % 2)",
        "lane_address(b, lane % 16, lane / 16)",
    ),
    "CTAs read the first one's memory": ("shared_base() & ~0x3ffffu", "shared_base() & 0u"),
    "every warp takes the first rows": ("16 * warp + lane % 16", "0 * warp + lane % 16"),
    "warps are counted in the block": ("thread_index() / 32 % 4", "thread_index() / 32"),
    "what was there is always added to": ("if (!add)", "if (add > 1)"),
    "every product starts from zero": ("if (!add)", "if (add < 2)"),
    "tokens are half as far apart": ("tokens + i * 2 * 128", "tokens + i * 128"),
    "columns are exchanged in half of the tokens": ("rows, next_low, next_high", "rows, next_high, next_low"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_noticed(tmp_path: Path, machine: Path, fault: str) -> None:
    """The emulator would be no evidence if it let these through."""
    emulator = Emulator(tmp_path, machine, BOTH_SHARED, (FAULTS[fault],))
    with pytest.raises(AssertionError, match="assert"):
        for copies_land, seed in itertools.product((AT_RANDOM, AT_ONCE, LATE), (1, 2)):
            run(emulator, 29, 600, 200, 272, copies_land=copies_land, seed=seed, most_clusters=2)


@pytest.mark.parametrize("fault", [None, *MMA_SYNC_FAULTS])
def test_faults_of_mma_sync_are_noticed(tmp_path: Path, machine: Path, fault: str | None) -> None:
    """Two CTAs of two warpgroups, tokens that are loaded in more than one go, and several items, the second with sums
    left over."""
    edits = () if fault is None else (MMA_SYNC_FAULTS[fault],)
    emulator = Emulator(tmp_path, machine, TileShape(32, 2, 1, 2, 1, 3, 2), edits, mma_sync=True)
    with nullcontext() if fault is None else pytest.raises(AssertionError, match="assert"):
        run(emulator, 29, 300, 200, 144, most_clusters=1)
