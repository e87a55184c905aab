"""What attention over a split KV cache allocates for itself on a GPU: the compiler sees only its result."""

from __future__ import annotations

import torch
from torch.export import ExportedProgram

from penstock.kv.layout import workspace_bound_bytes
from penstock.torch_private.functionalized import called_op, called_with
from penstock.torch_private.graph import size_bound

ATTEND = "penstock::kv_attend"


def kv_workspace_bound_bytes(ep: ExportedProgram, device: torch.device) -> int | None:
    """The most that one call allocates, for the largest shapes; None if a size has no bound. Calls do not overlap."""
    if device.type != "cuda":
        return 0
    largest = 0
    for node in ep.graph.nodes:
        if node.op != "call_function" or called_op(node) != ATTEND:
            continue
        query, near, far = (called_with(node, name).meta["val"] for name in ("q", "device_kv", "host_kv"))
        sizes = [size_bound(size, ep.range_constraints) for size in (*query.shape, *near.shape[2:4], far.shape[3])]
        known = [size for size in sizes if size is not None]
        if len(known) < len(sizes):
            return None
        batch, heads, tokens, head_dim, kv_heads, device_positions, host_positions = known
        # The capacity of both sides together, wherever the cache is split.
        needed = workspace_bound_bytes(
            batch=batch,
            heads=heads,
            kv_heads=kv_heads,
            tokens=tokens,
            head_dim=head_dim,
            element_bytes=query.element_size(),
            capacity=device_positions + host_positions,
        )
        largest = max(largest, needed)
    return largest
