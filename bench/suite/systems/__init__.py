"""Every system of the suite, in the order of the table."""

from __future__ import annotations

from bench.suite.systems import accelerate_offload, deepspeed_zero, diffusers_groups, eager, mmgp_budget, ours, uva
from bench.suite.systems.system import System

# The yardsticks: outputs are compared with theirs, and the bound holds the second one's time. They always run.
REFERENCE, RESIDENT = eager.EAGER, ours.RESIDENT

SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (
        REFERENCE,
        RESIDENT,
        ours.PLANNED,
        ours.LRU,
        ours.GRAPH,
        accelerate_offload.DEFAULT,
        accelerate_offload.PINNED,
        accelerate_offload.HALF,
        diffusers_groups.LEAF,
        diffusers_groups.BLOCK,
        uva.UVA,
        deepspeed_zero.ZERO_INFERENCE,
        mmgp_budget.MMGP,
    )
}
PLANNED = ours.PLANNED
