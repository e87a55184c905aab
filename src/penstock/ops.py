"""The custom ops that stand in a program. Importing this module registers them.

fetch            what the pass puts in front of a use of a weight; takes the weight, runs eagerly, survives export.save
penstock_weight  what a fetch becomes while compiling: a factory without the weight, so that nothing of it can be
                 cloned, folded or put on the device. Its name is long because the C shim that the compiled code calls
                 is named after it without the namespace.
penstock_linear  x (tokens, K) times a lent weight (N, K) transposed, plus bias: for a weight whose rows may lie in two
                 places. Its C shim asks the session where, by the access of the weight.
penstock_rows    rows of a lent weight by index: experts, of which only the requested ones need to be present.
penstock_grouped each group of rows of x times its matrix of a lent weight. `ends`: where each group ends. `linear`:
                 the matrices are (columns, depth), as linears have them.
force_clone      a copy that the compiler cannot elide
materialize      the identity, computed on the spot: the compiler may not compute its input again in each of its readers
forbid_reinplace a late use of lent weights, lowered to nothing; it keeps passes from writing into them
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.layout import canonical

_LIBRARY = torch.library.Library("penstock", "DEF")
_LIBRARY.define("fetch(Tensor weight, int access, str name) -> Tensor")
# No pointwise tag and a positional device: a pass that moves constructors rewrites only the keyword.
_LIBRARY.define("penstock_weight(int access, SymInt[] size, ScalarType dtype, Device device) -> Tensor")
# The C shim takes x as rows that follow one another, without gaps.
_LIBRARY.define(
    "penstock_linear(Tensor x, Tensor weight, Tensor? bias, int access) -> Tensor",
    tags=(torch.Tag.needs_contiguous_strides,),
)
_LIBRARY.define(
    "penstock_rows(Tensor weight, Tensor index, int access) -> Tensor", tags=(torch.Tag.needs_contiguous_strides,)
)
_LIBRARY.define(
    "penstock_grouped(Tensor x, Tensor weight, Tensor ends, bool linear, int access) -> Tensor",
    tags=(torch.Tag.needs_contiguous_strides,),
)
_LIBRARY.define("force_clone(Tensor value) -> Tensor")
_LIBRARY.define("materialize(Tensor value) -> Tensor")
_LIBRARY.define("forbid_reinplace(Tensor[] lent) -> ()")

FETCH = torch.ops.penstock.fetch.default
WEIGHT = torch.ops.penstock.penstock_weight.default
LINEAR = torch.ops.penstock.penstock_linear.default
ROWS = torch.ops.penstock.penstock_rows.default
GROUPED = torch.ops.penstock.penstock_grouped.default
FORCE_CLONE = torch.ops.penstock.force_clone.default
MATERIALIZE = torch.ops.penstock.materialize.default
FORBID_REINPLACE = torch.ops.penstock.forbid_reinplace.default


def _fetch(weight: torch.Tensor, access: int, name: str) -> torch.Tensor:
    # Always a copy: an op that returned its own input would make outputs alias the weight.
    order = canonical(weight.shape, weight.stride())
    inverse = [order.index(d) for d in range(weight.dim())]
    plain = weight.resolve_conj().resolve_neg()  # as the weights file has it
    return plain.permute(order).clone(memory_format=torch.contiguous_format).permute(inverse)


def _weight_missing(access: int, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    raise RuntimeError(f"access {access}: a weightless program runs only as compiled code inside a session")


def _weight_fake(access: int, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device=device)


def _linear_missing(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, access: int) -> torch.Tensor:
    raise RuntimeError(f"access {access}: a weightless program multiplies only as compiled code inside a session")


def _linear_fake(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, access: int) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _rows_missing(weight: torch.Tensor, index: torch.Tensor, access: int) -> torch.Tensor:
    raise RuntimeError(f"access {access}: a weightless program takes experts only as compiled code inside a session")


def _rows_fake(weight: torch.Tensor, index: torch.Tensor, access: int) -> torch.Tensor:
    return weight.new_empty((*index.shape, *weight.shape[1:]))


def _grouped_missing(
    x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, linear: bool, access: int
) -> torch.Tensor:
    return _rows_missing(weight, ends, access)


def _grouped_fake(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, linear: bool, access: int) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[1 if linear else 2])


_LIBRARY.impl("fetch", _fetch, "CompositeExplicitAutograd")
# A lazily conjugated or negated weight reaches the op as it is. If it were resolved first, fetch would take a copy, no
# longer the weight itself.
for _key in ("Conjugate", "Negative"):
    _LIBRARY.impl("fetch", torch.library.fallthrough_kernel, _key)
_LIBRARY.impl("penstock_weight", _weight_missing, "CompositeExplicitAutograd")
_LIBRARY.impl("penstock_linear", _linear_missing, "CompositeExplicitAutograd")
_LIBRARY.impl("penstock_rows", _rows_missing, "CompositeExplicitAutograd")
_LIBRARY.impl("penstock_grouped", _grouped_missing, "CompositeExplicitAutograd")
_LIBRARY.impl("force_clone", lambda value: value.clone(), "CompositeExplicitAutograd")
_LIBRARY.impl("materialize", lambda value: value.clone(), "CompositeExplicitAutograd")
_LIBRARY.impl("forbid_reinplace", lambda lent: None, "CompositeExplicitAutograd")
torch.library.register_fake("penstock::fetch", _fetch, lib=_LIBRARY)
torch.library.register_fake("penstock::penstock_weight", _weight_fake, lib=_LIBRARY)
torch.library.register_fake("penstock::penstock_linear", _linear_fake, lib=_LIBRARY)
torch.library.register_fake("penstock::penstock_rows", _rows_fake, lib=_LIBRARY)
torch.library.register_fake("penstock::penstock_grouped", _grouped_fake, lib=_LIBRARY)
torch.library.register_fake("penstock::force_clone", lambda value: torch.empty_like(value), lib=_LIBRARY)
torch.library.register_fake("penstock::materialize", lambda value: torch.empty_like(value), lib=_LIBRARY)
torch.library.register_fake("penstock::forbid_reinplace", lambda lent: None, lib=_LIBRARY)
