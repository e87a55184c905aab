"""Runs inside a budget from files of inputs, and what they report."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.cli import run
from penstock.program import read_program
from tests.cli.conftest import Cli
from tests.cli.models import WIDTH, Small
from tests.cli.test_plan import planner

np = pytest.importorskip("numpy")
INDEX, SCALE = torch.tensor([3, 1, 4, 1, 5]), torch.linspace(0.5, 2, WIDTH)


def write(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    if path.suffix == ".pt":
        torch.save(tensors, path)
    elif path.suffix == ".npz":
        np.savez(path, **{name: tensor.numpy() for name, tensor in tensors.items()})
    else:
        pytest.importorskip("safetensors.torch").save_file(tensors, path)
    return path


def read(path: Path) -> list[torch.Tensor]:
    if path.suffix == ".pt":
        return list(torch.load(path, weights_only=True).values())
    if path.suffix == ".npz":
        return [torch.from_numpy(array) for array in np.load(path).values()]
    return list(pytest.importorskip("safetensors.torch").load_file(path).values())


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    return write(tmp_path / "in.pt", {"index": INDEX, "scale": SCALE})


@pytest.fixture(scope="module")
def wanted(program: Path) -> list[torch.Tensor]:
    with penstock.Module(program, "1TiB") as module, torch.no_grad():
        return list(module(INDEX, scale=SCALE).values())


@pytest.mark.parametrize("suffix", [".pt", ".npz", ".safetensors"])
def test_inputs_and_outputs(cli: Cli, program: Path, tmp_path: Path, wanted: list[Any], suffix: str) -> None:
    given = write(tmp_path / f"in{suffix}", {"index": INDEX, "scale": SCALE})
    out = tmp_path / f"out{suffix}"
    budget = planner(program).floor_bytes
    assert cli("run", program, "--budget", budget, "--inputs", given, "--out", out).code == 0
    found = read(out)
    assert len(found) == 2
    for tensor, right in zip(found, wanted, strict=True):
        assert torch.equal(tensor, right) and tensor.dtype == right.dtype


def test_the_eager_model_agrees(wanted: list[Any]) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        torch.testing.assert_close(wanted, list(Small().eval()(INDEX, scale=SCALE).values()))


@pytest.mark.parametrize(
    "held",
    [{"args": (INDEX,), "kwargs": {"scale": SCALE}}, {"0": INDEX, "1": SCALE}, {"arr_0": INDEX, "arr_1": SCALE}],
    ids=["nested", "numbers", "numpy's names"],
)
def test_ways_to_give_inputs(cli: Cli, program: Path, tmp_path: Path, held: Any, wanted: list[Any]) -> None:
    torch.save(held, tmp_path / "in.pt")
    out = tmp_path / "out.pt"
    assert cli("run", program, "--budget", "1GB", "--inputs", tmp_path / "in.pt", "--out", out).code == 0
    assert all(torch.equal(a, b) for a, b in zip(read(out), wanted, strict=True))


def test_the_report(cli: Cli, program: Path, inputs: Path) -> None:
    ours = planner(program)
    budget = (ours.floor_bytes + ours.full_bytes) // 2
    told = cli("run", program, "--budget", budget, "--inputs", inputs, "--repeat", 3, "--json").document
    warm = ours.plan(budget).methods[0].warm
    assert (told["bytes_streamed"], told["copies"], told["bytes_hit"]) == (
        warm.bytes_streamed,
        warm.copies,
        warm.bytes_hit,
    )
    assert told["budget_bytes"] == budget >= told["peak_bytes"] > 0
    assert told["floor_bytes"] == ours.floor_bytes and told["runs"] == 3
    assert told["streamed_bytes_per_s"] == pytest.approx(told["bytes_streamed"] / told["run_s"])
    assert told["link_part"] == pytest.approx(told["streamed_bytes_per_s"] / told["link_bytes_per_s"])


def test_one_run_is_a_cold_one(cli: Cli, program: Path, inputs: Path) -> None:
    budget = planner(program).floor_bytes
    told = cli("run", program, "--budget", budget, "--inputs", inputs, "--json").document
    assert told["run_s"] is None and told["first_run_s"] > 0
    assert told["bytes_streamed"] == planner(program).plan(budget).methods[0].cold.bytes_streamed


def test_the_trace(cli: Cli, program: Path, inputs: Path, tmp_path: Path) -> None:
    trace = tmp_path / "t.json"
    budget = planner(program).floor_bytes
    assert cli("run", program, "--budget", budget, "--inputs", inputs, "--repeat", 2, "--trace", trace).code == 0
    events = json.loads(trace.read_text())["traceEvents"]
    steps = len(read_program(program).methods[0].schedule.steps)
    assert sum(event.get("cat") == "compute" for event in events) == 2 * steps
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.pt", "t.json"]


def test_step_times_go_to_plan(cli: Cli, program: Path, inputs: Path, tmp_path: Path) -> None:
    times, budget = tmp_path / "times.json", planner(program).floor_bytes
    options = ("--budget", budget, "--inputs", inputs, "--repeat", 3, "--write-step-times", times)
    assert cli("run", program, *options).code == 0
    told = cli("plan", program, "--budget", budget, "--step-times", times, "--json").document
    assert told["step_times"] == "measured" and told["notes"] == []
    assert told["methods"][0]["resident_s"] == pytest.approx(sum(json.loads(times.read_text())["step_s"]["forward"]))


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_a_pickle_is_not_run(cli: Cli, program: Path, tmp_path: Path) -> None:
    torch.save((Evil(tmp_path / "owned"),), tmp_path / "in.pt")
    told = cli("run", program, "--budget", "1GB", "--inputs", tmp_path / "in.pt", "--json")
    assert told.code == 12 and told.document["error"]["class"] == "InputError"
    assert not (tmp_path / "owned").exists()
    pickle.loads(pickle.dumps(Evil(tmp_path / "owned")))
    assert (tmp_path / "owned").exists(), "it would have been, had it been run"


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ({"index": INDEX}, "missing: scale"),
        ({"index": INDEX, "scale": SCALE, "more": SCALE}, "unknown: more"),
        ({"0": INDEX, "2": SCALE}, "needs 0 to 1"),
        ({"0": INDEX}, "takes 2: index, scale"),
        ({"index": INDEX.float(), "scale": SCALE}, "needs int64"),
        ((INDEX,), "scale"),
    ],
    ids=str,
)
def test_inputs_that_do_not_fit(cli: Cli, program: Path, tmp_path: Path, held: Any, said: str) -> None:
    torch.save(held, tmp_path / "in.pt")
    told = cli("run", program, "--budget", "1GB", "--inputs", tmp_path / "in.pt", "--out", tmp_path / "o.pt")
    assert told.code == 12 and said in told.stderr
    assert not (tmp_path / "o.pt").exists()


@pytest.mark.parametrize("suffix", [".pt", ".npz", ".safetensors"])
@pytest.mark.parametrize(
    "content", [b"", b"\x80\x02]q", b"PK\x03\x04", bytes(100), b"\x93NUMPY\x01\x00", b"{}"], ids=repr
)
def test_junk_is_no_input(cli: Cli, program: Path, tmp_path: Path, suffix: str, content: bytes) -> None:
    (tmp_path / f"junk{suffix}").write_bytes(content)
    told = cli("run", program, "--budget", "1GB", "--inputs", tmp_path / f"junk{suffix}", "--json")
    assert told.code == 12 and told.document["error"]["class"] == "InputError"
    assert f"junk{suffix}" in told.document["error"]["message"]


@pytest.mark.parametrize(
    "held",
    [
        {"args": 5},
        {"args": (INDEX,), "kwargs": [1]},
        {"args": (), "kwargs": {1: INDEX}},
        {"0": INDEX, "arr_0": INDEX},
        {0: INDEX, "scale": SCALE},
        {"index": INDEX.float().to_sparse(), "scale": SCALE},
        {"index": INDEX.to("meta"), "scale": SCALE},
        {"index": "text", "scale": None},
        [[[]]],
        5,
        None,
    ],
    ids=str,
)
def test_what_is_no_arguments(cli: Cli, program: Path, tmp_path: Path, held: Any) -> None:
    torch.save(held, tmp_path / "in.pt")
    told = cli("run", program, "--budget", "1GB", "--inputs", tmp_path / "in.pt", "--json")
    assert told.code == 12 and told.document["error"]["class"] == "InputError"


def test_refusals(cli: Cli, program: Path, inputs: Path, tmp_path: Path) -> None:
    floor = planner(program).floor_bytes
    assert cli("run", program, "--budget", floor - 1, "--inputs", inputs).code == 10
    assert cli("run", program, "--budget", "8 parsecs", "--inputs", inputs).code == 10
    assert cli("run", program, "--budget", "1GB", "--inputs", tmp_path / "none.pt").code == 12
    assert cli("run", program, "--budget", "1GB", "--inputs", inputs, "--method", "nope").code == 2
    assert cli("run", program, "--budget", "1GB", "--inputs", inputs, "--trace", tmp_path / "no/t.json").code == 9
    assert cli("run", program, "--budget", "1GB", "--inputs", inputs, "--out", "o.csv").code == 2
    assert cli("run", program, "--budget", "1GB", "--inputs", inputs, "--repeat", 0).code == 2
    assert cli("run", program, "--inputs", inputs, "--trace", "t", "--write-step-times", "s").code == 2
    assert cli("run", program, "--inputs", inputs, "--host-memory", "pinned").code == 2
    assert cli("run", program, "--inputs", inputs, "--device-memory", "8 parsecs").code == 2
    both = cli("run", program, "--inputs", inputs, "--device-memory", "1GiB", "--budget", "1GiB")
    assert both.code == 2 and "--budget and --device-memory both limit device memory" in both.stderr
    assert cli("run", program, "--weights", program, "--budget", "1GB", "--inputs", inputs).code == 7


def test_split_is_the_modules_business(cli: Cli, program: Path, inputs: Path) -> None:
    """This program was compiled without."""
    told = cli("run", program, "--budget", "1GB", "--inputs", inputs, "--placement", "split")
    assert told.code and "does not go with a program compiled without split_linear=True" in " ".join(
        told.stderr.split()
    )


def test_host_memory_may_be_capped(cli: Cli, program: Path, inputs: Path) -> None:
    floor = planner(program, "stream").floor_bytes
    told = cli("run", program, "--budget", floor, "--inputs", inputs, "--host-memory", "64KiB", "--json")
    assert told.code == 0 and told.document["bytes_streamed"] > 0
    told = cli("run", program, "--budget", floor, "--inputs", inputs, "--host-memory", "staged")
    assert told.code and "is now a cap in bytes" in " ".join(told.stderr.split())


@pytest.mark.parametrize(
    ("option", "now"), [("--mode", "use --placement, where streamed is now stream"), ("--linear", "its own kernel")]
)
def test_options_of_before_are_told_the_new_ones(cli: Cli, program: Path, inputs: Path, option: str, now: str) -> None:
    told = cli("run", program, "--inputs", inputs, option, "split")
    assert told.code == 2 and now in " ".join(told.stderr.split())
    assert option not in cli("run", "--help").stdout


def test_bfloat16_survives_safetensors_and_not_npz(tmp_path: Path) -> None:
    from penstock.cli.tensors_file import dump_tensors, load_tensors
    from penstock.errors import OutputPathError

    tensors = {"x": torch.randn(3, 2).bfloat16().T, "none": torch.empty(0, 4), "one": torch.tensor(True)}
    path = tmp_path / "t.safetensors"
    path.write_bytes(dump_tensors(path, None, tensors))
    found = load_tensors(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype
    with pytest.raises(OutputPathError, match="safetensors"):
        dump_tensors(tmp_path / "t.npz", None, tensors)


def test_a_trace_that_was_interrupted_before_it_was_entered_leaves_no_file(tmp_path: Path) -> None:
    """An open trace is written when its module is closed, which a command does last."""

    class Module:
        path: Path | None = None

        def trace(self, path: Path) -> None:
            self.path = path
            raise KeyboardInterrupt

        def close(self) -> None:
            if self.path is not None:
                self.path.write_text("spans")
                self.path = None

    module = Module()
    with pytest.raises(KeyboardInterrupt), run._recording(module, tmp_path / "t.json", None):
        raise AssertionError("it was never entered")
    module.close()
    assert list(tmp_path.iterdir()) == []
