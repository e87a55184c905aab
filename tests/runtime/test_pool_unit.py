"""How the unit in which a GPU's pools take memory is found out (S4): against a made-up libcuda."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.runtime.builds import COMPILER, ROOT, SOURCES

MIB = 1 << 20
# A pool rounds its cap up to 32 MiB, 0 being none at all, and takes memory by that unit.
FAKE = """
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
enum { unit = 32 << 20 };
typedef struct { int type, handles; struct { int type, id; } location; void* security; size_t max_bytes; } Properties;
typedef struct { size_t cap, held, peak; } Pool;
size_t most_bytes = 0, uncapped_pools = 0, live_pools = 0, held_bytes = 0;
int cuMemGetAllocationGranularity(size_t* out, void* p, int how) { *out = 2 << 20; return 0; }
int cuMemPoolCreate(void** out, Properties* wanted) {
  Pool* pool = calloc(1, sizeof(Pool));
  pool->cap = (wanted->max_bytes + unit - 1) / unit * unit;
  uncapped_pools += wanted->max_bytes == 0;
  live_pools++;
  *out = pool;
  return 0;
}
int cuMemPoolDestroy(Pool* pool) { held_bytes -= pool->held; live_pools--; free(pool); return 0; }
int cuMemAllocFromPoolAsync(uint64_t* out, size_t bytes, Pool* pool, void* stream) {
  size_t taken = (bytes + unit - 1) / unit * unit;
  if (pool->cap && taken > pool->cap) return 2;
  pool->held = pool->peak = taken;
  held_bytes += taken;
  if (held_bytes > most_bytes) most_bytes = held_bytes;
  *out = 4096;
  return 0;
}
int cuMemPoolGetAttribute(Pool* pool, int which, uint64_t* out) { *out = pool->peak; return 0; }
"""
ASK = """
import ctypes, sys
fake, core = ctypes.CDLL(sys.argv[1]), ctypes.CDLL(sys.argv[2])
core.penstock_cuda_create.restype = ctypes.c_void_p
driver, unit = ctypes.c_void_p(core.penstock_cuda_create(0)), ctypes.c_int64()
for _ in range(2):
    assert core.penstock_driver_pool_unit(driver, ctypes.byref(unit)) == 0
names = ("most_bytes", "uncapped_pools", "live_pools", "held_bytes")
print(unit.value, *(ctypes.c_size_t.in_dll(fake, name).value for name in names))
"""


def test_no_pool_without_a_cap_is_made_and_nothing_of_it_is_left(tmp_path: Path) -> None:
    names = set(re.findall(r'find\("(cu\w+)"', (SOURCES / "cuda/cuda_library.cpp").read_text()))
    assert len(names) > 40
    others = sorted(names - set(re.findall(r"int (cu\w+)\(", FAKE)))
    (tmp_path / "fake.c").write_text(FAKE + "\n".join(f"int {name}() {{ return 0; }}" for name in others))
    fake = tmp_path / "libcuda.so.1"
    subprocess.run([COMPILER, "-xc", "-shared", "-fPIC", str(tmp_path / "fake.c"), "-o", str(fake)], check=True)
    core = ROOT / "src" / "penstock" / "libpenstock.so"
    asked = subprocess.run(
        [sys.executable, "-c", ASK, str(fake), str(core)],
        env={"LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    unit_bytes, most_bytes, uncapped_pools, live_pools, held_bytes = map(int, asked.stdout.split())
    assert (unit_bytes, most_bytes) == (32 * MIB, 32 * MIB)
    assert (uncapped_pools, live_pools, held_bytes) == (0, 0, 0)
