"""How long a compile will take, judged by earlier ones: the cache holds their programs and how long they took."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock.store.entries import Entry

FILE = "compile-time.json"
# Measured on Llamas with 8 and 32 layers, two methods side by side, on 16 cores with a GPU (docs/models.md). On another
# machine the first prediction is off by as much as that machine is slower; from the second on, its own times count.
BASE_S, LAYER_S = 75.0, 2.5
EVERY_S = 15.0
# Programs that differ in any of these take another time for each layer.
_SAME = ("device", "machine", "torch", "inductor_configs")


@dataclass(frozen=True)
class CompileTime:
    layers: int
    seconds: float

    @property
    def ratio(self) -> float:
        """Relative to what is assumed for a machine that nothing is known about."""
        return self.seconds / (BASE_S + LAYER_S * self.layers)


def write_time(folder: Path, taken: CompileTime) -> None:
    (folder / FILE).write_text(json.dumps(asdict(taken)))


def past_times(entries: Sequence[Entry], key: Mapping[str, Any]) -> list[CompileTime]:
    """Times of programs that were compiled as this one will be."""
    found = []
    for entry in entries:
        if entry.kind == "programs" and all((entry.key or {}).get(part) == key[part] for part in _SAME):
            # Only a hint: an entry without it, or with half of it, is skipped.
            with contextlib.suppress(OSError, ValueError, TypeError):
                read = CompileTime(**json.loads((entry.path / FILE).read_text()))
                found.append(CompileTime(int(read.layers), float(read.seconds)))
    return found


def predicted_s(layers: int, past: Sequence[CompileTime]) -> float:
    expected = BASE_S + LAYER_S * layers
    return expected * sum(one.ratio for one in past) / len(past) if past else expected


@contextlib.contextmanager
def countdown(total_s: float, say: Callable[[str], None], every_s: float = EVERY_S) -> Iterator[None]:
    """Says from time to time how much is left."""
    ended = threading.Event()
    begun_s = time.monotonic()

    def tell() -> None:
        while not ended.wait(every_s):
            left_s = total_s - (time.monotonic() - begun_s)
            say(
                f"penstock: compiling, about {left_s:.0f} s left"
                if left_s >= 1
                else f"penstock: still compiling, {-left_s:.0f} s longer than expected"
            )

    thread = threading.Thread(target=tell, name="penstock-countdown", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
