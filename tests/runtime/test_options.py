"""Which options go together: every pair that does not is refused, by the one table that docs/runtime.md shows too."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.direct.launch_shape import Limits
from penstock.errors import HostMemoryError, PenstockError
from penstock.placement_names import PLACEMENTS
from penstock.plan.calibration import Calibration, Link
from penstock.program import Program
from penstock.renamed import OPTIONS
from penstock.runtime.linear_choice import LinearChoice, choose_linear
from penstock.runtime.module import Module as CompiledModule
from penstock.runtime.options import REFUSALS, Asked, Options, judge, judged

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
TIMES = Calibration(Link(1e9), {"forward": (1.0,)})


@pytest.fixture
def program(chain: Path) -> Program:
    return penstock.read_program(chain)


def with_linears(program: Program) -> Program:
    def changed(method: Any) -> Any:
        accesses = tuple(dataclasses.replace(access, linear=True) for access in method.schedule.accesses)
        return dataclasses.replace(method, schedule=dataclasses.replace(method.schedule, accesses=accesses))

    return dataclasses.replace(program, methods=tuple(changed(method) for method in program.methods))


BUDGETS = ("budget", "weight_offload_budget_mb", "device_memory")


def combinations() -> Iterator[tuple[Asked, bool, bool, str | None]]:
    """With what is not a module's to be asked: whether weights are packed, whether the program is to have a KV cache on
    both sides, and the call, which a wrong load does not come to."""
    rows = itertools.product(
        (dict.fromkeys(given, 1 << 30) for n in range(4) for given in itertools.combinations(BUDGETS, n)),
        PLACEMENTS,
        ("registered", "1MiB"),
        (None, "first-runs", TIMES),
        (False, True),
        ((None, False), (None, True), (Limits(), False), ("measured", False)),
        (False, True),
        (None, "calibrate()", "calibrate(in_place=True)"),
    )
    for given, placement, host_memory, calibration, cuda_graph, (limits, host_cache), is_packed, call in rows:
        yield (
            Asked(
                **given,
                placement=placement,
                host_memory=host_memory,
                calibration=calibration,
                cuda_graph=cuda_graph,
                split_limits=limits,
            ),
            is_packed,
            host_cache,
            call,
        )


def refused(
    asked: Asked,
    device: torch.device,
    linear: LinearChoice,
    is_delegate: bool,
    is_packed: bool,
    host_cache: bool,
    call: Any,
) -> str | None:
    try:
        options = judge(asked, device, linear, is_delegate=is_delegate, host_cache=host_cache)
        judged(dataclasses.replace(judged(dataclasses.replace(options, is_packed=is_packed)), call=call))
    except PenstockError as error:
        return str(error)
    return None


def test_every_combination_is_judged_as_the_table_says(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written out once more, without the table: what must be refused is, and nothing else."""
    used: set[str] = set()
    cases = 0
    for capability in ((9, 0), (8, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        choices = {
            (device, linears): choose_linear(with_linears(program) if linears else program, device)
            for device in (CPU, GPU)
            for linears in (False, True)
        }
        for (asked, is_packed, host_cache, call), (device, linears), is_delegate in itertools.product(
            combinations(), choices, (False, True)
        ):
            told = refused(asked, device, choices[device, linears], is_delegate, is_packed, host_cache, call)
            capped, lru = asked.host_memory != "registered", asked.placement == "lru"
            kernel = linears and (device is CPU or capability == (9, 0))
            wrong = (
                sum(getattr(asked, name) is not None for name in BUDGETS) > 1
                or (host_cache and asked.device_memory is None)
                or (is_packed and asked.placement in ("in-place", "split", "lru"))
                or (call is not None and asked.placement in ("in-place", "lru"))
                or (call == "calibrate(in_place=True)" and (capped or is_packed or asked.placement == "stream"))
                or (asked.placement in ("in-place", "split") and capped)
                or (asked.placement == "in-place" and asked.calibration is not None)
                or (asked.placement == "split" and asked.calibration == "first-runs")
                or (asked.placement == "split" and not kernel)
                or (lru and (capped or linears or asked.calibration is not None))
                or (asked.cuda_graph and (device is CPU or lru or capped or is_delegate))
                or (asked.split_limits is not None and not (kernel and device is GPU))
                or (is_delegate and (asked.calibration == "first-runs" or asked.device_memory is not None))
            )
            assert (told is not None) == wrong, (asked, device, linears, is_delegate, told)
            cases += 1
            if told is not None:
                (row,) = (row for row in REFUSALS if told.startswith(f"{row.option} does not go with {row.beside}: "))
                used.add(f"{row.option} does not go with {row.beside}")
    assert cases == 2 * 8 * 240 * 2 * 3 * 8
    assert used == {f"{row.option} does not go with {row.beside}" for row in REFUSALS}, "a row that refuses nothing"


def test_the_documented_table_is_the_one_that_judges() -> None:
    text = Path("docs/runtime.md").read_text()
    section = text[text.index("## Which options go together") :]
    section = section[: section.index("\n## ", 1)]
    rows = re.findall(r"^\| `(.+?)` \| (.+?) \| (.+?) \| `(\w+)` \|$", section, re.M)
    assert [(option, beside.replace("`", ""), because, error) for option, beside, because, error in rows] == [
        (row.option, row.beside, row.reason.format(obstacle="the message has the reason"), row.error.__name__)
        for row in REFUSALS
    ]


def test_an_option_of_a_module_is_one_that_is_judged() -> None:
    """All but those that say where files are and what runs them."""
    named = set(inspect.signature(CompiledModule.__init__).parameters)
    known = {field.name for field in dataclasses.fields(Asked)}
    assert named == known | {"self", "path", "device", "weights", "before"}


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("split_limits", "mesured", "split_limits is 'mesured'; it must be Limits, \"measured\" or None"),
        ("cuda_graph", "no", "cuda_graph is 'no'; it must be True or False"),
        ("verify", 1, "verify is 1; it must be True or False"),
        ("device_memory", "auto", "device_memory: 'auto' is not a number of bytes"),
    ],
)
def test_a_mistyped_value_is_refused_by_name(name: str, value: Any, text: str) -> None:
    """On a GPU that has everything, where no combination rules it out."""
    with pytest.raises(PenstockError, match=re.escape(text)):
        judge(Asked(**{name: value}), GPU, LinearChoice(has_linears=True))


def test_what_is_planned_where_no_weight_stays_in_memory(program: Program) -> None:
    def of(**asked: Any) -> Options:
        return judge(Asked(**asked), CPU, choose_linear(program, CPU))

    assert of().planned_as == "auto" and of(placement="in-place").planned_as == "in-place"
    assert of(host_memory="1MiB").planned_as == of(placement="lru").planned_as == "stream"
    assert of(host_memory="1MiB").host_memory_cap_bytes == 1 << 20 and of().host_memory_cap_bytes is None


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_before_are_refused_by_their_new_names(chain: Path, name: str) -> None:
    with pytest.raises(PenstockError, match=re.escape(f"Module has no {name}= any more: {OPTIONS[name]}")):
        penstock.Module(chain, **{name: "lru"})  # type: ignore[arg-type]


def test_values_of_before_are_refused_by_their_new_names(chain: Path) -> None:
    for before, now in (("streamed", "stream"), ("direct", "in-place"), ("planned", "auto")):
        with pytest.raises(PenstockError, match=f"what was placement='{before}' is now \"{now}\""):
            penstock.Module(chain, placement=before)
    with pytest.raises(HostMemoryError, match="what was host_memory='staged' is now a cap in bytes"):
        penstock.Module(chain, host_memory="staged")


def test_other_names_are_pythons_to_refuse(chain: Path) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'bugdet'"):
        penstock.Module(chain, bugdet=1)  # type: ignore[arg-type]
    with penstock.Module(chain, "1GiB") as module:
        with pytest.raises(AttributeError, match=r"no attribute 'calibrate_direct' any more: use calibrate\(in_place"):
            module.calibrate_direct()
        with pytest.raises(AttributeError, match="no attribute 'bugdet_bytes'$"):
            _ = module.bugdet_bytes
        assert not hasattr(module, "mode")
