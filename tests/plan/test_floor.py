from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.plan.floor import Floor, floor_bytes
from penstock.schedule import Access, Schedule, Step
from penstock.weight import Weight

PAGE = 2 * 2**20


def weights_of(**nbytes: int) -> dict[str, Weight]:
    return {name: Weight(name, "uint8", (size,), (0,)) for name, size in nbytes.items()}


def chain(*steps: str, method: str = "forward") -> Schedule:
    """chain("a", "b c") has two steps; the second reads two weights. Every use is an access of its own."""
    accesses: list[Access] = []
    emitted: list[Step] = []
    for index, names in enumerate(steps):
        fetched = [Access(len(accesses) + k, name) for k, name in enumerate(names.split())]
        accesses += fetched
        emitted.append(Step(f"k{index}", tuple(access.number for access in fetched)))
    return Schedule(method, tuple(accesses), tuple(emitted))


# ---- by hand


def test_the_worst_pair_and_the_copy_after_it() -> None:
    # Pairs and what follows them: ab+c 111, bc+d 1110, cd+a 1101, da+b 1011.
    floor = floor_bytes([chain("a", "b", "c", "d")], weights_of(a=1, b=10, c=100, d=1000))
    assert floor == Floor(1110, 0, 1110, "forward", 1, ("b", "c"), "d")


def test_wraps_from_the_last_step_to_the_first() -> None:
    # The head and the embedding meet between two runs: nothing within one run is as large.
    floor = floor_bytes([chain("embedding", "x", "y", "prefix")], weights_of(embedding=500, x=5, y=4, prefix=500))
    assert floor == Floor(1005, 0, 1005, "forward", 3, ("embedding", "prefix"), "x")


def test_of_equal_steps_the_first_is_named() -> None:
    floor = floor_bytes([chain("a", "b", "c", "d")], weights_of(a=5, b=5, c=5, d=5))
    assert (floor.floor_bytes, floor.step_index, floor.pair, floor.next_copy) == (15, 0, ("a", "b"), "c")


def test_no_schedule_and_an_empty_one_need_nothing() -> None:
    nothing = Floor(0, 0, 0, None, None, (), None)
    assert floor_bytes([], {}) == nothing
    assert floor_bytes([Schedule("forward", (), ())], weights_of(a=7)) == nothing


def test_one_step_meets_itself_in_the_next_run() -> None:
    floor = floor_bytes([chain("a b a")], weights_of(a=3, b=4))
    assert floor == Floor(7, 0, 7, "forward", 0, ("a", "b"), None)


def test_two_steps_hold_everything_and_copy_nothing() -> None:
    floor = floor_bytes([chain("a", "b")], weights_of(a=3, b=4))
    assert floor == Floor(7, 0, 7, "forward", 0, ("a", "b"), None)


def test_a_weight_counts_once_however_often_it_is_accessed() -> None:
    floor = floor_bytes([chain("a", "a", "a b", "b a")], weights_of(a=100, b=1))
    assert floor.floor_bytes == 101


def test_next_copy_skips_what_is_already_held() -> None:
    # After (a, b) come a and b again: both held. The next copy is d.
    floor = floor_bytes([chain("a", "b", "a", "b", "d")], weights_of(a=20, b=10, d=5))
    assert floor == Floor(35, 0, 35, "forward", 0, ("a", "b"), "d")


def test_next_copy_is_looked_for_after_all_accesses_of_the_second_step() -> None:
    # Step 1 fetches b and c; the copy after (0, 1) is d, not c.
    floor = floor_bytes([chain("a", "b c", "d", "e")], weights_of(a=1000, b=1, c=1, d=300, e=1))
    assert floor == Floor(1302, 0, 1302, "forward", 0, ("a", "b", "c"), "d")


def test_next_copy_is_the_first_of_the_step_that_fetches_several() -> None:
    floor = floor_bytes([chain("a", "b", "c d", "e")], weights_of(a=100, b=100, c=1, d=2, e=1))
    assert floor == Floor(201, 0, 201, "forward", 0, ("a", "b"), "c")


def test_a_lent_weight_stays_through_the_steps_between_its_readers() -> None:
    # a is read by steps 0 and 3, so it is held beside (b, c) and c's follower too.
    accesses = tuple(Access(number, name) for number, name in enumerate("abcde"))
    steps = (Step("k0", (0,)), Step("k1", (1,)), Step("k2", (2,)), Step("k3", (0, 3)), Step("k4", (4,)))
    floor = floor_bytes([Schedule("forward", accesses, steps)], weights_of(a=1000, b=50, c=60, d=70, e=1))
    assert floor == Floor(1180, 0, 1180, "forward", 1, ("a", "b", "c"), "d")


def test_a_step_that_fetches_nothing_new_looks_past_itself() -> None:
    # Step 1 reads only what step 0 fetched: the copy after (0, 1) is what step 2 fetches.
    accesses = (Access(0, "a"), Access(1, "b"), Access(2, "c"))
    steps = (Step("k0", (0,)), Step("k1", (0,)), Step("k2", (1,)), Step("k3", (2,)))
    floor = floor_bytes([Schedule("forward", accesses, steps)], weights_of(a=100, b=30, c=1))
    assert floor == Floor(131, 0, 131, "forward", 1, ("a", "b"), "c")


def test_a_weight_without_bytes_is_not_a_copy() -> None:
    floor = floor_bytes([chain("a", "b", "none", "c", "d")], weights_of(a=40, b=40, none=0, c=30, d=1))
    assert floor == Floor(110, 0, 110, "forward", 0, ("a", "b"), "c")


def test_only_weights_without_bytes() -> None:
    assert floor_bytes([chain("a", "b", "c")], weights_of(a=0, b=0, c=0)) == Floor(0, 0, 0, None, None, (), None)


def test_resident_is_packed_at_256_bytes_and_leaves_the_transient_part() -> None:
    floor = floor_bytes(
        [chain("a", "b", "c", "d")], weights_of(a=1, b=10, c=100, d=1000), resident=frozenset({"b", "c"})
    )
    # (c, d) and (d, a) are {d, a} or {d} + a: 1001 all the same.
    assert (floor.resident_bytes, floor.transient_bytes, floor.floor_bytes) == (512, 1001, 1513)


def test_everything_resident_streams_nothing() -> None:
    floor = floor_bytes([chain("a", "b")], weights_of(a=256, b=1), resident=frozenset({"a", "b"}))
    assert floor == Floor(512, 512, 0, None, None, (), None)


def test_a_resident_weight_that_no_schedule_reads_still_takes_its_bytes() -> None:
    assert floor_bytes([chain("a")], weights_of(a=1, unread=256), resident=frozenset({"unread"})).floor_bytes == 257


def test_direct_needs_no_bytes() -> None:
    floor = floor_bytes([chain("a", "b", "c", "d")], weights_of(a=1, b=10, c=100, d=1000), direct=frozenset({"d"}))
    assert floor.floor_bytes == 111


def test_direct_can_raise_the_floor() -> None:
    """Not monotone, and rightly so: without the small weight in between, the copy in flight is the large one."""
    weights = weights_of(a=50, b=50, small=1, large=90, z=1, y=1)
    schedules = [chain("a", "b", "small", "large", "z", "y")]
    assert floor_bytes(schedules, weights).floor_bytes == 141
    assert floor_bytes(schedules, weights, direct=frozenset({"small"})).floor_bytes == 190


def test_pinned_is_resident_for_all_methods() -> None:
    weights = weights_of(p=300, a=10, b=20, c=30)
    pinning = Schedule("prefill", (Access(0, "a"), Access(1, "p", pinned=True)), (Step("k0", (0,)), Step("k1", (1,))))
    # decode's own access of p is not pinned, but the weight is in place all the time all the same.
    decode = chain("a", "p", "b", "c", method="decode")
    floor = floor_bytes([pinning, decode], weights)
    # The step that reads only p streams nothing, but it is a step: (a, p)+b 30, (p, b)+c 50, (b, c)+a 60, (c, a)+b 60.
    assert floor == Floor(512 + 60, 512, 60, "decode", 2, ("b", "c"), "a")


def test_methods_share_residents_and_take_turns_with_the_rest() -> None:
    weights = weights_of(r=256, a=100, b=200, c=300)
    prefill, decode = chain("r", "a", "b", method="prefill"), chain("r", "c", "a", method="decode")
    floor = floor_bytes([prefill, decode], weights, resident=frozenset({"r"}))
    assert (floor.floor_bytes, floor.resident_bytes, floor.method) == (256 + 400, 256, "decode")
    alone = floor_bytes([prefill], weights, resident=frozenset({"r"}))
    assert alone.floor_bytes == 256 + 300


def test_pages_round_each_streamed_weight_and_all_residents_together() -> None:
    weights = weights_of(a=1, b=PAGE, c=PAGE + 1, r1=10, r2=10)
    floor = floor_bytes([chain("a", "b", "c", "r1", "r2")], weights, granularity_bytes=PAGE)
    assert floor.floor_bytes == 4 * PAGE  # b 1, c 2, r1 1: each rounded up on its own
    held = floor_bytes(
        [chain("a", "b", "c", "r1", "r2")], weights, resident=frozenset({"r1", "r2"}), granularity_bytes=PAGE
    )
    assert (held.resident_bytes, held.transient_bytes) == (PAGE, 4 * PAGE)


def test_one_byte_more_is_one_byte_more() -> None:
    schedules = [chain("a", "b", "c", "d")]
    sizes = {"a": 1, "b": 10, "c": 100, "d": 1000}
    before = floor_bytes(schedules, weights_of(**sizes)).floor_bytes
    for name, more in (("a", 0), ("b", 1), ("c", 1), ("d", 1)):
        after = floor_bytes(schedules, weights_of(**{**sizes, name: sizes[name] + 1})).floor_bytes
        assert after == before + more


# ---- refusals


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (Schedule("m", (Access(0, "a"), Access(0, "b")), (Step("k", (0,)),)), "not unique"),
        (Schedule("m", (Access(0, "zzz"),), (Step("k", (0,)),)), "'zzz', which is not a weight"),
        (Schedule("m", (Access(0, "a"), Access(1, "b")), (Step("k", (0,)),)), r"access 1 \('b'\) is read by no step"),
        (Schedule("m", (Access(0, "a"),), (Step("k", (0, 9)),)), "step 0 reads access 9, which is never called"),
        (
            Schedule("m", (Access(0, "a"), Access(1, "b")), (Step("k", (1,)), Step("l", (0,)))),
            r"access 1 \('b'\) is first read by step 0, but is called after",
        ),
    ],
)
def test_a_schedule_that_breaks_its_own_rules_is_refused(schedule: Schedule, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        floor_bytes([schedule], weights_of(a=1, b=1))


def test_contradictory_placements_are_refused() -> None:
    weights = weights_of(a=1, b=1)
    with pytest.raises(ValueError, match="not a weight: 'x'"):
        floor_bytes([chain("a")], weights, resident=frozenset({"x"}))
    with pytest.raises(ValueError, match="direct, but resident or pinned as well: 'a'"):
        floor_bytes([chain("a")], weights, resident=frozenset({"a"}), direct=frozenset({"a"}))
    pinning = Schedule("m", (Access(0, "b", pinned=True),), (Step("k", (0,)),))
    with pytest.raises(ValueError, match="direct, but resident or pinned as well: 'b'"):
        floor_bytes([pinning], weights, direct=frozenset({"b"}))
    with pytest.raises(ValueError, match="granularity_bytes is 0"):
        floor_bytes([chain("a")], weights, granularity_bytes=0)


# ---- against a simulation


def simulated_transient_bytes(schedule: Schedule, pages: dict[str, int], *, copied: set[str]) -> int:
    """Peak of a device that is watched over two runs, with two more unrolled behind them to look ahead into.

    Nothing here knows about pairs or cycles: there is a clock, uses that begin and end, and a queue of calls.
    """
    count = len(schedule.steps)
    uses: list[tuple[int, int, str]] = []
    calls: list[tuple[int, str]] = []
    for run in range(4):
        for access in schedule.accesses:
            reads = [run * count + i for i, step in enumerate(schedule.steps) if access.number in step.accesses]
            uses.append((min(reads), max(reads), access.weight))
            calls.append((min(reads), access.weight))

    device: set[str] = set()
    peak_bytes = 0
    for clock in range(2 * count):
        running = {name for begin, end, name in uses if begin <= clock <= end and name in copied}
        launched = {name for begin, end, name in uses if begin <= clock + 1 <= end and name in copied}
        device &= running | launched
        device |= running | launched
        queue = [name for time, name in calls if time > clock + 1]
        for name in queue:
            if name in copied and name not in device and pages[name] > 0:
                device.add(name)
                break
        peak_bytes = max(peak_bytes, sum(pages[name] for name in device))
    return peak_bytes


@st.composite
def schedules_over(draw: st.DrawFn, names: list[str], method: str = "forward") -> Schedule:
    accesses: list[Access] = []
    steps: list[Step] = []
    # Numbers are any order of labels: the floor must not take them for positions.
    factor, offset = draw(st.integers(1, 22)), draw(st.integers(0, 22))
    numbers = [(factor * position + offset) % 23 for position in range(23)]
    for index in range(draw(st.integers(0, 7))):
        earlier = [access.number for access in accesses]
        fetched = draw(st.lists(st.sampled_from(names), min_size=0 if earlier else 1, max_size=3))
        lent = draw(st.lists(st.sampled_from(earlier), max_size=2, unique=True)) if earlier else []
        if not fetched and not lent:
            lent = [earlier[-1]]
        new = [Access(numbers[len(accesses) + k], name, draw(st.integers(0, 9)) == 0) for k, name in enumerate(fetched)]
        accesses += new
        steps.append(Step(f"k{index}", (*lent, *(access.number for access in new))))
    return Schedule(method, tuple(accesses), tuple(steps))


NAMES = ["a", "b", "c", "d", "e", "f"]
SIZES = st.fixed_dictionaries({name: st.integers(0, 40) for name in NAMES})
SUBSETS = st.frozensets(st.sampled_from(NAMES))


def pinned_names(*schedules: Schedule) -> set[str]:
    return {access.weight for schedule in schedules for access in schedule.accesses if access.pinned}


@settings(max_examples=250, deadline=None)
@given(
    schedule=schedules_over(NAMES),
    other=schedules_over(NAMES, "other"),
    sizes=SIZES,
    resident=SUBSETS,
    direct=SUBSETS,
    granularity=st.sampled_from([1, 7, 16, 512]),
)
def test_equals_the_simulation(
    schedule: Schedule,
    other: Schedule,
    sizes: dict[str, int],
    resident: frozenset[str],
    direct: frozenset[str],
    granularity: int,
) -> None:
    pinned = pinned_names(schedule, other)
    direct -= resident | pinned
    floor = floor_bytes(
        [schedule, other], weights_of(**sizes), resident=resident, direct=direct, granularity_bytes=granularity
    )

    pages = {name: size + -size % granularity for name, size in sizes.items()}
    copied = set(NAMES) - resident - pinned - direct
    transient = max(simulated_transient_bytes(one, pages, copied=copied) for one in (schedule, other))
    end = 0
    for name in sorted(resident | pinned):
        begin = end + -end % 256
        end = begin + sizes[name]
    slots = end + -end % 256
    assert floor.transient_bytes == transient
    assert floor.resident_bytes == slots + -slots % granularity
    assert floor.floor_bytes == floor.resident_bytes + floor.transient_bytes
    # What it says sets the floor does add up to it.
    named = [*floor.pair, *([] if floor.next_copy is None else [floor.next_copy])]
    assert len(set(named)) == len(named)
    assert sum(pages[name] for name in named) == transient
    assert (floor.method is None) == (floor.step_index is None) == (transient == 0)


# ---- what is truly monotone


@settings(max_examples=60, deadline=None)
@given(schedule=schedules_over(NAMES), sizes=SIZES, resident=SUBSETS, more=SUBSETS)
def test_more_residents_never_lower_the_floor_at_byte_granularity(
    schedule: Schedule, sizes: dict[str, int], resident: frozenset[str], more: frozenset[str]
) -> None:
    weights = weights_of(**sizes)
    few = floor_bytes([schedule], weights, resident=resident)
    many = floor_bytes([schedule], weights, resident=resident | more)
    assert many.floor_bytes >= few.floor_bytes
    assert many.resident_bytes >= few.resident_bytes


def test_more_residents_do_lower_the_floor_where_pages_are_large() -> None:
    """Why small weights are packed: three of them take a page each when streamed, one page when resident."""
    weights = weights_of(a=8192, b=8192, c=8192, d=8192)
    schedules = [chain("a", "b", "c", "d")]
    assert floor_bytes(schedules, weights, granularity_bytes=PAGE).floor_bytes == 3 * PAGE
    packed = floor_bytes(schedules, weights, resident=frozenset("abcd"), granularity_bytes=PAGE)
    assert packed.floor_bytes == PAGE


@settings(max_examples=60, deadline=None)
@given(schedule=schedules_over(NAMES), sizes=SIZES, grown=st.sampled_from(NAMES), by=st.integers(1, 50))
def test_a_larger_weight_never_lowers_the_floor(schedule: Schedule, sizes: dict[str, int], grown: str, by: int) -> None:
    sizes = {name: size + 1 for name, size in sizes.items()}  # from no bytes to some, it may: it becomes the next copy
    before = floor_bytes([schedule], weights_of(**sizes)).transient_bytes
    after = floor_bytes([schedule], weights_of(**{**sizes, grown: sizes[grown] + by})).transient_bytes
    assert before <= after <= before + by


@settings(max_examples=60, deadline=None)
@given(schedule=schedules_over(NAMES), other=schedules_over(NAMES, "other"), sizes=SIZES, factor=st.integers(1, 5))
def test_more_methods_and_coarser_pages_never_lower_the_floor(
    schedule: Schedule, other: Schedule, sizes: dict[str, int], factor: int
) -> None:
    weights = weights_of(**sizes)
    one = floor_bytes([schedule], weights)
    assert floor_bytes([schedule, other], weights).floor_bytes >= one.floor_bytes
    fine = floor_bytes([schedule], weights, granularity_bytes=3)
    coarse = floor_bytes([schedule], weights, granularity_bytes=3 * factor)
    assert one.floor_bytes <= fine.floor_bytes <= coarse.floor_bytes


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3), min_size=1, max_size=7),
    sizes=SIZES,
    turn=st.integers(0, 6),
)
def test_where_the_cycle_is_cut_does_not_matter(steps: list[list[str]], sizes: dict[str, int], turn: int) -> None:
    turn %= len(steps)
    as_given = chain(*(" ".join(step) for step in steps))
    rotated = chain(*(" ".join(step) for step in steps[turn:] + steps[:turn]))
    weights = weights_of(**sizes)
    assert floor_bytes([as_given], weights).floor_bytes == floor_bytes([rotated], weights).floor_bytes


@settings(max_examples=60, deadline=None)
@given(schedule=schedules_over(NAMES), sizes=SIZES)
def test_lies_between_the_largest_step_and_the_whole_model(schedule: Schedule, sizes: dict[str, int]) -> None:
    floor = floor_bytes([schedule], weights_of(**sizes))
    streamed = set(schedule.weight_names) - pinned_names(schedule)
    steps = [schedule.live_weights(index) & streamed for index in range(len(schedule.steps))]
    largest_step_bytes = max((sum(sizes[name] for name in step) for step in steps), default=0)
    assert largest_step_bytes <= floor.transient_bytes <= sum(sizes[name] for name in streamed)


# ---- real shapes


def llama_3_8b(*, fused_norms: bool) -> tuple[Schedule, dict[str, Weight]]:
    """Every launch of its own, or each norm read by the launch of the matmul that follows it."""
    hidden, kv, ff, vocabulary = 4096, 1024, 14336, 128256
    weights: dict[str, Weight] = {}
    steps: list[str] = []

    def step(name: str, *shape: int) -> None:
        weights[name] = Weight(name, "bfloat16", shape, tuple(range(len(shape))))
        if fused_norms and steps and steps[-1].endswith("norm"):
            steps[-1] += f" {name}"
        else:
            steps.append(name)

    step("embedding", vocabulary, hidden)
    for layer in range(32):
        step(f"{layer}.attention_norm", hidden)
        step(f"{layer}.q", hidden, hidden)
        step(f"{layer}.k", kv, hidden)
        step(f"{layer}.v", kv, hidden)
        step(f"{layer}.o", hidden, hidden)
        step(f"{layer}.mlp_norm", hidden)
        step(f"{layer}.gate", ff, hidden)
        step(f"{layer}.up", ff, hidden)
        step(f"{layer}.down", hidden, ff)
    step("norm", hidden)
    step("lm_head", vocabulary, hidden)
    return chain(*steps), weights


PREFIX_BYTES, MLP_BYTES, Q_BYTES, NORM_BYTES = 1_050_673_152, 117_440_512, 33_554_432, 8192


@pytest.mark.parametrize("granularity_bytes", [1, PAGE])
@pytest.mark.parametrize("norms_resident", [False, True])
@pytest.mark.parametrize("fused_norms", [False, True])
def test_llama_3_8b_is_within_its_limits(fused_norms: bool, norms_resident: bool, granularity_bytes: int) -> None:
    schedule, weights = llama_3_8b(fused_norms=fused_norms)
    assert sum(weight.nbytes for weight in weights.values()) == 16_060_522_496
    norms = frozenset(name for name in weights if name.endswith("norm")) if norms_resident else frozenset()
    streamed = floor_bytes([schedule], weights, resident=norms, granularity_bytes=granularity_bytes)
    direct = floor_bytes(
        [schedule], weights, resident=norms, direct=frozenset({"embedding"}), granularity_bytes=granularity_bytes
    )
    assert streamed.floor_bytes <= 2.23e9
    assert direct.floor_bytes <= 1.30e9


def test_llama_3_8b_exactly() -> None:
    schedule, weights = llama_3_8b(fused_norms=False)
    direct = frozenset({"embedding"})
    plain = floor_bytes([schedule], weights)
    assert plain.floor_bytes == 2 * PREFIX_BYTES + NORM_BYTES
    assert (plain.pair, plain.next_copy) == (("norm", "lm_head"), "embedding")
    plain = floor_bytes([schedule], weights, direct=direct)
    assert plain.floor_bytes == PREFIX_BYTES + MLP_BYTES + NORM_BYTES
    assert (plain.pair, plain.next_copy) == (("31.down", "norm"), "lm_head")


def test_llama_3_8b_with_norms_fused_and_resident_exactly() -> None:
    schedule, weights = llama_3_8b(fused_norms=True)
    norms = frozenset(name for name in weights if name.endswith("norm"))
    dense = floor_bytes([schedule], weights, resident=norms)
    assert dense.resident_bytes == 65 * NORM_BYTES
    assert dense.transient_bytes == 2 * PREFIX_BYTES + MLP_BYTES
    assert (dense.pair, dense.next_copy) == (("31.down", "lm_head"), "embedding")
    dense = floor_bytes([schedule], weights, resident=norms, direct=frozenset({"embedding"}))
    assert dense.transient_bytes == PREFIX_BYTES + 2 * MLP_BYTES
    assert (dense.pair, dense.next_copy) == (("31.up", "31.down"), "lm_head")


def test_ten_thousand_accesses_of_few_weights() -> None:
    # Two weights by turns, and the one other copy at the far end: a search that walks accesses would be quadratic.
    names = [("a", "b")[index % 2] for index in range(9_999)]
    floor = floor_bytes([chain(*names, "far")], weights_of(a=10, b=20, far=3))
    assert (floor.floor_bytes, floor.step_index, floor.next_copy) == (33, 0, "far")
    distinct = [f"w{index}" for index in range(10_000)]
    floor = floor_bytes([chain(*distinct)], weights_of(**{name: index for index, name in enumerate(distinct)}))
    assert floor.floor_bytes == 9_997 + 9_998 + 9_999
