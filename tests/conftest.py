import os
import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

# Nothing is asserted about time: a busy machine is no failure. Nor is anything left to luck: the examples are the same
# each time and everywhere. `make test-random` draws others.
RANDOM_VARIABLE = "PENSTOCK_RANDOM_EXAMPLES"
_UNTIMED = dict(deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", derandomize=True, **_UNTIMED)
settings.register_profile("random", derandomize=False, print_blob=True, **_UNTIMED)
if os.environ.get(RANDOM_VARIABLE):
    settings.load_profile("random")
else:
    settings.load_profile("same")
    # Hypothesis also takes constants of the modules imported by then. Which these are depends on the tests that this
    # worker has had before, and so on how fast each of them is.
    providers._get_local_constants = Constants

# What takes minutes: behind `make test-all`. Whole files, by their path below this folder.
SLOW_FILES = (
    "direct/test_emulated_kernel.py",  # compiles the kernel for an emulator, once for each fault
    "direct/test_kernel_compiles.py",  # with nvcc and NVRTC, for each architecture
    "executorch/test_example.py",  # builds a program in C++ against ExecuTorch
    "executorch/test_mutations.py",  # builds the delegate with every fault in it, and plays all plays against each
    "export/test_hazards.py",  # compiles a program for each way in which Inductor would break a lent weight
    "export/test_linears.py",  # compiles what split linears become; runtime/test_split_modules.py runs one of them
    "export/test_models.py",  # compiles small models of many kinds; those of transformers have a target of their own
    "export/test_pass_compiled.py",  # compiles what test_pass.py runs as it is exported
    "export/test_small_programs.py",  # compiles odd ones, and some from two threads
    "export/test_low_memory.py",  # exports models of half a gigabyte; `make gate` holds the same limit
    "report/test_demo.py",  # the whole demo, as `make demo` runs it
    "runtime/test_mutations.py",  # builds the core with every fault in it, and plays all scenarios against each
    "runtime/test_sanitizers.py",  # builds it with sanitizers
    "soak/test_slice.py",  # everything at random, from fixed seeds
    "verify/test_poison.py",  # compiles programs in which a guard or a check is left out; each must be noticed
    "worked/test_embeddings.py",  # a real model with its weights
)
# And whatever uses one of these fixtures.
SLOW_FIXTURES = frozenset(("finished",))  # a run of the benchmark suite

# The longest of the others. They go first: near the end only short ones are left, and no worker waits for another.
LONG_FILES = (
    "runtime/test_interrupts.py",
    "export/test_pass.py",
    "runtime/test_split_modules.py",
    "fuzz/test_slice.py",
    "export/test_compile.py",
    "runtime/test_driver_faults.py",
    "report/test_collect.py",
    "executorch/test_surface.py",
    "executorch/test_payload.py",
    "executorch/test_bad_files.py",
    "executorch/test_module.py",
    "runtime/test_leaks.py",
    "plan/test_placements.py",
    "plan/test_planner.py",
    "plan/test_record.py",
)

# What a shell starts in the background ignores interrupts, and hands that on. Tests send themselves some.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {f"/tests/{name}": place for place, name in enumerate(LONG_FILES)}

    def place(item: pytest.Item) -> int:
        path = item.path.as_posix()
        return places.get(path[path.rfind("/tests/") :], len(places))

    items.sort(key=place)
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if item.path.as_posix().endswith(tuple(f"/tests/{name}" for name in SLOW_FILES)) or SLOW_FIXTURES & {*fixtures}:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def the_same_numbers_each_time() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def products_stay_what_they_were() -> Iterator[None]:
    """Where a CPU cannot multiply bfloat16, torch's first attempt turns oneDNN off for good, and with it the bits of
    every product: results that were kept from before would differ from those after."""
    before = torch.backends.mkldnn.enabled
    yield
    torch.backends.mkldnn.enabled = before
