"""y = x @ W^T + bias, the first rows of W in device memory and the others in registered host memory, in one launch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from penstock.direct.architecture import Architecture, mma_sync_on
from penstock.direct.driver_calls import (
    BFLOAT16,
    FLOAT16,
    PROMOTE_256_BYTES,
    PROMOTE_NOTHING,
    DriverCalls,
    launch_config,
)
from penstock.direct.failures import KernelInputError
from penstock.direct.faults import WORDS, describe_fault
from penstock.direct.kernel_build import KernelBuilds, LoadedKernel
from penstock.direct.launch_shape import LaunchShape, Limits, check_sizes, launch_shape
from penstock.direct.params import SplitParams, aligned_params, fill_shape
from penstock.direct.schedule import ELEMENT_BYTES, GRAIN
from penstock.direct.tile_shape import PORTABLE_CLUSTER_CTAS, TOKEN_CTAS, TileShape, choose_tile

DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Options:
    """How to launch. The defaults are for use; other values show what an option gains, or help to find faults."""

    # None: no congestion control, every cluster faces the host.
    limits: Limits | None = Limits()  # noqa: RUF009 - frozen
    # Off: each block of tokens reads the host's rows again, as on a GPU whose CTAs share nothing.
    multicast: bool = True
    # The launch may begin, and copy W, before the previous launch on the stream has ended. Only for weights that no
    # kernel right before it writes.
    overlapped: bool = False
    # "own": the fastest that the GPU has. "mma_sync": what newer GPUs get; other bits, but the same at every split.
    instructions: Literal["own", "mma_sync"] = "own"
    # Less than the GPU has, for smaller tiles and shorter rings; None: all of it.
    shared_limit_bytes: int | None = None


@dataclass(frozen=True)
class Side:
    """Rows of W that lie in one memory: where the device finds the first, and elements from row to row."""

    address: int
    rows: int
    stride: int


@dataclass(frozen=True)
class Operands:
    """Sizes and both sides of W, checked. Nothing is read from a side without rows."""

    tokens: int
    depth: int
    bf16: bool
    prefix: Side
    rest: Side

    @property
    def rows(self) -> int:
        return self.prefix.rows + self.rest.rows


class SplitLinear:
    """The kernel on one device. `bounded_waits`: a wait that can only be a fault ends in an error; see `fault`."""

    def __init__(self, device: torch.device | str, *, bounded_waits: bool = False) -> None:
        self.device = torch.device(device)
        if self.device.type != "cuda":
            raise KernelInputError(f"split linear got the device {self.device} and needs a CUDA device")
        self.ordinal = torch.cuda.current_device() if self.device.index is None else self.device.index
        self._driver = DriverCalls()
        self._builds = KernelBuilds(self._driver, self.ordinal)
        self._bounded_waits = bounded_waits
        self._fault: torch.Tensor | None = None

    @property
    def capability(self) -> tuple[int, int]:
        return self._builds.limits.major, self._builds.limits.minor

    @property
    def fault(self) -> str | None:
        """What the last bounded wait that ran out of time was waiting for; readable after the launch has failed."""
        return None if self._fault is None else describe_fault(self._fault.tolist())

    def close(self) -> None:
        with self._driver.context(self.ordinal):
            self._builds.unload()

    def shape(
        self, tokens: int, rows: int, depth: int, prefix_rows: int, dtype: torch.dtype, options: Options
    ) -> LaunchShape:
        """The launch for these sizes. Compiles and loads a new kernel, so not during stream capture."""
        check_sizes(tokens, rows, depth, prefix_rows)
        bf16 = dtype == torch.bfloat16
        tile = self._tile(tokens, options)
        kernel = self._kernel(tile, bf16, options)
        if not kernel.most_clusters and tile.cluster_ctas > PORTABLE_CLUSTER_CTAS:
            tile = self._tile(tokens, options, PORTABLE_CLUSTER_CTAS)
            kernel = self._kernel(tile, bf16, options)
        flop_per_s = self._architecture(options).warpgroup_flop_per_s
        return launch_shape(tokens, rows, depth, prefix_rows, tile, kernel.most_clusters, options.limits, flop_per_s)

    def function(self, tile: TileShape, options: Options, *, bf16: bool) -> int:
        """The kernel that `shape` chose this tile for, with the same options."""
        return self._kernel(tile, bf16, options).function

    def _kernel(self, tile: TileShape, bf16: bool, options: Options) -> LoadedKernel:
        architecture = self._architecture(options)
        with self._driver.context(self.ordinal):
            return self._builds.kernel(tile, architecture, bf16=bf16, bounded_waits=self._bounded_waits)

    def _architecture(self, options: Options) -> Architecture:
        if options.instructions == "own":
            return self._builds.architecture
        if options.instructions != "mma_sync":
            raise KernelInputError(f"instructions is {options.instructions!r}; it must be 'own' or 'mma_sync'")
        usual = mma_sync_on(*self.capability)
        return replace(usual, clusters=usual.clusters and options.multicast)

    def fill_weight(self, params: SplitParams, shape: LaunchShape, prefix: Side, rest: Side, *, bf16: bool) -> None:
        """Fills in the shape of the launch and where W lies: all but x, y and the bias."""
        fill_shape(params, shape)
        for name, side, promotion in (("prefix", prefix, PROMOTE_256_BYTES), ("rest", rest, PROMOTE_NOTHING)):
            # A side without rows has nothing to describe, and no tile asks for it.
            if side.rows:
                self._encode(params, name, side, shape, bf16, shape.tile.w_box_rows, promotion)
                self._encode(params, f"{name}_16", side, shape, bf16, GRAIN, promotion)

    def _encode(
        self, params: SplitParams, name: str, side: Side, shape: LaunchShape, bf16: bool, box_rows: int, promotion: int
    ) -> None:
        self._driver.encode_map(
            getattr(params, name),
            BFLOAT16 if bf16 else FLOAT16,
            side.address,
            shape.depth,
            side.rows,
            side.stride * ELEMENT_BYTES,
            box_rows,
            promotion,
        )

    def _tile(self, tokens: int, options: Options, most_token_ctas: int = TOKEN_CTAS[-1]) -> TileShape:
        clusters = self._architecture(options).clusters
        has_bytes = self._builds.limits.shared_limit_bytes
        if options.shared_limit_bytes is not None and options.shared_limit_bytes > has_bytes:
            raise KernelInputError(
                f"shared_limit_bytes is {options.shared_limit_bytes:,}, and a block on this GPU has {has_bytes:,}"
            )
        return choose_tile(
            tokens,
            multicast=options.multicast and clusters,
            most_token_ctas=most_token_ctas,
            shared_limit_bytes=has_bytes if options.shared_limit_bytes is None else options.shared_limit_bytes,
        )

    def __call__(
        self,
        x: torch.Tensor,
        prefix: torch.Tensor | None,
        rest: torch.Tensor | None,
        bias: torch.Tensor | None = None,
        *,
        out: torch.Tensor | None = None,
        options: Options = Options(),
        host_bytes: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """On the current stream. Adds the bytes requested from the host to `host_bytes`, one int64 on the device."""
        with self._driver.context(self.ordinal):
            operands = self._check(x, prefix, rest, bias, out, host_bytes)
            y = x.new_empty(operands.tokens, operands.rows) if out is None else out
            shape = self.shape(operands.tokens, operands.rows, operands.depth, operands.prefix.rows, x.dtype, options)
            params = self._params(operands, shape, x, bias, y, host_bytes)
            stream = torch.cuda.current_stream(self.device).cuda_stream
            tile = shape.tile
            function = self.function(tile, options, bf16=operands.bf16)
            config = launch_config(
                shape.blocks, tile.threads, tile.shared_bytes, tile.cluster_ctas, stream, overlapped=options.overlapped
            )
            self._driver.launch(function, config, params)
        return y

    def _params(
        self,
        operands: Operands,
        shape: LaunchShape,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        y: torch.Tensor,
        host_bytes: torch.Tensor | None,
    ) -> SplitParams:
        params, bf16 = aligned_params(), operands.bf16
        self.fill_weight(params, shape, operands.prefix, operands.rest, bf16=bf16)
        rows = Side(x.data_ptr(), operands.tokens, _stride(x))
        self._encode(params, "x", rows, shape, bf16, shape.tile.x_box_rows, PROMOTE_256_BYTES)
        params.y_address, params.y_stride = y.data_ptr(), _stride(y)
        params.bias_address = 0 if bias is None else bias.data_ptr()
        params.host_bytes_address = 0 if host_bytes is None else host_bytes.data_ptr()
        if self._bounded_waits and self._fault is None:
            self._fault = torch.zeros(WORDS, dtype=torch.int32).pin_memory()
        params.fault_address = 0 if self._fault is None else self._driver.device_address(self._fault.data_ptr())
        return params

    def _check(
        self,
        x: torch.Tensor,
        prefix: torch.Tensor | None,
        rest: torch.Tensor | None,
        bias: torch.Tensor | None,
        out: torch.Tensor | None,
        host_bytes: torch.Tensor | None,
    ) -> Operands:
        if x.dtype not in DTYPES:
            raise KernelInputError(f"x is {x.dtype}; split linear needs one of {', '.join(map(str, DTYPES))}")
        if x.dim() != 2:
            raise KernelInputError(f"x has the shape {tuple(x.shape)}; split linear needs (tokens, K)")
        tokens, depth = x.shape
        prefix_rows = 0 if prefix is None else prefix.shape[0]
        rows = prefix_rows + (0 if rest is None else rest.shape[0])
        check_sizes(tokens, rows, depth, prefix_rows)
        sides = {"prefix": Side(0, 0, 0), "rest": Side(0, 0, 0)}
        for name, tensor in (("x", x), ("prefix", prefix), ("rest", rest)):
            if tensor is None or not tensor.shape[0]:
                continue
            _check_matrix(name, tensor, x.dtype, depth, aligned=True)
            if name != "rest" and tensor.device != x.device:
                raise KernelInputError(f"{name} is on {tensor.device} and x on {x.device}; they must be on one device")
            if name in sides:
                address = self._driver.device_address(tensor.data_ptr())
                sides[name] = Side(address, tensor.shape[0], _stride(tensor))
        if bias is not None and (tuple(bias.shape) != (rows,) or bias.dtype != x.dtype or not bias.is_contiguous()):
            raise KernelInputError(f"bias is {bias.dtype} {tuple(bias.shape)}; needs a contiguous {x.dtype} ({rows},)")
        if out is not None:
            _check_matrix("out", out, x.dtype, rows, aligned=False)
            if out.shape[0] != tokens:
                raise KernelInputError(f"out has {out.shape[0]} rows; {tokens} tokens need {tokens}")
        if host_bytes is not None and (host_bytes.dtype != torch.int64 or host_bytes.device != x.device):
            raise KernelInputError(
                f"host_bytes is {host_bytes.dtype} on {host_bytes.device}; needs int64 on {x.device}"
            )
        return Operands(tokens, depth, x.dtype == torch.bfloat16, sides["prefix"], sides["rest"])


def _stride(matrix: torch.Tensor) -> int:
    """Elements from row to row. For a single row, torch may report any stride."""
    return matrix.stride(0) if matrix.shape[0] > 1 else max(matrix.stride(0), matrix.shape[1])


def _check_matrix(name: str, matrix: torch.Tensor, dtype: torch.dtype, columns: int, *, aligned: bool) -> None:
    if matrix.dim() != 2 or matrix.shape[1] != columns or matrix.dtype != dtype:
        raise KernelInputError(
            f"{name} is {matrix.dtype} {tuple(matrix.shape)}; split linear needs {dtype} (rows, {columns})"
        )
    if (matrix.stride(1) != 1 and columns > 1) or _stride(matrix) < columns:
        raise KernelInputError(f"{name} has the strides {matrix.stride()}; it needs rows one after the other")
    if aligned and (matrix.data_ptr() % 16 or _stride(matrix) * ELEMENT_BYTES % 16):
        raise KernelInputError(
            f"{name} starts at {matrix.data_ptr():#x} with rows {_stride(matrix) * ELEMENT_BYTES} bytes apart; the "
            "copy engine needs both to be multiples of 16"
        )
