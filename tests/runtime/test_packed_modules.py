"""Modules with packed weights: the same bits as with the file that is not packed, and what packed weights cannot do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.cli.main import main
from penstock.errors import BelowFloorError, PenstockError, WeightsFileError
from penstock.runtime.plan_installer import FIRST_RUNS
from penstock.weights import read_index
from tests.runtime.modules import STAGING_CAP_BYTES, check_memory, traffic

BLOCK_BYTES = 64 * 1024


class Mixed(nn.Module):
    """A table that is gathered from, and products in two dtypes; one weight too small to be packed."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1024, 128)
        self.enter = nn.Linear(128, 256)
        self.up = nn.ModuleList(nn.Linear(256, 512, bias=False, dtype=torch.bfloat16) for _ in range(4))
        self.down = nn.ModuleList(nn.Linear(512, 256, bias=False, dtype=torch.bfloat16) for _ in range(4))
        self.leave = nn.Linear(256, 1024)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.enter(self.table(tokens)).to(torch.bfloat16)
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(torch.nn.functional.silu(up(x)))
        return self.leave(x.float())


TOKENS = torch.arange(5)[None] * 37


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled with its weights packed."""
    path = tmp_path_factory.mktemp("packed") / "model.pt2"
    torch.manual_seed(0)
    exported = torch.export.export(Mixed().eval(), (TOKENS,))
    penstock.compile(penstock.apply_weight_offload(exported), path, device="cpu", pack=True)
    assert sorted(each.name for each in path.parent.iterdir()) == ["model.pt2", "model.ptd"]
    return path


@pytest.fixture(scope="module")
def raw(program: Path) -> Path:
    path = program.with_name("raw.ptd")
    penstock.unpack(program.with_suffix(".ptd"), path)
    return path


@pytest.fixture(scope="module")
def expected(program: Path, raw: Path) -> Tensor:
    with penstock.Module(program, weights=raw) as module:
        found: Tensor = module(TOKENS)
        return found


def told(capfd: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    main([*map(str, arguments), "--json"])
    document: dict[str, Any] = json.loads(capfd.readouterr().out)
    return document


def test_commands_are_about_the_weights_file(program: Path, raw: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Floor, bytes and copies are a module's, with packed weights and without."""
    floors = []
    for weights in (program.with_suffix(".ptd"), raw):
        with penstock.Module(program, weights=weights) as module:
            floors.append(module.floor_bytes)
            module.set_budget(module.floor_bytes)
            for _ in range(2):
                module(TOKENS)
            done = module.last_run
        with pytest.raises(BelowFloorError):
            penstock.Module(program, floors[-1] - 1, weights=weights)
        plan = told(capfd, "plan", program, "--weights", weights, "--budget", floors[-1], "--link", "25GB/s")
        assert plan["floor_bytes"] == floors[-1] and plan["weights_file"].startswith(weights.name)
        (run,) = plan["methods"]
        assert (run["bytes_streamed"], run["copies"]) == (done.bytes_streamed, done.copies)
        assert run["predicted_s"] >= run["bound_s"]
        below = told(capfd, "plan", program, "--weights", weights, "--budget", floors[-1] - 1)
        assert below["error"]["class"] == "BelowFloorError"
        checks = told(capfd, "verify", program, "--weights", weights, "--no-run")["checks"]
        (floor,) = (check for check in checks if check["name"] == "floor")
        assert floor["status"] == "pass" and f"{floors[-1]} (auto)" in floor["finding"]
    assert floors[0] > floors[1]
    # Without --weights: of the file beside the program.
    assert told(capfd, "inspect", program)["floor"]["placed_bytes"] == floors[0]
    refused = told(capfd, "plan", program, "--budget", "1GiB", "--placement", "split")
    assert "split" in refused["error"]["message"]


def test_a_file_that_cannot_be_used_is_named(program: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = shutil.copy(program, tmp_path / "model.pt2")
    (tmp_path / "model.ptd").write_bytes(b"no weights")
    found = told(capfd, "inspect", path)["weights_file"]
    assert found.startswith("model.ptd cannot be used: ")
    (tmp_path / "model.ptd").unlink()
    assert told(capfd, "inspect", path)["weights_file"] == "model.ptd is not there"
    missing = told(capfd, "plan", path, "--budget", "1GiB", "--weights", tmp_path / "other.ptd")
    assert missing["error"]["class"] == "WeightsFileError"


def test_a_baked_budget_below_the_floor_of_packed_weights(program: Path, raw: Path, tmp_path: Path) -> None:
    """One that unpacked weights would do with is refused at export, and nothing is left behind."""
    exported = penstock.apply_weight_offload(torch.export.export(Mixed().eval(), (TOKENS,)))
    with penstock.Module(program, weights=raw) as unpacked, penstock.Module(program) as packed:
        raw_floor, floor = unpacked.floor_bytes, packed.floor_bytes
    path = tmp_path / "model.pt2"
    for budget in (raw_floor, floor - 1):
        with pytest.raises(BelowFloorError) as refused:
            penstock.compile(exported, path, device="cpu", pack=True, weight_offload_budget=budget)
        assert refused.value.floor_bytes == floor and not list(tmp_path.iterdir())
    penstock.compile(exported, path, device="cpu", pack=True, weight_offload_budget=floor)
    with penstock.Module(path) as module:
        assert module.budget_bytes == module.floor_bytes == floor


@pytest.mark.parametrize("options", [{}, {"host_memory": STAGING_CAP_BYTES}, {"placement": "stream"}], ids=str)
def test_every_budget_gives_the_same_bits(
    program: Path, expected: Tensor, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_POISON", "1")
    with penstock.Module(program, **options) as module:
        floor, full = module.floor_bytes, module.full_bytes
        stored = streamed = False
        for eighths in range(9):
            module.set_budget(floor + (full - floor) * eighths // 8)
            assert module.plan is not None
            planned = module.plan.method("forward")
            for run in range(3):
                assert torch.equal(module(TOKENS), expected)
                assert traffic(module.last_run) == (planned.warm if run else planned.cold)
            check_memory(module, full)
            stored |= bool(module.plan.stores)
            streamed |= planned.warm.bytes_streamed < planned.warm.bytes_decoded
        assert stored and streamed
        assert planned.warm.bytes_decoded == 0  # with everything resident
        with pytest.raises(BelowFloorError) as refused:
            module.set_budget(floor - 1)
        assert refused.value.floor_bytes == floor


def test_what_a_program_gathers_from_is_left(program: Path) -> None:
    index = read_index(program.with_suffix(".ptd"))
    large = {entry.name for entry in index if entry.raw_bytes >= BLOCK_BYTES}
    assert {entry.name for entry in index if entry.packing} == large - {"table.weight"}


def test_the_floor_is_little_above_that_of_the_raw_file(program: Path, raw: Path) -> None:
    with (
        penstock.Module(program, placement="stream") as packed,
        penstock.Module(program, weights=raw, placement="stream") as other,
    ):
        assert other.floor_bytes < packed.floor_bytes <= other.floor_bytes + 8 * 2**20


def test_a_calibrated_plan_gives_the_same_bits(program: Path, expected: Tensor) -> None:
    with penstock.Module(program) as module:
        module.set_budget((module.floor_bytes + module.full_bytes) // 2)
        with module.calibrate():
            module(TOKENS)
            module(TOKENS)
        assert torch.equal(module(TOKENS), expected)
        assert module.calibration is not None


def test_first_runs_that_take_nothing_over_the_link_are_not_planned_by(program: Path, expected: Tensor) -> None:
    """Everything that is copied lies in device memory, packed: the link is not to be seen."""
    with penstock.Module(program) as module:
        step = (module.full_bytes - module.floor_bytes) // 40
        budgets = range(module.full_bytes - step, module.floor_bytes, -step)
        found = (budget for budget in budgets if (plan := module.plan_at(budget)) and plan.stores)
        budget = next(found)
    with penstock.Module(program, budget, calibration="first-runs") as module:
        assert module.plan is not None and module.plan.stores and not module.plan.takes_link
        for _ in range(FIRST_RUNS + 2):
            assert torch.equal(module(TOKENS), expected)
        assert module.calibration is None


@pytest.mark.parametrize("placement", ["in-place", "lru"])
def test_placements_that_need_weights_as_they_are(program: Path, placement: str) -> None:
    with pytest.raises(
        PenstockError, match=f'placement="{placement}" does not go with packed weights: .*`penstock unpack`'
    ):
        penstock.Module(program, placement=placement)


def test_reads_in_place_are_not_timed(program: Path) -> None:
    with penstock.Module(program) as module:
        module.set_budget((module.floor_bytes + module.full_bytes) // 2)
        with module.calibrate():
            module(TOKENS)
        with (
            pytest.raises(PenstockError, match="does not go with packed weights: .*no kernel reads packed ones"),
            module.calibrate(in_place=True),
        ):
            pass


def test_a_packed_table_that_is_gathered_from(program: Path, raw: Path, tmp_path: Path) -> None:
    packed = tmp_path / "all.ptd"
    penstock.pack(raw, packed)  # without the program, which would have told
    with pytest.raises(WeightsFileError, match=r"gathers from 'table\.weight', which is packed.*--program"):
        penstock.Module(program, weights=packed)


def test_a_damaged_file_is_refused_by_verify(program: Path, tmp_path: Path) -> None:
    weights = tmp_path / "model.ptd"
    shutil.copy(program.with_suffix(".ptd"), weights)
    entry = next(entry for entry in read_index(weights) if entry.packing)
    with weights.open("r+b") as file:
        file.seek(entry.offset_bytes + entry.length_bytes // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(WeightsFileError, match=entry.name):
        penstock.Module(program, weights=weights, verify=True)
    # Without it other numbers come out, and nothing else happens.
    with penstock.Module(program, weights=weights) as module:
        module.set_budget((module.floor_bytes + module.full_bytes) // 2)
        assert module(TOKENS).shape == (1, 5, 1024)
