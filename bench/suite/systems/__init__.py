"""Every system of the suite, in the order of the table."""

from __future__ import annotations

from bench.suite.systems import (
    accelerate_offload,
    aotinductor,
    deepspeed_zero,
    dfloat11_model,
    diffusers_groups,
    eager,
    mmgp_budget,
    ours,
    uva,
)
from bench.suite.systems.system import System

# The yardsticks: outputs are compared with theirs, and the bound holds the second one's time. They always run.
REFERENCE, RESIDENT = eager.EAGER, ours.RESIDENT

SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (
        REFERENCE,
        RESIDENT,
        ours.PLANNED,
        ours.CALIBRATED,
        ours.LRU,
        ours.GRAPH,
        ours.PACKED,
        ours.PACKED_CALIBRATED,
        ours.PACKED_GRAPH,
        aotinductor.COMPILED,
        aotinductor.COMPILED_GRAPH,
        accelerate_offload.DEFAULT,
        accelerate_offload.PINNED,
        accelerate_offload.HALF,
        diffusers_groups.LEAF,
        diffusers_groups.BLOCK,
        diffusers_groups.BLOCK_BESIDE,
        uva.UVA,
        deepspeed_zero.ZERO_INFERENCE,
        mmgp_budget.MMGP,
        dfloat11_model.DFLOAT11,
    )
}
PLANNED = ours.PLANNED
CALIBRATED, LRU = ours.CALIBRATED, ours.LRU
# They run with a weights file that must be packed for them.
PACKED = (ours.PACKED, ours.PACKED_CALIBRATED, ours.PACKED_GRAPH)
# The modes that meet every peer at its footprint.
COMPARED = (ours.PLANNED, ours.GRAPH)
# They run a program that must be compiled for them.
PLAIN = (aotinductor.COMPILED, aotinductor.COMPILED_GRAPH)
