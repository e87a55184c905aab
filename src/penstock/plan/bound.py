"""The time below which no plan can come: the yardstick beside every time that is predicted or measured."""

from __future__ import annotations


def lower_bound_s(*, weight_bytes: int, budget_bytes: int, resident_s: float, link_bytes_per_s: float) -> float:
    """Of one run in the steady state, for a program that reads every weight in every run.

    `resident_s` is the same program with every weight in place. What the budget does not hold crosses the link once a
    run, at the least; copies and kernels overlap, at the best, all the time.
    """
    for name, value in (("weight_bytes", weight_bytes), ("budget_bytes", budget_bytes), ("resident_s", resident_s)):
        if not value >= 0:
            raise ValueError(f"{name} is {value}; it must not be negative")
    if not link_bytes_per_s > 0:
        raise ValueError(f"link_bytes_per_s is {link_bytes_per_s}; it must be positive")
    return max(resident_s, (weight_bytes - budget_bytes) / link_bytes_per_s)
