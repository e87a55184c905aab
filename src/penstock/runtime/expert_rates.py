"""Expert hits and misses that the device counted while running, by bank; and hit rates with more or fewer slots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from penstock.plan.experts import HitRates, why_no_slots
from penstock.plan.plan import NO_SLOTS, Plan
from penstock.program import Program
from penstock.runtime.session import Session

# The log of a bank is replayed with slots for these fractions of its experts.
_PARTS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.55, 0.75, 1.0)
# A bank's log needs this many calls after warm-up before it says more than the default does: some 60 calls in all.
_ENOUGH_CALLS = 48


@dataclass(frozen=True)
class ExpertUse:
    """The use of one bank since its slots were made; a change of budget makes new ones."""

    # The stacked weights of a layer.
    weights: tuple[str, ...]
    experts: int
    slots: int
    calls: int
    hits: int
    misses: int

    @property
    def hit_rate(self) -> float | None:
        """The fraction of requested experts that were in a slot; None before the first request."""
        uses = self.hits + self.misses
        return self.hits / uses if uses else None


def expert_uses(session: Session, plan: Plan | None) -> tuple[ExpertUse, ...]:
    """Waits for the device."""
    if plan is None or not plan.banks:
        return ()
    return tuple(
        ExpertUse(tuple(member.weight for member in bank.members), bank.experts, bank.slots, *counts)
        for bank, counts in zip(plan.banks, session.expert_counts(), strict=True)
    )


def slots_summary(program: Program, plan: Plan | None) -> list[str]:
    """Mentions weights that are read in host memory without slots, because of how the program takes their experts."""
    if plan is None:
        return []
    why = why_no_slots([method.schedule for method in program.methods], {one.name: one for one in program.weights})
    names = {one.weight for method in plan.methods for one in method.placements if one.bank == NO_SLOTS} & why.keys()
    weights = "1 weight" if len(names) == 1 else f"{len(names)} weights"
    return [f"no slots for {weights} of experts (penstock inspect says why)"] if names else []


def measured_hit_rates(
    session: Session, plan: Plan | None, known: Mapping[str, HitRates], together: Mapping[str, tuple[str, ...]]
) -> dict[str, HitRates]:
    """The `known` hit rates, by weight, updated with what the banks of this plan have logged since it was installed;
    empty if no bank was used enough. What is learned applies to all weights that are taken `together`, also to those
    that are held whole now. Waits for the device."""
    uses = expert_uses(session, plan)
    rates: dict[str, HitRates] = {}
    for number, use in enumerate(uses):
        slots = sorted({max(1, round(part * use.experts)) for part in _PARTS})
        played = session.expert_hits(number, slots)
        _, asked, calls = played[0]
        if asked and calls >= _ENOUGH_CALLS:
            points = ((count, hits / asked) for count, (hits, _, _) in zip(slots, played, strict=True))
            rates[use.weights[0]] = HitRates(((0, 0.0), *points))
    if not rates:
        return {}
    mean = sum(use.hits + use.misses for use in uses) / len(uses)
    # Nobody counts how often banks without slots are used.
    found = {name: replace(one, share=1.0) for name, one in known.items()}
    for use in uses:
        name = use.weights[0]
        one = rates.get(name) or known.get(name) or HitRates.usual(use.experts)
        found |= dict.fromkeys(together[name], replace(one, share=(use.hits + use.misses) / mean))
    return found
