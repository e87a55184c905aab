"""The parts that need no runtime: the bytes in the file, the table of plans, ops on their way back to ATen."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.errors import OutputExistsError, OutputPathError, PackageError
from penstock.executorch.dialect import plain_op
from penstock.executorch.file_seal import append_seal, check_seal
from penstock.executorch.lowering import export
from penstock.executorch.payload import WEIGHT_SHIFT, StoredPlan, fnv64, pack_payload, read_description
from penstock.executorch.plan_table import make_plan_tables
from penstock.plan.planner import Planner
from penstock.schedule import Access, Schedule, Step
from penstock.weight import Weight

aten = torch.ops.aten
PAGE = 4096


DESCRIPTION: dict[str, Any] = {
    "program": "p",
    "device": "cpu",
    "page_bytes": PAGE,
    "plan_tables": [
        {"methods": [0], "reads_in_place": 0, "floor_bytes": 1, "full_bytes": 2, "plans": 1, "seals": ["0" * 16]}
    ],
    "budget_bytes": None,
    "activation_bytes": 5,
    "built_with": {"torch": "2"},
    "weights": [{"names": ["é"], "scalar_type": 6, "shape": [3], "dim_order": [0], "nbytes": 12}],
    "states": [{"name": "s", "scalar_type": 6, "shape": [2, 3], "dim_order": [1, 0], "nbytes": 24, "stored": 1}],
    "methods": [
        {
            "name": "forward",
            "accesses": ["é"],
            "states": [0],
            "inputs": [{"scalar_type": 6, "shape": [-1], "dim_order": [0]}],
            "outputs": 1,
        }
    ],
}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"page_bytes": 0}, "page_bytes is 0"),
        ({"page_bytes": True}, "page_bytes is true, needs a whole number"),
        ({"plan_tables": []}, "has 0 plan tables"),
        ({"plan_tables": [{**DESCRIPTION["plan_tables"][0], "methods": [1]}]}, "for a method that is not there"),
        ({"weights": []}, "'forward' reads 'é', which is no weight"),
        ({"device": None}, "device is null, needs text"),
        ({"states": []}, "'forward' has state that is none"),
        ({"states": [{**DESCRIPTION["states"][0], "dim_order": [1, 1]}]}, "state 's' has dim order"),
        ({"states": [{**DESCRIPTION["states"][0], "shape": [2, -3]}]}, "shape"),
    ],
)
def test_a_description_that_is_none_is_refused_though_its_hash_is_right(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(PackageError, match=said):
        read_description(pack_payload({**DESCRIPTION, **changes}, [], b""))


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
    packed = pack_payload(DESCRIPTION, [StoredPlan(5, bytes(16))], b"code")
    assert read_description(packed) == DESCRIPTION
    for at in range(len(packed)):
        broken = bytearray(packed)
        broken[at] ^= 1
        with pytest.raises(PackageError):
            read_description(bytes(broken))
    with pytest.raises(PackageError):
        read_description(packed[:-1])


def test_the_hash_is_the_one_of_the_core() -> None:
    assert fnv64(b"") == 0xCBF29CE484222325
    assert fnv64(b"a") == 0xAF63DC4C8601EC8C  # FNV-1a of one byte, as published


def test_plans_name_weights_by_number() -> None:
    weights = [Weight(f"w{k}", "uint8", (3 * PAGE,), (0,)) for k in range(12)]

    def schedule(name: str, used: range) -> Schedule:
        accesses = tuple(Access(number, weights[k].name) for number, k in enumerate(used))
        return Schedule(name, accesses, tuple(Step("kernel", (number,)) for number in range(len(used))))

    schedules = [schedule("forward", range(12)), schedule("short", range(6, 12))]
    whole, first, second = make_plan_tables(schedules, weights, page_bytes=PAGE)
    planner = Planner(schedules, {weight.name: weight for weight in weights}, page_bytes=PAGE)
    assert (whole.floor_bytes, whole.full_bytes) == (planner.floor_bytes, 36 * PAGE)
    assert [table.methods for table in (whole, first, second)] == [(0, 1), (0,), (1,)]
    # By itself a method has a floor and weights of its own.
    assert second.full_bytes == 18 * PAGE
    for table in (whole, first, second):
        held = [plan.device_bytes for plan in table.plans]
        assert held == sorted(set(held))
        assert held[0] <= table.floor_bytes
        assert held[-1] == table.full_bytes
    # All other numbers of a plan this small are far below, or -1; and weights keep their numbers in every table.
    for table, used in ((whole, range(12)), (second, range(6, 12))):
        raw = table.plans[-1].numbers
        numbers = struct.unpack(f"<{len(raw) // 8}q", raw)
        named = {number >> WEIGHT_SHIFT for number in numbers if number >> WEIGHT_SHIFT > 0}
        assert named == set(used) - {0}


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
