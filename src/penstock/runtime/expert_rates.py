"""What the device has counted of experts while running, bank by bank; and what more slots or fewer would have held."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.plan.experts import HitRates
from penstock.plan.plan import Plan
from penstock.runtime.session import Session

# Of the experts of a bank: with so many slots each, what was logged is played again.
_PARTS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.55, 0.75, 1.0)
# Calls of a bank before its log says more than the default does.
_ENOUGH_CALLS = 64


@dataclass(frozen=True)
class ExpertUse:
    """Of one bank since its slots were made: a change of budget makes new ones."""

    # The stacked weights of a layer.
    weights: tuple[str, ...]
    experts: int
    slots: int
    calls: int
    hits: int
    misses: int

    @property
    def hit_rate(self) -> float | None:
        """Of what was asked for, what was in a slot; None before anything was."""
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


def measured_hit_rates(session: Session, plan: Plan | None) -> dict[str, HitRates]:
    """By the first weight of each bank that was used enough. Waits for the device."""
    found: dict[str, HitRates] = {}
    for number, use in enumerate(expert_uses(session, plan)):
        if use.calls < _ENOUGH_CALLS:
            continue
        slots = sorted({max(1, round(part * use.experts)) for part in _PARTS})
        played = session.expert_hits(number, slots)
        if all(uses for _, uses in played):
            # How many of one call's are hits: banks are asked for other numbers of experts.
            calls = _logged_calls(use.calls)
            points = ((count, hits / calls) for count, (hits, _) in zip(slots, played, strict=True))
            found[use.weights[0]] = HitRates(((0, 0.0), *points))
    return found


def _logged_calls(calls: int) -> int:
    """That count: a log has the last 256, of which the first quarter warms up."""
    logged = min(calls, 256)
    return logged - logged // 4
