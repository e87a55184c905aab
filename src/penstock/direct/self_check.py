"""Checks the kernel on a kind of GPU where it was never tried, before use: products with results known to the bit.

All operands are small whole numbers, so every sum is exact in 32 bits, in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from penstock.direct.architecture import capability_text
from penstock.direct.failures import KernelDeviceError
from penstock.direct.split_linear import SplitLinear

# Compute capabilities of GPUs on which the tests of the kernel have run.
TRIED_CAPABILITIES = frozenset({(9, 0)})
# Both ragged. The columns are more than twice what the longest ring holds, so every slot is filled at least twice. The
# rows are several tiles of the largest kind.
ROWS, DEPTH = 520, 3080
# None; one grain; not on the border of any tile; all.
PREFIX_ROWS = (0, 16, 272, ROWS)
# One for each size of tile, one that several CTAs share, and one that is more than a cluster takes at a time.
BF16_TOKENS = (5, 12, 30, 64, 100, 150, 256, 300, 4100)
# The two kinds of floats differ in one word of an instruction.
FP16_TOKENS = (8, 200)
LARGEST = 4

# x, prefix, rest, bias, out: y = x @ W^T + bias, written to `out`.
Launch = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], object]

_checked: set[int] = set()


@dataclass(frozen=True)
class Product:
    """Operands in host memory, and the results they must have."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    wanted: torch.Tensor


def open_kernel(device: torch.device | str) -> SplitLinear:
    """The kernel, ready for use. On a kind of GPU where it was never tried it is checked first, with bounded waits.

    The waits stay bounded, so a barrier that behaves differently there fails the launch instead of hanging the GPU.
    """
    kernel = SplitLinear(device)
    if kernel.capability in TRIED_CAPABILITIES:
        return kernel
    kernel.close()
    kernel = SplitLinear(device, bounded_waits=True)
    try:
        check_first_use(kernel)
    except BaseException:
        kernel.close()
        raise
    return kernel


def check_first_use(kernel: SplitLinear) -> None:
    """Once for each device of the process."""
    if kernel.ordinal in _checked:
        return

    def launch(
        x: torch.Tensor, prefix: torch.Tensor, rest: torch.Tensor, bias: torch.Tensor, out: torch.Tensor
    ) -> None:
        kernel(x, prefix, rest, bias, out=out)

    check_products(launch, kernel.device, kernel.capability)
    _checked.add(kernel.ordinal)


def check_products(launch: Launch, device: torch.device, capability: tuple[int, int]) -> None:
    """Raises KernelDeviceError at the first product that differs from exact arithmetic in any bit."""
    for product in products():
        x, bias = product.x.to(device), product.bias.to(device)
        for prefix_rows in PREFIX_ROWS:
            # Copies, so that the other side does not lie behind a side's last row.
            prefix, rest = product.weight[:prefix_rows].clone().to(device), product.weight[prefix_rows:].clone()
            if device.type == "cuda":
                rest = rest.pin_memory()
            out = torch.full(product.wanted.shape, torch.nan, dtype=x.dtype, device=device)
            launch(x, prefix, rest, bias, out)
            found = out.cpu()
            wrong = (found.view(torch.int16) != product.wanted.view(torch.int16)).nonzero()
            if len(wrong):
                raise KernelDeviceError(_complaint(product, prefix_rows, found, wrong, device, capability))


def products() -> Iterator[Product]:
    for dtype, counts in ((torch.bfloat16, BF16_TOKENS), (torch.float16, FP16_TOKENS)):
        for tokens in counts:
            generator = torch.Generator().manual_seed(tokens)
            x, weight, bias = (
                torch.randint(-LARGEST, LARGEST + 1, shape, generator=generator).to(dtype)
                for shape in ((tokens, DEPTH), (ROWS, DEPTH), (ROWS,))
            )
            yield Product(x, weight, bias, (x.double() @ weight.double().T + bias.double()).to(dtype))


def _complaint(
    product: Product,
    prefix_rows: int,
    found: torch.Tensor,
    wrong: torch.Tensor,
    device: torch.device,
    capability: tuple[int, int],
) -> str:
    tokens, rows = found.shape
    token, row = (int(index) for index in wrong[0])
    sizes = f"T={tokens}, N={rows}, K={product.x.shape[1]}, {found.dtype}, {prefix_rows} rows in device memory"
    return (
        f"split linear multiplies wrongly on {device}: it has compute capability {capability_text(capability)}, on "
        f"which the kernel had not been tried. With {sizes}, {len(wrong):,} of {found.numel():,} results differ; the "
        f"first, token {token} of row {row}, is {found[token, row].item()} and must be "
        f"{product.wanted[token, row].item()}. Programs that are compiled without split_linear do not need it"
    )
