"""Rules for which expert leaves a slot, on made routings, beside a clairvoyant one: hit rates with 13, 26 and 48 slots
for 128 experts.

    python -m bench.expert_rules [--tokens 900] [--rules lru,16,64,256,clairvoyant] [--out FILE.json]

A number is after how many tokens a use counts half. The first hundred tokens do not count. --out stores the rates.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.experts.routed import Shape, routing

SLOTS = (13, 26, 48)
WARM_TOKENS = 100
ROUTINGS = ((0.6, 0), (0.3, 0), (0.3, 5))
SEEDS = (0, 1)

# Of an expert: what it counts at a token, given when it was used before that. The least leaves.
Rule = Callable[[list[int], int], float]


def last_use(uses: list[int], now: int) -> float:
    return uses[-1]


def halving(tokens: int) -> Rule:
    """In steps, as the tables of the core have it, and of equals the last use."""

    def count(uses: list[int], now: int) -> float:
        recent = uses[-40 * tokens :]
        return sum(0.5 ** (now // tokens - use // tokens) for use in recent) + uses[-1] * 1e-9

    return count


def hits(trace: Sequence[Sequence[int]], slots: int, rule: Rule) -> float:
    held: set[int] = set()
    uses: dict[int, list[int]] = {}
    found = asked = 0
    for now, wanted in enumerate(trace):
        if now >= WARM_TOKENS:
            found += len(held.intersection(wanted))
            asked += len(wanted)
        for expert in wanted:
            uses.setdefault(expert, []).append(now)
        for expert in wanted:
            if expert in held:
                continue
            if len(held) >= slots:
                free = held.difference(wanted)
                if not free:
                    continue
                held.remove(min(free, key=lambda one: rule(uses[one], now)))
            held.add(expert)
    return found / asked


def clairvoyant_hits(trace: Sequence[Sequence[int]], slots: int) -> float:
    """Whoever is asked for last leaves; also who was just asked for."""
    never = len(trace)
    following: list[dict[int, int]] = []
    known: dict[int, int] = {}
    for now in range(len(trace) - 1, -1, -1):
        following.append({expert: known.get(expert, never) for expert in trace[now]})
        known.update(dict.fromkeys(trace[now], now))
    following.reverse()
    held: dict[int, int] = {}
    found = asked = 0
    for now, wanted in enumerate(trace):
        if now >= WARM_TOKENS:
            found += sum(expert in held for expert in wanted)
            asked += len(wanted)
        held.update(following[now])
        for expert in sorted(held, key=lambda one: -held[one])[: max(0, len(held) - slots)]:
            del held[expert]
    return found / asked


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=900)
    parser.add_argument("--rules", default="lru,16,64,256,clairvoyant")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    shape = Shape(layers=1, experts=128, top=8)
    traces = {
        (stay, drift): [
            routing(shape, given.tokens, stay=stay, seed=seed, drift=drift)[:, 0].tolist() for seed in SEEDS
        ]
        for stay, drift in ROUTINGS
    }
    rows = []
    for name in given.rules.split(","):
        cells = []
        for (stay, drift), some in traces.items():
            rates = []
            for slots in SLOTS:
                if name == "clairvoyant":
                    each = [clairvoyant_hits(trace, slots) for trace in some]
                else:
                    rule = last_use if name == "lru" else halving(int(name))
                    each = [hits(trace, slots, rule) for trace in some]
                rates.append(sum(each) / len(each))
            rows.append({"rule": name, "stay": stay, "drift": drift, "hit_rates": dict(zip(SLOTS, rates, strict=True))})
            cells.append(", ".join(f"{rate:.2f}" for rate in rates))
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    if given.out is not None:
        made = {"experts": shape.experts, "top": shape.top, "tokens": given.tokens, "warm_tokens": WARM_TOKENS}
        given.out.write_text(json.dumps(made | {"seeds": SEEDS, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
