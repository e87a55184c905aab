"""Options at load, as C++ gives them: what there is, and what is refused."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.budget import mb_to_bytes, parse_bytes
from penstock.errors import BudgetError
from penstock.runtime.options import REFUSALS
from tests.executorch.cpp_program import build_program

INTERNAL, INVALID_ARGUMENT, MEMORY_ALLOCATION_FAILED, INVALID_EXTERNAL_DATA = 0x01, 0x12, 0x21, 0x24
Probe = Callable[..., tuple[int, str]]


# A C++ program is built for them.
pytestmark = pytest.mark.slow


def refusal(budget: str) -> str:
    """What Python says of it."""
    with pytest.raises(BudgetError) as refused:
        parse_bytes(budget)
    return str(refused.value)


def mb_refusal(budget_mb: int) -> str:
    with pytest.raises(BudgetError) as refused:
        mb_to_bytes(budget_mb)
    return str(refused.value)


def sessions(log: str, origin: str) -> int:
    """How many were made with a budget that comes from there."""
    return log.count(f"({origin}), resident ")


@pytest.fixture(scope="module")
def probe(library: Path, lowered: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Probe:
    program = build_program(
        Path(__file__).with_name("option_probe.cpp"), library, tmp_path_factory.mktemp("probe") / "option_probe"
    )

    def run(
        *options: tuple[str, str, str],
        mode: str = "mmap",
        path: Path | None = None,
        data: Path | None = None,
        rows: int = 3,
        environment: dict[str, str] | None = None,
    ) -> tuple[int, str]:
        model = path or lowered("chain")
        words = [program, model, data or model.with_suffix(".ptd"), mode, rows, *(w for o in options for w in o)]
        done = subprocess.run(
            [str(word) for word in words],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **(environment or {})},
        )
        assert done.returncode == 0, done.stderr
        return int(done.stdout), done.stderr

    return run


def test_options_that_there_are(probe: Probe) -> None:
    status, log = probe()
    assert (status, sessions(log, "automatic")) == (0, 2)
    for option in (
        ("int", "weight_offload_budget_mb", "1"),
        ("text", "weight_offload_budget", "1048576"),
        ("text", "weight_offload_budget", "200000"),
        ("text", "weight_offload_budget", "0.2 MB"),
    ):
        status, log = probe(option, ("text", "weight_offload_group", "one"))
        assert (status, sessions(log, "given at load")) == (0, 2)
    status, log = probe(("text", "weight_offload_budget", "auto"), ("bool", "weight_offload_quiet", "true"))
    assert (status, "penstock:" in log) == (0, False)
    status, log = probe(
        ("text", "weight_offload_budget", "200000"), ("text", "weight_offload_host_memory_cap", "65536")
    )
    assert (status, log.count(", staged")) == (0, 2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([("int", "weight_offload_budget_mib", "1")], "there is no option 'weight_offload_budget_mib'"),
        ([("int", "weight_offload_budget_mb", "-1")], mb_refusal(-1)),
        ([("text", "weight_offload_budget_mb", "1")], "weight_offload_budget_mb is no int"),
        ([("int", "weight_offload_budget", "1")], "weight_offload_budget is no string"),
        ([("text", "weight_offload_budget", "")], f"weight_offload_budget: {refusal('')}"),
        ([("text", "weight_offload_budget", "1 Gib")], f"weight_offload_budget: {refusal('1 Gib')}"),
        (
            [("text", "weight_offload_budget", "9223372036854775808")],
            f"weight_offload_budget: {refusal('9223372036854775808')}",
        ),
        ([("text", "weight_offload_host_memory_cap", "1G")], f"weight_offload_host_memory_cap: {refusal('1G')}"),
        ([("text", "weight_offload_budget", "1" * 400)], "255 characters or more"),
        ([("int", "weight_offload_budget_mb", "0")], "is below the floor"),
        (
            [("int", "weight_offload_budget_mb", "1"), ("text", "weight_offload_budget", "1048576")],
            "were both given",
        ),
        ([("int", "weight_offload_group", "1")], "weight_offload_group is no string"),
        ([("text", "weight_offload_quiet", "yes")], "weight_offload_quiet is no bool"),
        ([("text", "weight_offload_budget:forward", "-1")], f"weight_offload_budget:forward: {refusal('-1')}"),
        ([("text", "weight_offload_budget:backward", "1")], "names no delegate; the program has forward"),
        ([("int", "weight_offload_device", "-1")], "weight_offload_device is no int of 0 or more"),
        ([("int", "weight_offload_device", "1")], "compiled for cpu, which has no number"),
    ],
)
def test_options_that_are_refused(probe: Probe, options: list[tuple[str, str, str]], said: str) -> None:
    status, log = probe(*options)
    assert status == INVALID_ARGUMENT
    assert said in log


def test_graphs_are_refused_as_python_refuses_them(probe: Probe) -> None:
    """On a CPU. With a cap: tests/executorch/delegate_plays.py, where a library stands in for a GPU's driver."""
    status, log = probe(("bool", "weight_offload_cuda_graph", "true"))
    (reason,) = (one.reason for one in REFUSALS if (one.option, one.beside) == ("cuda_graph=True", "a CPU"))
    assert status == INTERNAL and f"weight_offload_cuda_graph does not go with a CPU: {reason}" in log
    status, log = probe(("bool", "weight_offload_cuda_graph", "false"))
    assert status == 0 and "graphs" not in log
    status, log = probe(("text", "weight_offload_cuda_graph", "true"))
    assert status == INVALID_ARGUMENT and "weight_offload_cuda_graph is no bool" in log


def test_a_cap_too_small_to_stage_through(probe: Probe) -> None:
    status, log = probe(("text", "weight_offload_host_memory_cap", "100"))
    assert status == MEMORY_ALLOCATION_FAILED and "staging needs at least 16384" in log


def test_a_delegate_with_a_budget_of_its_own(probe: Probe, lowered: Callable[[str], Path]) -> None:
    path = lowered("split")
    own = [("text", f"weight_offload_budget:forward__{number}", "1048576") for number in range(2)]
    status, log = probe(*own, path=path, rows=2)
    assert (status, sessions(log, "given at load"), sessions(log, "automatic")) == (0, 4, 0)
    assert [log.count(f" (of forward__{number} alone)\n") for number in range(2)] == [2, 2]
    # One alone; the other one has the program's.
    status, log = probe(own[0], path=path, rows=2)
    assert (status, sessions(log, "given at load"), sessions(log, "automatic")) == (0, 2, 2)
    status, log = probe(("text", "weight_offload_budget:forward__1", "4096"), path=path, rows=2)
    assert status == INVALID_ARGUMENT
    assert "is below the floor" in log


def test_the_plan_taken_is_the_largest_that_fits(probe: Probe) -> None:
    """A process without Python plans nothing: it takes one of the plans in the file."""
    _, log = probe(("text", "weight_offload_budget", "0"))
    floor_bytes = int(re.search(r"needs at least (\d+) bytes", log).group(1))  # type: ignore[union-attr]
    taken = []
    for budget_bytes in (floor_bytes, floor_bytes + 30_000, floor_bytes + 60_000, 1 << 20):
        status, log = probe(("text", "weight_offload_budget", str(budget_bytes)))
        assert status == 0
        number, count, held = re.search(r"plan (\d+) of (\d+) in the file takes (\d+) KiB", log).groups()  # type: ignore[union-attr]
        assert int(held) * 1024 <= budget_bytes
        taken.append(int(number))
    # A plan may hold less than the budget it was made for, and then serves smaller ones.
    assert taken == sorted(taken)
    assert taken[0] < taken[-1] == int(count)


def test_a_file_that_is_read_instead_of_mapped_is_refused(probe: Probe) -> None:
    status, log = probe(mode="file")
    assert status == INVALID_EXTERNAL_DATA
    assert "LoadMode::Mmap" in log
