"""What penstock.Module has for a .pt2, on a .pte: there, or refused by name."""

from __future__ import annotations

import json
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
    BuildMismatchError,
    InputError,
    PenstockError,
    ScheduleDivergedError,
    StateInvalidError,
    WeightsFileError,
)
from tests.executorch.programs import FIRST_CALLS, random_rows
from tests.executorch.test_module import CALLS
from tests.runtime.modules import EVERYTHING, decode, generate, play, same

Paths = Callable[[str], Path]
Opened = Callable[..., Any]


def public_names(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def test_nothing_of_the_pt2_s_surface_is_missing(lowered: Paths, packaged: Path, opened: Opened) -> None:
    module = opened(lowered("decoder"), EVERYTHING)
    with penstock.Module(packaged, EVERYTHING) as ours:
        wanted = public_names(penstock.Module) | {name for name in vars(ours) if not name.startswith("_")}
        assert [name for name in sorted(wanted) if not hasattr(module, name)] == []
        for name in (
            "device",
            "weight_bytes",
            "state_bytes",
            "device_state_bytes",
            "floor_bytes",
            "budget_bytes",
            "calibration",
        ):
            assert getattr(module, name) == getattr(ours, name), name
    # The .ptd of a .pte has no metadata of ours in it.
    assert module.host_bytes == lowered("decoder").with_suffix(".ptd").stat().st_size
    assert {method.name for method in module.program.methods} == {"prefill", "decode"}


def test_the_budget_can_be_changed(lowered: Paths, opened: Opened) -> None:
    module = opened(lowered("chain"), EVERYTHING)
    expected, full_bytes = play(module.run_method, CALLS["chain"]), module.budget_bytes
    for budget_bytes in (module.floor_bytes, (module.floor_bytes + full_bytes) // 2, full_bytes):
        module.set_budget(budget_bytes)
        assert module.budget_bytes == budget_bytes
        assert module.device_memory()[0] <= budget_bytes
        assert same(play(module.run_method, CALLS["chain"]), expected)
        assert (module.last_run.bytes_streamed == 0) == (budget_bytes == full_bytes)
    with pytest.raises(BelowFloorError):
        module.set_budget(module.floor_bytes - 1)
    assert same(play(module.run_method, CALLS["chain"]), expected)


def test_runs_are_traced_and_calibrated(lowered: Paths, opened: Opened, tmp_path: Path) -> None:
    module = opened(lowered("chain"), opened(lowered("chain"), EVERYTHING).floor_bytes)
    expected = play(module.run_method, CALLS["chain"])
    with module.trace(tmp_path / "trace.json"):
        module(random_rows(3))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    copies = [event for event in events if event.get("cat") == "copy"]
    plan = module.plan.method("forward")
    assert sum(event["args"]["bytes"] for event in copies) == plan.warm.bytes_streamed
    assert {event["name"] for event in copies} <= {weight.name for weight in module.program.weights}
    assert len([event for event in events if event.get("cat") == "compute"]) == plan.step_count
    with module.calibrate():
        for _ in range(3):
            module(random_rows(3))
    assert module.calibration is not None
    with module.calibrate(in_place=True):
        module(random_rows(3))
    assert module.calibration.direct_step_s
    assert module.plan_at(module.full_bytes).method("forward").warm.copies == 0
    assert module.plan_at(f"{module.full_bytes} B") == module.plan_at(module.full_bytes)
    assert same(play(module.run_method, CALLS["chain"]), expected)


def test_state_is_read_written_and_reset(lowered: Paths, packaged: Path, opened: Opened) -> None:
    module = opened(lowered("decoder"), EVERYTHING)
    tokens, logits = generate(module.run_method, 3)
    with penstock.Module(packaged, EVERYTHING) as ours:
        assert generate(ours.run_method, 3)[0] == tokens
        for state in ours.program.states:
            assert torch.equal(module.read_state(state.name), ours.read_state(state.name))
        name, (method, arguments) = "layers.0.attn.k_cache", decode(3, 11)
        before = module.run_method(method, *arguments)
        for each in (module, ours):
            each.write_state(name, torch.full_like(each.read_state(name), 2.0))
        after = module.run_method(method, *arguments)
        assert torch.equal(after, ours.run_method(method, *arguments))
        assert not torch.equal(after, before)
    module.reset_state()
    assert not module.read_state(name).any()
    assert all(torch.equal(a, b) for a, b in zip(generate(module.run_method, 3)[1], logits, strict=True))
    with pytest.raises(InputError, match="no state 'nothing'; the program has layers.0.attn.k_cache"):
        module.read_state("nothing")
    with pytest.raises(InputError, match="needs float32"):
        module.write_state(name, torch.zeros(3))


def test_state_that_does_not_start_as_zeros(lowered: Paths, opened: Opened) -> None:
    module = opened(lowered("split"), EVERYTHING)
    x = random_rows(2)
    assert [module(x)[1].tolist() for _ in range(2)] == [[FIRST_CALLS + n] * 2 for n in (1, 2)]
    module.reset_state()
    assert module.read_state("calls").tolist() == [FIRST_CALLS] * 2
    assert module(x)[1].tolist() == [FIRST_CALLS + 1] * 2


def test_a_failed_run_leaves_state_unusable(lowered: Paths, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    module = opened(lowered("decoder"), EVERYTHING)
    expected = generate(module.run_method, 2)

    def failing(method: str, inputs: object) -> list[object]:
        raise ScheduleDivergedError("planted")

    with monkeypatch.context() as patched:
        patched.setattr(module._native, "execute", failing)
        with pytest.raises(ScheduleDivergedError):
            generate(module.run_method, 2)
    with pytest.raises(StateInvalidError, match="'prefill' failed: planted; call reset_state"):
        generate(module.run_method, 2)
    with pytest.raises(StateInvalidError):
        module.read_state("layers.0.attn.k_cache")
    module.reset_state()
    assert generate(module.run_method, 2)[0] == expected[0]


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"cuda_graph": True}, PenstockError, "does not go with a .pte: graphs belong to the delegates"),
        ({"calibration": "first-runs"}, PenstockError, "use calibrate"),
        ({"device": "cuda:1"}, BuildMismatchError, "compiled for cpu, and cannot run on cuda:1"),
        ({"verify": True}, WeightsFileError, "has no checksum"),
        ({"placement": "most"}, PenstockError, "placement is 'most'"),
        ({"policy": "lru"}, PenstockError, "no policy= any more: use placement="),
        ({"nothing": 1}, TypeError, "nothing"),
        ({"weights": []}, PenstockError, "weights is an empty list"),
        ({"delegate_budgets": {"backward": 1}}, BudgetError, "no delegate 'backward'; it has forward"),
        ({"delegate_budgets": {"forward": "1MiB"}}, BudgetError, "every delegate has one of its own"),
    ],
)
def test_options_that_are_refused(
    lowered: Paths, opened: Opened, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        opened(lowered("chain"), "240KiB", **options)


@pytest.mark.parametrize("options", [{"placement": "lru"}, {"host_memory": "64KiB"}])
def test_the_other_placements_of_the_pt2(lowered: Paths, opened: Opened, options: dict[str, Any]) -> None:
    expected = play(opened(lowered("chain"), EVERYTHING).run_method, CALLS["chain"])
    module = opened(lowered("chain"), "240KiB", **options)
    assert same(play(module.run_method, CALLS["chain"]), expected)
    assert module.device_memory()[1] <= module.budget_bytes == 240 * 2**10
    assert module.stats().bytes_streamed > 0


def test_a_delegate_with_a_budget_of_its_own(lowered: Paths, opened: Opened) -> None:
    path = lowered("decoder")
    whole = opened(path, EVERYTHING)
    expected = generate(whole.run_method, 4)
    # Decoding alone has a floor of its own, which is not above that of both.
    alone = opened(path, delegate_budgets={"decode": EVERYTHING, "prefill": EVERYTHING}).delegates["decode"]
    assert alone.floor_bytes <= whole.floor_bytes
    module = opened(path, whole.floor_bytes, delegate_budgets={"decode": alone.floor_bytes})
    tokens, logits = generate(module.run_method, 4)
    assert tokens == expected[0]
    assert all(torch.equal(a, b) for a, b in zip(logits, expected[1], strict=True))
    decode = module.delegates["decode"]
    assert [method.name for method in module.program.methods] == ["prefill"]
    assert (decode.stats().runs, module.stats().runs) == (4, 5)
    assert decode.device_memory()[1] <= decode.budget_bytes == alone.floor_bytes
    assert module.device_memory()[1] <= module.budget_bytes + decode.budget_bytes
    assert "(of decode alone)" in module.summary
    decode.set_budget(EVERYTHING)
    assert generate(module.run_method, 4)[0] == expected[0]
    with pytest.raises(BelowFloorError):
        opened(path, EVERYTHING, delegate_budgets={"decode": alone.floor_bytes - 1})
    both = opened(path, delegate_budgets={"decode": EVERYTHING, "prefill": EVERYTHING})
    with pytest.raises(PenstockError, match="every delegate of .* has a budget of its own"):
        both.set_budget(EVERYTHING)
