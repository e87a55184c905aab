"""The kernels that decode packed weights, run on the host: their arithmetic and their bounds, for lack of a GPU."""

from __future__ import annotations

import shutil
from itertools import product
from pathlib import Path

import pytest

from penstock.native import library_path
from tests.runtime.builds import COMPILER, play
from tests.runtime.test_sanitizers import environment, found
from tests.weights.block_stress import VALUE_BYTES
from tests.weights.damaged_weights import PARTS, check, damaged_weights
from tests.weights.kernel_stress import Kernels, blocks_of, build, some_values, stress

pytestmark = pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"there is no compiler {COMPILER}")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    return Kernels(build(tmp_path_factory.mktemp("kernels")))


@pytest.mark.parametrize("kind", VALUE_BYTES)
def test_kernels_make_the_same_bits(kernels: Kernels, kind: int) -> None:
    value_bytes = VALUE_BYTES[kind]
    for name, raw in some_values(kind).items():
        blocks, values = blocks_of(kind, raw), len(raw) // value_bytes
        assert kernels.decoded(kind, blocks, len(raw), 0, values) == raw, name
        # The middle of a tile to the middle of another: kernels write sixteen bytes at a time, so it begins at such.
        begin, end = values // 3 // 16 * 16, values - values // 7
        part = kernels.decoded(kind, blocks, len(raw), begin, end)
        assert part == raw[begin * value_bytes : end * value_bytes], name


def test_damaged_blocks_write_nothing_else(kernels: Kernels) -> None:
    stress(kernels, seed=0)


def test_damage_in_any_part_of_a_block_is_its_own(kernels: Kernels) -> None:
    """tests/gpu/memcheck.py has more of them decoded on a GPU."""
    found = list(damaged_weights(seed=0, count=72))
    assert {(weight.kind, weight.part) for weight in found} == set(product(VALUE_BYTES, PARTS))
    assert any(len(weight.blocks) > 1 for weight in found)
    for weight in found:
        check(kernels.decoded, weight)


@pytest.mark.slow
def test_no_damage_leads_a_kernel_outside(tmp_path: Path) -> None:
    runtime = found("libasan.so")
    if runtime is None:
        pytest.skip(f"{COMPILER} has no libasan.so")
    library = str(build(tmp_path, "-fno-omit-frame-pointer", "-fsanitize=address"))
    module, core = "tests.weights.kernel_stress", library_path()
    broken = play(core, module, library, "overrun", environment=environment(runtime))
    assert broken.returncode == 66 and "AddressSanitizer" in broken.stderr, broken.stderr
    whole = play(core, module, library, "stress", environment=environment(runtime))
    assert (whole.returncode, whole.stdout) == (0, "done\n"), whole.stderr
