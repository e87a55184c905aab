"""The files that are damaged. Small ones stand in corpus/; `python -m tests.fuzz.seeds` writes them anew."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tempfile
import zipfile
from pathlib import Path

from penstock.archive import CODE_FOLDER, METADATA_FILE, CodeFile
from penstock.executorch.file_seal import append_seal
from penstock.executorch.payload import StoredPlan, pack_payload
from penstock.program import ConstantSpec, Program, TensorSpec, program_to_json
from penstock.runtime.records import plan_numbers
from penstock.schedule import Access, Schedule, Step
from penstock.weight import State, Weight
from penstock.weights import layout_identity
from tests.plan.planning import make_plan

CORPUS = Path(__file__).parent / "corpus"
PAGE = 4096
SIZES = {"a": 3 * PAGE, "b": 5 * PAGE - 100, "c": 64, "d": 2 * PAGE, "e": 3 * PAGE}
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


def shared_description() -> dict[str, object]:
    table = {
        **{"methods": [0, 1], "reads_in_place": 0, "floor_bytes": 8 * PAGE, "full_bytes": 14 * PAGE},
        **{"plans": len(PLANS), "seals": [f"{plan.seal:016x}" for plan in PLANS]},
    }
    weight = {"scalar_type": 0, "dim_order": [0]}
    inputs = [{"scalar_type": 6, "shape": [-1, 4], "dim_order": [0, 1]}]
    return {
        "program": "p",
        "device": "cpu",
        "page_bytes": PAGE,
        "plan_tables": [table],
        "budget_bytes": None,
        "activation_bytes": 100,
        "built_with": {"torch": "2.13.0"},
        "weights": [{**weight, "names": [name], "shape": [count], "nbytes": count} for name, count in SIZES.items()],
        "states": [{"name": "s", "scalar_type": 6, "shape": [2, 3], "dim_order": [1, 0], "nbytes": 24, "stored": 0}],
        "methods": [
            {"name": name, "accesses": ["a"], "states": [0], "inputs": inputs, "outputs": 1}
            for name in ("forward", "decode")
        ],
    }


def write_pte(path: Path, payload: bytes) -> Path:
    with path.open("w+b") as file:
        file.write(b"\x08\0\0\0ET12" + b"weight_offload_signatures" + bytes(1000) + payload)
        append_seal(file)
    return path


def plan_corpus() -> list[list[int]]:
    weights = {name: Weight(name, "uint8", (count,), (0,)) for name, count in SIZES.items()}
    offsets = {name: PAGE * 8 * number for number, name in enumerate(SIZES)}
    budgets = (14 * PAGE, 16 * PAGE, 40 * PAGE)
    plans = [make_plan(schedules(), weights, budget_bytes=budget, page_bytes=PAGE) for budget in budgets]
    return [list(plan_numbers(plan, offsets)) for plan in plans]


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
    (CORPUS / "plans.json").write_text(json.dumps(plan_corpus()))


if __name__ == "__main__":
    main()
