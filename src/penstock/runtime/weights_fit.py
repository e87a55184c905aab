"""Whether a weights file is the program's. No torch."""

from __future__ import annotations

from penstock.errors import IdentityError, MissingWeightError, WeightMismatchError
from penstock.program import Program
from penstock.weight import State, Weight
from penstock.weights import Entry, WeightsIndex


def check_weights(program: Program, index: WeightsIndex) -> dict[str, Entry]:
    """The entry of each weight, and of each state whose first value is stored, by name."""
    items: list[Weight | State] = [*program.weights, *program.states]
    needed = [item.name for item in items if isinstance(item, Weight) or item.init == "stored"]
    found = {item.name: index[item.name] for item in items if item.name in index}
    missing = [name for name in needed if name not in found]
    if needed and not found:
        raise IdentityError(
            f"{index.path} holds none of the {len(needed)} weights of the program, such as {needed[0]!r}: it has "
            f"identity {index.identity}, the program needs {program.identity}"
        )
    if missing:
        raise MissingWeightError(
            f"{index.path} lacks {len(missing)} of the {len(needed)} weights of the program: "
            + ", ".join(map(repr, missing))
        )
    mismatches = [
        f"{item.name!r} is {_entry_text(entry)}, needs {_layout_text(item.dtype, item.shape, item.dim_order)}"
        for item in items
        if (entry := found.get(item.name)) is not None and not _fits(item, entry)
    ]
    if mismatches:
        raise WeightMismatchError(f"{index.path} does not fit the program: {'; '.join(mismatches)}")
    # A file that ExecuTorch wrote has no identity. Then there is nothing to check beyond the fit of every weight.
    if index.identity is not None and index.identity != program.identity:
        raise IdentityError(
            f"{index.path} was written for another program: every weight is there and fits, but it has identity "
            f"{index.identity}, the program needs {program.identity} (other weights, states or ties)"
        )
    return found


def _fits(item: Weight | State, entry: Entry) -> bool:
    if (entry.dtype, entry.shape) != (item.dtype, item.shape):
        return False
    return _memory_order(item.shape, item.dim_order) == _memory_order(entry.shape, entry.dim_order)


def _memory_order(shape: tuple[int, ...], dim_order: tuple[int, ...]) -> list[int]:
    """The part of a dim order that the bytes depend on: a dimension of size 1 may stand anywhere."""
    return [] if 0 in shape else [d for d in dim_order if shape[d] != 1]


def _entry_text(entry: Entry) -> str:
    if entry.kind == "blob":
        return f"{entry.length_bytes} bytes without a dtype and a shape"
    return _layout_text(entry.dtype, entry.shape, entry.dim_order)


def _layout_text(dtype: str, shape: tuple[int, ...], dim_order: tuple[int, ...]) -> str:
    plain = dim_order == tuple(range(len(shape)))
    return f"{dtype}{list(shape)}" + ("" if plain else f" with dim order {list(dim_order)}")
