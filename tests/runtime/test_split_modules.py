"""Modules whose linears read weights in two places, from export to result, on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.budget import format_bytes
from penstock.direct import availability
from penstock.direct.failures import KernelCompileError, KernelDeviceError
from penstock.errors import BelowFloorError, DeviceError, PenstockError
from penstock.placement_names import PLANNED
from penstock.plan.calibration import Calibration, Link
from penstock.runtime.linear_choice import choose_linear
from penstock.runtime.options import Asked, judge
from penstock.verify.module import PoisonedModule
from tests.harness import bits, compiled, offloaded
from tests.runtime.session_harness import PAGE

VOCABULARY, WIDTH, WIDE = 608, 64, 176
DTYPES = (torch.bfloat16, torch.float16, torch.bfloat16)


class Tied(nn.Module):
    """A table that is gathered from and multiplied with; layers of both kinds of floats, with a bias and without, and
    with other rows than 16s."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH, dtype=torch.bfloat16)
        self.up = nn.ModuleList(nn.Linear(WIDTH, WIDE + 2, dtype=dtype) for dtype in DTYPES)
        self.down = nn.ModuleList(nn.Linear(WIDE, WIDTH, bias=False, dtype=dtype) for dtype in DTYPES)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.table(tokens)
        for dtype, up, down in zip(DTYPES, self.up, self.down, strict=True):
            h = h + down(torch.tanh(up(h.to(dtype)))[..., :WIDE]).to(h.dtype)
        return h @ self.table.weight.t()


def tied() -> Tied:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Tied().eval().requires_grad_(False)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods: any number of tokens, and one."""
    count = torch.export.Dim("count", min=2, max=64)
    methods = {
        "prefill": offloaded(tied(), (torch.arange(7),), {"tokens": {0: count}}),
        "decode": offloaded(tied(), (torch.arange(1),)),
    }
    return compiled(tmp_path_factory.mktemp("tied"), methods, split_linear=True).program_path


CALLS = [("prefill", torch.arange(19) * 31), ("decode", torch.tensor([5])), ("prefill", torch.tensor([607, 0]))]


def results(module: penstock.Module) -> list[Tensor]:
    return [bits(module.run_method(method, tokens)) for method, tokens in CALLS]


def without_linears(program: penstock.Program) -> penstock.Program:
    methods = []
    for method in program.methods:
        accesses = tuple(replace(access, linear=False) for access in method.schedule.accesses)
        methods.append(replace(method, schedule=replace(method.schedule, accesses=accesses)))
    return replace(program, methods=tuple(methods))


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    """To the eager model, which rounds between operations that the compiler fuses."""
    assert (ours - theirs).float().norm() < 0.02 * theirs.float().norm()


def opened(path: Path, budget: int | str, **options: Any) -> penstock.Module:
    return penstock.Module(path, budget, **options)


@pytest.fixture(scope="module")
def resident(program: Path) -> list[Tensor]:
    with opened(program, "1TiB", placement="stream") as module:
        assert module.plan is not None and not any(method.copies for method in module.plan.methods)
        return results(module)


def test_bits_are_the_same_at_every_budget(program: Path, resident: list[Tensor]) -> None:
    splits = set()
    with opened(program, "1TiB", placement="split") as module:
        floor, full = module.floor_bytes, module.full_bytes
        # No linear has to fit: what is left are the biases.
        assert floor == PAGE
        budgets = [floor + (full - floor) * part // 12 for part in range(13)]
        for budget in [*budgets, *reversed(budgets)]:
            module.set_budget(budget)
            assert module.plan is not None
            splits |= set(module.plan.split_weights)
            for _ in range(2):
                assert same(results(module), resident), budget
            assert module.device_memory()[0] <= budget
            assert module.stats().copies == 0
    assert splits >= {"table.weight", "up.0.weight", "up.1.weight", "down.0.weight"}
    with opened(program, floor, placement="split") as module:
        assert same(results(module), resident)
        assert module.device_memory() == (floor, floor)
    with pytest.raises(BelowFloorError, match=f"needs at least {floor} bytes"):
        opened(program, floor - 1, placement="split")


def test_bits_are_the_same_in_every_placement(program: Path, resident: list[Tensor]) -> None:
    for placement in ("auto", "stream", "in-place"):
        with opened(program, "1TiB", placement=placement) as module:
            floor, full = module.floor_bytes, module.full_bytes
            for part in range(4):
                module.set_budget(floor + (full - floor) * part // 4)
                assert same(results(module), resident), (placement, part)
            if placement == "stream":
                assert module.stats().copies


def test_below_copyings_floor_the_summary_says_what_copying_needs(program: Path, resident: list[Tensor]) -> None:
    with opened(program, "1TiB", placement="auto") as module:
        floor, copying_bytes = module.floor_bytes, module._policy.copying_bytes
        assert PAGE <= floor < copying_bytes
        reads = f"read over the link because copying needs {format_bytes(copying_bytes)}"
        for budget, below in ((floor, True), (copying_bytes - PAGE, True), (copying_bytes, False)):
            module.set_budget(budget)
            assert (reads in module.summary) == below, (budget, module.summary)
            assert same(results(module), resident)
            assert module.device_memory()[0] <= budget
            # From there on it is the faster way that is taken, whichever it is.
            assert not below or module.last_run.copies == 0


def test_the_hundredth_run(program: Path, resident: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_POISON", "1")
    with opened(program, 10 * PAGE, placement="split") as module:
        assert module.plan is not None and module.plan.split_weights
        for _ in range(100):
            assert same(results(module), resident)
        peak = module.device_memory()[1]
        assert peak == module.plan.device_bytes <= 10 * PAGE


def test_results_come_close_to_the_eager_model(program: Path, resident: list[Tensor]) -> None:
    model = tied()
    with opened(program, 12 * PAGE, placement="split") as module:
        for method, tokens in CALLS:
            assert_close(module.run_method(method, tokens), model(tokens))


def test_bits_are_the_same_under_a_cap_on_host_memory(program: Path, resident: list[Tensor]) -> None:
    for placement in ("auto", "stream"):
        with opened(program, 48 * PAGE, placement=placement, host_memory=64 * PAGE) as module:
            assert same(results(module), resident) and module.stats().copies


def test_under_poison_every_linear_reads_what_it_was_lent(program: Path) -> None:
    module = PoisonedModule(program)
    model = tied()
    for _ in range(2):
        for method, tokens in CALLS:
            assert_close(module.run_method(method, tokens), model(tokens))


def test_a_calibration_may_split(program: Path, resident: list[Tensor]) -> None:
    budget = 40 * PAGE
    with opened(program, budget) as module:
        # Split already where copying has just begun to fit: steps are timed with everything copied.
        assert module.plan is not None and module.plan.split_weights
        with module.calibrate():
            assert module.plan is not None and not module.plan.split_weights
            assert same(results(module), resident)
            assert module.last_run.copies > 0
        with module.calibrate(in_place=True):
            assert module.device_memory()[0] < 2 * PAGE and same(results(module), resident)
        assert same(results(module), resident)
        assert module.device_memory()[0] <= budget


def test_the_summary_says_what_is_split(program: Path) -> None:
    with opened(program, 12 * PAGE, placement="split") as module:
        assert "of split weights read in place" in module.summary
        module.set_budget(module.full_bytes)
        assert "split" not in module.summary


def test_a_program_without_such_linears_is_not_split(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def plain(path: Path, **options: Any) -> penstock.Program:
        return without_linears(penstock.read_program(path))

    monkeypatch.setattr("penstock.runtime.module.read_offloaded", plain)
    with pytest.raises(PenstockError, match='"split" does not go with a program compiled without split_linear=True'):
        opened(program, "1TiB", placement="split")
    opened(program, "1TiB").close()


def test_another_gpu_is_told_by_its_capability(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, gpu = penstock.read_program(program), torch.device("cuda:0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    with pytest.raises(DeviceError, match=r"a GPU without the kernel for it: .* capability 8\.9, .* 9\.0 or newer"):
        judge(Asked(placement="split"), gpu, choose_linear(loaded, gpu))
    options = judge(Asked(), gpu, choose_linear(loaded, gpu))
    assert not options.can_split and not options.offers_kernel
    (told,) = options.linear.summary()
    assert "no weight is split: this GPU has compute capability 8.9" in told
    opened_on: list[torch.device] = []

    def open_kernel(device: torch.device) -> Any:
        opened_on.append(device)
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(availability, "open_kernel", open_kernel)
    for capability in ((9, 0), (10, 3), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        for asked, can_split in (
            *((Asked(placement=placement), True) for placement in PLANNED),
            (Asked(placement="auto", host_memory="1GiB"), False),
        ):
            opened_on.clear()
            options = judge(asked, gpu, choose_linear(loaded, gpu))
            assert options.offers_kernel and options.can_split == can_split
            # Where it was never tried it is tried before anything is planned for it; elsewhere it costs nothing.
            assert opened_on == ([gpu] if capability != (9, 0) else [])
    opened_on.clear()
    assert not judge(Asked(), gpu, choose_linear(without_linears(loaded), gpu)).offers_kernel and not opened_on


@pytest.mark.parametrize("failure", [KernelCompileError("NVRTC knows no sm_103a"), KernelDeviceError("wrong sums")])
def test_a_gpu_that_fails_the_check_still_runs_the_program(
    program: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    """By the library, and says why; unless the kernel was asked for."""
    loaded, gpu = penstock.read_program(program), torch.device("cuda:0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 3))

    def fail(device: torch.device) -> Any:
        raise failure

    monkeypatch.setattr(availability, "open_kernel", fail)
    options = judge(Asked(), gpu, choose_linear(loaded, gpu))
    assert not options.can_split and not options.offers_kernel
    assert options.linear.summary() == [f"no weight is split: {failure}"]
    with pytest.raises(DeviceError, match=f"does not go with a GPU without the kernel for it: {failure}"):
        judge(Asked(placement="split"), gpu, choose_linear(loaded, gpu))


# ---- by measured times


def rows_on_device(module: penstock.Module) -> dict[str, int]:
    assert module.plan is not None
    placements = (placement for method in module.plan.methods for placement in method.placements)
    return {placement.weight: placement.prefix_bytes for placement in placements if placement.prefix_bytes is not None}


def test_a_split_module_is_calibrated_by_itself(program: Path, resident: list[Tensor]) -> None:
    # First runs tell how long steps take with their weights on the device, so nothing is split for them.
    with opened(program, "1TiB", calibration="first-runs") as module:
        copying_bytes = module.floor_bytes
    with opened(program, copying_bytes, placement="split") as module:
        assert module.plan is not None
        before = module.plan.split_weights
        for in_place in (False, True):
            with module.calibrate(in_place=in_place):
                for _ in range(3):
                    assert same(results(module), resident)
                # Steps are timed with their weights on the device: copied there, but for the table that is only
                # gathered from; or everything in host memory.
                assert module.plan is not None and not module.plan.split_weights
                assert (module.plan.direct_weights == ("table.weight",)) != in_place
                assert (module.last_run.copies > 0) != in_place
            assert module.calibration is not None and bool(module.calibration.direct_step_s) == in_place
            # Nothing is copied any more. How much of each weight is on the device is as the times were.
            assert module.plan is not None and not any(method.copies for method in module.plan.methods)
            assert in_place or module.plan.split_weights == before
            assert same(results(module), resident)
            assert module.device_memory()[0] <= copying_bytes
        known = module.calibration
        module.set_budget(copying_bytes - PAGE)
        with pytest.raises(PenstockError, match=f"takes {copying_bytes} bytes; the budget is {copying_bytes - PAGE}"):
            with module.calibrate():
                pass
        assert module.calibration == known
        assert same(results(module), resident)


def test_what_costs_more_on_the_host_has_more_on_the_device(program: Path, resident: list[Tensor]) -> None:
    """Ratios per operation: by times in which one weight's rows on the host cost a hundred times as much."""
    methods = penstock.read_program(program).methods
    steps = {method.name: method.schedule for method in methods}
    favoured = {"up.0.weight", "down.2.weight"}

    def direct_s(method: str) -> tuple[float, ...]:
        schedule = steps[method]
        dear = {schedule.first_step[access.number] for access in schedule.accesses if access.weight in favoured}
        return tuple(1e-1 if step in dear else 1e-3 for step in range(len(schedule.steps)))

    times = Calibration(
        Link(1e9), {name: (1e-6,) * len(one.steps) for name, one in steps.items()}, {n: direct_s(n) for n in steps}
    )
    with opened(program, "1TiB", placement="split") as module:
        budget = module.full_bytes // 2
    found = {}
    for known in (None, times):
        with opened(program, budget, placement="split", calibration=known) as module:
            found[known is not None] = rows_on_device(module)
            whole = set(module.plan.direct_weights) | set(rows_on_device(module))  # type: ignore[union-attr]
            assert same(results(module), resident)
            assert module.device_memory()[0] <= budget
            if known is not None:
                # All of it on the device, where the others have less than before.
                assert not favoured & whole
    assert found[True] != found[False] and favoured & set(found[False])


def test_in_place_there_is_nothing_to_calibrate(program: Path) -> None:
    with opened(program, 0, placement="in-place") as module:
        with pytest.raises(PenstockError, match=r"calibrate\(\) does not go with .*in-place"), module.calibrate():
            pass
        results(module)
