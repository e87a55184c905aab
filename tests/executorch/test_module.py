"""penstock.executorch.Module: the outputs of the .pt2 path to the bit, inside the same budgets."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
import penstock.executorch
from penstock.errors import (
    BelowFloorError,
    BudgetError,
    ClosedError,
    ForkedError,
    InputError,
    PackageError,
    PenstockError,
)
from penstock.executorch.native import NativeModule
from tests.executorch.programs import WIDTH, random_rows
from tests.runtime.modules import EVERYTHING, SCRIPTS, Call, generate, play, same

Paths = Callable[[str], Path]
Opened = Callable[..., Any]

CALLS: dict[str, list[Call]] = {
    "chain": [("forward", (random_rows(rows, seed=rows),)) for rows in (3, 1, 17, 3, 32)],
    "decoder": SCRIPTS["decoder"],
}


def test_outputs_are_those_of_the_pt2_at_every_budget(lowered: Paths, packaged: Path, opened: Opened) -> None:
    script = CALLS["decoder"]
    with penstock.Module(packaged, EVERYTHING) as resident:
        expected = play(resident.run_method, script)
        floor_bytes, full_bytes = resident.floor_bytes, resident.budget_bytes
    for budget_bytes in (floor_bytes, (floor_bytes + full_bytes) // 2, full_bytes):
        module = opened(lowered("decoder"), budget_bytes)
        assert same(play(module.run_method, script), expected)
        assert (module.floor_bytes, module.budget_bytes) == (floor_bytes, budget_bytes)
        held_bytes, peak_bytes = module.device_memory()
        assert held_bytes == module.plan.device_bytes
        assert peak_bytes <= budget_bytes
        # S7: what was counted is what the plan says. Where not everything fits, something was streamed.
        last, warm = module.last_run, module.plan.method("decode").warm
        assert (last.bytes_streamed, last.copies, last.bytes_hit) == (warm.bytes_streamed, warm.copies, warm.bytes_hit)
        assert module.stats().runs == len(script)
        assert (module.stats().bytes_streamed == 0) == (budget_bytes == full_bytes)
    with pytest.raises(BelowFloorError, match=f"needs at least {floor_bytes} bytes") as refused:
        opened(lowered("decoder"), floor_bytes - 1)
    assert (refused.value.budget_bytes, refused.value.floor_bytes) == (floor_bytes - 1, floor_bytes)


def test_methods_share_state_and_one_budget(lowered: Paths, packaged: Path, opened: Opened) -> None:
    with penstock.Module(packaged, EVERYTHING) as resident:
        expected = generate(resident.run_method, 6)
        floor_bytes = resident.floor_bytes
    module = opened(lowered("decoder"), floor_bytes)
    tokens, logits = generate(module.run_method, 6)
    assert tokens == expected[0]
    assert all(torch.equal(a, b) for a, b in zip(logits, expected[1], strict=True))
    assert module.methods == ("decode", "prefill")
    assert module.device_memory()[1] <= floor_bytes


def test_delegates_without_python_take_plans_from_the_file(lowered: Paths, opened: Opened) -> None:
    """What a C++ process does: no session is lent, so the delegates make one, with weights that are read in place."""
    path = lowered("decoder")
    resident = opened(path, EVERYTHING)
    expected = generate(resident.run_method, 6)
    for number, budget_bytes in enumerate((resident.floor_bytes, resident.floor_bytes + 100_000, None)):
        budget = "auto" if budget_bytes is None else str(budget_bytes)
        native = NativeModule(str(path), [str(path.with_suffix(".ptd"))], budget, f"plans {number}")
        try:
            for name in ("prefill", "decode"):
                native.load_method(name)
            (payload,) = native.payloads()
            rows = [(row.methods, bool(row.in_place)) for row in payload.description.plan_tables]
            assert rows == [(which, direct) for direct in (True, False) for which in ((0, 1), (0,), (1,))]
            found = native.session()
            assert found is not None
            assert found[1].floor_bytes == resident.floor_bytes
            assert found[1].plan_bytes <= found[1].budget_bytes <= (budget_bytes or resident.full_bytes)
            assert found[1].source == ("automatic" if budget_bytes is None else "load")
            for _ in range(2):
                tokens, logits = generate(lambda name, *given: native.execute(name, given)[0], 6)  # noqa: B023
                assert tokens == expected[0]
                assert all(torch.equal(a, b) for a, b in zip(logits, expected[1], strict=True))
        finally:
            native.close()


def test_freed_memory_is_not_read(lowered: Paths, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    resident = opened(lowered("decoder"), EVERYTHING)
    expected = play(resident.run_method, CALLS["decoder"])
    monkeypatch.setenv("PENSTOCK_POISON", "1")
    assert same(play(opened(lowered("decoder"), resident.floor_bytes).run_method, CALLS["decoder"]), expected)
    monkeypatch.setenv("PENSTOCK_POISON", "yes")
    with pytest.raises(PenstockError, match="PENSTOCK_POISON is 'yes'"):
        opened(lowered("decoder"), EVERYTHING)


def test_which_budget_holds(lowered: Paths, opened: Opened) -> None:
    path = lowered("chain")
    automatic = opened(path)
    assert automatic.budget_bytes == automatic.plan.device_bytes
    assert "(automatic)" in automatic.summary
    assert "(given at load)" in opened(path, weight_offload_budget_mb=1).summary
    assert opened(path, "200 KiB").budget_bytes == 200 * 2**10
    assert "(baked at export)" in opened(lowered("hazards")).summary
    with pytest.raises(BudgetError, match="does not go with budget="):
        opened(path, "1MiB", weight_offload_budget_mb=1)
    for malformed in ("12abc", "-1", "", "1.1B", "9223372036854775808"):
        with pytest.raises(BudgetError):
            opened(path, malformed)
    with pytest.raises(BudgetError):
        opened(path, weight_offload_budget_mb=-1)


def test_two_modules_of_one_file_have_budgets_of_their_own(lowered: Paths, opened: Opened) -> None:
    path = lowered("decoder")
    small = opened(path, opened(path, EVERYTHING).floor_bytes)
    large, again = opened(path, EVERYTHING), opened(path, EVERYTHING)
    script = CALLS["decoder"][:3]
    assert same(play(small.run_method, script), play(large.run_method, script))
    assert again.stats().runs == 0
    assert small.device_memory()[1] <= small.floor_bytes < large.device_memory()[0]


def test_programs_that_follow_one_another_are_not_mixed_up(lowered: Paths, opened: Opened) -> None:
    """Code of one program stays mapped after it is closed, and a name that is used again would find it."""
    results: dict[str, list[torch.Tensor]] = {"chain": [], "split": []}
    for name in ("chain", "split") * 3:
        module = opened(lowered(name), EVERYTHING)
        found = module(random_rows(2))
        results[name].append(found[0] if name == "split" else found["hidden"])
        module.close()
    for found in results.values():
        assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert results["chain"][0].shape != results["split"][0].shape


def test_inputs_are_checked(lowered: Paths, opened: Opened) -> None:
    module = opened(lowered("chain"), EVERYTHING)
    expected = module(random_rows(3))
    assert set(expected) == {"hidden", "sum"}
    for wrong in (random_rows(3).double(), random_rows(3)[:, 1:], random_rows(33), 3):
        with pytest.raises(InputError):
            module(wrong)
    with pytest.raises(InputError):
        module()
    with pytest.raises(PackageError, match="no method 'backward'"):
        module.run_method("backward", random_rows(3))
    strided = random_rows(6)[::2]
    assert torch.equal(module(strided)["hidden"], module(strided.contiguous())["hidden"])


def test_a_closed_module_says_so(lowered: Paths, opened: Opened) -> None:
    module = opened(lowered("chain"), EVERYTHING)
    module.close()
    module.close()
    for use in (lambda: module(torch.ones(3, WIDTH)), module.stats, module.reset_state, lambda: module.plan):
        with pytest.raises(ClosedError):
            use()


def test_a_child_is_told_to_load_its_own(lowered: Paths, opened: Opened) -> None:
    module = opened(lowered("chain"), EVERYTHING)
    child = os.fork()
    if child == 0:
        try:
            module(torch.ones(3, WIDTH))
        except ForkedError:
            module.close()
            os._exit(42)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42


def test_penstock_module_takes_a_pte(lowered: Paths) -> None:
    path = lowered("chain")
    with penstock.executorch.Module(path, EVERYTHING) as resident:
        expected, floor_bytes = play(resident.run_method, CALLS["chain"]), resident.floor_bytes
    with penstock.Module(path, budget=floor_bytes) as module:
        assert isinstance(module, penstock.executorch.Module)
        assert same(play(module.run_method, CALLS["chain"]), expected)
        assert module.stats().bytes_streamed > 0
    with pytest.raises(PenstockError, match="cuda_graph=True does not go with a .pte"):
        penstock.Module(path, cuda_graph=True)
