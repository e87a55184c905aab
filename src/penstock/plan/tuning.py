"""Every number that tunes planning, and where it comes from. What a plan is and what makes it safe is said elsewhere.

"The record" is tests/plan/record: 15 programs at 12 budgets, on links of 12 to 55 GB/s beside GPUs of 1 and 4 TB/s.
"""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

# ---- What copies cost

# What one copy costs besides its bytes, in bytes of the link: 4 to 5 us of a link of 55 GB/s, measured on an H200. A
# copy of fewer bytes is mostly overhead, and is avoided where the budget leaves a choice.
COPY_OVERHEAD_BYTES = 256 * 1024
# A copy below this is held back for the pages after it, if it is also a small part of its stay.
PART_BYTES = 4 * 2**20
PART_OF_STAY = 8
# Room left for copies to run ahead, rather than spent on longer prefixes: 0.6 ms of a link of 55 GB/s, which bridges
# steps of uneven length. Never more than this part of the budget.
LOOKAHEAD_BYTES = 32 * 2**20
LOOKAHEAD_PART = 32
# Also never more than this part of what does not fit: it would cost more than the steps it bridges.
LOOKAHEAD_PART_OF_STREAM = 96

# ---- How much is tried. More of it takes longer and finds little: planning should take a second at most.

# A program with more accesses than this (Llama-3-8B has 291) gets less of everything that is tried more than once.
MANY_ACCESSES = 2_000
# Sizes grow by this factor from one candidate set to the next; the first size is this part of a page.
SIZE_FACTOR = 4
FIRST_PART_OF_PAGE = 256
# In short runs, a ring with a few pages more may be the only one that closes.
MORE_PAGES = 6
# How often weights kept between uses may turn out not to fit on the cycle, though their load does; and the part left
# free for that where accesses are many.
KEPT_ATTEMPTS = 4
KEPT_ROOM_PART = 48
# How often more is streamed because held weights share pages less well than expected.
SHARED_PAGES_ATTEMPTS = 8
# Where to cut the cycle is a guess; several are tried, those with the least load first. More where it costs little.
CUTS_AT_LEAST, CUTS_AT_MOST = 2, 64
RANGES_TIMES_CUTS = 8192

# ---- The search


class Trials(NamedTuple):
    """How many candidates are acted out: as many as have `accesses` in all, which bounds the time planning takes."""

    accesses: int
    most: int
    least: int = 3

    def of(self, access_count: int) -> int:
        return max(self.least, min(self.most, self.accesses // max(access_count, 1)))


# About a second for Llama-3-8B on two cores. With few accesses, 48 made a row of the record 1.4% slower than 120, and
# 1,000 at most 0.4% faster.
MEASURED_TRIALS = Trials(accesses=25_000, most=120)
# Without measured times each candidate is acted out on several machines. With few accesses, more candidates than this
# gain nothing.
NOMINAL_TRIALS = Trials(accesses=3_000, most=24)
# The factor from one cap to the next. On five rows of the record, 1.2 changed no time by more than 0.1%.
CAP_FACTOR = 1.3
# Places that are tried for the beginning of the ring.
CUTS = 8
# This part of the trials is left for neighbours of the best. Besides changes by single pages, neighbours have these
# multiples of a candidate's room and cap, and other caps down to that part of its own. Where nothing was measured,
# candidates have the usual room or more. As first chosen; none was measured by itself.
NEIGHBOURS_SHARE = 2
NEXT_AHEAD_TIMES = (0.25, 0.5, 2, 4)
NEXT_CAP_TIMES = (0.875, 1.125)
LEAST_CAP_PART = 3
AHEAD_TIMES = (1, 2, 4)
# Candidates whose neighbours are tried. With six, one of five rows of the record was 0.3% faster, at twice the time.
CLIMBS = 3
# Where accesses are few, plans for this many smaller budgets are looked at too, page by page. The number falls with the
# cube of the accesses, since each plan takes as long as the first, and luck counts for less.
SMALLER_BUDGETS = Trials(accesses=100_000, most=24, least=0)
# Plans within this factor of the fastest are equally fast.
AS_FAST = 1.0002

# ---- Reading over the link

# This many of the largest weight sizes are tried as the smallest size that is read in place. The largest weights are
# those that make a ring long.
SIZES_TRIED = 6
# This many of the resulting drafts are worked out.
DRAFTS_KEPT = 2
# Parts of the pages that neither the ring nor a cap asks for, tried for other rows of the menu.
MEASURED_PARTS = (0.0, 0.25, 0.5, 0.75, 1.0)
# A prefix with this many rows or more has a multiple of them: the tiles of the kernel have 64 or 128, and none is cut.
PREFIX_GRAIN_ROWS = 128
# What a byte that our kernel reads over the link costs, relative to one that is copied, where that was not timed:
# attention reached 50.4 of 55.4 GB/s with half of a cache far, split linears 51 (docs/direct.md).
FAR_READ_COST = 1.1
# A budget too small for copying is refused if its plan takes more than this many times what copying takes at its own
# floor. A slower run would be no answer.
WORTHWHILE_TIMES = 1.5

# ---- Experts in slots

# Hit rates of a token's experts, by the part of the experts that have a slot, where nothing was measured: as published
# for Qwen3-30B-A3B with slots replaced by recency.
DEFAULT_HIT_RATES = ((0.0, 0.0), (0.06, 0.37), (0.19, 0.74), (0.38, 0.89), (0.64, 0.96), (1.0, 1.0))
# With slots for less than this part of the experts next to nothing hits, so they are read in place.
FEWEST_SLOTS_PART = Fraction(1, 20)
# For experts that a prompt reads whole and a token by index: the part of them that a token reads, and how many tokens
# come after each prompt. The first is Qwen3-30B-A3B's, the second is not known.
EXPERTS_OF_A_TOKEN = 1 / 16
TOKENS_AFTER_PROMPT = 64
# This part of such experts get slots before any are held for the prompt. By the numbers above, up to there a slot takes
# more off the link than the same bytes would if held, and beyond it less.
SLOTS_BEFORE_HELD_PART = 0.38

# ---- Machines that stand for all where nothing was measured

# Between PCIe 4 and 5; with this latency a copy costs 160 kB besides its bytes. With 25 GB/s and 2.9 us fewer rows of
# the record were worse than before, but one token came to 1.054 of the bound at 90% of 16 layers, where 1.05 is wanted.
NOMINAL_LINK_BYTES_PER_S = 40e9
NOMINAL_COPY_LATENCY_S = 4e-6
# For each machine: how much it counts, and what its steps take relative to the link for the same bytes: nothing; what
# memory of 1 TB/s takes beside a link of 55 GB/s; and many tokens. Of eight such lists, this is the one with which the
# most rows of the record are no worse than before.
NOMINAL_STEPS = ((1.0, 0.0), (1.0, 1 / 18), (0.3, 0.4))

# Packed weights: how many slots they pass through, the most bytes of all slots together, and the most as a part of the
# budget. A copy of 8 MiB takes 150 us on an H200's link, and 8 us pass before the next has begun: two large slots make
# fewer copies, three let the link run further ahead. Each plan takes the faster. In the simulator, for 16 layers of
# Llama-3-8B with 10 to 60%, 16 to 64 MiB in all differ by at most 2% from these; with 6%, 1/24 is 1% faster than 1/32.
SLOT_COUNTS = (3, 2)
MOST_SLOTS_BYTES = 24 * 2**20
SLOTS_PART_OF_BUDGET = 1 / 24
# Without times, these parts are tried for what stays packed.
PACKED_PARTS = (1.0, 0.5, 0.0)
# Decoding speed where none was measured: 1.85 TB/s alone on an H200, less while steps run.
NOMINAL_DECODED_BYTES_PER_S = 1.5e12

# ---- Weights and KV caches in one total

# How far a cache is assumed to be filled: the mean over a text that grows from nothing to all of it. Positions behind
# that get device memory when nothing else wants it.
CACHE_FILL = 0.5
