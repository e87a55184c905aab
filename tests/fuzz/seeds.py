"""The files that are damaged. Small ones stand in corpus/; `python -m tests.fuzz.seeds` writes them anew."""

from __future__ import annotations

import dataclasses
import hashlib
import struct
import tempfile
import zipfile
from array import array
from pathlib import Path

from penstock.archive import CODE_FOLDER, METADATA_FILE, CodeFile
from penstock.executorch.description import (
    DelegateInput,
    DelegateMethod,
    DelegateRef,
    Description,
    IndexSlice,
    InputIndex,
    PlanTable,
    SharedState,
    SharedWeight,
)
from penstock.executorch.file_seal import append_seal
from penstock.executorch.packed_plans import PLANS_MAGIC, PackedPlans
from penstock.executorch.payload import StoredPlan, pack_delegate_ref, pack_payload, record_seal, sealed_parts
from penstock.plan.experts import Slots, find_banks, with_slots
from penstock.plan.packed import BLOCK_BYTES, SlotSizes, with_packed
from penstock.plan.plan import Plan
from penstock.plan.planner import Planner
from penstock.program import ConstantSpec, Program, TensorSpec, program_to_json
from penstock.record import to_record
from penstock.runtime.records import lru_numbers, packed_numbers, plan_numbers
from penstock.schedule import Access, Schedule, Step
from penstock.weight import State, Weight
from penstock.weights import layout_identity
from penstock.weights.packed_format import BLOCK_RAW_BYTES, HEADER, MAGIC, UNIT_BYTES, VERSIONS, layout_checksum
from penstock.weights.packing import Blocks

CORPUS = Path(__file__).parent / "corpus"
PAGE = 4096
SIZES = {"a": 3 * PAGE, "b": 5 * PAGE - 100, "c": 64, "d": 2 * PAGE, "e": 3 * PAGE}
# Of the experts of a layer: so many rows in both weights, taken by one index.
EXPERTS = 8
EXPERT_SIZES = {"up": EXPERTS * 2048, "down": EXPERTS * 1040}
STREAMED_SIZES = {
    **{f"w{number}": 3 * PAGE - 100 * number for number in range(7)},
    "table": 9 * PAGE,
    **EXPERT_SIZES,
}
BFLOAT16 = 6  # PackedKind::bfloat16_levels in csrc/packed/packed_block.h
CODE = {"forward": b"code of forward " * 20, "decode": b"code of decode " * 20}


def schedules() -> list[Schedule]:
    first = tuple(Access(number, name, gathered=name == "e") for number, name in enumerate(SIZES))
    steps = tuple(Step(f"kernel {number}", (number,)) for number in range(len(SIZES)))
    second = (Access(7, "d"), Access(9, "b", pinned=True))
    return [Schedule("forward", first, steps), Schedule("decode", second, (Step("mix", (7, 9)),))]


def a_program() -> Program:
    from tests.runtime.programs import a_method

    weights = [Weight(name, "uint8", (count,), (0,), ("tied",) if name == "a" else ()) for name, count in SIZES.items()]
    states = [State("left", "float32", (2, 3), (0, 1), "zeros"), State("right", "float32", (2, 3), (0, 1), "stored")]
    inputs = [
        TensorSpec("x", "float32", ("s0", 4), (4, 1)),
        TensorSpec("y", "int64", ("2*s0 + 1",), (1,)),
        ConstantSpec("flag", True),
    ]
    forward = a_method(
        inputs,
        ((0, {"y": 0}), {"flag": 0}),
        outputs=[TensorSpec("z", "float32", ("s0", 4), (4, 1)), ConstantSpec("", float("inf"))],
        result={"z": 0, "n": [0]},
        symbols={"s0": (1, 64)},
        states=("left", "right"),
    )
    decode = a_method(name="decode", states=("right",))
    methods = [dataclasses.replace(m, schedule=s) for m, s in zip((forward, decode), schedules(), strict=True)]
    return Program(
        tuple(methods), tuple(weights), tuple(states), layout_identity(weights, states), 10 * PAGE, None, ("old",),
        "cpu", {"torch": "2.13.0", "machine": "m", "cpu": "c", "penstock": "1", "python": "3"},
    )  # fmt: skip


def code_files(code: dict[str, bytes] = CODE) -> list[CodeFile]:
    return [
        CodeFile(f"{CODE_FOLDER}{method}/k.wrapper.cpp", len(content), hashlib.sha256(content).hexdigest())
        for method, content in sorted(code.items())
    ]


def write_program(path: Path, description: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for method, content in sorted(CODE.items()):
            archive.writestr(f"archive/{CODE_FOLDER}{method}/k.wrapper.cpp", content)
        archive.writestr(f"archive/extra/{METADATA_FILE}", description)
        archive.writestr("archive/version", "1")
    return path


PLANS = [StoredPlan(9 * PAGE, bytes(80)), StoredPlan(14 * PAGE, bytes(160))]


def shared_description() -> Description:
    indexes = (
        InputIndex(-3, 2, "weight", 1, 5, (IndexSlice(1, -1, 2),)),
        InputIndex(0, 9, "s", 0, 9, ()),
    )
    inputs = (DelegateInput("x", 6, (-1, 4), (0, 1), ()), DelegateInput("ids", 4, (-1,), (0,), indexes))
    return Description(
        program="p",
        device="cuda",
        page_bytes=PAGE,
        budget_bytes=None,
        activation_bytes=100,
        built_with={"torch": "2.13.0", "machine": "m", "cpu": "c", "capability": "9.0", "gpu": "g"},
        weights=tuple(SharedWeight((name,), 0, (count,), (0,), count) for name, count in SIZES.items()),
        states=(SharedState("s", 6, (2, 3), (1, 0), 24, 0),),
        methods=tuple(DelegateMethod(name, (0,), inputs, 1, 512) for name in ("forward", "decode")),
        plan_tables=(PlanTable((0, 1), (4,), 8 * PAGE, 14 * PAGE, 8 * PAGE, tuple(plan.row() for plan in PLANS)),),
    )


def write_pte(path: Path, payload: bytes) -> Path:
    with path.open("w+b") as file:
        file.write(b"\x08\0\0\0ET12" + b"weight_offload_signatures" + bytes(1000) + payload)
        append_seal(file)
    return path


def streaming_schedules() -> list[Schedule]:
    """Of which a plan at its floor copies, and reads a table in place: and so has records of every kind."""
    names = [name for name in STREAMED_SIZES if name not in EXPERT_SIZES]
    forward = tuple(Access(number, name, gathered=name == "table") for number, name in enumerate((*names, names[1])))
    steps = tuple(Step(f"kernel {number}", (number,)) for number in range(len(forward)))
    back = tuple(Access(number, name) for number, name in enumerate(reversed(names[:-1])))
    return [
        Schedule("forward", forward, steps),
        Schedule("back", back, tuple(Step("mix", (number,)) for number in range(len(back)))),
    ]


def expert_schedules() -> list[Schedule]:
    """The same with a bank, which one method reads by one index and then by another, and the other by one."""
    made = []
    for schedule, routings in zip(streaming_schedules(), ((0, 1), (5,)), strict=True):
        accesses, steps = list(schedule.accesses), list(schedule.steps)
        for routing in routings:
            for name in EXPERT_SIZES:
                accesses.append(Access(len(accesses), name, gathered=True, routing=routing))
                steps.append(Step(f"experts {routing}", (accesses[-1].number,)))
        made.append(Schedule(schedule.method, tuple(accesses), tuple(steps)))
    return made


def streamed_weights() -> dict[str, Weight]:
    plain = {name: Weight(name, "uint8", (count,), (0,)) for name, count in STREAMED_SIZES.items()}
    stacked = {name: Weight(name, "uint8", (EXPERTS, count // EXPERTS), (0, 1)) for name, count in EXPERT_SIZES.items()}
    return {**plain, **stacked}


def expert_plan() -> Plan:
    """Streams, and has slots for three experts."""
    weights, schedules = streamed_weights(), expert_schedules()
    planner = Planner(schedules, weights, page_bytes=PAGE, placement="auto")
    banks = find_banks(schedules, weights, EXPERT_SIZES)
    plan = planner.plan(planner.floor_bytes)
    return with_slots(plan, schedules, weights, banks, Slots({bank.names[0]: 3 for bank in banks}))


def packed_entry() -> bytes:
    """A header and a table, with next to no blocks: what these hold, another reader judges."""
    shape, sizes = (BLOCK_RAW_BYTES // 2 + 8,), (1, 1)
    layout = layout_checksum("bfloat16", shape, (0,))
    header = HEADER.pack(MAGIC, VERSIONS[BFLOAT16], BFLOAT16, 2 * shape[0], BLOCK_RAW_BYTES, len(sizes), layout)
    return header + struct.pack("<4I", *sizes, 0, 0) + bytes(UNIT_BYTES * len(sizes))


def records() -> dict[str, bytes]:
    """One of each kind that the core and the delegate read, and a plan for each way to place weights."""
    weights = streamed_weights()
    planner = Planner(streaming_schedules(), weights, page_bytes=PAGE)
    plans = [planner.plan(planner.floor_bytes + pages * PAGE) for pages in (0, 4)]
    plans.append(planner.plan(planner.full_bytes))
    # As if its blocks were whole and as long as packed: what a block may have is not the plan's to know.
    begins = {name: (0, STREAMED_SIZES[name] // 16 * 16) for name in ("w1", "w2", "w4")}
    plans.append(with_packed(plans[1], begins, SlotSizes(2, 4 * PAGE, 8 * PAGE), 4 * PAGE))
    plans.append(expert_plan())
    blocks = Blocks(BFLOAT16, 2 * BLOCK_BYTES + 5000, 7 * PAGE, array("q", (0, 46_000, 92_000, 96_000)))
    lru = lru_numbers(streaming_schedules(), weights, budget_bytes=20 * PAGE, granularity_bytes=PAGE)
    packed = bytes(packed_numbers([(1, 6 * PAGE, blocks), (3, 6 * PAGE, blocks)]))
    description = shared_description()
    packed_plans = to_record(PackedPlans(description.program, record_seal(packed), description.plan_tables))
    return {
        **{f"plan-{number}": bytes(plan_numbers(plan, weights)) for number, plan in enumerate(plans)},
        "lru": bytes(lru),
        "packed": packed,
        "description": to_record(description),
        # With a header each, which holds a checksum of the rest; the last with one of its own.
        "payload": pack_payload(description, PLANS, bytes(80)),
        "delegate-ref": pack_delegate_ref(DelegateRef("payload", "forward", 1)),
        "packed-plans": sealed_parts(PLANS_MAGIC, packed_plans, b"".join(plan.numbers for plan in PLANS), b""),
        "packed-entry": packed_entry(),
    }


def write_packed(path: Path) -> None:
    """As small as may be: a whole block and a short one, with escapes; and one of float32, without."""
    from penstock.weights import write_ptd
    from penstock.weights.packing import pack

    weights = [
        Weight("halves", "bfloat16", (32768 + 700,), (0,), ("tied",)),
        Weight("raw", "uint8", (100,), (0,)),
        Weight("floats", "float32", (128, 130), (1, 0)),
    ]
    pattern = b"".join(bytes((number, number if number % 16 == 0 else 0x3F)) for number in range(128))
    raw = {"halves": pattern * 262, "raw": bytes(range(100)), "floats": b"\1\2\x80\x3f" * 16640}
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "plain.ptd"
        write_ptd(plain, weights, lambda item: [raw[item.name][: item.nbytes]], identity=layout_identity(weights, ()))
        pack(plain, path, overwrite=True)


def main() -> None:
    from tests.weights.ptd_cases import EVERY_KIND, STATES, TIED, Crafted, write

    write(CORPUS / "ours.ptd", [*EVERY_KIND[:6], TIED, Weight("twin", "uint8", (3, 5), (0, 1))], STATES)
    Crafted().write(CORPUS / "small.ptd")
    write_packed(CORPUS / "packed.ptd")
    foreign = Crafted()
    foreign.metadata = None
    foreign.write(CORPUS / "foreign.ptd")
    write_program(CORPUS / "program.pt2", program_to_json(a_program(), code_files()).encode())
    write_pte(CORPUS / "shared.pte", pack_payload(shared_description(), PLANS, (CORPUS / "program.pt2").read_bytes()))
    for name, record in records().items():
        (CORPUS / f"{name}.record").write_bytes(record)


if __name__ == "__main__":
    main()
