"""This project: all resident, planned, planned and calibrated, lru, planned as a captured graph, and packed weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from bench.suite.measure import WARM_UP_RUNS
from bench.suite.model import inputs
from bench.suite.result import Traffic
from bench.suite.systems.system import Facts, Opened, Setting, System, Unavailable

if TYPE_CHECKING:
    import penstock

CALIBRATING_RUNS = 5
# Larger than any model: the module clamps it to what all weights take.
EVERYTHING = "1024TiB"


def _open(
    placement: str = "auto", *, calibrated: bool = False, cuda_graph: bool = False, packed: bool = False
) -> Callable[[Setting], AbstractContextManager[Opened]]:
    @contextmanager
    def opened(setting: Setting) -> Iterator[Opened]:
        import penstock
        from penstock.errors import BelowFloorError, CaptureError

        def load(budget: int | str) -> penstock.Module:
            return penstock.Module(
                setting.program_path,
                weights=setting.packed_path if packed else None,
                budget=budget,
                placement=placement,
                device=setting.device,
                cuda_graph=cuda_graph,
            )

        try:
            module = load(_budget(setting))
        except BelowFloorError as error:
            module = load(error.floor_bytes)
        except CaptureError as error:
            if setting.device.startswith("cuda"):
                raise  # there it must work
            raise Unavailable(str(error)) from error
        with module:
            if calibrated:
                _calibrate(module, setting)

            def facts() -> Facts:
                last, plan = module.last_run, module.plan
                if cuda_graph and last.replays != 1:
                    raise RuntimeError(f"the last run was {last.replays} replays of a graph; it must be one")
                return Facts(
                    Traffic(
                        bytes_streamed=last.bytes_streamed,
                        source="counted",
                        planned_bytes=None if plan is None else plan.method(module.methods[0]).warm.bytes_streamed,
                        copies=last.copies,
                    ),
                    budget_bytes=module.budget_bytes,
                    floor_bytes=module.floor_bytes,
                    weights_peak_bytes=module.device_memory()[1],
                )

            yield Opened(module, facts)

    return opened


def _calibrate(module: penstock.Module, setting: Setting) -> None:
    assert module.plan is not None
    if module.plan.method(module.methods[0]).warm.bytes_streamed == 0:
        return  # there is nothing to plan
    x = inputs(setting.shape, setting.tokens, setting.device)
    for _ in range(WARM_UP_RUNS):
        module(x)
    with module.calibrate():
        for _ in range(CALIBRATING_RUNS):
            module(x)


def _budget(setting: Setting) -> int | str:
    if setting.budget_bytes is not None:
        return setting.budget_bytes
    # Rounding to pages makes all weights resident take a little more than their bytes; "all" means all.
    if setting.budget_fraction is None or setting.budget_fraction >= 1:
        return EVERYTHING
    return int(setting.budget_fraction * setting.weight_bytes)


def _system(
    name: str,
    title: str,
    open: Callable[[Setting], AbstractContextManager[Opened]],
    *,
    budgeted: bool = True,
) -> System:
    return System(name, f"ours, {title}", open, ours=True, budgeted=budgeted, shares_process=True, asynchronous=True)


RESIDENT = _system("resident", "all resident", _open(), budgeted=False)
PLANNED = _system("planned", "planned", _open())
CALIBRATED = _system("calibrated", "planned and calibrated", _open(calibrated=True))
LRU = _system("lru", "lru", _open("lru"))
GRAPH = _system("graph", "graph", _open(cuda_graph=True))
PACKED = _system("packed", "packed weights", _open(packed=True))
PACKED_CALIBRATED = _system("packed-calibrated", "packed weights, calibrated", _open(packed=True, calibrated=True))
PACKED_GRAPH = _system("packed-graph", "packed weights, graph", _open(packed=True, cuda_graph=True))
