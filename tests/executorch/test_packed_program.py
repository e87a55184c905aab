"""A weights file packed for a .pte: what its delegates gather from and what they do not read stays as it is."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from executorch.exir import to_edge
from torch import Tensor, nn

import penstock
from penstock.errors import MissingWeightError, PackageError, WeightMismatchError
from penstock.executorch import merge_weights
from penstock.weight import Weight
from penstock.weights import WeightsIndex, layout_identity, read_index, write_ptd
from tests.executorch.programs import REPOSITORY
from tests.harness import FAST, offloaded
from tests.runtime.modules import EVERYTHING
from tests.weights.packed_cases import gaussian, packable

ROWS, WIDTH = 1024, 192
TABLE, HEAD = "table.weight", "head.weight"
TOKENS = torch.arange(9) * 113


class Tied(nn.Module):
    """A table that is gathered from and multiplied by, under two names, and weights that are only multiplied by."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tied") / "model.pte"
    torch.manual_seed(0)
    exported = offloaded(Tied().eval(), (TOKENS,))
    penstock.executorch.export(exported, path, device="cpu", inductor_configs=FAST)
    merge_weights([path.with_suffix(".ptd")], path.with_name("raw.ptd"))
    return path


@pytest.fixture(scope="module")
def raw(program: Path) -> Path:
    return program.with_name("raw.ptd")


def packed_names(index: WeightsIndex) -> set[str]:
    return {entry.name for entry in index if entry.packing is not None}


def rewritten(source: Path, target: Path, weights: list[Weight], contents: dict[str, bytes]) -> Path:
    """The weights of another file, or given ones."""
    index, whole = read_index(source), source.read_bytes()
    for entry in index:
        contents.setdefault(entry.name, whole[entry.offset_bytes :][: entry.length_bytes])
    write_ptd(target, weights, lambda item: [contents[item.name]], identity=layout_identity(weights, ()))
    return target


def stored(index: WeightsIndex) -> list[Weight]:
    tied = {entry.name: tuple(one.name for one in index if one.alias_of == entry.name) for entry in index}
    return [Weight(e.name, e.dtype, e.shape, e.dim_order, tied[e.name]) for e in index.unique_entries]


def test_the_table_stays_and_the_bits_are_the_same(program: Path, raw: Path, tmp_path: Path) -> None:
    index = penstock.pack(raw, tmp_path / "packed.ptd", program=program)
    assert packed_names(index) == {f"layers.{number}.weight" for number in range(4)}
    assert {TABLE, HEAD} <= packed_names(penstock.pack(raw, tmp_path / "all.ptd"))
    with penstock.Module(program, EVERYTHING, weights=raw) as module:
        expected = module(TOKENS)
    with penstock.Module(program, EVERYTHING, weights=index.path) as module:
        floor_bytes, full_bytes = module.floor_bytes, module.full_bytes
        for budget_bytes in (floor_bytes, (floor_bytes + full_bytes) // 2, full_bytes):
            module.set_budget(budget_bytes)
            for _ in range(2):
                assert torch.equal(module(TOKENS), expected)
        module.set_budget(floor_bytes)
        module(TOKENS)
        assert module.last_run.bytes_decoded > 0


def test_the_command_reads_the_program_and_loads_nothing_of_it(program: Path, raw: Path, tmp_path: Path) -> None:
    """Neither torch nor ExecuTorch is there to run anything."""
    script = (
        "import json, sys\n"
        "from penstock.cli.main import penstock\n"
        "penstock(sys.argv[1:], standalone_mode=False)\n"
        "print(json.dumps(sorted({'torch', 'executorch'} & set(sys.modules))), file=sys.stderr)\n"
    )
    command = ["pack", raw, "-o", tmp_path / "packed.ptd", "--program", program, "--json"]
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, command)],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": f"{REPOSITORY / 'src'}"},
    )
    assert json.loads(done.stdout)["packed_count"] == 4
    assert json.loads(done.stderr.splitlines()[-1]) == []
    assert packed_names(read_index(tmp_path / "packed.ptd")) == {f"layers.{number}.weight" for number in range(4)}


def test_a_tied_weight_is_left_under_either_name(program: Path, raw: Path, tmp_path: Path) -> None:
    """A file that ExecuTorch wrote keeps one of its names, any."""
    weights = stored(read_index(raw))
    (tied,) = (weight for weight in weights if weight.aliases)
    others = [weight for weight in weights if weight is not tied]
    content = raw.read_bytes()[read_index(raw)[TABLE].offset_bytes :][: tied.nbytes]
    for name in (TABLE, HEAD):
        only = replace(tied, name=name, aliases=())
        path = rewritten(raw, tmp_path / f"{name}.ptd", [only, *others], {name: content})
        index = penstock.pack(path, tmp_path / f"{name} packed.ptd", program=program)
        assert packed_names(index) == {f"layers.{number}.weight" for number in range(4)}


def test_what_no_delegate_reads_is_left(program: Path, raw: Path, tmp_path: Path) -> None:
    """ExecuTorch finds its own constants by their layouts, which packed entries have not."""
    other = Weight("constant", "bfloat16", (65536,), (0,))
    content = {"constant": gaussian("bfloat16", 65536)}
    path = rewritten(raw, tmp_path / "more.ptd", [*stored(read_index(raw)), other], content)
    index = penstock.pack(path, tmp_path / "packed.ptd", program=program)
    assert packed_names(index) == {f"layers.{number}.weight" for number in range(4)}
    assert "constant" in packed_names(penstock.pack(path, tmp_path / "all.ptd"))


def test_weights_of_another_model_are_refused(program: Path, raw: Path, tmp_path: Path) -> None:
    target = tmp_path / "packed.ptd"
    with pytest.raises(MissingWeightError, match=r"other\.ptd lacks '.*', which .*model\.pte reads"):
        penstock.pack(packable(tmp_path / "other.ptd"), target, program=program)
    weights = stored(read_index(raw))
    number = next(i for i, weight in enumerate(weights) if weight.name == "layers.2.weight")
    weights[number] = replace(weights[number], shape=(WIDTH * 2, WIDTH // 2))
    path = rewritten(raw, tmp_path / "shaped.ptd", weights, {})
    with pytest.raises(WeightMismatchError, match=r"'layers\.2\.weight' is .*\[384, 96\].* needs .*\[192, 192\]"):
        penstock.pack(path, target, program=program)
    assert not target.exists()


def test_damaged_programs_are_refused_by_name(program: Path, raw: Path, tmp_path: Path) -> None:
    whole, rng = program.read_bytes(), random.Random(0)
    start = whole.index(b"PNSTKPRG")
    places = [*range(start, start + 48, 5), *(rng.randrange(len(whole)) for _ in range(60)), len(whole) - 1]
    damaged, target = tmp_path / "damaged.pte", tmp_path / "packed.ptd"
    for place in places:
        changed = bytearray(whole)
        changed[place] ^= 1 << rng.randrange(8)
        damaged.write_bytes(changed)
        with pytest.raises(PackageError, match=r"damaged\.pte"):
            penstock.pack(raw, target, program=damaged)
    for part in (0.0, 0.1, 0.5, 0.99):
        damaged.write_bytes(whole[: int(len(whole) * part)])
        with pytest.raises(PackageError, match=r"damaged\.pte"):
            penstock.pack(raw, target, program=damaged)
    assert not target.exists()


def test_what_is_no_program_of_ours_is_refused(raw: Path, tmp_path: Path) -> None:
    target = tmp_path / "packed.ptd"
    exported = torch.export.export(nn.Linear(8, 8), (torch.ones(2, 8),))
    to_edge(exported).to_executorch().save(str(tmp_path / "plain.pte"))
    (tmp_path / "text.pte").write_text("no program at all")
    for name in ("plain.pte", "text.pte"):
        with pytest.raises(PackageError, match=rf"{name}: it has no Penstock delegate"):
            penstock.pack(raw, target, program=tmp_path / name)
    with pytest.raises(PackageError, match=r"none\.pte"):
        penstock.pack(raw, target, program=tmp_path / "none.pte")
    with pytest.raises(PackageError, match=r"plain\.pt2"):
        penstock.pack(raw, target, program=(tmp_path / "plain.pte").rename(tmp_path / "plain.pt2"))
    assert not target.exists()
