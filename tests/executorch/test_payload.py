"""The parts that need no runtime: the bytes in the file, the table of plans, ops on their way back to ATen."""

from __future__ import annotations

import random
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.errors import OutputExistsError, OutputPathError, PackageError
from penstock.executorch.description import (
    DelegateInput,
    DelegateMethod,
    Description,
    IndexSlice,
    InputIndex,
    PlanTable,
    SharedState,
    SharedWeight,
)
from penstock.executorch.dialect import plain_op
from penstock.executorch.file_seal import append_seal, check_seal
from penstock.executorch.lowering import export
from penstock.executorch.payload import StoredPlan, checksum, pack_payload, read_payload
from penstock.executorch.plan_table import make_plan_tables
from penstock.native import core
from penstock.plan.planner import Planner
from penstock.record import VERSION
from penstock.schedule import Access, Schedule, Step
from penstock.weight import Weight

aten = torch.ops.aten
PAGE = 4096


PLAN = StoredPlan(5, bytes(16))
INDEX = InputIndex(0, 3, "é", 0, 3, (IndexSlice(0, 2, 1),))
DESCRIPTION = Description(
    program="p",
    device="cpu",
    page_bytes=PAGE,
    budget_bytes=None,
    activation_bytes=5,
    built_with={"torch": "2"},
    weights=(SharedWeight(("é", "of several words"), 6, (3,), (0,), 12),),
    states=(SharedState("s", 6, (2, 3), (1, 0), 24, 1),),
    methods=(DelegateMethod("forward", (0,), (DelegateInput("x", 6, (-1,), (0,), ()),), 1, 256),),
    plan_tables=(PlanTable((0,), (0,), 1, 2, 1, (PLAN.row(),)),),
)
(WEIGHT,), (STATE,), (METHOD,), (TABLE,) = (
    *(DESCRIPTION.weights, DESCRIPTION.states),
    *(DESCRIPTION.methods, DESCRIPTION.plan_tables),
)


def taking(scalar_type: int, shape: tuple[int, ...], *indexes: InputIndex) -> DelegateMethod:
    return replace(METHOD, inputs=(DelegateInput("x", scalar_type, shape, tuple(range(len(shape))), indexes),))


def turned(*dim_order: int) -> DelegateInput:
    return DelegateInput("x", 6, (3, 3), dim_order, ())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"page_bytes": 0}, "page_bytes is 0"),
        ({"page_bytes": (1 << 30) + 1}, "page_bytes is 1073741825"),
        ({"page_bytes": -1}, "page_bytes is -1, needs a whole number"),
        ({"plan_tables": ()}, "has 0 plan tables"),
        ({"methods": (), "plan_tables": (replace(TABLE, methods=()),)}, "and 0 methods"),
        ({"plan_tables": (replace(TABLE, methods=(1,)),)}, "for a method that is not there"),
        ({"plan_tables": (replace(TABLE, in_place=(1,)),)}, "for a weight that is not there"),
        ({"plan_tables": (replace(TABLE, plans=()),)}, "holds no plan"),
        (
            {"plan_tables": (replace(TABLE, floor_bytes=2**63 - 1),)},
            "9223372036854775807 bytes, more than there can be",
        ),
        ({"weights": (replace(WEIGHT, names=()),)}, "a weight has no name"),
        ({"weights": (replace(WEIGHT, nbytes=-1),)}, r"weights\[0\].nbytes is -1"),
        ({"states": ()}, "'forward' has state that is none"),
        ({"states": (replace(STATE, dim_order=(1, 1)),)}, "state 's' has dim order"),
        ({"states": (replace(STATE, shape=(2, -3)),)}, "shape"),
        ({"methods": (taking(6, (-2,)),)}, "a size below -1"),
        ({"methods": (replace(METHOD, inputs=(turned(1, 2),)),)}, r"input 'x' has dim order \[1, 2\]"),
        ({"methods": (taking(6, (3,), INDEX),)}, "of scalar type 6"),
        ({"methods": (taking(4, (3, 3), INDEX),)}, "other dimensions"),
        ({"methods": (taking(4, (3,), replace(INDEX, region=(IndexSlice(0, 1, 0),))),)}, "a slice with step 0"),
    ],
)
def test_a_description_that_is_none_is_refused_though_its_checksum_is_right(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(PackageError, match=said):
        read_payload(pack_payload(replace(DESCRIPTION, **changes), [PLAN], b""))


def test_an_earlier_format_is_refused_with_what_makes_it_anew() -> None:
    packed = bytearray(pack_payload(DESCRIPTION, [PLAN], b"code"))
    packed[8] = VERSION - 1
    said = f"has format version {VERSION - 1}, and this release reads version {VERSION}: lower it again, with "
    with pytest.raises(PackageError, match=said):
        read_payload(bytes(packed))


def test_every_byte_of_a_file_with_a_seal_is_covered(tmp_path: Path) -> None:
    path = tmp_path / "m.pte"
    with path.open("w+b") as file:
        file.write(b"\x08\0\0\0ET12" + b"weight_offload_signatures" + bytes(100))
        append_seal(file)
    whole = path.read_bytes()
    check_seal(path)
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(PackageError, match=r"m\.pte is damaged"):
            check_seal(path)
        path.write_bytes(whole[: max(at, 40)])
        with pytest.raises(PackageError, match="is damaged or truncated"):
            check_seal(path)
    path.write_bytes(b"\x08\0\0\0ET12 of other tools")
    check_seal(path)
    with pytest.raises(PackageError, match="it is a folder"):
        check_seal(tmp_path)


def test_a_description_comes_back_and_damage_does_not() -> None:
    packed = pack_payload(DESCRIPTION, [PLAN], b"code")
    found = read_payload(packed)
    assert (found.description, found.plans, found.code) == (DESCRIPTION, PLAN.numbers, b"code")
    for at in range(len(packed)):
        broken = bytearray(packed)
        broken[at] ^= 1
        with pytest.raises(PackageError):
            read_payload(bytes(broken))
    with pytest.raises(PackageError):
        read_payload(packed[:-1])


def test_the_checksum_is_the_one_of_the_core() -> None:
    """XXH3 has another way for short, middle and long texts, and for the last part of a block."""
    draw = random.Random(1)
    for count in (*range(600), *range(1000, 1200), 4096, 100_000):
        data = draw.randbytes(count)
        assert core().penstock_checksum(data, count) == checksum(data), count


def test_plans_name_weights_by_number() -> None:
    weights = [Weight(f"w{k}", "uint8", (3 * PAGE,), (0,)) for k in range(12)]

    def schedule(name: str, used: range) -> Schedule:
        accesses = tuple(Access(number, weights[k].name) for number, k in enumerate(used))
        return Schedule(name, accesses, tuple(Step("kernel", (number,)) for number in range(len(used))))

    schedules = [schedule("forward", range(12)), schedule("short", range(6, 12))]
    whole, first, second = make_plan_tables(schedules, weights, page_bytes=PAGE, device="cpu")
    planner = Planner(schedules, {weight.name: weight for weight in weights}, page_bytes=PAGE)
    assert (whole.row.floor_bytes, whole.row.full_bytes) == (planner.floor_bytes, 36 * PAGE)
    assert [table.row.methods for table in (whole, first, second)] == [(0, 1), (0,), (1,)]
    # By itself a method has a floor and weights of its own.
    assert second.row.full_bytes == 18 * PAGE
    for table in (whole, first, second):
        held = [plan.device_bytes for plan in table.plans]
        assert held == sorted(set(held))
        assert held[0] <= table.row.floor_bytes
        assert held[-1] == table.row.full_bytes
        assert [plan.is_copying for plan in table.plans] == [nbytes < held[-1] for nbytes in held]
    # Weights keep their numbers in every table. With everything resident, one fill for each.
    for table, used in ((whole, range(12)), (second, range(6, 12))):
        raw = table.plans[-1].numbers
        numbers = struct.unpack(f"<{len(raw) // 8}q", raw)
        fills = {at for at in range(len(numbers)) if numbers[at : at + 2] == (0, 3 * PAGE) and numbers[at - 1] < PAGE}
        assert {numbers[at - 1] for at in fills} == set(used)


@pytest.mark.parametrize(
    ("copying", "plain"),
    [
        (aten.view_copy.default, aten.reshape.default),
        (aten.view_copy.dtype, aten.view.dtype),
        (aten.slice_copy.Tensor, aten.slice.Tensor),
        (aten.permute_copy.default, aten.permute.default),
        (aten.split_with_sizes_copy.default, aten.split_with_sizes.default),
        (aten._to_copy.default, aten._to_copy.default),
        (aten.copy.default, aten.copy.default),
        (aten.index_copy.default, aten.index_copy.default),
        (aten.mm.default, aten.mm.default),
    ],
)
def test_views_that_were_made_copies_are_views_again(copying: object, plain: object) -> None:
    assert plain_op(copying) is plain  # type: ignore[arg-type]


def test_where_files_cannot_go(tmp_path: Path) -> None:
    from tests.executorch.programs import hazards

    program = hazards()
    with pytest.raises(OutputPathError, match="must end in .pte"):
        export(program, tmp_path / "model.pt2", device="cpu")
    with pytest.raises(OutputPathError, match="does not exist"):
        export(program, tmp_path / "none" / "model.pte", device="cpu")
    (tmp_path / "model.ptd").touch()
    with pytest.raises(OutputExistsError, match="overwrite=True"):
        export(program, tmp_path / "model.pte", device="cpu")
