"""This project: planned, lru, all resident; and, once there is one, the captured graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from bench.suite.result import Traffic
from bench.suite.systems.system import Facts, Opened, Setting, System

# Larger than any model: the module clamps it to what all weights take.
EVERYTHING = "1024TiB"


def _open(policy: str) -> Callable[[Setting], AbstractContextManager[Opened]]:
    @contextmanager
    def opened(setting: Setting) -> Iterator[Opened]:
        import penstock
        from penstock.errors import BelowFloorError

        def load(budget: int | str) -> penstock.Module:
            return penstock.Module(
                setting.program_path, budget=budget, policy=policy, device=setting.device, quiet=True
            )

        try:
            module = load(_budget(setting))
        except BelowFloorError as error:
            module = load(error.floor_bytes)
        with module:

            def facts() -> Facts:
                last, plan = module.last_run, module.plan
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


def _budget(setting: Setting) -> int | str:
    if setting.budget_bytes is not None:
        return setting.budget_bytes
    # Rounding to pages makes all weights resident take a little more than their bytes; "all" means all.
    if setting.budget_fraction is None or setting.budget_fraction >= 1:
        return EVERYTHING
    return int(setting.budget_fraction * setting.weight_bytes)


RESIDENT = System("resident", "ours, all resident", _open("planned"), ours=True, shares_process=True)
PLANNED = System("planned", "ours, planned", _open("planned"), ours=True, budgeted=True, shares_process=True)
LRU = System("lru", "ours, lru", _open("lru"), ours=True, budgeted=True, shares_process=True)
# The place of Module(..., cuda_graph=True): give it an `open` of its own and remove `unavailable`.
GRAPH = System("graph", "ours, graph", _open("planned"), ours=True, budgeted=True, unavailable="not implemented yet")
