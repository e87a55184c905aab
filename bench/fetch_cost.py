"""Host time of a fetch: every weight resident, so that each access is a hit and no copy is in flight.

    python -m bench.fetch_cost model.pt2 [--method decode]

Calls the shim that compiled code calls, for every access of a program and in its order, from a few lines of C: what is
timed is the core, not the kernels. The time includes making and deleting the tensor handle, and the end of each step.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import tempfile
from pathlib import Path

import torch

import penstock
from penstock.program import Method
from penstock.torch_private.cpp_compiler import cpp_compiler
from penstock.weight import Weight

_DRIVER = """
#include <chrono>
#include <cstdint>
using Fetch = int32_t (*)(int64_t, const int64_t*, int64_t, int32_t, int32_t, int32_t, void**);
extern "C" int64_t run_once(Fetch fetch, void (*done)(int64_t), int32_t (*drop)(void*), int64_t count,
                            const int64_t* numbers, const int64_t* ranks, const int64_t* sizes, const int32_t* dtypes,
                            const int64_t* last_of_step, int32_t device_type) {
  auto begin = std::chrono::steady_clock::now();
  int64_t step = 0;
  for (int64_t i = 0; i < count; ++i) {
    void* tensor = nullptr;
    if (fetch(numbers[i], sizes, ranks[i], dtypes[i], device_type, 0, &tensor)) return -1;
    drop(tensor);
    sizes += ranks[i];
    for (; step < last_of_step[i]; ++step) done(step);
  }
  return std::chrono::nanoseconds(std::chrono::steady_clock::now() - begin).count();
}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=Path, help="a .pt2 of penstock.compile")
    parser.add_argument("--method")
    parser.add_argument("--runs", type=int, default=200)
    options = parser.parse_args()
    with penstock.Module(options.program, budget="1TiB") as module:
        method = module.program.method(options.method or module.methods[0])
        assert module.plan is not None and module.plan.ring_bytes == 0
        times_ns = sorted(_run(module, method) for _ in range(options.runs))
        count = len(method.schedule.accesses)
        print(
            f"{options.program} {method.name} on {module.device}: {count} accesses, host time per access "
            f"{times_ns[len(times_ns) // 2] / count:.0f} ns (median of {options.runs} runs, best "
            f"{times_ns[0] / count:.0f} ns)"
        )


def _run(module: penstock.Module, method: Method) -> int:
    library, torch_library = _build(), ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    core = module._session._core
    weights: dict[str, Weight] = {weight.name: weight for weight in module.program.weights}
    accesses = method.schedule.accesses
    shapes = [weights[access.weight].storage_shape for access in accesses]
    first = method.schedule.first_step
    # After the last access of a step come the ends of all steps before the next access's first one.
    ends = [first[access.number] for access in accesses[1:]] + [len(method.schedule.steps)]
    dtypes = [getattr(torch_library, f"aoti_torch_dtype_{weights[a.weight].dtype}")() for a in accesses]
    fetch = getattr(core, f"aoti_torch_{module.device.type}_penstock_weight")
    device_type = getattr(torch_library, f"aoti_torch_device_type_{module.device.type}")()
    int64s = lambda values: (ctypes.c_int64 * len(values))(*values)  # noqa: E731
    stream = torch.cuda.current_stream().cuda_stream if module.device.type == "cuda" else 0
    module._session.begin(module.methods.index(method.name), stream)
    spent_ns = library.run_once(
        ctypes.cast(fetch, ctypes.c_void_p),
        ctypes.cast(core.penstock_done, ctypes.c_void_p),
        ctypes.cast(torch_library.aoti_torch_delete_tensor_object, ctypes.c_void_p),
        ctypes.c_int64(len(accesses)),
        int64s([access.number for access in accesses]),
        int64s([len(shape) for shape in shapes]),
        int64s([size for shape in shapes for size in shape]),
        (ctypes.c_int32 * len(dtypes))(*dtypes),
        int64s(ends),
        ctypes.c_int32(device_type),
    )
    module._session.end()
    assert spent_ns >= 0
    return int(spent_ns)


_built: list[ctypes.CDLL] = []


def _build() -> ctypes.CDLL:
    if not _built:
        folder = Path(tempfile.mkdtemp())
        (folder / "driver.cpp").write_text(_DRIVER)
        target = folder / "driver.so"
        subprocess.run(
            [cpp_compiler(), "-O2", "-std=c++17", "-shared", "-fPIC", str(folder / "driver.cpp"), "-o", str(target)],
            check=True,
        )
        library = ctypes.CDLL(str(target))
        library.run_once.restype = ctypes.c_int64
        _built.append(library)
    return _built[0]


if __name__ == "__main__":
    main()
