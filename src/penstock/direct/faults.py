"""Describes in words what a bounded wait of a kernel leaves behind before it traps."""

from __future__ import annotations

from collections.abc import Sequence

WORDS = 8
# As numbered in kernels/split_linear.cu.
SITES = {
    1: "the W producer, for an empty slot",
    2: "the x producer, for an empty slot",
    3: "a consumer, for a full slot of W",
    4: "a consumer, for a full slot of x",
}


def describe_fault(words: Sequence[int]) -> str | None:
    """None if no wait ran out of time."""
    site, block, thread, barrier, parity = words[:5]
    if site == 0:
        return None
    who = SITES.get(site, f"site {site}")
    return f"a wait ran out of time: {who}; block {block}, thread {thread}, barrier at {barrier:#x}, parity {parity}"
