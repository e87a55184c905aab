"""One forward pass through the products of some decoder layers, their weights raw or packed in device memory, or packed
in host memory: as one CUDA graph, inside a budget of device bytes. bench.packed_codes times it.

Weights are cut into chunks of rows. A packed chunk is decoded into a slot of a ring, on a stream of its own; one that
lies in host memory is copied to another ring first. A few contents are used again and again, but every chunk has
memory of its own, and neighbours differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from bench.packed_kernels import Code, Encoded

HIDDEN, FEED_FORWARD, KV = 4096, 14336, 1024
LAYERS = 16
SHAPES = (
    (HIDDEN, HIDDEN), (KV, HIDDEN), (KV, HIDDEN), (HIDDEN, HIDDEN),
    (FEED_FORWARD, HIDDEN), (FEED_FORWARD, HIDDEN), (HIDDEN, FEED_FORWARD),
)  # fmt: skip
# Of a chunk, by columns: 8 MiB, or 7.
ROWS = {HIDDEN: 1024, FEED_FORWARD: 256}
# It has no divisor in common with the rings' lengths: a slot that is read too early or too late is noticed.
CONTENTS = 3
SLOTS, STAGES = 8, 8
HOST_PIECE_BYTES = 1 << 30
FEWEST_RUNS, MOST_RUNS = 3, 200


@dataclass(frozen=True)
class Chunk:
    rows: int
    columns: int
    content: int

    @property
    def raw_bytes(self) -> int:
        return 2 * self.rows * self.columns


@dataclass(frozen=True)
class Scheme:
    """Which code weights have that stay packed in device memory, and which those that stream."""

    name: str
    resident: Code
    streamed: Code


@dataclass(frozen=True)
class Placement:
    """By chunk: `raw`, `packed` (both in device memory) or `streamed`."""

    places: tuple[str, ...]
    device_bytes: int
    streamed_bytes: int


def all_chunks(layers: int = LAYERS) -> list[Chunk]:
    sizes = [(ROWS[columns], columns) for rows, columns in SHAPES * layers for _ in range(rows // ROWS[columns])]
    return [Chunk(rows, columns, number % CONTENTS) for number, (rows, columns) in enumerate(sizes)]


def _spread(sizes_bytes: Sequence[int], share: float) -> list[bool]:
    """Chosen evenly, and of no beginning more than this share of its bytes."""
    chosen: list[bool] = []
    seen_bytes, taken_bytes = 0, 0
    for size_bytes in sizes_bytes:
        seen_bytes += size_bytes
        chosen.append(taken_bytes + size_bytes <= share * seen_bytes)
        taken_bytes += size_bytes if chosen[-1] else 0
    return chosen


def placed(chunks: Sequence[Chunk], resident: Sequence[int], streamed: Sequence[int], budget_bytes: float) -> Placement:
    """`resident` and `streamed`: the bytes of each chunk in the code of either. Rings count as device bytes."""
    raw_total, packed_total = sum(chunk.raw_bytes for chunk in chunks), sum(resident)
    slots_bytes = SLOTS * max(chunk.raw_bytes for chunk in chunks)
    stages_bytes = STAGES * max(streamed)
    left_bytes = budget_bytes - slots_bytes - packed_total
    if left_bytes >= 0:
        more = [chunk.raw_bytes - packed for chunk, packed in zip(chunks, resident, strict=True)]
        chosen = _spread(more, left_bytes / (raw_total - packed_total))
        places = tuple("raw" if is_raw else "packed" for is_raw in chosen)
    else:
        share = (budget_bytes - slots_bytes - stages_bytes) / packed_total
        if share < 0:
            raise ValueError(f"the rings alone take {slots_bytes + stages_bytes} bytes, and the budget is less")
        places = tuple("packed" if stays else "streamed" for stays in _spread(resident, share))
    device_bytes = slots_bytes + (stages_bytes if "streamed" in places else 0)
    for chunk, packed_bytes, place in zip(chunks, resident, places, strict=True):
        device_bytes += {"raw": chunk.raw_bytes, "packed": packed_bytes, "streamed": 0}[place]
    sent = sum(count for count, place in zip(streamed, places, strict=True) if place == "streamed")
    return Placement(places, device_bytes, sent)


class HostMemory:
    """Pinned pieces, kept for the next user: pinning takes longer than filling."""

    def __init__(self) -> None:
        self._pieces: list[Tensor] = []
        self.reset()

    def reset(self) -> None:
        self._piece, self._used_bytes = 0, 0

    def take(self, count_bytes: int) -> Tensor:
        if self._used_bytes + count_bytes > HOST_PIECE_BYTES:
            self._piece, self._used_bytes = self._piece + 1, 0
        if self._piece == len(self._pieces):
            self._pieces.append(torch.empty(HOST_PIECE_BYTES, dtype=torch.uint8, pin_memory=True))
        begin, self._used_bytes = self._used_bytes, self._used_bytes + count_bytes
        return self._pieces[self._piece][begin : begin + count_bytes]


class Contents:
    """Weights that chunks share, encoded in every code, and what products with them come to."""

    def __init__(self, chunks: Sequence[Chunk], codes: Sequence[Code]) -> None:
        generator = torch.Generator(device="cuda").manual_seed(0)
        self.raw: dict[Chunk, Tensor] = {}
        self.packed: dict[str, dict[Chunk, Encoded]] = {code.name: {} for code in codes}
        for chunk in dict.fromkeys(chunks):
            drawn = torch.randn(chunk.rows, chunk.columns, device="cuda", generator=generator)
            self.raw[chunk] = (drawn * 0.02).bfloat16()
            for code in codes:
                self.packed[code.name][chunk] = code.encode(self.raw[chunk])

    def bytes_of(self, chunks: Sequence[Chunk], code: Code) -> list[int]:
        return [self.packed[code.name][chunk].packed_bytes for chunk in chunks]


class Inputs:
    """Of one number of tokens, with the products that are right."""

    def __init__(self, contents: Contents, tokens: int) -> None:
        generator = torch.Generator(device="cuda").manual_seed(1)
        self.tokens = tokens
        self.by_columns = {
            columns: torch.randn(columns, tokens, device="cuda", dtype=torch.bfloat16, generator=generator)
            for columns in ROWS
        }
        self.right = {chunk: torch.mm(raw, self.by_columns[chunk.columns]) for chunk, raw in contents.raw.items()}


class Pass:
    """All memory that one scheme needs at one budget, filled; and the pass over it."""

    def __init__(
        self, chunks: Sequence[Chunk], contents: Contents, scheme: Scheme, placement: Placement, host: HostMemory
    ) -> None:
        self._chunks, self._contents, self._scheme, self._placement = chunks, contents, scheme, placement
        self._weights: list[Tensor] = []
        host.reset()
        for chunk, place in zip(chunks, placement.places, strict=True):
            if place == "raw":
                self._weights.append(contents.raw[chunk].clone())
            elif place == "packed":
                self._weights.append(contents.packed[scheme.resident.name][chunk].content.clone())
            else:
                source = contents.packed[scheme.streamed.name][chunk].content
                self._weights.append(host.take(source.numel()))
                self._weights[-1].copy_(source, non_blocking=True)
        most_bytes = max(chunk.raw_bytes for chunk in chunks)
        most_staged = max(contents.bytes_of(chunks, scheme.streamed)) if placement.streamed_bytes else 0
        self._slots = [torch.empty(most_bytes // 2, dtype=torch.bfloat16, device="cuda") for _ in range(SLOTS)]
        self._stages = [torch.empty(most_staged, dtype=torch.uint8, device="cuda") for _ in range(STAGES)]
        self._copying, self._decoding = torch.cuda.Stream(), torch.cuda.Stream()
        torch.cuda.synchronize()

    def _run(self, inputs: Inputs, outputs: Sequence[Tensor], blocks: int) -> None:
        computing = torch.cuda.current_stream()
        for stream in (self._copying, self._decoding):
            stream.wait_stream(computing)
        read: list[torch.cuda.Event] = []  # of slots
        decoded: list[torch.cuda.Event] = []  # of stages
        for chunk, place, weight, output in zip(
            self._chunks, self._placement.places, self._weights, outputs, strict=True
        ):
            x = inputs.by_columns[chunk.columns]
            if place == "raw":
                torch.mm(weight, x, out=output)
                continue
            code = self._scheme.resident if place == "packed" else self._scheme.streamed
            packed = self._contents.packed[code.name][chunk]
            slot = self._slots[len(read) % SLOTS][: chunk.raw_bytes // 2].view(chunk.rows, chunk.columns)
            if len(read) >= SLOTS:
                self._decoding.wait_event(read[-SLOTS])
            source = weight
            if place == "streamed":
                source = self._stages[len(decoded) % STAGES][: weight.numel()]
                if len(decoded) >= STAGES:
                    self._copying.wait_event(decoded[-STAGES])
                with torch.cuda.stream(self._copying):
                    source.copy_(weight, non_blocking=True)
                self._decoding.wait_stream(self._copying)
            with torch.cuda.stream(self._decoding):
                code.decode(packed, source.data_ptr(), slot, blocks)
            if place == "streamed":
                decoded.append(self._decoding.record_event())
            computing.wait_stream(self._decoding)
            torch.mm(slot, x, out=output)
            read.append(computing.record_event())
        for stream in (self._copying, self._decoding):
            computing.wait_stream(stream)

    def measured(self, inputs: Inputs, blocks: int, round_s: float) -> tuple[float, bool]:
        """The median time of replays, and whether all products were right."""
        outputs = [
            torch.empty(chunk.rows, inputs.tokens, device="cuda", dtype=torch.bfloat16) for chunk in self._chunks
        ]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._run(inputs, outputs, blocks)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            self._run(inputs, outputs, blocks)
        for tensor in (*outputs, *self._slots):
            tensor.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        same = [torch.equal(output, inputs.right[chunk]) for output, chunk in zip(outputs, self._chunks, strict=True)]
        times_s: list[float] = []
        while len(times_s) < FEWEST_RUNS or (sum(times_s) < round_s and len(times_s) < MOST_RUNS):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times_s.append(begin.elapsed_time(end) / 1e3)
        return median(times_s), all(same)
