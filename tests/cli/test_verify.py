"""A sound program passes every check; each check fails where what it looks at is wrong."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.cli.call_arguments import made_arguments
from penstock.cli.verify_checks import Verifier
from penstock.program import METADATA_FILE, TensorSpec, read_program
from penstock.sealed_text import sealed
from penstock.weights import read_index
from tests.cli.conftest import Cli, rewritten
from tests.cli.models import WIDTH
from tests.cli.test_plan import planner
from tests.runtime.programs import a_method

CHECKS = ["archive", "weights fit", "checksums", "schedule", "floor", "lifetimes", "poisoned run"]


@pytest.fixture
def copied(program: Path, tmp_path: Path) -> Path:
    for suffix in (".pt2", ".ptd"):
        shutil.copy(program.with_suffix(suffix), tmp_path / f"model{suffix}")
    return tmp_path / "model.pt2"


def statuses(told: dict[str, Any]) -> dict[str, str]:
    return {check["name"]: check["status"] for check in told["checks"]}


def test_a_sound_program(cli: Cli, program: Path) -> None:
    told = cli("verify", program, "--json")
    assert told.code == 0 and told.document["ok"] is True
    assert statuses(told.document) == dict.fromkeys(CHECKS, "pass")
    assert "seed 0" in told.document["inputs"]
    by_name = {check["name"]: check["finding"] for check in told.document["checks"]}
    floors = {placement: planner(program, placement).floor_bytes for placement in ("auto", "stream")}
    assert all(f"{nbytes} ({placement})" in by_name["floor"] for placement, nbytes in floors.items())
    assert f"{read_program(program).floor_bytes} bytes as recorded" in by_name["floor"]
    assert "6 outputs bit-identical" in by_name["poisoned run"], "two outputs, three runs"
    runs = re.findall(r"(auto|stream) within (\d+) bytes, (\d+) streamed", by_name["poisoned run"])
    assert [placement for placement, _, _ in runs] == ["auto", "stream"]
    for placement, peak, streamed in runs:
        assert 0 < int(peak) <= floors[placement] and int(streamed) > 0


def test_given_inputs(cli: Cli, program: Path, tmp_path: Path) -> None:
    torch.save({"index": torch.arange(5), "scale": torch.ones(WIDTH)}, tmp_path / "in.pt")
    told = cli("verify", program, "--inputs", tmp_path / "in.pt", "--json")
    assert told.code == 0 and told.document["inputs"] == str(tmp_path / "in.pt")
    torch.save({"index": torch.arange(5)}, tmp_path / "in.pt")
    told = cli("verify", program, "--inputs", tmp_path / "in.pt", "--json")
    assert told.code == 1 and statuses(told.document)["poisoned run"] == "fail"


def test_without_running(cli: Cli, program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.torch_private.loader.CompiledMethod.__init__", _must_not_be_loaded)
    told = cli("verify", program, "--no-run", "--json")
    assert told.code == 0
    assert statuses(told.document) == dict.fromkeys(CHECKS[:5], "pass") | dict.fromkeys(CHECKS[5:], "skip")
    assert told.document["inputs"] == "none: nothing was run"


def _must_not_be_loaded(*arguments: object) -> None:
    raise AssertionError("native code of a program was loaded")


def damaged_weights(path: Path) -> None:
    entry = read_index(path.with_suffix(".ptd")).entries[0]
    with path.with_suffix(".ptd").open("r+b") as file:
        file.seek(entry.offset_bytes)
        byte = file.read(1)[0]
        file.seek(entry.offset_bytes)
        file.write(bytes([byte ^ 1]))


def no_weights(path: Path) -> None:
    path.with_suffix(".ptd").unlink()


def damaged_archive(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[content.index(b"run_impl")] ^= 1
    path.write_bytes(content)


def _metadata(path: Path, change: Callable[[Any], None]) -> None:
    def changed(name: str, content: bytes) -> bytes:
        if not name.endswith(METADATA_FILE):
            return content
        table = json.loads(content)
        del table["seal"]
        change(table)
        return sealed(json.dumps(table))

    rewritten(path, path.with_suffix(".new"), changed).replace(path)


def wrong_floor(path: Path) -> None:
    _metadata(path, lambda table: table.update(floor_bytes=table["floor_bytes"] - 1))


def swapped_accesses(path: Path) -> None:
    def swap(table: Any) -> None:
        accesses = table["methods"][0]["schedule"]["accesses"]
        accesses[0][0], accesses[1][0] = accesses[1][0], accesses[0][0]

    _metadata(path, swap)


def shorter_lifetime(path: Path) -> None:
    """The last step that reads the last weight is forgotten: the record ends before the code does."""

    def shorten(table: Any) -> None:
        table["methods"][0]["schedule"]["steps"].pop()
        table["methods"][0]["schedule"]["accesses"].pop()

    _metadata(path, shorten)


@pytest.mark.parametrize(
    ("damage", "failing"),
    [
        (damaged_weights, ["checksums"]),
        (no_weights, ["weights fit", "checksums"]),
        (wrong_floor, ["floor"]),
        (shorter_lifetime, ["schedule"]),
    ],
)
def test_damage(cli: Cli, copied: Path, damage: Callable[[Path], None], failing: list[str]) -> None:
    damage(copied)
    told = cli("verify", copied, "--json")
    found = statuses(told.document)
    assert told.code == 1 and told.document["ok"] is False
    assert all(found[name] == "fail" for name in failing)
    assert found["lifetimes"] == found["poisoned run"] == "skip", "nothing unsound is loaded"
    shown = cli("verify", copied)
    assert shown.code == 1 and "fail" in shown.stdout


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (damaged_archive, "is damaged: its bytes have the CRC"),
        (swapped_accesses, "calls must be in the order of their first readers"),
    ],
)
def test_what_cannot_be_a_program_is_refused_before_any_check(
    cli: Cli, copied: Path, damage: Callable[[Path], None], said: str
) -> None:
    damage(copied)
    told = cli("verify", copied, "--json")
    assert told.code == 8 and said in json.dumps(told.document)


def test_a_bit_that_differs_is_found(cli: Cli, program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = Verifier._play
    calls: list[Any] = []

    def off_by_one_bit(self: Verifier, *arguments: Any) -> Any:
        played = genuine(self, *arguments)
        calls.append(played)
        if len(calls) > 1:  # the first are the all-resident runs
            played[-1][1][-1] ^= 1
        return played

    monkeypatch.setattr(Verifier, "_play", off_by_one_bit)
    told = cli("verify", program, "--json")
    assert told.code == 1
    assert statuses(told.document)["poisoned run"] == statuses(told.document)["lifetimes"] == "fail"


def test_poison_is_on(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    import penstock.runtime.module as module_file

    genuine = module_file.open_soft_driver

    def watched(page_bytes: int, *, poison: bool) -> Any:
        seen.append(poison)
        return genuine(page_bytes, poison=poison)

    monkeypatch.setattr(module_file, "open_soft_driver", watched)
    checks = list(Verifier(program, program.with_suffix(".ptd"), None, None, 0).checks(run=True))
    assert [check.status for check in checks] == ["pass"] * len(CHECKS)
    assert seen[0] is False and seen[-1] is True, "all resident without poison, at the floor with it"


def test_usage(cli: Cli, program: Path) -> None:
    assert cli("verify", program.with_suffix(".ptd")).code == 2
    assert cli("verify", program, "--method", "forward").code == 2
    assert cli("verify", program.with_name("none.pt2")).code == 8
    inputs = ("--inputs", program.with_name("inputs.pt"))
    for options in ((*inputs, "--seed", 0), ("--no-run", "--seed", 0), ("--no-run", *inputs)):
        told = cli("verify", program, *options)
        assert told.code == 2 and str(options[-2]) in told.stderr, "an option that would do nothing"
    for seed in ("9" * 23, "9" * 5000, "-1", "nan", "1.5", str(2**63)):
        assert cli("verify", program, "--seed", seed).code == 2


def test_made_inputs_have_the_recorded_layout() -> None:
    method = a_method(
        [
            TensorSpec("x", "float32", ("s0", 3), (3, 1)),
            TensorSpec("turned", "float64", (2, "2*s0"), (1, 2)),
            TensorSpec("expanded", "float32", (4, 5), (0, 1)),
            TensorSpec("index", "int64", (2, "s0"), ("s0", 1)),
            TensorSpec("flag", "bool", (3,), (1,)),
            TensorSpec("scalar", "int32", (), ()),
        ],
        symbols={"s0": (2, 3)},
    )
    (x, turned, expanded, index, flag, scalar), keywords = made_arguments(method, seed=1)
    again = made_arguments(method, seed=1)[0]
    other = made_arguments(method, seed=2)[0]
    assert keywords == {} and torch.equal(x, again[0]) and not torch.equal(x, other[0])
    assert x.shape == (3, 3) and turned.shape == (2, 6) and turned.stride() == (1, 2)
    assert expanded.stride() == (0, 1) and torch.equal(expanded[0], expanded[3])
    assert index.tolist() == [[0, 1, 2]] * 2 and index.dtype == torch.int64
    assert flag.tolist() == [False, True, False] and scalar.item() == 0 and scalar.dtype == torch.int32
