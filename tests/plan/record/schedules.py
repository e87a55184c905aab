"""Programs whose plans are recorded: schedules as the compiler writes them for real models, and odd ones.

Real ones are built from the models' shapes: one access and one step for each weight, norms included, in the order in
which the model runs. Sizes are those of bfloat16 unless said otherwise.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.schedule import Access, Schedule, Step
from penstock.weight import Weight

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Program:
    schedules: tuple[Schedule, ...]
    weights: dict[str, Weight]
    # By method, how many times longer a step computes than its weights take to be read: 1 for a token, more for many.
    intensity: dict[str, float]

    @property
    def weight_bytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights.values())


# A step: the weights that it reads, a table that it only gathers from marked with "@", one that stays with "!".
Steps = Sequence[str]


def program(sizes: dict[str, int], intensity: dict[str, float] | None = None, **methods: Steps) -> Program:
    return Program(
        tuple(_schedule(method, steps) for method, steps in methods.items()),
        {name: Weight(name, "uint8", (nbytes,), (0,)) for name, nbytes in sizes.items()},
        intensity or dict.fromkeys(methods, 1.0),
    )


def _schedule(method: str, steps: Steps) -> Schedule:
    accesses: list[Access] = []
    emitted: list[Step] = []
    for index, names in enumerate(steps):
        fetched = [
            Access(len(accesses) + at, name.strip("@!"), pinned=name.endswith("!"), gathered=name.endswith("@"))
            for at, name in enumerate(names.split())
        ]
        accesses += fetched
        emitted.append(Step(f"kernel_{index}", tuple(access.number for access in fetched)))
    return Schedule(method, tuple(accesses), tuple(emitted))


def _decoder(
    layers: int,
    hidden: int,
    feed_forward: int,
    kv: int,
    vocabulary: int,
    *,
    tied: bool = False,
    query: int | None = None,
) -> tuple[dict[str, int], list[str]]:
    """Sizes and steps of a decoder with gated feed-forward, as Llama and Qwen have it."""
    query = query or hidden
    sizes = {"embed": 2 * vocabulary * hidden, "norm": 2 * hidden}
    steps = ["embed@"]
    for layer in range(layers):
        parts = {
            "norm1": hidden, "q": hidden * query, "k": hidden * kv, "v": hidden * kv, "o": query * hidden,
            "norm2": hidden, "gate": hidden * feed_forward, "up": hidden * feed_forward, "down": hidden * feed_forward,
        }  # fmt: skip
        sizes |= {f"{layer}.{name}": 2 * count for name, count in parts.items()}
        steps += [f"{layer}.{name}" for name in parts]
    if not tied:
        sizes["head"] = 2 * vocabulary * hidden
    return sizes, [*steps, "norm", "embed" if tied else "head"]


def llama_3_8b() -> Program:
    """Two methods over the same weights."""
    sizes, steps = _decoder(32, 4096, 14336, 1024, 128256)
    return program(sizes, {"prefill": 20.0, "decode": 1.0}, prefill=steps, decode=steps)


def llama_3_8b_decode() -> Program:
    sizes, steps = _decoder(32, 4096, 14336, 1024, 128256)
    return program(sizes, decode=steps)


def llama_3_70b() -> Program:
    sizes, steps = _decoder(80, 8192, 28672, 1024, 128256)
    return program(sizes, decode=steps)


def qwen3_14b() -> Program:
    sizes, steps = _decoder(40, 5120, 17408, 1024, 151936)
    return program(sizes, {"prefill": 20.0, "decode": 1.0}, prefill=steps, decode=steps)


def tied_decoder() -> Program:
    """The head is the embedding: gathered from at the beginning, multiplied by at the end. Two methods."""
    sizes, steps = _decoder(8, 1024, 2816, 1024, 32000, tied=True)
    return program(sizes, {"prefill": 20.0, "decode": 1.0}, prefill=steps, decode=steps)


def qwen3_moe() -> Program:
    """Of Qwen3-30B-A3B's shape: experts of a layer in two tensors that are gathered from."""
    sizes, steps = {"embed": 2 * 151936 * 2048, "norm": 4096, "head": 2 * 151936 * 2048}, ["embed@"]
    for layer in range(48):
        parts = {
            "norm1": 2048, "q": 2048 * 4096, "k": 2048 * 512, "v": 2048 * 512, "o": 4096 * 2048, "norm2": 2048,
            "router": 2048 * 128,
        }  # fmt: skip
        sizes |= {f"{layer}.{name}": 2 * count for name, count in parts.items()}
        sizes |= {f"{layer}.gate_up": 2 * 128 * 2048 * 1536, f"{layer}.down": 2 * 128 * 768 * 2048}
        steps += [*(f"{layer}.{name}" for name in parts), f"{layer}.gate_up@", f"{layer}.down@"]
    return program(sizes, decode=[*steps, "norm", "head"])


def unet() -> Program:
    """Convolutions and attention of very different sizes, down and up again (SDXL's widths)."""
    sizes: dict[str, int] = {}
    steps: list[str] = []

    def add(name: str, count: int) -> None:
        sizes[name] = 2 * count
        steps.append(name)

    for side, widths in (("down", (320, 640, 1280)), ("up", (1280, 640, 320))):
        for level, width in enumerate(widths):
            blocks = {320: 0, 640: 2, 1280: 10}[width]
            for block in range(2 + (side == "up")):
                at = f"{side}.{level}.{block}"
                before = width * (2 if side == "up" else 1)
                add(f"{at}.conv1", 9 * before * width)
                add(f"{at}.time", 1280 * width)
                add(f"{at}.conv2", 9 * width * width)
                for layer in range(blocks):
                    for part, count in (("qkv", 3), ("out", 1), ("cross_q", 1), ("cross_out", 1)):
                        add(f"{at}.{layer}.{part}", count * width * width)
                    add(f"{at}.{layer}.cross_kv", 2 * 2048 * width)
                    add(f"{at}.{layer}.ff1", 8 * width * width)
                    add(f"{at}.{layer}.ff2", 4 * width * width)
    return program(sizes, {"forward": 30.0}, forward=steps)


def bert_large() -> Program:
    """float32, biases and norms as steps of their own or with others."""
    sizes = {"embed": 4 * 30522 * 1024, "places": 4 * 512 * 1024, "norm": 8192, "pool": 4 * 1024 * 1024}
    steps = ["embed@ places norm"]
    for layer in range(24):
        for part, count in (("q", 1), ("k", 1), ("v", 1), ("o", 1), ("up", 4), ("down", 4)):
            sizes[f"{layer}.{part}"] = 4 * count * 1024 * 1024
            sizes[f"{layer}.{part}.bias"] = 4 * (4096 if part == "up" else 1024)
            steps.append(f"{layer}.{part} {layer}.{part}.bias")
            if part in ("o", "down"):
                sizes[f"{layer}.{part}.norm"] = 8192
                steps.append(f"{layer}.{part}.norm")
    return program(sizes, {"forward": 8.0}, forward=[*steps, "pool"])


def albert() -> Program:
    """One layer, six times in a pass."""
    sizes = {"embed": 4 * 30000 * 128, "widen": 4 * 128 * 768}
    layer = {"q": 1, "k": 1, "v": 1, "o": 1, "up": 4, "down": 4}
    sizes |= {name: 4 * count * 768 * 768 for name, count in layer.items()}
    return program(sizes, {"forward": 4.0}, forward=["embed@", "widen", *[*layer] * 6])


def shared_layers() -> Program:
    """Four layers of their own, each run twice in a row of all: weights with several uses far apart."""
    sizes = {f"{layer}.{part}": (layer + 1) * 6 * MIB for layer in range(4) for part in ("a", "b", "c")}
    once = [*sizes]
    return program(sizes, forward=[*once, *once])


def encoder_and_decoder() -> Program:
    """Two methods that share only a table."""
    sizes = {"shared": 64 * MIB}
    sizes |= {f"e{index}": 9 * MIB for index in range(24)} | {f"d{index}": 13 * MIB for index in range(36)}
    encode = ["shared@", *(f"e{index}" for index in range(24))]
    decode = ["shared@", *(f"d{index}" for index in range(36)), "shared"]
    return program(sizes, {"encode": 20.0, "decode": 1.0}, encode=encode, decode=decode)


def held_weights() -> Program:
    """Some may never leave: a loop's body reads them."""
    sizes = {f"w{index}": (3 + index % 5) * MIB for index in range(40)} | {"loop": 24 * MIB}
    return program(sizes, forward=["w0", "loop!", *(f"w{index}" for index in range(1, 40)), "loop!"])


def one_giant() -> Program:
    """A weight of half of everything among small ones."""
    sizes = {f"w{index}": 4 * MIB for index in range(50)} | {"giant": 200 * MIB}
    return program(sizes, forward=[*(f"w{index}" for index in range(25)), "giant", *(f"w{i}" for i in range(25, 50))])


def fused_steps() -> Program:
    """Kernels that read up to three weights, some of them again later."""
    draws = random.Random(16)
    sizes = {f"w{index}": draws.randrange(64 * KIB, 16 * MIB) for index in range(60)}
    names = [*sizes]
    steps = []
    for index in range(0, 60, 3):
        steps.append(" ".join(names[index : index + draws.randint(1, 3)]))
        if draws.random() < 0.3:
            steps.append(names[draws.randrange(index + 1)])
    used = {name for step in steps for name in step.split()}
    return program({name: nbytes for name, nbytes in sizes.items() if name in used}, forward=steps)


def uneven_steps() -> Program:
    """Sizes over three orders of magnitude, in no order."""
    draws = random.Random(17)
    sizes = {f"w{index}": int(2 ** draws.uniform(14, 25)) for index in range(80)}
    return program(sizes, forward=[*sizes])


PROGRAMS: dict[str, Callable[[], Program]] = {
    made.__name__: made
    for made in (
        llama_3_8b, llama_3_8b_decode, llama_3_70b, qwen3_14b, tied_decoder, qwen3_moe, unet, bert_large, albert,
        shared_layers, encoder_and_decoder, held_weights, one_giant, fused_steps, uneven_steps,
    )
}  # fmt: skip
