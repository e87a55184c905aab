"""What inspect says is what is in the files, and table and JSON say the same."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from penstock.executorch.description import DelegateMethod, Description, PlanTable
from penstock.executorch.payload import StoredPlan, pack_payload
from penstock.plan.floor import floor_bytes
from penstock.program import Program, read_program
from penstock.schedule import Access, Schedule, Step
from penstock.weight import State, Weight
from penstock.weights import read_index
from tests.cli.conftest import Cli, write_metadata
from tests.plan.planning import placed_floor
from tests.runtime.programs import a_method, a_program

PAGE = 4096
# In 4 KiB pages. The steps "mix" (b and c) and "end" (d), and the copy of e beside them, make the floor.
SIZES = {"a": 6, "b": 16, "c": 8, "d": 1, "e": 10, "f": 6, "g": 6, "h": 6, "i": 6}
FLOOR_PAGES = 16 + 8 + 1 + 10


def two_methods() -> Program:
    weights = [Weight(name, "uint8", (pages * PAGE,), (0,)) for name, pages in SIZES.items()]
    first, second = a_method(name="prefill"), a_method(name="decode")
    accesses = tuple(Access(number, name) for number, name in enumerate(SIZES))
    tail = (Step("tail", (number,)) for number in range(4, len(SIZES)))
    steps = (Step("load", (0,)), Step("mix", (1, 2)), Step("end", (3,)), *tail)
    prefill = Schedule("prefill", accesses, steps)
    decode = Schedule("decode", (Access(7, "d"),), (Step("one", (7,)),))
    states = (State("cache", "float32", (2, 3), (0, 1), "zeros"),)
    made = a_program(
        [dataclasses.replace(first, schedule=prefill), dataclasses.replace(second, schedule=decode)], weights, states
    )
    return dataclasses.replace(made, floor_bytes=FLOOR_PAGES * PAGE)


@pytest.fixture
def by_hand(tmp_path: Path) -> Path:
    return write_metadata(tmp_path / "hand.pt2", two_methods())


def test_a_program_as_json(cli: Cli, by_hand: Path) -> None:
    made = two_methods()
    told = cli("inspect", by_hand, "--json").document
    assert told["weight_bytes"] == sum(SIZES.values()) * PAGE
    assert [row["name"] for row in told["weights"]] == list(SIZES)
    assert [row["accesses"] for row in told["weights"]] == [1, 1, 1, 2, 1, 1, 1, 1, 1]
    assert told["state_bytes"] == 24 and told["states"][0]["name"] == "cache"
    prefill, decode = told["methods"]
    assert [(step["kernel"], step["weights"], step["nbytes"] // PAGE) for step in prefill["steps"]] == [
        ("load", ["a"], 6),
        ("mix", ["b", "c"], 24),
        ("end", ["d"], 1),
        ("tail", ["e"], 10),
        *(("tail", [name], 6) for name in "fghi"),
    ]
    assert decode["weight_bytes"] == PAGE and decode["accesses"] == 1
    weights = {weight.name: weight for weight in made.weights}
    schedules = [method.schedule for method in made.methods]
    floor = told["floor"]
    assert floor["computed_bytes"] == floor["recorded_bytes"] == floor_bytes(schedules, weights).floor_bytes
    assert floor["placed_bytes"] == placed_floor(schedules, weights, page_bytes=PAGE).floor_bytes
    assert floor["streamed_bytes"] == floor["placed_bytes"], "nothing is gathered from"


def test_experts_without_slots_are_named(cli: Cli, tmp_path: Path) -> None:
    """At no budget they have any: one method takes both by one index, and the other takes one of them alone."""
    names = ("up", "down", "more")
    weights = [Weight(name, "float32", (8, 1024), (0, 1)) for name in names]
    methods = []
    for method in ("prefill", "decode"):
        reads = (
            [(1, "down", 0), (2, "more", 2)] if method == "prefill" else [(0, "up", 0), (1, "down", 0), (2, "more", 2)]
        )
        accesses = tuple(Access(number, name, gathered=True, routing=by) for number, name, by in reads)
        steps = tuple(Step("one", (access.number,)) for access in accesses)
        methods.append(dataclasses.replace(a_method(name=method), schedule=Schedule(method, accesses, steps)))
    made = a_program(methods, weights, ())
    path = write_metadata(tmp_path / "experts.pt2", made)
    reason = "'up' is taken by its index in one place, and in another it is not"
    assert cli("inspect", path, "--json").document["without_slots"] == {"up": reason, "down": reason}
    shown = " ".join(cli("inspect", path).stdout.split())
    assert f"up has no slots: {reason}" in shown and "more has no slots" not in shown


def test_what_sets_the_floor(cli: Cli, by_hand: Path) -> None:
    floor = cli("inspect", by_hand, "--json").document["floor"]
    assert (floor["method"], floor["step_kernel"], floor["next_kernel"]) == ("prefill", "mix", "end")
    assert {part["name"]: part["nbytes"] // PAGE for part in floor["pair"]} == {"b": 16, "c": 8, "d": 1}
    assert floor["next_copy"] == {"name": "e", "nbytes": 10 * PAGE}
    assert floor["computed_bytes"] == FLOOR_PAGES * PAGE
    shown = " ".join(cli("inspect", by_hand).stdout.split())
    assert "step 1 (mix) and the next (end) of prefill: b + c + d, and the copy of e beside them" in shown


def test_the_table_is_made_of_the_same_numbers(cli: Cli, by_hand: Path) -> None:
    told, shown = cli("inspect", by_hand, "--json").document, cli("inspect", by_hand, "--schedule").stdout
    floor = told["floor"]
    for number in (floor["placed_bytes"], floor["computed_bytes"], floor["recorded_bytes"]):
        assert f"{number} bytes" in shown or f": {number}" in shown
    for method in told["methods"]:
        assert f"method {method['name']}" in shown
        for step in method["steps"]:
            assert any(
                line.split()[:2] == [str(step["index"]), step["kernel"]] and ", ".join(step["weights"]) in line
                for line in shown.splitlines()
            ), step


def test_top_shows_the_largest(cli: Cli, by_hand: Path) -> None:
    lines = cli("inspect", by_hand, "--top", "1").stdout.splitlines()
    assert "steps: the 1 largest of 8" in "\n".join(lines)
    rows = [line.split() for line in lines if line.split()[1:2] in (["load"], ["mix"], ["end"], ["tail"])]
    assert [row[:2] for row in rows] == [["1", "mix"]]


def test_top_and_schedule_exclude_each_other(cli: Cli, by_hand: Path) -> None:
    told = cli("inspect", by_hand, "--schedule", "--top", "1")
    assert told.code == 2 and "--top has no effect" in told.stderr


def test_a_compiled_program(cli: Cli, program: Path) -> None:
    told, read = cli("inspect", program, "--json").document, read_program(program)
    assert told["built_with"] == read.built_with and told["identity"] == read.identity
    (method,) = told["methods"]
    assert method["inputs"][0].startswith("index: int64[5]")
    assert [step["kernel"] for step in method["steps"]] == [step.kernel for step in read.methods[0].schedule.steps]
    assert told["floor"]["computed_bytes"] <= told["floor"]["placed_bytes"] == read.floor_bytes
    assert [row["name"] for row in told["weights"] if row["gathered"]] == ["table.weight"]
    assert not any(row["linear"] for row in told["weights"])
    assert told["floor"]["streamed_bytes"] > told["floor"]["placed_bytes"]


def test_a_weights_file(cli: Cli, program: Path) -> None:
    path = program.with_suffix(".ptd")
    index, told = read_index(path), cli("inspect", path, "--json").document
    assert told["file_bytes"] == path.stat().st_size and told["identity"] == index.identity
    assert [(row["name"], row["nbytes"], int(row["checksum"], 16)) for row in told["entries"]] == [
        (entry.name, entry.length_bytes, entry.checksum) for entry in index.entries
    ]
    shown = cli("inspect", path, "--schedule").stdout
    for row in told["entries"]:
        assert row["name"] in shown and row["checksum"] in shown


def pte(path: Path, code: Path, **changes: object) -> Path:
    """A .pte as far as inspect looks: what our delegates share, somewhere in a file."""
    plans = [StoredPlan(31 * PAGE, bytes(16)), StoredPlan(40 * PAGE, bytes(8)), StoredPlan(5 * PAGE, b"")]
    rows = [plan.row() for plan in plans]
    description = Description(
        program="p",
        device="cpu",
        page_bytes=PAGE,
        budget_bytes=None,
        activation_bytes=None,
        built_with={},
        weights=(),
        states=(),
        methods=(DelegateMethod("forward", (), (), 1, 0),),
        plan_tables=tuple(PlanTable((0,), (), PAGE, PAGE, 0, tuple(part)) for part in (rows[:2], rows[2:])),
    )
    description = dataclasses.replace(description, **changes)  # type: ignore[arg-type]
    payload = pack_payload(description, plans, code.read_bytes())
    path.write_bytes(b"\x08\0\0\0ET12" + bytes(4088) + payload + b"the rest")
    return path


@pytest.mark.parametrize(
    "changes",
    [
        *({"page_bytes": value} for value in (0, -1, 2**62)),
        *(
            {"plan_tables": value}
            for value in ((), (PlanTable((0,), (), PAGE, PAGE, 0, ()),), (PlanTable((7,), (), 0, 0, 0, ()),))
        ),
    ],
    ids=str,
)
def test_a_pte_that_describes_itself_wrongly(cli: Cli, tmp_path: Path, by_hand: Path, changes: dict[str, Any]) -> None:
    told = cli("inspect", pte(tmp_path / "m.pte", by_hand, **changes), "--json")
    assert told.code == 8 and "m.pte" in told.document["error"]["message"]


def test_a_pte_is_read_without_executorch(cli: Cli, tmp_path: Path, by_hand: Path) -> None:
    told = cli("inspect", pte(tmp_path / "m.pte", by_hand), "--json").document
    twin = cli("inspect", by_hand, "--json").document
    assert told["plan_bytes"] == [31 * PAGE, 40 * PAGE]
    assert told["weights_file"] == "m.ptd is not there"
    other = {"path", "kind", "file_bytes", "plan_bytes", "weights_file"}
    assert {k: v for k, v in told.items() if k not in other} == {k: v for k, v in twin.items() if k not in other}


@pytest.mark.parametrize("command", [("inspect",), ("plan", "--budget", "1GB")], ids=str)
def test_a_schedule_that_contradicts_itself_is_a_damaged_file(
    cli: Cli, tmp_path: Path, command: tuple[str, ...]
) -> None:
    """At export the same is the compiler's fault, with another code."""
    made = two_methods()
    schedule = dataclasses.replace(made.methods[0].schedule, steps=(Step("load", (99,)),))
    methods = (dataclasses.replace(made.methods[0], schedule=schedule), made.methods[1])
    path = write_metadata(tmp_path / "odd.pt2", dataclasses.replace(made, methods=methods))
    told = cli(command[0], path, *command[1:], "--json")
    assert told.code == 8 and told.document["error"]["class"] == "PackageError"
    assert "prefill" in told.document["error"]["message"]


def test_damaged_files_have_codes(cli: Cli, tmp_path: Path, by_hand: Path) -> None:
    path = pte(tmp_path / "m.pte", by_hand)
    content = bytearray(path.read_bytes())
    content[4096 + 200] ^= 1
    path.write_bytes(content)
    assert cli("inspect", path).code == 8
    (tmp_path / "n.pte").write_bytes(b"no payload in it")
    assert "no Penstock delegate" in cli("inspect", tmp_path / "n.pte").stderr
    assert cli("inspect", tmp_path / "none.pte").stderr.count("none.pte") == 1
    (tmp_path / "empty.pte").touch()
    (tmp_path / "w.ptd").write_bytes(bytes(100))
    (tmp_path / "p.pt2").write_bytes(bytes(100))
    found = [cli("inspect", tmp_path / name).code for name in ("empty.pte", "w.ptd", "p.pt2", "none.ptd", "none.pt2")]
    assert found == [8, 7, 8, 7, 8]
    assert cli("inspect", pte(tmp_path / "k.pte", by_hand, plan_tables=())).code == 8
    assert cli("inspect", pte(tmp_path / "k.pte", tmp_path / "n.pte")).code == 8, "what is inside is no .pt2"
