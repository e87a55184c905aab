"""Python's mirrors of the kernel's headers, compared with the headers themselves, compiled."""

from __future__ import annotations

import ctypes
import re
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.direct import faults, schedule, tile_shape
from penstock.direct.params import SPLIT_PARAMS_BYTES, TENSOR_MAP_ALIGNMENT, SplitParams, SplitSchedule
from penstock.direct.schedule import TileSchedule
from tests.direct.emulation import EMULATOR, KERNELS, compile_cpp


@pytest.fixture(scope="module")
def arithmetic(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = tmp_path_factory.mktemp("arithmetic") / "libarithmetic.so"
    compile_cpp("-Wno-invalid-offsetof", f"-I{KERNELS}", "-shared", EMULATOR / "arithmetic.cpp", "-o", library)
    return ctypes.CDLL(str(library))


SCHEDULES = st.builds(
    lambda split, clusters, host, **rest: TileSchedule(
        split_row=16 * split, clusters=clusters, **rest, host_clusters=host
    ),
    st.integers(0, 60),
    st.integers(1, 20),
    st.integers(0, 5),
    rows=st.integers(1, 900),
    cluster_rows=st.sampled_from((64, 128, 256)),
    token_blocks=st.integers(1, 3),
    helped=st.integers(0, 4),
).filter(lambda s: s.host_clusters <= s.clusters)


@given(SCHEDULES, st.integers(0, 25), st.integers(0, 20))
@settings(max_examples=500, deadline=None)
def test_items(arithmetic: ctypes.CDLL, planned: TileSchedule, cluster: int, step: int) -> None:
    cluster %= planned.clusters
    out = (ctypes.c_int * 2)()
    arithmetic.item(ctypes.byref(SplitSchedule(**asdict(planned))), cluster, step, out)
    mirrored = planned.item(cluster, step)
    assert tuple(out) == ((-1, 0) if mirrored is None else (mirrored.band, mirrored.token_block))


@given(SCHEDULES, st.integers(1, 40), st.integers(0, 60), st.sampled_from((8, 16, 64, 128)), st.integers(0, 4))
@settings(max_examples=500, deadline=None)
def test_host_bytes(
    arithmetic: ctypes.CDLL, planned: TileSchedule, eighths: int, row: int, count: int, chunk: int
) -> None:
    depth, row, column = 8 * eighths, 16 * row, schedule.CHUNK * chunk
    if column < depth:
        found = arithmetic.host_bytes(ctypes.byref(SplitSchedule(**asdict(planned))), depth, row, count, column)
        assert found == planned.host_bytes(depth, row, count, column)


def test_layout(arithmetic: ctypes.CDLL) -> None:
    arithmetic.field_name.restype = ctypes.c_char_p
    fields = range(arithmetic.field_count())
    compiled = {arithmetic.field_name(index).decode(): arithmetic.field_offset(index) for index in fields}
    mirrored = {name: getattr(SplitParams, name).offset for name, *_ in SplitParams._fields_}
    for name, *_ in SplitSchedule._fields_:
        mirrored[f"schedule.{name}"] = mirrored["schedule"] + getattr(SplitSchedule, name).offset
    assert mirrored == compiled
    assert (arithmetic.params_bytes(), arithmetic.params_alignment()) == (SPLIT_PARAMS_BYTES, TENSOR_MAP_ALIGNMENT)


def test_constants(arithmetic: ctypes.CDLL) -> None:
    assert (arithmetic.chunk(), arithmetic.grain()) == (schedule.CHUNK, schedule.GRAIN)
    text = (KERNELS / "split_linear.cu").read_text()
    assert f"kOutStride = 64 * 2 + {tile_shape.OUT_STRIDE_BYTES - 128};" in text
    sites = dict(re.findall(r"(kSite\w+) = (\d)", text))
    assert sites == {"kSiteWEmpty": "1", "kSiteXEmpty": "2", "kSiteWFull": "3", "kSiteXFull": "4"}
    assert set(map(int, sites.values())) == set(faults.SITES)
    products = re.findall(r"TILE_TOKENS == (\d+)", (KERNELS / "wgmma.h").read_text())
    assert tuple(map(int, products)) == tile_shape.TILE_TOKENS
    assert "static_assert(TILE_TOKENS == 8 || TILE_TOKENS % 16 == 0," in (KERNELS / "mma_sync.h").read_text()
    assert all(tokens == 8 or tokens % 16 == 0 for tokens in tile_shape.TILE_TOKENS)


def test_fault_words() -> None:
    assert faults.describe_fault([0] * faults.WORDS) is None
    told = faults.describe_fault([3, 7, 130, 0x400, 1, 0, 0, 0])
    assert told is not None and re.search("full slot of W; block 7, thread 130, barrier at 0x400, parity 1", told)


def test_kernels_are_found_beside_the_package_or_the_sources() -> None:
    from penstock.direct.source import read_source

    source = read_source("split_linear.cu")
    assert {name for name, _ in source.headers} == {path.name for path in Path(KERNELS).glob("*.h")}
    assert source.text == (KERNELS / "split_linear.cu").read_text()
