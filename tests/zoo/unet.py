"""A small convolutional U-Net: convolution, group norm, transposed convolution, skip connections."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import Case, freeze


class ConvBlock(nn.Module):
    def __init__(self, cin: int, cout: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, padding=1)
        self.norm1 = nn.GroupNorm(4, cout)
        self.conv2 = nn.Conv2d(cout, cout, 3, padding=1)
        self.norm2 = nn.GroupNorm(4, cout)
        self.skip = nn.Conv2d(cin, cout, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.norm1(self.conv1(x)))
        return F.silu(self.norm2(self.conv2(y))) + self.skip(x)


class UNet(nn.Module):
    def __init__(self, cin: int = 3, width: int = 8, depth: int = 2) -> None:
        super().__init__()
        widths = [width << i for i in range(depth + 1)]
        self.stem = nn.Conv2d(cin, width, 3, padding=1)
        self.down = nn.ModuleList([ConvBlock(a, a) for a in widths[:-1]])
        self.pool = nn.ModuleList([nn.Conv2d(a, 2 * a, 3, stride=2, padding=1) for a in widths[:-1]])
        self.middle = ConvBlock(widths[-1], widths[-1])
        self.unpool = nn.ModuleList([nn.ConvTranspose2d(2 * a, a, 2, stride=2) for a in widths[-2::-1]])
        self.up = nn.ModuleList([ConvBlock(2 * a, a) for a in widths[-2::-1]])
        self.out = nn.Conv2d(width, cin, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        skips = []
        for block, pool in zip(self.down, self.pool, strict=True):
            x = block(x)
            skips.append(x)
            x = pool(x)
        x = self.middle(x)
        for unpool, block in zip(self.unpool, self.up, strict=True):
            x = block(torch.cat((unpool(x), skips.pop()), dim=1))
        return self.out(x)


def unet(
    *, channels_last: bool = False, dtype: torch.dtype = torch.float32, size: int = 16, width: int = 8, seed: int = 0
) -> Case:
    """`channels_last` makes weights and input channels_last: 4-D weights whose strides are not contiguous."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = UNet(width=width).to(dtype)
    # Cloned: export makes a symbol for the base of an argument that is a view.
    image = torch.linspace(-1, 1, 2 * 3 * size * size, dtype=dtype).reshape(2, 3, size, size).clone()
    if channels_last:
        module = module.to(memory_format=torch.channels_last)
        image = image.contiguous(memory_format=torch.channels_last)
    return Case(freeze(module), (image,))
