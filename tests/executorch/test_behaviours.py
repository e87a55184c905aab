"""One table of behaviours for every way to open a program: a .pt2 and a .pte from Python, a .pte from C++."""

from __future__ import annotations

import itertools
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import penstock
import penstock.executorch
from penstock.errors import (
    BelowFloorError,
    BudgetError,
    InputError,
    MissingWeightError,
    PackageError,
    PenstockError,
    StateInvalidError,
    WeightMismatchError,
    WeightsChangedError,
    WeightsFileError,
)
from penstock.program import Program
from tests.executorch.cpp_program import build_program
from tests.executorch.players import BUDGET, CppPlayer, Player, PythonPlayer, Recording
from tests.executorch.test_states import WIDTH, Adding, Counter, Reading, programs, rows
from tests.harness import FAST, compiled
from tests.runtime.modules import EVERYTHING, rewrite_weights

WAYS = ["pt2", "pte", pytest.param("cpp", marks=pytest.mark.slow)]


@dataclass(frozen=True)
class Files:
    """Two methods over one weight and two states."""

    program: Path
    weights: Path
    described: Program
    floor_bytes: int
    full_bytes: int

    def copied_weights(self, folder: Path) -> Path:
        return Path(shutil.copy(self.weights, folder / "model.ptd"))


def expected(method: str, x: Tensor, sums: Tensor, calls: float) -> Tensor:
    """From the state before; whole numbers, so that no order of sums matters."""
    y = x @ Counter().weight
    return y + (sums + y[0]) + (calls + 1) if method == "add" else y * sums + calls


Behaviour = Callable[[Player, Files, Path], None]


# ----------------------------------------------------------------------------------------------------- the behaviours


def budgets(player: Player, files: Files, folder: Path) -> None:
    """The same bits at every budget, which can be changed while loaded, and back again."""
    player.open(files.program, files.weights, files.floor_bytes)
    between = (files.floor_bytes + files.full_bytes) // 2
    x = rows(1)
    for budget_bytes in (files.floor_bytes, between, files.full_bytes, files.floor_bytes):
        player.set_budget(budget_bytes)
        for number in range(2):
            sums = number * (x @ Counter().weight)[0]
            assert torch.equal(player.run("add", x), expected("add", x, sums, 5.0 + number))
        player.reset_state()


def budgets_below_the_floor(player: Player, files: Files, folder: Path) -> None:
    with pytest.raises(BelowFloorError, match=f"at least {files.floor_bytes} bytes") as refusal:
        player.open(files.program, files.weights, files.floor_bytes - 1)
    assert refusal.value.floor_bytes == files.floor_bytes
    player.open(files.program, files.weights, files.floor_bytes)
    with pytest.raises(BelowFloorError, match=f"at least {files.floor_bytes} bytes"):
        player.set_budget(files.floor_bytes - 1)
    x = rows(2)
    assert torch.equal(player.run("read", x), expected("read", x, torch.zeros(WIDTH), 5.0))


def budgets_that_are_none(player: Player, files: Files, folder: Path) -> None:
    budgets = ("-1", "12abc", "1.5", "8Gib", "abc", "9223372036854775808")
    for budget in budgets:
        with pytest.raises(BudgetError):
            player.open(files.program, files.weights, budget)
    player.open(files.program, files.weights, "1GiB")
    for budget in budgets:
        with pytest.raises(BudgetError):
            player.set_budget(budget)
    assert player.budget_bytes() == files.full_bytes


def budgets_of_single_methods(player: Player, files: Files, folder: Path) -> None:
    """What has one of its own keeps it when the other's changes. A .pt2 has one budget for all of its methods."""
    if files.program.suffix == ".pt2":
        with pytest.raises(TypeError, match="delegate_budgets"):
            player.open(files.program, files.weights, None, {"add": files.floor_bytes})
        return
    x, sums = rows(8), (rows(8) @ Counter().weight)[0]
    # A malformed one is named with whose it is, at load and later.
    with pytest.raises(BudgetError, match="'12abc' has the unit 'abc'"):
        player.open(files.program, files.weights, None, {"add": "12abc"})
    own = {"add": files.floor_bytes, "read": files.full_bytes}
    player.open(files.program, files.weights, None, own)
    assert [player.budget_bytes(method) for method in own] == [*own.values()]
    assert torch.equal(player.run("add", x), expected("add", x, torch.zeros(WIDTH), 5.0))
    assert torch.equal(player.run("read", x), expected("read", x, sums, 6.0))
    with pytest.raises(BudgetError, match="'12abc' has the unit 'abc'"):
        player.set_budget("12abc", "add")
    player.set_budget(files.full_bytes, "add")
    player.set_budget(files.floor_bytes, "read")
    assert [player.budget_bytes(method) for method in own] == [files.full_bytes, files.floor_bytes]
    assert torch.equal(player.run("read", x), expected("read", x, sums, 6.0))
    assert torch.equal(player.run("add", x), expected("add", x, sums, 6.0))


def automatic(player: Player, files: Files, folder: Path) -> None:
    player.open(files.program, files.weights, None)
    x = rows(3)
    assert torch.equal(player.run("add", x), expected("add", x, torch.zeros(WIDTH), 5.0))
    # There is more than it can use, at load and later.
    assert player.budget_bytes() == files.full_bytes
    player.set_budget(files.floor_bytes)
    assert player.budget_bytes() == files.floor_bytes
    player.set_budget("auto")
    assert player.budget_bytes() == files.full_bytes
    sums = (x @ Counter().weight)[0]
    assert torch.equal(player.run("read", x), expected("read", x, sums, 6.0))


def states(player: Player, files: Files, folder: Path) -> None:
    """What one method writes another one reads; read, written and reset by name from outside."""
    player.open(files.program, files.weights, files.floor_bytes)
    sums = torch.zeros(WIDTH)
    for seed in range(3):
        x = rows(seed)
        assert torch.equal(player.run("add", x), expected("add", x, sums, 5.0 + seed))
        sums = sums + (x @ Counter().weight)[0]
        assert torch.equal(player.run("read", x), expected("read", x, sums, 6.0 + seed))
    assert torch.equal(player.read_state("sums", sums), sums)
    player.write_state("sums", torch.arange(WIDTH).float())
    assert torch.equal(player.run("read", x), expected("read", x, torch.arange(WIDTH).float(), 8.0))
    player.reset_state()
    assert not player.read_state("sums", sums).any()
    assert player.read_state("calls", sums).tolist() == [5.0] * WIDTH


def states_that_there_are_not(player: Player, files: Files, folder: Path) -> None:
    player.open(files.program, files.weights, files.floor_bytes)
    for use in (
        lambda: player.read_state("nothing", torch.zeros(WIDTH)),
        lambda: player.write_state("nothing", torch.zeros(WIDTH)),
        lambda: player.write_state("sums", torch.zeros(WIDTH - 1)),
    ):
        with pytest.raises(InputError):
            use()
    assert not player.read_state("sums", torch.zeros(WIDTH)).any()


def inputs(player: Player, files: Files, folder: Path) -> None:
    """What does not fit is refused before anything of the run happens, and the next run is as if it had not been."""
    player.open(files.program, files.weights, files.floor_bytes)
    x = rows(4)
    for wrong in (x.double(), x[:, :-1].contiguous(), torch.cat([x, x])):
        with pytest.raises(InputError):
            player.run("add", wrong)
    assert torch.equal(player.run("add", x), expected("add", x, torch.zeros(WIDTH), 5.0))


def weights_that_do_not_fit(player: Player, files: Files, folder: Path) -> None:
    needs = rf"'weight' is %s, needs float32\[{WIDTH}, {WIDTH}\]"
    changes: list[tuple[type[PenstockError], str, dict[str, Any]]] = [
        (MissingWeightError, r"lacks 1 of the \d weights of the program: 'weight'", {"leave_out": "weight"}),
        (
            WeightMismatchError,
            needs % rf"float32\[{WIDTH // 2}, {WIDTH * 2}\]",
            {"change": {"name": "weight", "shape": (WIDTH // 2, WIDTH * 2)}},
        ),
        (
            WeightMismatchError,
            needs % rf"int32\[{WIDTH}, {WIDTH}\]",
            {"change": {"name": "weight", "dtype": "int32"}},
        ),
    ]
    for kind, said, change in changes:
        path = rewrite_weights(files.described, files.weights, folder / "other.ptd", **change)
        with pytest.raises(kind, match=said):
            player.open(files.program, path, files.floor_bytes)


def weights_cut_off(player: Player, files: Files, folder: Path) -> None:
    path = files.copied_weights(folder)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(PenstockError) as refusal:
        player.open(files.program, path, files.floor_bytes)
    assert isinstance(refusal.value, (WeightsFileError, PackageError))


def weights_changed_while_loaded(player: Player, files: Files, folder: Path) -> None:
    """Refused for as long as it is so. A .pte's state is to be reset: of several delegates some may have run."""
    path = files.copied_weights(folder)
    player.open(files.program, path, files.floor_bytes)
    x = rows(5)
    player.run("add", x)
    before = path.stat()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 10**9))
    for _ in range(2):
        with pytest.raises(WeightsChangedError):
            player.run("add", x)
        player.reset_state()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert torch.equal(player.run("add", x), expected("add", x, torch.zeros(WIDTH), 5.0))


def state_after_a_failed_run(player: Player, files: Files, folder: Path) -> None:
    """Refused until it is reset, once the cause is gone as well, and with the cause. A .pt2 has one runtime, which
    refuses this before anything of the run happens: nothing is to be reset."""
    path = files.copied_weights(folder)
    player.open(files.program, path, files.floor_bytes)
    x = rows(9)
    player.run("add", x)
    before = path.stat()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 10**9))
    with pytest.raises(WeightsChangedError) as failure:
        player.run("add", x)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    sums = torch.zeros(WIDTH)
    if files.program.suffix == ".pte":
        reason = f"method 'add' failed: {failure.value}"
        said = f"the state (sums, calls) may be half written: {reason}; call reset_state() first"
        for use in (
            lambda: player.run("add", x),
            lambda: player.run("read", x),
            lambda: player.read_state("sums", sums),
            lambda: player.write_state("sums", sums),
        ):
            with pytest.raises(StateInvalidError) as refusal:
                use()
            assert str(refusal.value) == said
    player.reset_state()
    assert torch.equal(player.run("add", x), expected("add", x, sums, 5.0))


def weights_that_are_not_there(player: Player, files: Files, folder: Path) -> None:
    with pytest.raises(PenstockError):
        player.open(files.program, folder / "nothing.ptd", files.floor_bytes)


def programs_cut_off(player: Player, files: Files, folder: Path) -> None:
    path = Path(shutil.copy(files.program, folder / files.program.name))
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(PackageError):
        player.open(path, files.weights, files.floor_bytes)


def methods_that_there_are_not(player: Player, files: Files, folder: Path) -> None:
    player.open(files.program, files.weights, files.floor_bytes)
    x = rows(6)
    with pytest.raises(PenstockError):
        player.run("nothing", x)
    assert torch.equal(player.run("add", x), expected("add", x, torch.zeros(WIDTH), 5.0))


def counters(player: Player, files: Files, folder: Path) -> None:
    """Every byte of the weight that a run reads was copied, or was there."""
    player.open(files.program, files.weights, files.floor_bytes)
    x, weight_bytes = rows(7), WIDTH * WIDTH * 4
    for runs in (1, 2, 3):
        player.run("add" if runs % 2 else "read", x)
        assert player.figure("runs") == runs
        found = [player.figure(name) for name in ("bytes_streamed", "bytes_hit", "bytes_in_place")]
        assert sum(found) == runs * weight_bytes and min(found) >= 0


BEHAVIOURS = [
    weights_that_are_not_there,
    programs_cut_off,
    methods_that_there_are_not,
    counters,
    budgets,
    budgets_below_the_floor,
    budgets_that_are_none,
    automatic,
    states,
    states_that_there_are_not,
    inputs,
    weights_that_do_not_fit,
    weights_cut_off,
    weights_changed_while_loaded,
    state_after_a_failed_run,
    budgets_of_single_methods,
]


# ---------------------------------------------------------------------------------------------------------- the table


@pytest.fixture(scope="module")
def pt2_files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    made = compiled(tmp_path_factory.mktemp("pt2"), programs(add=Adding(), read=Reading()))
    return described(made.program_path)


@pytest.fixture(scope="module")
def pte_files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    path = tmp_path_factory.mktemp("pte") / "model.pte"
    penstock.executorch.export(programs(add=Adding(), read=Reading()), path, device="cpu", inductor_configs=FAST)
    return described(path)


def described(path: Path) -> Files:
    with penstock.Module(path, EVERYTHING) as module:
        return Files(path, path.with_suffix(".ptd"), module.program, module.floor_bytes, module.full_bytes)


@pytest.fixture(scope="module")
def binary(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = Path(__file__).with_name("behaviour_probe.cpp")
    return build_program(source, library, tmp_path_factory.mktemp("cpp") / "behaviour_probe")


Played = Callable[[str], tuple[Player, Files]]


@pytest.fixture
def played(request: pytest.FixtureRequest) -> Iterator[Played]:
    """A player and its files, by the name of the way."""
    players: list[Player] = []

    def made(way: str) -> tuple[Player, Files]:
        files = request.getfixturevalue("pt2_files" if way == "pt2" else "pte_files")
        players.append(CppPlayer(request.getfixturevalue("binary")) if way == "cpp" else PythonPlayer())
        return players[-1], files

    yield made
    for player in players:
        player.close()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("behaviour", BEHAVIOURS, ids=lambda behaviour: behaviour.__name__)
def test_behaves(behaviour: Behaviour, way: str, played: Played, tmp_path: Path) -> None:
    behaviour(*played(way), tmp_path)


# ---------------------------------------------------------------------------------------------------------- the words

_NOT_OURS = "ExecuTorch refuses it before the delegate is asked; its log has the reason, in its own words"
# Of a behaviour, in a way: which refusals are worded otherwise than in the way before it (.pt2, .pte, C++), and why.
OTHER_WORDS: dict[tuple[str, str], tuple[list[int], str]] = {
    ("weights_that_are_not_there", "cpp"): ([0], _NOT_OURS),
    ("programs_cut_off", "cpp"): ([0], _NOT_OURS),
    ("methods_that_there_are_not", "cpp"): ([0], _NOT_OURS),
    ("inputs", "cpp"): ([0, 1, 2], _NOT_OURS),
    ("weights_cut_off", "cpp"): ([0], _NOT_OURS),
    ("budgets_below_the_floor", "cpp"): (
        [0, 1],
        "Python adds what other placements need; the file has no plans for those",
    ),
    ("states_that_there_are_not", "cpp"): ([2], "what C++ gives has a size, and neither a dtype nor a shape"),
    ("programs_cut_off", "pte"): ([0], "one is an archive, and the other one has a seal"),
    ("weights_cut_off", "pte"): ([0], "the two weights files are of different sizes"),
    ("state_after_a_failed_run", "pte"): ([1, 2, 3, 4], "a .pt2 refuses the run before any of it, and keeps its state"),
    ("budgets_of_single_methods", "pte"): ([0, 1], "a .pt2 has one budget for all of its methods"),
}


def sentences(behaviour: Behaviour, way: str, played: Played, folder: Path) -> list[str]:
    """What was refused, without what another play of the same has otherwise: paths and times."""
    player, files = played(way)
    recording = Recording(player)
    folder.mkdir()
    behaviour(cast(Player, recording), files, folder)
    found = []
    for error in recording.refusals:
        text = str(error).replace(str(folder), "FOLDER").replace(str(files.program), "PROGRAM")
        text = re.sub(r"\b\d+\.\d{9} s\b", "TIME", text)
        # C++ has several options that are amounts, and names the one that it means in front of the sentence.
        text = re.sub(rf"^{BUDGET}(:\w+)?: ", "", text) if way == "cpp" else text
        found.append(f"{type(error).__name__}: {text}")
    return found


@pytest.mark.parametrize(("way", "other"), [("pt2", "pte"), pytest.param("pte", "cpp", marks=pytest.mark.slow)])
@pytest.mark.parametrize("behaviour", BEHAVIOURS, ids=lambda behaviour: behaviour.__name__)
def test_says_the_same(behaviour: Behaviour, way: str, other: str, played: Played, tmp_path: Path) -> None:
    said, other_said = (sentences(behaviour, one, played, tmp_path / one) for one in (way, other))
    pairs = enumerate(itertools.zip_longest(said, other_said))
    differ = {number: pair for number, pair in pairs if pair[0] != pair[1]}
    # An exception that is none any more is to be struck off the list.
    numbers, _ = OTHER_WORDS.get((behaviour.__name__, other), ([], ""))
    assert list(differ) == numbers, differ


@pytest.mark.slow
def test_an_option_of_a_load_and_of_a_loaded_program_are_the_same(played: Played) -> None:
    """A budget in MiB is for the whole program only: of one method there is none, at load and later."""
    player, files = played("cpp")
    assert isinstance(player, CppPlayer)
    of_one = {f"{BUDGET}_mb:add": 1}
    with pytest.raises(PenstockError, match=f"there is no option '{BUDGET}_mb:add'"):
        player.open_with(files.program, files.weights, of_one)
    player.open_with(files.program, files.weights, {f"{BUDGET}:add": files.floor_bytes})
    with pytest.raises(PenstockError, match=f"'{BUDGET}_mb:add' cannot be set of a loaded program"):
        player.set_option(*of_one.popitem())
    assert player.budget_bytes("add") == files.floor_bytes
    malformed = {f"{BUDGET}:add": "8Gib"}
    with pytest.raises(BudgetError, match=f"^{BUDGET}:add: '8Gib' has the unit 'Gib'"):
        player.set_option(*next(iter(malformed.items())))
    with pytest.raises(BudgetError, match=f"^{BUDGET}:add: '8Gib' has the unit 'Gib'"):
        player.open_with(files.program, files.weights, malformed)
