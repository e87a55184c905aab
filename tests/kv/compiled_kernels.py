"""Compiles the kernels for a Hopper GPU, without one; prints how many 16-byte asynchronous copies each has."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

POINTERS = ("q", "device_kv", "host_kv", "far_kv", "out", "k", "v", "staging")
TYPES = {
    **dict.fromkeys(POINTERS, "*bf16"),
    **dict.fromkeys(("starts", "counts"), "*i32"),
    **dict.fromkeys(("part_out", "part_top", "part_total"), "*fp32"),
    "scale_log2": "fp32",
}
# As launched for Llama-3-8B: a few tokens of several sequences, and one of one. A number that is 1 is a constant for
# Triton, and code that takes it for a tensor fails.
CONSTANTS = dict(GROUP=4, HEAD_DIM=128, SLOTS=64, BLOCK=64, COLUMNS=128, PARTS=16, TOKENS=16, UPCAST=False)
ROWS = {"attend_parts": 16, "merge_parts": 4}
ONES = dict.fromkeys(("batch", "kv_heads", "tokens", "row_blocks", "parts", "rows"), 1)


def copies(kernel: triton.JITFunction, ones: dict[str, int]) -> int:
    names = kernel.arg_names
    given = {**CONSTANTS, "ROWS": ROWS.get(kernel.__name__), "INTERLEAVED": not ones, **ones}
    constants = {name: given[name] for name in names if name in given}
    # What a launch finds out by itself: addresses and strides are multiples of 16.
    aligned = [name for name in names if name in POINTERS or name.endswith(("_stride", "_offset"))]
    source = ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in constants else TYPES.get(name, "i32") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_stages": 3})
    assert compiled.asm["cubin"]
    return sum("cp.async.c" in line and "0x10" in line for line in compiled.asm["ptx"].splitlines())


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        # By its path: its package would import torch, which takes longer than all the rest.
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for name, kernel in vars(module).items():
            if isinstance(kernel, triton.JITFunction) and not name.startswith("_"):
                for ones in ({}, ONES):
                    print(f"{name} with {len(ones)} ones: wide copies {copies(kernel, ones)}")
