"""Recipes for the native core: how it launches the split linear kernel for one weight and one number of tokens."""

from __future__ import annotations

import ctypes
import sys

import torch

from penstock.direct.launch_shape import Limits
from penstock.direct.params import TENSOR_MAP_ALIGNMENT, SplitParams
from penstock.direct.self_check import open_kernel
from penstock.direct.split_linear import Options, Side
from penstock.errors import DriverCallError


class LinearCase(ctypes.Structure):
    """What a recipe is for; csrc/linear/linear_recipe.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("method", "access", "tokens", "rows", "depth", "prefix_rows")),
        *((name, ctypes.c_uint64) for name in ("prefix_address", "rest_address")),
        ("is_bf16", ctypes.c_int32),
    ]


_LAUNCH = (
    ("function", ctypes.c_uint64),
    *((name, ctypes.c_int64) for name in ("blocks", "threads", "shared_bytes", "cluster_ctas", "x_box_rows")),
)


class LinearRecipe(ctypes.Structure):
    """A launch without what changes from call to call: x, y and the bias."""

    _fields_ = [
        *_LAUNCH,
        # Tensor maps must be aligned.
        ("pad", ctypes.c_char * (TENSOR_MAP_ALIGNMENT - 8 * len(_LAUNCH))),
        ("params", SplitParams),
    ]


class Recipes:
    """Recipes for one device. `limits`: what its link and its SMs can do; None: those of an H200 on PCIe 5 x16.

    On a kind of GPU where the kernel was never tried, it is checked once first: KernelDeviceError if it is wrong.
    """

    def __init__(self, device: torch.device | str, limits: Limits | None = None) -> None:
        self._kernel = open_kernel(device)
        self._options = Options() if limits is None else Options(limits=limits)

    def prepare(self, case_address: int, recipe_address: int) -> None:
        """Fills the recipe at this address. Compiles and loads a new kernel, so not during stream capture."""
        case, recipe = LinearCase.from_address(case_address), LinearRecipe.from_address(recipe_address)
        bf16 = bool(case.is_bf16)
        dtype = torch.bfloat16 if bf16 else torch.float16
        shape = self._kernel.shape(case.tokens, case.rows, case.depth, case.prefix_rows, dtype, self._options)
        prefix = Side(case.prefix_address, case.prefix_rows, case.depth)
        rest = Side(case.rest_address, case.rows - case.prefix_rows, case.depth)
        self._kernel.fill_weight(recipe.params, shape, prefix, rest, bf16=bf16)
        tile = shape.tile
        recipe.function = self._kernel.function(tile, self._options, bf16=bf16)
        recipe.blocks, recipe.threads = shape.blocks, tile.threads
        recipe.shared_bytes, recipe.cluster_ctas = tile.shared_bytes, tile.cluster_ctas
        recipe.x_box_rows = tile.x_box_rows

    def close(self) -> None:
        """Unloads the kernels; nothing may still launch them."""
        try:
            self._kernel.close()
        except DriverCallError as error:
            # A lost context refuses even this, and other resources must still be given back.
            print(f"penstock: the kernels of split linears could not be unloaded: {error}", file=sys.stderr)
