"""A plan: where every weight lies and when every copy is issued. Plain data that the planner hands to the core.

Device memory consists of physical blocks, mapped into ranges of virtual addresses. A weight's prefix may lie in a
resident block. Its suffix, or all of it, comes and goes in ring pages that many ranges share. One such visit is a stay:
copied once, read by one or more accesses, then overwritten. Addresses never change while a plan lives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

# The range index of accesses without bytes, in a plan that has no ranges at all.
NO_RANGE = -1
# The range index of accesses that are read in host memory.
DIRECT = -2
# The bank index of experts that have no slots.
NO_SLOTS = -2

# A weight is split at a multiple of this many rows: the kernel multiplies by that many at once.
SPLIT_ROWS = 16


@dataclass(frozen=True)
class Block:
    """Physical device memory, created as one unit. A ring block is exactly one page."""

    nbytes: int
    ring: bool


@dataclass(frozen=True)
class Range:
    """Virtual addresses, a multiple of the page, covered by whole blocks that are mapped one after the other."""

    nbytes: int
    # Indices into Plan.blocks.
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """One copy: bytes of a weight to an offset in a range."""

    weight: str
    weight_offset_bytes: int
    nbytes: int
    range_index: int
    range_offset_bytes: int


@dataclass(frozen=True)
class Copy:
    """One piece of a stay, and when it is copied."""

    stay: int
    piece: Piece
    # The host issues it right before it fetches the access at this position. The method's number of accesses stands for
    # the end of the run.
    issue_before: int
    # On the device the copy waits for the end of this step: the last reader of anything its pages held before. None:
    # they held nothing. The step has ended when the copy is issued, in this run or (if it comes later) in the last one.
    wait_step: int | None
    # For a packed weight, the bytes that cross the link: 0 if the piece stays packed in device memory. None: the weight
    # is not packed, and the whole piece crosses the link.
    packed_bytes: int | None = None

    @property
    def link_bytes(self) -> int:
        return self.piece.nbytes if self.packed_bytes is None else self.packed_bytes

    @property
    def decoded_bytes(self) -> int:
        return 0 if self.packed_bytes is None else self.piece.nbytes


@dataclass(frozen=True)
class Stay:
    """One weight in the ring, from its copies to its last reader."""

    weight: str
    nbytes: int
    # Positions (in the method's access order) that read this stay, in the order in which they follow its copies. In a
    # stay that crosses the end of a run, accesses of the next run come last, so the positions may drop once.
    accesses: tuple[int, ...]
    # The step after which the pages may be overwritten.
    last_step: int

    @property
    def crosses_end(self) -> bool:
        """Whether it is read on both sides of the end of a run."""
        return self.accesses[-1] < self.accesses[0]


@dataclass(frozen=True)
class Placement:
    """Where one access finds its weight: at an offset in a range. `stay` is None when all of it is resident.

    `range_index` is NO_RANGE for a weight without bytes in a plan without ranges, and DIRECT for one that is read in
    place, in host memory. One launch reads both sides of a split weight: its range holds only the prefix, and the rest
    is read in host memory.
    """

    number: int
    weight: str
    nbytes: int
    range_index: int
    range_offset_bytes: int
    stay: int | None
    # None: not split. Otherwise at least one row but not all of them: those cases are direct and resident.
    prefix_bytes: int | None = None
    # For experts that are read in host memory: the bank whose slots hold some of them, or NO_SLOTS. None: no experts,
    # or all of them lie in the range.
    bank: int | None = None
    # Whether its index decides what the slots hold from here on, also for the other weights of the bank.
    chooses: bool = False

    @property
    def is_direct(self) -> bool:
        return self.range_index == DIRECT

    @property
    def is_split(self) -> bool:
        return self.prefix_bytes is not None

    @property
    def has_slots(self) -> bool:
        return self.bank is not None and self.bank != NO_SLOTS

    @property
    def in_place_bytes(self) -> int:
        """The bytes that are read in place, in host memory."""
        if self.is_direct:
            # For experts with slots, only the device knows.
            return 0 if self.has_slots else self.nbytes
        return 0 if self.prefix_bytes is None else self.nbytes - self.prefix_bytes


@dataclass(frozen=True)
class Traffic:
    """What one run of a method moves. S7: what is counted while running equals this.

    Weights that are read in place, whole or all but a prefix, are not hits. Every access counts all of its weight's
    bytes that lie in host memory. How many of them a kernel reads is up to the kernel, so this is an upper bound.
    """

    bytes_streamed: int
    copies: int
    bytes_hit: int
    bytes_in_place: int
    # For packed weights, in unpacked bytes; bytes_streamed is what crosses the link.
    bytes_decoded: int = 0


@dataclass(frozen=True)
class MethodPlan:
    method: str
    # In the order in which the compiled code makes them.
    placements: tuple[Placement, ...]
    stays: tuple[Stay, ...]
    # In the order of issue within a run.
    copies: tuple[Copy, ...]
    step_count: int

    @cached_property
    def prologue(self) -> tuple[int, ...]:
        """Indices of the copies that are done or under way when a run begins, in the order of their first readers.

        These are copies issued in the run before their first reader's, and all copies of a stay that crosses the end of
        a run. A run that finds the ring in other hands issues them first.
        """

        def enters(copy: Copy) -> bool:
            stay = self.stays[copy.stay]
            return stay.crosses_end or stay.accesses[0] < copy.issue_before

        found = [index for index, copy in enumerate(self.copies) if enters(copy)]
        return tuple(sorted(found, key=lambda index: min(self.stays[self.copies[index].stay].accesses)))

    @cached_property
    def warm(self) -> Traffic:
        """A run that follows a run of the same method. Copies for the next run count where they are issued."""
        return self._traffic(cold=False)

    @cached_property
    def cold(self) -> Traffic:
        """A run that finds the ring in other hands: the stays that would be in place are copied first."""
        return self._traffic(cold=True)

    def _traffic(self, *, cold: bool) -> Traffic:
        issued = [*(self.copies[index] for index in (self.prologue if cold else ())), *self.copies]
        # The first access that reads a copy is not a hit. In a cold run, a stay that crosses the end of the run is
        # copied twice and has two such accesses.
        missed = [*self.stays, *(stay for stay in self.stays if cold and stay.crosses_end)]
        return Traffic(
            bytes_streamed=sum(copy.link_bytes for copy in issued),
            copies=len(issued),
            bytes_hit=sum(
                placement.nbytes
                for placement in self.placements
                if not placement.in_place_bytes and not placement.has_slots
            )
            - sum(stay.nbytes for stay in missed),
            bytes_in_place=sum(placement.in_place_bytes for placement in self.placements),
            bytes_decoded=sum(copy.decoded_bytes for copy in issued),
        )


@dataclass(frozen=True)
class Slots:
    """Slots for packed weights on their way over the link: one after the other, in a range of their own."""

    count: int
    nbytes: int
    range_index: int


@dataclass(frozen=True)
class Store:
    """Bytes of a weight that stay in device memory packed as in the file, and are decoded for each stay."""

    # Counted in the unpacked weight; the range is where the packed bytes lie.
    piece: Piece
    packed_bytes: int


@dataclass(frozen=True)
class BankMember:
    """A weight of a bank, and where its slots lie, one after the other."""

    weight: str
    row_bytes: int
    range_index: int
    range_offset_bytes: int


@dataclass(frozen=True)
class Bank:
    """Weights whose rows are experts, taken by one index. An expert lies in the same slot of all of them, or in none.
    Which experts have slots changes while running; the table of that lies on the device as well."""

    experts: int
    slots: int
    range_index: int
    range_offset_bytes: int
    members: tuple[BankMember, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one expert, in all weights."""
        return sum(member.row_bytes for member in self.members)


@dataclass(frozen=True)
class Plan:
    """One plan serves all methods: they share the resident blocks, and take turns with the ring."""

    page_bytes: int
    blocks: tuple[Block, ...]
    ranges: tuple[Range, ...]
    # Resident content, copied once when the plan is installed.
    fills: tuple[Piece, ...]
    methods: tuple[MethodPlan, ...]
    # For a weights file with packed weights.
    slots: Slots | None = None
    stores: tuple[Store, ...] = ()
    banks: tuple[Bank, ...] = ()

    @cached_property
    def device_bytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)

    @cached_property
    def ring_bytes(self) -> int:
        return sum(block.nbytes for block in self.blocks if block.ring)

    @property
    def resident_bytes(self) -> int:
        """Device memory that keeps its content, rounding to pages included."""
        return self.device_bytes - self.ring_bytes

    @property
    def takes_link(self) -> bool:
        """False if everything that is copied lies in device memory, packed."""
        return any(copy.link_bytes for method in self.methods for copy in method.copies)

    @cached_property
    def direct_weights(self) -> tuple[str, ...]:
        """Weights that some access reads in place, in host memory."""
        return self._weights_of(lambda placement: placement.is_direct)

    @cached_property
    def split_weights(self) -> tuple[str, ...]:
        """Weights that some access reads on both sides."""
        return self._weights_of(lambda placement: placement.is_split)

    def method(self, name: str) -> MethodPlan:
        return next(method for method in self.methods if method.method == name)

    def _weights_of(self, wanted: Callable[[Placement], bool]) -> tuple[str, ...]:
        placements = (placement for method in self.methods for placement in method.placements)
        return tuple(dict.fromkeys(placement.weight for placement in placements if wanted(placement)))
