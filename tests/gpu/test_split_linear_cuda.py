"""The split linear kernel on a GPU: bits, errors, host bytes. Each group of cases in a child with a time limit.

    python -m pytest tests/gpu/test_split_linear_cuda.py
    python -m tests.gpu.test_split_linear_cuda tokens 64      # one group, in this process
    python -m tests.gpu.test_split_linear_cuda mma_sync 64    # the same by the build for GPUs newer than Hopper
    python -m tests.gpu.test_split_linear_cuda as_12 64       # and with what of it a GPU of 12.x gets
    compute-sanitizer --tool racecheck python -m tests.gpu.test_split_linear_cuda small [mma_sync]

A fault of a barrier hangs a GPU: waits are bounded, and say in the child's last lines which one ran out of time.
"""

from __future__ import annotations

import mmap
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.direct.architecture import architecture_of
from penstock.direct.failures import KernelDeviceError
from penstock.direct.launch_shape import Limits
from penstock.direct.self_check import check_products
from penstock.direct.split_linear import Options, SplitLinear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TOKENS = (1, 8, 17, 64, 100, 512, 2048, 4096)
CHILD_LIMIT_S = 150
# Ragged in rows and columns; then sizes at which every slot of every ring comes round, and several items per cluster.
SIZES = ((203, 8), (520, 264), (1000, 1096), (4096, 2048))
# The GPU's own; what 10.x and 11.x get; what 12.x gets, with 99 KiB of shared memory for a block and no clusters.
BUILDS = {
    "tokens": Options(),
    "mma_sync": Options(instructions="mma_sync"),
    "as_12": Options(instructions="mma_sync", multicast=False, shared_limit_bytes=101_376),
}
# All of them give the same bits.
ALIKE: dict[str, dict[str, Any]] = {
    "usual": {},
    "no congestion control": {"limits": None},
    "one host CTA": {"limits": Limits(host_ctas=1, host_inflight_bytes=1)},
    "no multicast": {"multicast": False},
    "overlapped": {"overlapped": True},
}


def run_child(*arguments: str, limit_s: int = CHILD_LIMIT_S) -> None:
    command = [sys.executable, "-m", "tests.gpu.test_split_linear_cuda", *arguments]
    with tempfile.TemporaryFile("w+") as told:
        try:
            ended = subprocess.run(command, stdout=told, stderr=subprocess.STDOUT, timeout=limit_s).returncode
        except subprocess.TimeoutExpired:
            ended = None
        told.seek(0)
        tail = "".join(told.readlines()[-25:])
    assert ended is not None, f"no end within {limit_s} s; it was at:\n{tail}"
    assert ended == 0, tail


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("build", BUILDS)
def test_tokens(build: str, tokens: int) -> None:
    run_child(build, str(tokens))


@pytest.mark.parametrize("group", ["registered", "graph", "again", "overlapped", "large", "self_check"])
def test_group(group: str) -> None:
    run_child(group)


@pytest.mark.parametrize("build", ["mma_sync", "as_12"])
@pytest.mark.parametrize("group", ["again", "large"])
def test_group_of_another_build(group: str, build: str) -> None:
    run_child(group, build)


@dataclass(frozen=True)
class Case:
    """Fresh random operands; W as one tensor on the GPU and one in pinned host memory."""

    x: torch.Tensor
    weight: torch.Tensor
    host_weight: torch.Tensor
    bias: torch.Tensor | None

    @classmethod
    def random(cls, tokens: int, rows: int, depth: int, dtype: torch.dtype, biased: bool) -> Case:
        x = torch.randn(tokens, depth, device="cuda").to(dtype)
        weight = (torch.randn(rows, depth, device="cuda") / depth**0.5).to(dtype)
        bias = torch.randn(rows, device="cuda").to(dtype) if biased else None
        return cls(x, weight, weight.cpu().pin_memory(), bias)

    def run(self, kernel: SplitLinear, prefix_rows: int, options: Options) -> tuple[torch.Tensor, int]:
        """The result, out of a larger buffer of NaN of which nothing else may be written; and the host's bytes."""
        tokens, rows = self.x.shape[0], self.weight.shape[0]
        buffer = torch.full(
            (tokens + 1, rows + (prefix_rows // 16 % 3) * 4), torch.nan, dtype=self.x.dtype, device="cuda"
        )
        counter = torch.zeros(1, dtype=torch.int64, device="cuda")
        # Copies: what lies behind a side's last row is not the other side.
        prefix = self.weight[:prefix_rows].clone()
        rest = self.host_weight[prefix_rows:]
        out = buffer[:tokens, :rows]
        kernel(self.x, prefix, rest, self.bias, out=out, options=options, host_bytes=counter)
        torch.cuda.synchronize()
        assert buffer[tokens:].isnan().all() and buffer[:, rows:].isnan().all(), "written outside of y"
        return out.contiguous(), int(counter.item())

    def errors(self, y: torch.Tensor) -> tuple[float, float]:
        """Root mean square of the error against 64-bit sums: of y, and of torch's own product."""
        exact = self.x.double() @ self.weight.double().T + (0 if self.bias is None else self.bias.double())
        own = torch.nn.functional.linear(self.x, self.weight, self.bias)
        return tuple(float((z.double() - exact).square().mean().sqrt()) for z in (y, own))  # type: ignore[return-value]


def splits(rows: int) -> Iterator[int]:
    """All of them where there are few; otherwise the ends, both sides of tile borders, and some inside."""
    if rows <= 256:
        yield from (*range(0, rows, 16), rows)
        return
    wanted = {0, 16, 48, 64, 112, 128, 144, 256, rows // 3, rows // 2, rows - 130, rows - 64, rows - 16}
    yield from sorted({row // 16 * 16 for row in wanted if 0 <= row < rows} | {rows})


def check_case(kernel: SplitLinear, case: Case, base: Options, changes: dict[str, dict[str, Any]], label: str) -> None:
    rows, depth = case.weight.shape
    tokens = case.x.shape[0]
    whole, asked = case.run(kernel, rows, base)
    assert asked == 0
    assert whole.isfinite().all(), f"{label}: results that were not written"
    mine, own = case.errors(whole)
    assert mine <= own * 1.02 + 1e-12, f"{label}: error {mine:.3e}, torch's own {own:.3e}"
    if base.instructions == "mma_sync":
        # Each result is one chain of the same products, whatever the tile: so neither shared memory nor clusters show.
        other, _ = case.run(kernel, rows, BUILDS["mma_sync"])
        assert torch.equal(other.view(torch.int16), whole.view(torch.int16)), f"{label}: bits of the tile"
    for name, change in changes.items():
        option = replace(base, **change)
        for prefix_rows in splits(rows):
            print(f"{label} H={prefix_rows} {name}", flush=True)
            y, asked = case.run(kernel, prefix_rows, option)
            assert torch.equal(y.view(torch.int16), whole.view(torch.int16)), "other bits"
            shape = kernel.shape(tokens, rows, depth, prefix_rows, case.x.dtype, option)
            assert asked == shape.host_bytes, f"asked {asked} bytes of the host, planned {shape.host_bytes}"
            if option.multicast and architecture_of(*kernel.capability).clusters:
                assert asked == (rows - prefix_rows) * depth * 2, "a host row crossed the link more than once"


def group_tokens(kernel: SplitLinear, base: Options, tokens: int) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for number, (rows, depth) in enumerate(SIZES):
            case = Case.random(tokens, rows, depth, dtype, biased=number % 2 == 0)
            label = f"T={tokens} N={rows} K={depth} {dtype}"
            check_case(kernel, case, base, ALIKE if number == 2 else {"usual": {}}, label)


def group_registered(kernel: SplitLinear) -> None:
    """The rest in a mapped file that is registered read-only, at an odd page: what a weights file is."""
    rows, depth, prefix_rows = 1000, 1096, 400
    case = Case.random(8, rows, depth, torch.bfloat16, biased=True)
    with tempfile.NamedTemporaryFile(dir=Path.cwd()) as file:
        file.write(b"\0" * 4096 + case.host_weight[prefix_rows:].contiguous().view(torch.uint8).numpy().tobytes())
        file.flush()
        # Shared: registering a private mapping read-only does not return.
        mapped = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)
        flat = torch.frombuffer(mapped, dtype=torch.uint8)
        runtime = torch.cuda.cudart()
        portable_and_read_only = 1 | 8
        assert int(runtime.cudaHostRegister(flat.data_ptr(), flat.numel(), portable_and_read_only)) == 0
        rest = flat[4096:].view(torch.bfloat16).view(rows - prefix_rows, depth)
        wanted, _ = case.run(kernel, rows, Options())
        y = kernel(case.x, case.weight[:prefix_rows].clone(), rest, case.bias)
        torch.cuda.synchronize()
        assert int(runtime.cudaHostUnregister(flat.data_ptr())) == 0
        assert torch.equal(y.view(torch.int16), wanted.view(torch.int16))


def group_graph(kernel: SplitLinear) -> None:
    case = Case.random(8, 520, 264, torch.bfloat16, biased=True)
    wanted, _ = case.run(kernel, 272, Options())
    prefix, rest = case.weight[:272].clone(), case.host_weight[272:]
    y = torch.empty_like(wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel(case.x, prefix, rest, case.bias, out=y)
    for _ in range(3):
        y.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y.view(torch.int16), wanted.view(torch.int16))


def group_overlapped(kernel: SplitLinear) -> None:
    """A chain in which each launch reads what the one before it writes, and all write to the same two buffers."""
    for tokens in (1, 64, 512):
        weights = [(torch.randn(1024, 1024, device="cuda") / 32).to(torch.bfloat16) for _ in range(3)]
        rests = [weight[512:].cpu().pin_memory() for weight in weights]
        prefixes = [weight[:512].clone() for weight in weights]
        x = torch.randn(tokens, 1024, device="cuda").to(torch.bfloat16)
        results = []
        for overlapped in (False, True):
            buffers = [x.clone(), torch.full_like(x, torch.nan)]
            torch.cuda.synchronize()
            for turn in range(60):
                to = buffers[(turn + 1) % 2]
                prefix, rest = prefixes[turn % 3], rests[turn % 3]
                kernel(buffers[turn % 2], prefix, rest, out=to, options=Options(overlapped=overlapped))
            torch.cuda.synchronize()
            results.append(buffers[0].view(torch.int16))
        print(f"overlapped T={tokens}", flush=True)
        assert torch.equal(*results)
        assert results[0].view(torch.bfloat16).isfinite().all()


def group_again(kernel: SplitLinear, base: Options) -> None:
    """Many launches one behind the other: the same bits each time, also when they overlap on two streams."""
    for tokens in (1, 64, 512, 2048):
        case = Case.random(tokens, 2000, 1096, torch.bfloat16, biased=True)
        wanted, _ = case.run(kernel, 2000, base)
        prefix, rest = case.weight[:1008].clone(), case.host_weight[1008:]
        outputs = [torch.full_like(wanted, torch.nan) for _ in range(40)]
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        torch.cuda.synchronize()
        for turn, out in enumerate(outputs):
            with torch.cuda.stream(streams[turn % 2]):
                kernel(case.x, prefix, rest, case.bias, out=out, options=base)
        torch.cuda.synchronize()
        print(f"again T={tokens}", flush=True)
        assert all(torch.equal(y.view(torch.int16), wanted.view(torch.int16)) for y in outputs)


def group_large(kernel: SplitLinear, base: Options) -> None:
    """The sizes of the benchmark, once each."""
    for tokens, (rows, depth) in ((1, (14336, 4096)), (64, (7168, 7168)), (2048, (7168, 7168))):
        case = Case.random(tokens, rows, depth, torch.bfloat16, biased=False)
        whole, _ = case.run(kernel, rows, base)
        mine, own = case.errors(whole)
        assert mine <= own * 1.02 + 1e-12, (tokens, mine, own)
        for prefix_rows in (0, rows // 2 // 16 * 16 + 16, rows * 97 // 100 // 16 * 16):
            print(f"large T={tokens} H={prefix_rows}", flush=True)
            y, asked = case.run(kernel, prefix_rows, base)
            assert torch.equal(y.view(torch.int16), whole.view(torch.int16))
            shape = kernel.shape(tokens, rows, depth, prefix_rows, torch.bfloat16, base)
            assert asked == (rows - prefix_rows) * depth * 2 * shape.tile.token_blocks


def group_small(kernel: SplitLinear, base: Options) -> None:
    """What compute-sanitizer watches: every kind of tile and of cluster, little work."""
    for tokens in (1, 17, 64, 300, 600):
        case = Case.random(tokens, 203, 136, torch.bfloat16, biased=True)
        check_case(kernel, case, base, {"usual": {}}, f"small T={tokens}")


def group_self_check(kernel: SplitLinear) -> None:
    """Every build passes what GPUs that were never tried are asked; one result that is off does not."""
    device = torch.device("cuda")
    for name, options in BUILDS.items():
        print(f"self_check {name}", flush=True)

        def launch(x: Any, prefix: Any, rest: Any, bias: Any, out: Any, options: Options = options) -> None:
            kernel(x, prefix, rest, bias, out=out, options=options)

        check_products(launch, device, kernel.capability)

    def wrong(x: Any, prefix: Any, rest: Any, bias: Any, out: Any) -> None:
        kernel(x, prefix, rest, bias, out=out)
        out[-1, -1] += 16

    with pytest.raises(KernelDeviceError, match="token 4 of row 519"):
        check_products(wrong, device, kernel.capability)


def main(arguments: list[str]) -> None:
    torch.manual_seed(int.from_bytes(arguments[0].encode()[:4], "big"))
    kernel = SplitLinear("cuda", bounded_waits=True)
    group, *rest = arguments
    try:
        if group in BUILDS:
            group_tokens(kernel, BUILDS[group], int(rest[0]))
        elif group in ("again", "large", "small"):
            globals()[f"group_{group}"](kernel, BUILDS[rest[0] if rest else "tokens"])
        else:
            globals()[f"group_{group}"](kernel)
    except BaseException:
        print(f"fault: {kernel.fault}", flush=True)
        raise
    print("complete", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
