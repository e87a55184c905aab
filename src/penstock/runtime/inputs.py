"""A call's arguments, checked against the method's signature and laid out as the compiled code reads them.

The compiled code checks nothing: it reads every input with the strides of the example it was compiled for, whatever the
tensor's own are, and on a GPU with loads that need 16-byte alignment.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

import torch

from penstock.errors import InputError, PackageError
from penstock.layout import overlaps
from penstock.program import ConstantSpec, Method, TensorSpec
from penstock.runtime.call_structure import CallStructure
from penstock.runtime.index_check import check_indices as refuse_outside
from penstock.runtime.symbolic_layout import SymbolicLayout

ALIGNMENT_BYTES = 16
# How many combinations of shapes are remembered: a decoder's growing context must not fill the memory.
_REMEMBERED_SHAPES = 64


class InputBinding:
    """Turns the arguments of one method's calls into the flat tensors that its compiled code takes after the states.

    `written` names the inputs that the program writes into. They are passed as they are or refused, never copied: the
    caller would not see the update. Numbers that index a table or a cache are checked if they lie in host memory. On a
    GPU the check waits for the device, so there it runs only with `check_indices`.
    """

    def __init__(
        self, method: Method, device: torch.device, *, written: Collection[str], check_indices: bool = False
    ) -> None:
        self._method = method.name
        self._specs = method.signature.inputs
        self._structure = CallStructure(method.signature.in_spec, len(self._specs))
        self._device = device
        self._tensor_specs = [spec for spec in self._specs if isinstance(spec, TensorSpec)]
        self._dtypes = [_dtype(spec) for spec in self._tensor_specs]
        # Indices into what flat() returns.
        self.written = [index for index, spec in enumerate(self._tensor_specs) if spec.name in written]
        checked = check_indices or device.type == "cpu"
        self._indexing = [(index, spec) for index, spec in enumerate(self._tensor_specs) if spec.indexes and checked]
        layout = SymbolicLayout(self._tensor_specs, method.signature.symbols)
        self._symbol_ranges = layout.ranges_text
        # Shapes that do not fit raise, and are not remembered.
        self._strides = lru_cache(_REMEMBERED_SHAPES)(layout.strides)

    @property
    def signature_text(self) -> str:
        """forward(x: float32[s0, 16], flag: True) on cpu, where 1 <= s0 <= 64"""
        leaves = [_spec_text(spec) for spec in self._specs]
        return f"{self._method}({self._structure.render(leaves)}) on {self._device}{self._symbol_ranges}"

    def flat(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> list[torch.Tensor]:
        try:
            tensors = self._tensors(self._structure.leaves(arguments, keywords))
            self._lay_out(tensors)
            for index, spec in self._indexing:
                refuse_outside(spec, tensors[index])
        except InputError as error:
            raise InputError(f"method {self._method!r}: {error}\nexpected: {self.signature_text}") from error
        return tensors

    def _tensors(self, leaves: Sequence[Any]) -> list[torch.Tensor]:
        tensors: list[torch.Tensor] = []
        grad_mode = torch.is_grad_enabled()
        for spec, leaf in zip(self._specs, leaves, strict=True):
            if isinstance(spec, ConstantSpec):
                if not _same_constant(leaf, spec.value):
                    raise InputError(
                        f"input {spec.name!r} is {leaf!r:.80}, needs {spec.value!r}: it was fixed at export"
                    )
                continue
            if type(leaf) is not torch.Tensor and type(leaf) is not torch.nn.Parameter:
                raise InputError(_not_a_tensor(spec.name, leaf))
            if leaf.is_nested or leaf.layout is not torch.strided:
                kind = "nested" if leaf.is_nested else str(leaf.layout).removeprefix("torch.")
                raise InputError(f"input {spec.name!r} is a {kind} tensor, needs to be a dense (strided) one")
            if leaf.dtype is not self._dtypes[len(tensors)]:
                got = str(leaf.dtype).removeprefix("torch.")
                raise InputError(f"input {spec.name!r} has dtype {got}, needs {spec.dtype}")
            if leaf.device != self._device:
                raise InputError(f"input {spec.name!r} is on {leaf.device}, needs to be on {self._device}")
            if grad_mode and leaf.requires_grad:
                raise InputError(
                    f"input {spec.name!r} requires grad, and a compiled program computes no gradients; "
                    "call it under torch.no_grad(), or pass a detached tensor"
                )
            tensors.append(leaf)
        return tensors

    def _lay_out(self, tensors: list[torch.Tensor]) -> None:
        """Replaces what the compiled code would misread with a copy that it reads right."""
        expected = self._strides(tuple([tensor.shape for tensor in tensors]))
        for index, (tensor, strides) in enumerate(zip(tensors, expected, strict=True)):
            lazy = tensor.is_neg() or (tensor.dtype.is_complex and tensor.is_conj())
            if lazy or tensor.stride() != strides or self._address(index, tensor) % ALIGNMENT_BYTES:
                tensors[index] = self._laid_out(index, tensor, strides)
        for index in self.written:
            self._refuse_shared(index, tensors)

    def _laid_out(self, index: int, tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
        name = self._tensor_specs[index].name
        # The strides of a dimension of size 1 are never used, nor are those of an empty tensor.
        same = tensor.numel() == 0 or all(
            size == 1 or got == needed for size, got, needed in zip(tensor.shape, tensor.stride(), strides, strict=True)
        )
        lazy = tensor.is_conj() or tensor.is_neg()
        if same and not lazy and self._address(index, tensor) % ALIGNMENT_BYTES == 0:
            return tensor
        if index in self.written:
            raise InputError(
                f"the program writes into input {name!r}, so it is not copied: it has strides {list(tensor.stride())} "
                f"at address {tensor.data_ptr():#x}{', lazily conjugated or negated' if lazy else ''}; needs strides "
                f"{list(strides)} at a multiple of {ALIGNMENT_BYTES}"
            )
        with torch.no_grad():
            if overlaps(tensor.shape, strides) and tensor.numel():
                if not same or lazy:
                    raise InputError(
                        f"input {name!r} has strides {list(tensor.stride())}; the program was compiled for an expanded "
                        f"one that has strides {list(strides)}, and reads only the elements that those reach; needs an "
                        "input expanded in the same way, or an export with a plain example"
                    )
                # Elements that share memory cannot be written one by one: the memory they span is copied instead.
                span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
                return tensor.as_strided((span,), (1,)).clone().as_strided(tensor.shape, tensor.stride())
            copy = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
            return copy.copy_(tensor)

    def _address(self, index: int, tensor: torch.Tensor) -> int:
        try:
            return tensor.data_ptr()
        except RuntimeError as error:
            name = self._tensor_specs[index].name
            raise InputError(
                f"input {name!r} has no memory of its own (is it inside vmap or grad?): {error}"
            ) from error

    def _refuse_shared(self, written: int, tensors: Sequence[torch.Tensor]) -> None:
        memory = tensors[written].untyped_storage().data_ptr()
        for index, tensor in enumerate(tensors):
            if index != written and memory and tensor.untyped_storage().data_ptr() == memory:
                names = [self._tensor_specs[i].name for i in (written, index)]
                raise InputError(
                    f"the program writes into input {names[0]!r}, and input {names[1]!r} shares its memory"
                )


def _dtype(spec: TensorSpec) -> torch.dtype:
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise PackageError(
            f"input {spec.name!r} has dtype {spec.dtype!r}, which torch {torch.__version__} does not have"
        )
    return dtype


def _same_constant(given: Any, fixed: Any) -> bool:
    """Whether the program computes the same with both. 1, 1.0 and True differ, as do 0.0 and -0.0; NaN equals NaN."""
    if fixed is None or isinstance(fixed, bool):
        return given is fixed
    if isinstance(fixed, float):
        return isinstance(given, float) and given.hex() == fixed.hex()
    return isinstance(given, type(fixed)) and not isinstance(given, bool) and bool(given == fixed)


def _not_a_tensor(name: str, leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        kind = type(leaf)
        return (
            f"input {name!r} is a {kind.__module__}.{kind.__qualname__}, a subclass of torch.Tensor whose memory may "
            "hold something else; needs a plain torch.Tensor"
        )
    return f"input {name!r} is {leaf!r:.80} of type {type(leaf).__name__}, needs to be a torch.Tensor"


def _spec_text(spec: TensorSpec | ConstantSpec) -> str:
    if isinstance(spec, ConstantSpec):
        return f"{spec.name}: {spec.value!r}"
    return f"{spec.name}: {spec.dtype}[{', '.join(map(str, spec.shape))}]"
