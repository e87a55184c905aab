"""Programs and helpers for the tests of penstock.Module: small models, and what a module of one should do."""

from __future__ import annotations

import ctypes
import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from examples.decoder import TINY, methods
from torch import Tensor, nn
from torch.export import Dim

import penstock
from penstock.errors import BelowFloorError
from penstock.plan.plan import Traffic
from penstock.program import Program
from penstock.runtime.driver import Driver, open_soft_driver
from penstock.schedule import Schedule
from penstock.weights import read_index, write_ptd
from tests.harness import bits, compiled, leaves, offloaded
from tests.native.driver import wrap
from tests.runtime.soft import Failure, SoftHooks

PAGE = 4096
EVERYTHING = "1TiB"
STAGING_CAP_BYTES = 16 * PAGE

# How a module can be set up. What a run must give is the same for all.
SETUPS: dict[str, dict[str, Any]] = {
    "registered": {},
    "staged": {"host_memory": STAGING_CAP_BYTES},
    "lru": {"placement": "lru"},
}

# No weight but the norms' is smaller than a page, and most do not end on one.
DECODER = dataclasses.replace(TINY, hidden=72, ff=160, vocab=300)
PROMPT = 8
CHAIN_WIDTH = 160
CHAIN_BAKED_BYTES = 450 * 1024
GATE_WIDTH = 80


class Chain(nn.Module):
    """A weight with two names, and a fused kernel that reads three weights."""

    def __init__(self, width: int = CHAIN_WIDTH, rows: int = 12) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.middle = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(5)))
        self.again = nn.Linear(width, width, bias=False)
        self.again.weight = self.first.weight
        self.last = nn.Linear(width, width // 2)
        for name in ("scale", "shift", "gain"):
            self.register_parameter(name, nn.Parameter(torch.randn(rows, width)))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.first(x)
        h = ((h.unsqueeze(1) * self.scale + self.shift).relu() * self.gain).sum(1)
        h = self.last(self.again(self.middle(h)))
        return {"hidden": h, "sum": h.sum(-1)}


class Gate(nn.Module):
    """Weights that are read inside a branch, and state whose first value is not zero."""

    def __init__(self, width: int = GATE_WIDTH) -> None:
        super().__init__()
        self.before = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
        self.yes = nn.Linear(width, width, bias=False)
        self.no = nn.Linear(width, width, bias=False)
        self.after = nn.Sequential(*(nn.Linear(width, width) for _ in range(3)))
        self.register_buffer("total", torch.arange(1.0, width + 1))

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        h = torch.cond(x.sum() > 0, lambda h: h @ self.yes.weight, lambda h: h @ self.no.weight, (h,))
        h = self.after(h)
        self.total.add_(h.sum(0))
        return h * self.total


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make()


def _compile_decoder(folder: Path) -> None:
    cases = methods(DECODER, prompt=PROMPT)
    compiled(folder, {name: offloaded(case.module, case.args, case.dynamic_shapes) for name, case in cases.items()})


def _compile_chain(folder: Path) -> None:
    # A number of rows without a highest value: there is no automatic budget for this one.
    program = offloaded(_seeded(Chain), (torch.ones(3, CHAIN_WIDTH),), ({0: Dim("rows")},))
    compiled(folder, program, weight_offload_budget=CHAIN_BAKED_BYTES)


def _compile_gate(folder: Path) -> None:
    compiled(folder, offloaded(_seeded(Gate), (torch.ones(2, GATE_WIDTH),)))


COMPILERS: dict[str, Callable[[Path], None]] = {
    "decoder": _compile_decoder,
    "chain": _compile_chain,
    "gate": _compile_gate,
}

# ---- calls

Call = tuple[str, tuple[Tensor, ...]]


def random_input(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def prefill(length: int = PROMPT) -> Call:
    return "prefill", ((torch.arange(length) * 7 % DECODER.vocab)[None].clone(), torch.arange(length))


def decode(token: int, position: int) -> Call:
    return "decode", (torch.tensor([[token]]), torch.tensor([position]))


# Methods follow themselves and each other, and shapes change: runs that find the ring as they left it, and others.
SCRIPTS: dict[str, list[Call]] = {
    "decoder": [
        prefill(),
        *(decode(11 * k, PROMPT + k) for k in range(3)),
        prefill(5),
        decode(5, 5),
        prefill(2),
        prefill(12),
        *(decode(17 * k, 12 + k) for k in range(4)),
    ],
    "chain": [("forward", (random_input(rows, CHAIN_WIDTH, seed=rows),)) for rows in (3, 1, 17, 3, 2)],
    "gate": [("forward", (sign * random_input(2, GATE_WIDTH).abs(),)) for sign in (1, -1, -1, 1)],
}


def play(run: Callable[..., Any], script: Sequence[Call]) -> list[list[Tensor]]:
    """The bytes of every output of every call."""
    return [[bits(leaf) for leaf in leaves(run(method, *arguments))] for method, arguments in script]


def same(ours: Sequence[Sequence[Tensor]], theirs: Sequence[Sequence[Tensor]]) -> bool:
    return len(ours) == len(theirs) and all(
        len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
        for a, b in zip(ours, theirs, strict=True)
    )


def generate(run: Callable[..., Any], steps: int) -> tuple[list[int], list[Tensor]]:
    """Greedy: every token depends on all that came before, through the cache."""
    method, arguments = prefill()
    logits = [run(method, *arguments)]
    tokens: list[int] = []
    for step in range(steps):
        tokens.append(int(logits[-1].argmax()))
        method, arguments = decode(tokens[-1], PROMPT + step)
        logits.append(run(method, *arguments))
    return tokens, [bits(row) for row in logits]


# ---- what a module should have counted


class LruModel:
    """The least-recently-used policy once more, over names: what it copies and what it finds."""

    def __init__(self, program: Program, budget_bytes: int) -> None:
        self._pages = {weight.name: -(-weight.nbytes // PAGE) for weight in program.weights}
        self._nbytes = {weight.name: weight.nbytes for weight in program.weights}
        self._room_pages = budget_bytes // PAGE
        accesses = [access for method in program.methods for access in method.schedule.accesses]
        self._pinned = {access.weight for access in accesses if access.pinned}
        self._last_use: dict[str, int] = {}
        self._unread: set[str] = set()
        self._readers: Counter[str] = Counter()
        self._clock = 0
        self._copied: list[str] = []
        for weight in program.weights:
            if weight.name in self._pinned:
                assert self._place(weight.name)
        self._unread.clear()

    @property
    def held(self) -> list[str]:
        return list(self._last_use)

    def run(self, schedule: Schedule) -> Traffic:
        self._copied = []
        hit_bytes = 0
        for index in range(len(schedule.steps)):
            for position, access in enumerate(schedule.accesses):
                if schedule.first_step[access.number] == index:
                    following = schedule.accesses[(position + 1) % len(schedule.accesses)]
                    hit_bytes += self._lend(access.weight, following.weight)
            for access in schedule.accesses:
                self._readers[access.weight] -= schedule.last_step[access.number] == index
        return Traffic(sum(self._nbytes[name] for name in self._copied), len(self._copied), hit_bytes, 0)

    def _lend(self, name: str, following: str) -> int:
        if name not in self._last_use:
            assert self._place(name), f"no room for {name}"
        hit = name not in self._unread
        self._unread.discard(name)
        self._readers[name] += 1
        self._touch(name)
        if following not in self._last_use:
            self._place(following)
        return self._nbytes[name] if hit else 0

    def _place(self, name: str) -> bool:
        while sum(self._pages[held] for held in self._last_use) + self._pages[name] > self._room_pages:
            idle = [held for held in self._last_use if not self._readers[held] and held not in self._pinned]
            if not idle:
                return False
            victim = min(idle, key=self._last_use.__getitem__)
            del self._last_use[victim]
            self._unread.discard(victim)
        self._copied.append(name)
        self._unread.add(name)
        self._touch(name)
        return True

    def _touch(self, name: str) -> None:
        self._clock += 1
        self._last_use[name] = self._clock


class Watched:
    """Runs a module and says after every run what it should have counted (S7), and what it should hold (S4).

    The module has not run yet, or its last run failed.
    """

    def __init__(self, module: penstock.Module) -> None:
        self.module = module
        before = module.stats()
        self.runs = before.runs
        self.total = traffic(before)
        self._most_bytes = 0
        self.budget_changed()

    def budget_changed(self, tried_bytes: int = 0) -> None:
        """`tried_bytes`: a budget whose plan was begun and given up."""
        self._most_bytes = max(self._most_bytes, self.module.budget_bytes, tried_bytes)
        self._owner: str | None = None
        self._lru = None if self.module.plan else LruModel(self.module.program, self.module.budget_bytes)

    def run_failed(self) -> None:
        """Of the planned policy: the next run finds nothing in place."""
        assert self._lru is None
        self._owner = None

    def __call__(self, method: str, *arguments: Any) -> Any:
        result = self.run_on(method, *arguments)
        self.check()
        return result

    def run_on(self, method: str, *arguments: Any) -> Any:
        """Without waiting for anything: copies for the next run may be under way when it begins."""
        result = self.module.run_method(method, *arguments)
        self.has_run(method)
        return result

    def has_run(self, method: str) -> None:
        """Called by run_on; and by a test for a run that was made elsewhere."""
        self._last = self._expected(method)
        self.runs += 1
        self.total = Traffic(*(getattr(self.total, name) + getattr(self._last, name) for name in _TRAFFIC))

    def check(self) -> None:
        assert traffic(self.module.last_run) == self._last
        assert traffic(self.module.stats()) == self.total
        assert (self.module.last_run.runs, self.module.stats().runs) == (1, self.runs)
        check_memory(self.module, self._most_bytes)
        if self._lru:
            self._check_pool(self._lru.held)

    def _check_pool(self, held: Sequence[str]) -> None:
        sizes = {weight.name: weight.nbytes for weight in self.module.program.weights}
        counts = hooks(self.module).counts()
        # The soft pool rounds nothing; the module counts with the page that a device's pool may round to.
        assert (counts.pool_allocations, counts.pool_bytes) == (len(held), sum(sizes[name] for name in held))
        assert self.module.device_memory()[0] == sum(-(-sizes[name] // PAGE) * PAGE for name in held)

    def _expected(self, method: str) -> Traffic:
        if self._lru:
            return self._lru.run(self.module.program.method(method).schedule)
        assert self.module.plan is not None
        planned = self.module.plan.method(method)
        warm, self._owner = self._owner == method, method
        return planned.warm if warm else planned.cold


_TRAFFIC = [field.name for field in dataclasses.fields(Traffic)]


def traffic(stats: Any) -> Traffic:
    return Traffic(stats.bytes_streamed, stats.copies, stats.bytes_hit, stats.bytes_in_place, stats.bytes_decoded)


def check_memory(module: penstock.Module, most_bytes: int | None = None) -> None:
    """What the module says it holds is what its driver has given out, and within the budget (S4). `most_bytes`: the
    largest budget it has had."""
    counts = hooks(module).counts()
    held_bytes, peak_bytes = module.device_memory()
    assert held_bytes <= module.budget_bytes
    assert 0 < peak_bytes <= (most_bytes or module.budget_bytes)
    if module.plan is None:
        assert counts.block_bytes == 0 and counts.pools == 1 and counts.pool_bytes <= peak_bytes
    else:
        assert (counts.block_bytes, counts.peak_block_bytes, counts.pool_bytes) == (held_bytes, peak_bytes, 0)
        assert held_bytes == module.plan.device_bytes
    assert counts.peak_host_bytes <= STAGING_CAP_BYTES
    assert counts.host_bytes == (module.host_bytes if counts.host_bytes else 0)


def floor_of(path: Path, **options: Any) -> int:
    try:
        penstock.Module(path, 0, **options)
    except BelowFloorError as error:
        return error.floor_bytes
    raise AssertionError("a budget of 0 bytes was enough")


def at_the_floor(path: Path, **options: Any) -> penstock.Module:
    return penstock.Module(path, floor_of(path, **options), **options)


def budgets(module: penstock.Module, steps: int = 4) -> list[int]:
    """From the floor to everything, for the module's policy; not all of them whole pages."""
    floor, full = module.floor_bytes, module.budget_bytes
    assert floor < full
    return [floor, *(floor + (full - floor) * k // steps for k in range(1, steps)), full]


# ---- the soft driver under a module


def open_wrapped_driver(page_bytes: int, *, capacity_bytes: int = 0, poison: bool = False) -> Driver:
    """Stands in for open_soft_driver: what hooks() needs."""
    driver = open_soft_driver(page_bytes, capacity_bytes=capacity_bytes, poison=poison)
    assert driver.handle is not None
    driver.handle = wrap(driver.handle)
    return driver


def hooks(module: penstock.Module | Driver) -> SoftHooks:
    """The functions for tests of a wrapped driver."""
    driver = module._driver if isinstance(module, penstock.Module) else module
    assert driver.handle is not None
    return SoftHooks(driver.handle)


class KeptDriver(Driver):
    """Outlives its module, so that what the module left behind can be counted."""

    closed = False

    def close(self) -> None:
        self.closed = True

    def destroy(self) -> None:
        super().close()


class KeptDrivers:
    """Stands in for open_soft_driver."""

    def __init__(self) -> None:
        self.made: list[KeptDriver] = []
        self.capacity_bytes = 0
        self._fail: tuple[int, Failure, str] | None = None

    def fail_at(self, n: int, call: str, failure: Failure = Failure.NONE) -> None:
        """Of the driver that is made next."""
        self._fail = (n, failure, call)

    def open(self, page_bytes: int, *, capacity_bytes: int = 0, poison: bool = False) -> Driver:
        made = open_wrapped_driver(page_bytes, capacity_bytes=capacity_bytes or self.capacity_bytes, poison=poison)
        assert made.handle is not None
        self.made.append(KeptDriver(made.handle))
        made.handle = None  # it has another owner now
        if self._fail:
            hooks(self.made[-1]).fail_at(*self._fail)
            self._fail = None
        return self.made[-1]

    @property
    def last(self) -> SoftHooks:
        return hooks(self.made[-1])

    def check(self) -> None:
        """Every module has closed its driver, and left nothing in it."""
        for driver in self.made:
            assert driver.closed
            assert not hooks(driver).counts().alive()

    def destroy(self) -> None:
        for driver in self.made:
            # A module that a failed test left open would still use its own.
            if driver.closed:
                driver.destroy()


# ---- files


def rewrite_weights(
    program: Program,
    source: Path,
    target: Path,
    *,
    change: Mapping[str, Any] | None = None,
    leave_out: str = "",
    value: Callable[[str, bytes], bytes] = lambda name, content: content,
    identity: str | None = None,
) -> Path:
    """The weights file once more; `change` are the fields of one weight: {"name": ..., "shape": ...}."""
    index = read_index(source)
    content = source.read_bytes()

    def stored(name: str) -> bytes:
        entry = index[name]
        return value(name, content[entry.offset_bytes : entry.offset_bytes + entry.length_bytes])

    weights = [
        dataclasses.replace(weight, **change) if change and weight.name == change["name"] else weight
        for weight in program.weights
        if weight.name != leave_out
    ]
    write_ptd(
        target, weights, lambda item: [stored(item.name)], states=program.states, identity=identity or program.identity
    )
    return target


def other_values(name: str, content: bytes) -> bytes:
    """Values that another training might have given: as many floats, none of them the same."""
    floats = torch.frombuffer(bytearray(content), dtype=torch.float32)
    changed = floats * -0.5 + 0.01
    return ctypes.string_at(changed.data_ptr(), changed.nbytes)
