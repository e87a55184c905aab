"""penstock.compile: what it writes for one method and for several, and where the values come from."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
import penstock.export.compile as compile_module
from penstock.errors import BelowFloorError, CheckpointError, MethodConflictError, PackageError
from penstock.native import core
from penstock.plan.pages import soft_page_bytes
from penstock.plan.planner import Planner
from penstock.program import FORMAT_VERSION, TensorSpec, program_from_json, program_to_json, read_program
from penstock.torch_private.loader import CompiledMethod as LoadedMethod
from penstock.verify.module import PoisonedModule
from penstock.weights import layout_identity, read_index, verify_checksums
from penstock.weights.format import PAGE_BYTES
from tests.export import builds
from tests.export.builds import DECODE, Built, build, bytes_of, net, shifted, stored_bytes, unchanged
from tests.harness import offloaded

GIB = 2**30


def test_two_files_and_nothing_else(decoder_build: Built, small_build: Built) -> None:
    for result in (decoder_build.result, small_build.result):
        assert [p.name for p in sorted(result.program_path.parent.iterdir())] == ["model.pt2", "model.ptd"]
        assert result.weights_path == result.program_path.with_suffix(".ptd")


def test_one_method_runs(decoder_build: Built) -> None:
    module = PoisonedModule(decoder_build.result.program_path)
    reference = copy.deepcopy(DECODE.module)
    for _ in range(3):  # the caches fill up
        with torch.no_grad():
            torch.testing.assert_close(module(*DECODE.args), reference(*DECODE.args))


def test_several_methods_run_over_the_same_weights_and_state(small_build: Built) -> None:
    module = PoisonedModule(small_build.result.program_path)
    models = shifted(8)
    assert [m.name for m in module.program.methods] == ["first", "second"]
    for name, rows in (("first", 3), ("second", 3), ("second", 40), ("first", 3)):
        x = torch.randn(rows, 8)
        with torch.no_grad():
            torch.testing.assert_close(module.run_method(name, x), models[name](x))
    torch.testing.assert_close(module.states["total"], models["first"].total)
    assert torch.count_nonzero(module.states["total"])


def test_weights_that_methods_share_are_stored_once(small_build: Built) -> None:
    program = small_build.result.program
    shared = {"shift", "linear.weight", "linear.bias"}
    for method in program.methods:
        assert {access.weight for access in method.schedule.accesses} > shared
    index = read_index(small_build.result.weights_path)
    assert sorted(entry.name for entry in index) == sorted(shared | {"lifted_tensor_0", "second.lifted_tensor_0"})
    assert [entry.name for entry in index.unique_entries] == [entry.name for entry in index]
    offsets = [entry.offset_bytes for entry in index]
    assert len(set(offsets)) == 5
    assert index.file_bytes < 5 * PAGE_BYTES + 4 * PAGE_BYTES  # a page for each, and the index and metadata


def test_the_weights_file(decoder_build: Built) -> None:
    """In the order of first access, on pages, with the values of the model, and of the program's identity."""
    program = decoder_build.result.program
    order = list(dict.fromkeys(access.weight for access in program.methods[0].schedule.accesses))
    index = read_index(decoder_build.result.weights_path)
    assert [entry.name for entry in index.unique_entries] == order == [w.name for w in program.weights]
    offsets = [entry.offset_bytes for entry in index.unique_entries]
    assert offsets == sorted(offsets)
    assert all(offset % PAGE_BYTES == 0 for offset in offsets)
    assert index.identity == program.identity == layout_identity(program.weights, program.states)
    verify_checksums(index)
    tensors = {**dict(DECODE.module.named_parameters()), "inv_freq": DECODE.module.inv_freq}
    assert tensors.keys() == set(order)
    held = stored_bytes(decoder_build.result.weights_path)
    for weight in program.weights:
        assert held[weight.name] == bytes_of(tensors[weight.name], weight.dim_order)


def test_the_second_method_s_weights_follow_the_first_s(small_build: Built) -> None:
    order: dict[str, None] = {}
    for method in small_build.result.program.methods:
        order.update(dict.fromkeys(access.weight for access in method.schedule.accesses))
    index = read_index(small_build.result.weights_path)
    assert [entry.name for entry in index] == list(order) == [w.name for w in small_build.result.program.weights]
    assert list(order)[-1] == "second.lifted_tensor_0"


def test_executorch_reads_the_weights_file(decoder_build: Built) -> None:
    serialize = pytest.importorskip("executorch.extension.flat_tensor.serialize.serialize")
    cord = pytest.importorskip("executorch.exir._serialize._cord")
    raw = decoder_build.result.weights_path.read_bytes()
    theirs = serialize.FlatTensorSerializer().deserialize(cord.Cord(raw))
    held = stored_bytes(decoder_build.result.weights_path)
    assert set(theirs.named_data) - {"penstock.json"} == set(held)
    for name, expected in held.items():
        assert bytes(theirs.buffers[theirs.named_data[name].buffer_index]) == expected


def test_the_metadata_round_trips(decoder_build: Built, small_build: Built) -> None:
    for result in (decoder_build.result, small_build.result):
        assert read_program(result.program_path) == result.program
        assert read_program(str(result.program_path)) == result.program
        assert program_from_json(program_to_json(result.program)) == result.program


def test_what_the_metadata_says(decoder_build: Built) -> None:
    with zipfile.ZipFile(decoder_build.result.program_path) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith("/extra/penstock.json")]
        table = json.loads(archive.read(name))
    assert table["format_version"] == FORMAT_VERSION == 6
    program = read_program(decoder_build.result.program_path)
    assert program.budget_bytes == 8 * GIB
    assert program.device == "cpu"
    assert program.built_with["torch"] == torch.__version__
    assert program.built_with["penstock"] == penstock.__version__
    assert program.unused == ()
    caches = {"layers.0.attn.k_cache", "layers.0.attn.v_cache"}
    assert {s.name: (s.dtype, s.shape, s.init) for s in program.states} == dict.fromkeys(
        caches, ("float32", (1, 2, 32, 16), "zeros")
    )
    assert program.state_bytes == 2 * 2 * 32 * 16 * 4
    assert program.weight_bytes == sum(t.nbytes for t in DECODE.module.parameters()) + 8 * 4
    (decode,) = program.methods
    assert set(decode.states) == caches
    assert 0 < decode.activation_example_bytes == decode.activation_bound_bytes  # nothing is dynamic
    assert decode.signature.symbols == {}
    with pytest.raises(PackageError, match="no method 'other'; the program has decode"):
        program.method("other")


def test_what_the_metadata_says_about_dynamic_shapes(small_build: Built) -> None:
    first, second = read_program(small_build.result.program_path).methods
    (symbol,) = second.signature.symbols
    assert second.signature.symbols[symbol] == (2, 64)
    assert [spec.shape for spec in second.signature.inputs if isinstance(spec, TensorSpec)] == [(symbol, 8)]
    assert [spec.shape for spec in first.signature.inputs if isinstance(spec, TensorSpec)] == [(3, 8)]
    assert second.activation_example_bytes < second.activation_bound_bytes
    assert first.activation_example_bytes == first.activation_bound_bytes


def test_the_floor_can_be_computed_again(decoder_build: Built, small_build: Built) -> None:
    for result in (decoder_build.result, small_build.result):
        program = read_program(result.program_path)
        schedules, weights = [m.schedule for m in program.methods], {w.name: w for w in program.weights}
        page_bytes = soft_page_bytes(program.weight_bytes)
        floor = Planner(schedules, weights, page_bytes=page_bytes, placement="auto").floor()
        assert floor == result.floor
        assert 0 < program.floor_bytes == floor.floor_bytes


def test_reading_files_takes_no_torch(decoder_build: Built) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"  # from here on, importing torch is an ImportError
        "import penstock\n"
        "from penstock.program import read_program\n"
        "from penstock.weights import read_index\n"
        "program, index = read_program(sys.argv[1]), read_index(sys.argv[2])\n"
        "assert penstock.read_program(sys.argv[1]) == program\n"
        "print(program.identity, index.identity, program.floor_bytes, len(program.methods[0].schedule.steps))\n"
    )
    result = decoder_build.result
    command = [sys.executable, "-c", code, str(result.program_path), str(result.weights_path)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    steps = len(result.program.methods[0].schedule.steps)
    identity = result.program.identity
    assert child.stdout.split() == [identity, identity, str(result.program.floor_bytes), str(steps)]


def test_the_program_holds_no_constants(decoder_build: Built, small_build: Built, wide_build: Built) -> None:
    core()
    searched = 0
    for result in (decoder_build.result, small_build.result, wide_build.result):
        with zipfile.ZipFile(result.program_path) as archive:
            members = [archive.read(name) for name in archive.namelist()]
        for method in result.program.methods:
            assert not LoadedMethod(result.program_path, method.name)._loader.get_constant_fqns()
        for name, raw in stored_bytes(result.weights_path).items():
            # Weights of random numbers; the others are too plain (ones) or too short to be told from code.
            if len(raw) >= 256 and len(set(raw)) > 64:
                searched += 1
                assert not any(raw[64:128] in member for member in members), name
    assert searched > 10


def test_the_program_does_not_grow_with_the_model(small_build: Built, wide_build: Built) -> None:
    def code_bytes(path: Path) -> int:
        with zipfile.ZipFile(path) as archive:
            return sum(i.file_size for i in archive.infolist() if "/aotinductor/first/" in i.filename)

    assert wide_build.result.program.weight_bytes > small_build.result.program.weight_bytes + 2**20
    grown = code_bytes(wide_build.result.program_path) - code_bytes(small_build.result.program_path)
    assert abs(grown) < 64 * 1024


# -------------------------------------------------------------------------------------------------- methods and weights


def test_lifted_constants_of_one_name_and_two_values(small_build: Built) -> None:
    held = stored_bytes(small_build.result.weights_path)
    assert held["lifted_tensor_0"] == bytes_of(torch.tensor([1.0, 0.0]))
    assert held["second.lifted_tensor_0"] == bytes_of(torch.tensor([2.0, 0.0]))
    first, second = (
        {access.weight for access in method.schedule.accesses if "lifted" in access.weight}
        for method in small_build.result.program.methods
    )
    assert (first, second) == ({"lifted_tensor_0"}, {"second.lifted_tensor_0"})


def test_lifted_constants_of_one_value_are_one(quick: None, tmp_path: Path) -> None:
    models = shifted(8)
    models["second"].constant = 1.0
    result = build({name: offloaded(model, (torch.ones(3, 8),)) for name, model in models.items()}, tmp_path)
    assert {w.name for w in result.program.weights} == {"shift", "linear.weight", "linear.bias", "lifted_tensor_0"}


class Uses(nn.Module):
    def __init__(self, weight: Any, cache: Any, buffer: Any, persistent: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 4) if weight is None else weight)
        self.register_buffer("buffer", torch.ones(2) if buffer is None else buffer, persistent=persistent)
        self.register_buffer("cache", torch.zeros(2) if cache is None else cache, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache.add_(x.sum())
        return x * self.weight.sum() + self.buffer.sum()


def uses(
    weight: Any = None, cache: Any = None, *, buffer: Any = None, persistent: bool = True, device: str = "cpu"
) -> torch.export.ExportedProgram:
    model = Uses(weight, cache, buffer, persistent).to(device)
    return offloaded(model, (torch.ones(2, device=device),))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: uses(torch.full((3, 4), 2.0)), "weight 'weight' in method 'second' differs"),
        (lambda: uses(torch.ones(4, 3)), r"weight 'weight'.*here float32 \[4, 3\], there float32 \[3, 4\]"),
        (lambda: uses(torch.ones(3, 4).double()), r"weight 'weight'.*here float64 \[3, 4\], there float32 \[3, 4\]"),
        (lambda: uses(torch.ones(4, 3).t()), "weight 'weight' in method 'second' differs"),
        (lambda: uses(device="meta"), "'(weight|cache|buffer)' in method 'second'"),
        (lambda: uses(buffer=torch.full((2,), -1.0)), "weight 'buffer' in method 'second' differs"),
        (lambda: uses(cache=torch.zeros(3)), r"state 'cache' in method 'second' \(float32 \[3\]\).*float32 \[2\]"),
        (lambda: uses(cache=torch.zeros(2).double()), "state 'cache' in method 'second'.*float64"),
        (lambda: uses(cache=torch.ones(2)), "state 'cache' in method 'second'.*other first values"),
    ],
)
def test_methods_that_disagree_are_refused(
    no_compiler: None, tmp_path: Path, other: Callable[[], Any], message: str
) -> None:
    with unchanged(tmp_path), pytest.raises(MethodConflictError, match=message):
        build({"first": uses(), "second": other()}, tmp_path)


def test_methods_that_agree(quick: None, tmp_path: Path) -> None:
    result = build({"first": uses(), "second": uses(), "third": uses()}, tmp_path)
    assert [w.name for w in result.program.weights] == ["weight", "buffer"]
    assert [s.name for s in result.program.states] == ["cache"]
    assert [m.name for m in result.program.methods] == ["first", "second", "third"]


def test_non_persistent_buffers_may_differ(quick: None, tmp_path: Path) -> None:
    programs = {
        "first": uses(persistent=False),
        "second": uses(persistent=False, buffer=torch.full((5,), 7.0)),
    }
    result = build(programs, tmp_path)
    held = stored_bytes(result.weights_path)
    assert held["buffer"] == bytes_of(torch.ones(2))
    assert held["second.buffer"] == bytes_of(torch.full((5,), 7.0))
    assert [a.weight for a in result.program.methods[1].schedule.accesses] == ["weight", "second.buffer"]


# ------------------------------------------------------------------------------------------------------------- budgets


def test_budgets_at_and_below_the_floor(quick: None, tmp_path: Path, program: torch.export.ExportedProgram) -> None:
    floor = build(program, tmp_path).program.floor_bytes
    assert floor > 1
    for below in (floor - 1, 0, str(floor - 1)):
        with unchanged(tmp_path), pytest.raises(BelowFloorError, match=f"needs at least {floor} bytes"):
            build(program, tmp_path, weight_offload_budget=below, overwrite=True)
    for budget, expected in ((floor, floor), (str(floor), floor), ("8GiB", 8 * GIB), (2**63 - 1, 2**63 - 1)):
        result = build(program, tmp_path, weight_offload_budget=budget, overwrite=True)
        assert result.program.budget_bytes == read_program(result.program_path).budget_bytes == expected
        assert result.program.floor_bytes == floor


def test_no_files_are_left_when_the_budget_is_below_the_floor(
    quick: None, tmp_path: Path, program: torch.export.ExportedProgram
) -> None:
    with pytest.raises(BelowFloorError, match=r"weight_offload_budget is 1 B, below the floor"):
        build(program, tmp_path, weight_offload_budget=1)
    assert list(tmp_path.iterdir()) == []


# -------------------------------------------------------------------------------------------------------------- values

safetensors_torch = pytest.importorskip("safetensors.torch")


def checkpoint_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """As files hold it: row by row, a tied weight under one of its names, and without what nobody reads."""
    left_out = {"tail.weight", "unused.weight", "unused.bias"}
    return {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in left_out}


def write_shards(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    names = sorted(tensors)
    placed = {}
    for number in range(3):
        file = f"model-{number}.safetensors"
        part = {name: tensors[name] for name in names[number::3]}
        safetensors_torch.save_file(part, folder / file)
        placed |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    return folder


def test_what_a_weights_file_holds(quick: None, tmp_path: Path, program: torch.export.ExportedProgram) -> None:
    result = build(program, tmp_path)
    model = net()
    tensors = {**model.state_dict(), **dict(model.named_buffers())}
    held = stored_bytes(result.weights_path)
    assert set(held) == {
        *("embed.weight", "tail.weight", "linear.weight", "linear.bias"),
        *("scale", "mean", "skewed", "head.weight", "count"),
    }
    by_name = {item.name: item for item in (*result.program.weights, *result.program.states)}
    assert by_name["embed.weight"].aliases == ("tail.weight",)
    assert by_name["skewed"].dim_order == by_name["count"].dim_order == (1, 0)
    for name, raw in held.items():
        order = by_name[name].dim_order if name in by_name else None
        assert raw == bytes_of(tensors[name], order), name
    assert {s.name: s.init for s in result.program.states} == {"cache": "zeros", "count": "stored"}
    assert result.program.unused == ("unused.bias", "unused.weight")


@pytest.fixture
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*treespec", category=FutureWarning)
        yield


def test_a_model_on_meta_gives_the_same_file(
    quick: None, tmp_path: Path, program: torch.export.ExportedProgram, meta_program: torch.export.ExportedProgram
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "meta").mkdir()
    (tmp_path / "checkpoint").mkdir()
    model = net()
    real = build(program, tmp_path / "real")
    write_shards(tmp_path / "checkpoint", checkpoint_of(model))
    sources = [tmp_path / "checkpoint", {"scale": model.scale, "cache": model.cache}]
    with pytest.warns(UserWarning, match="state 'cache' has no first value") as seen:
        meta = build(meta_program, tmp_path / "meta", weights=[tmp_path / "checkpoint", {"scale": model.scale}])
    # It points at the line that calls compile, which is in `build`.
    assert [w.filename for w in seen if "first value" in str(w.message)] == [builds.__file__]
    assert meta.weights_path.read_bytes() == real.weights_path.read_bytes()
    assert meta.program == real.program
    # Whatever the default device is: models on meta are built under one.
    again = tmp_path / "again"
    again.mkdir()
    with torch.device("meta"), pytest.warns(UserWarning, match="state 'cache' has no first value"):
        build(meta_program, again, weights=[tmp_path / "checkpoint", {"scale": model.scale}])
    assert (again / "model.ptd").read_bytes() == real.weights_path.read_bytes()
    # A first value that is given is stored, even if it is all zeros.
    stored = build(meta_program, tmp_path / "meta", weights=sources, overwrite=True)
    assert {s.name: s.init for s in stored.program.states} == {"cache": "stored", "count": "stored"}
    assert stored_bytes(stored.weights_path)["cache"] == bytes(4 * 8 * 4)


def test_without_values_everything_that_lacks_them_is_named(
    no_compiler: None, tmp_path: Path, meta_program: torch.export.ExportedProgram
) -> None:
    with (
        unchanged(tmp_path),
        pytest.warns(UserWarning, match="state 'cache'"),
        pytest.raises(CheckpointError, match=r"^8 tensors of the program have no values .*pass weights=") as caught,
    ):
        build(meta_program, tmp_path)
    for name in ("embed.weight", "linear.weight", "linear.bias", "scale", "mean", "skewed", "head.weight", "count"):
        assert name in str(caught.value)
    assert "unused" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:state 'cache'")
def test_every_fault_of_a_checkpoint_is_listed_at_once(
    no_compiler: None, tmp_path: Path, meta_program: torch.export.ExportedProgram
) -> None:
    tensors = checkpoint_of(net())
    del tensors["mean"], tensors["embed.weight"], tensors["count"]
    tensors["linear.weight"] = torch.zeros(8, 9)
    tensors["head.weight"] = tensors["head.weight"].to(torch.bfloat16)
    tensors["skewed"] = tensors["skewed"].t().contiguous()
    path = tmp_path / "model.safetensors"
    safetensors_torch.save_file(tensors, path)
    with unchanged(tmp_path), pytest.raises(CheckpointError) as caught:
        build(meta_program, tmp_path, weights=path)
    first, *lines, hint = str(caught.value).splitlines()
    assert first == f"the checkpoint {path} does not fit the program, 7 mismatches:"
    assert sorted(line.strip() for line in lines) == sorted(
        [
            "embed.weight / tail.weight: missing",
            "mean: missing",
            "scale: missing",
            "count: missing",
            "linear.weight: has shape [8, 9], needs [8, 8]",
            "head.weight: has dtype bfloat16, needs float32",
            "skewed: has shape [8, 24], needs [24, 8]",
        ]
    )
    assert "weights=[checkpoint, {name: tensor}]" in hint


@pytest.mark.filterwarnings("ignore:state 'cache'")
def test_a_buffer_that_no_checkpoint_has(
    quick: None, tmp_path: Path, meta_program: torch.export.ExportedProgram
) -> None:
    tensors = checkpoint_of(net())
    with unchanged(tmp_path), pytest.raises(CheckpointError, match=r":\n  scale: missing\n.*non-persistent"):
        build(meta_program, tmp_path, weights=tensors)
    scale = torch.arange(8.0)
    result = build(meta_program, tmp_path, weights=[tensors, {"scale": scale}])
    assert stored_bytes(result.weights_path)["scale"] == bytes_of(scale)


@pytest.mark.filterwarnings("ignore:state 'cache'")
@pytest.mark.parametrize("name", ["embed.weight", "tail.weight"])
def test_a_tied_weight_under_either_name(
    quick: None, tmp_path: Path, meta_program: torch.export.ExportedProgram, name: str
) -> None:
    model = net()
    tensors = {**checkpoint_of(model), "scale": model.scale}
    value = tensors.pop("embed.weight")
    result = build(meta_program, tmp_path, weights={**tensors, name: value})
    held = stored_bytes(result.weights_path)
    assert held["embed.weight"] == held["tail.weight"] == bytes_of(value)
    with pytest.raises(CheckpointError, match=r"tail\.weight: differs from embed\.weight, to which"):
        build(
            meta_program, tmp_path, weights={**tensors, "embed.weight": value, "tail.weight": value + 1}, overwrite=True
        )


def test_a_checkpoint_comes_before_the_model_s_own_values(
    quick: None, tmp_path: Path, program: torch.export.ExportedProgram, no_warning: None
) -> None:
    other = net(seed=1)
    result = build(program, tmp_path, weights=checkpoint_of(other))
    held = stored_bytes(result.weights_path)
    for name, tensor in checkpoint_of(other).items():
        order = (1, 0) if name in ("skewed", "count") else None
        assert held[name] == bytes_of(tensor, order), name
        assert held[name] != bytes_of(program.state_dict[name], order) or name == "count"
    assert held["scale"] == bytes_of(net().scale)  # not in the checkpoint, and need not be
    given = torch.full((8,), 5.0)
    result = build(program, tmp_path, weights=[checkpoint_of(other), {"scale": given}], overwrite=True)
    assert stored_bytes(result.weights_path)["scale"] == bytes_of(given)


def test_nothing_is_cast(no_compiler: None, tmp_path: Path, program: torch.export.ExportedProgram) -> None:
    tensors = {name: tensor.double() for name, tensor in checkpoint_of(net()).items()}
    with pytest.raises(CheckpointError, match=r"linear\.bias: has dtype float64, needs float32"):
        build(program, tmp_path, weights=tensors)


def test_a_checkpoint_that_is_cut_while_it_is_read(
    quick: None, tmp_path: Path, program: torch.export.ExportedProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    path = tmp_path / "model.safetensors"
    safetensors_torch.save_file(checkpoint_of(net()), path)
    pack = compile_module.pack_program

    def cut(*args: Any) -> bytes:
        path.write_bytes(path.read_bytes()[:-1000])
        return pack(*args)

    monkeypatch.setattr(compile_module, "pack_program", cut)
    with unchanged(tmp_path / "out"), pytest.raises(CheckpointError, match="ends early; the file changed"):
        build(program, tmp_path / "out", weights=path)


def test_values_are_those_of_the_time_of_writing_and_the_program_stays(
    quick: None, tmp_path: Path, program: torch.export.ExportedProgram
) -> None:
    before = str(program.graph), {name: bytes_of(t) for name, t in program.state_dict.items()}
    build(program, tmp_path)
    assert (str(program.graph), {name: bytes_of(t) for name, t in program.state_dict.items()}) == before
