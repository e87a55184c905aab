"""ExecuTorch reads our files, and we read ExecuTorch's: its Python reader, its C++ runtime, its own exports."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import WeightsFileError
from penstock.weight import ITEM_BYTES, State, Weight
from penstock.weights import WeightsIndex, layout_identity, read_index, write_ptd
from penstock.weights.format import SCALAR_TYPES
from penstock.weights.packing import pack
from tests.weights.packed_cases import PACKED, packable
from tests.weights.ptd_cases import EVERY_KIND, STATES, TIED, payload, write

torch = pytest.importorskip("torch")
pytest.importorskip("executorch.extension.flat_tensor.serialize.serialize")

from executorch.exir import ExecutorchBackendConfig, to_edge  # noqa: E402
from executorch.exir._serialize._cord import Cord  # noqa: E402
from executorch.exir._serialize.data_serializer import DataEntry, DataPayload  # noqa: E402
from executorch.exir.tensor import scalar_type_table  # noqa: E402
from executorch.exir.tensor_layout import TensorLayout  # noqa: E402
from executorch.extension.flat_tensor.serialize.serialize import FlatTensorConfig, FlatTensorSerializer  # noqa: E402
from executorch.runtime import Runtime  # noqa: E402

WRITTEN: tuple[Weight | State, ...] = (*EVERY_KIND, TIED, STATES[0])


def names_of(source: Weight | State) -> tuple[str, ...]:
    return source.names if isinstance(source, Weight) else (source.name,)


def tensor_from(raw: bytes, dtype: str, shape: tuple[int, ...], dim_order: tuple[int, ...]) -> Any:
    """The tensor that a dim order and bytes describe."""
    flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    stored = flat.view(getattr(torch, dtype)).reshape([shape[dim] for dim in dim_order])
    return stored.permute([dim_order.index(dim) for dim in range(len(shape))])


@pytest.fixture(scope="module")
def our_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ours") / "model.ptd"
    write(path, [*EVERY_KIND, TIED], STATES)
    return path


def schema_numbers() -> dict[str, int]:
    """The enum ScalarType as the schema in the package spells it."""
    spec = importlib.util.find_spec("executorch.extension.flat_tensor.serialize")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    text = (Path(next(iter(spec.submodule_search_locations))) / "scalar_type.fbs").read_text()
    return {name: int(number) for name, number in re.findall(r"^  (\w+) = (\d+),$", text, re.MULTILINE)}


def test_our_dtype_numbers_are_its_schema_s() -> None:
    numbers = schema_numbers()
    table = {str(dtype).removeprefix("torch."): scalar_type.name for dtype, scalar_type in scalar_type_table.items()}
    # In the schema and in the C++ runtime, but not in the Python package's table of dtypes.
    table |= {"uint64": "UINT64", "float8_e5m2fnuz": "FLOAT8E5M2FNUZ", "float8_e4m3fnuz": "FLOAT8E4M3FNUZ"}
    known = {dtype: numbers[table[dtype]] for dtype in ITEM_BYTES if table.get(dtype) in numbers}
    assert known == SCALAR_TYPES
    # When the schema learns these, they can have a tensor layout too.
    assert set(ITEM_BYTES) - set(SCALAR_TYPES) == {"complex32", "complex64", "complex128", "float8_e8m0fnu"}


def test_its_python_reader_reads_ours(our_path: Path) -> None:
    theirs = FlatTensorSerializer().deserialize(Cord(our_path.read_bytes()))
    assert list(theirs.named_data) == [name for source in WRITTEN for name in names_of(source)] + ["penstock.json"]
    for source in WRITTEN:
        for name in names_of(source):
            entry = theirs.named_data[name]
            raw = bytes(theirs.buffers[entry.buffer_index])
            assert raw == payload(source)
            layout = entry.tensor_layout
            assert (layout is None) == (source.dtype not in SCALAR_TYPES)
            if layout is not None:
                assert layout.scalar_type == SCALAR_TYPES[source.dtype]
                assert tuple(layout.sizes) == source.shape
                assert tuple(layout.dim_order) == source.dim_order


def test_what_it_takes_for_a_tensor_is_the_tensor(tmp_path: Path) -> None:
    conv = torch.randn(4, 3, 5, 6).to(memory_format=torch.channels_last)
    order = (0, 2, 3, 1)
    weight = Weight("conv", "float32", tuple(conv.shape), order)
    stored = conv.permute(order).contiguous().numpy().tobytes()
    write_ptd(tmp_path / "model.ptd", [weight], lambda _: [stored], identity="i")
    theirs = FlatTensorSerializer().deserialize(Cord((tmp_path / "model.ptd").read_bytes()))
    entry = theirs.named_data["conv"]
    expected = TensorLayout.from_tensor(conv)
    assert entry.tensor_layout == expected
    raw = bytes(theirs.buffers[entry.buffer_index])
    assert torch.equal(tensor_from(raw, "float32", weight.shape, tuple(expected.dim_order)), conv)


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    spec = importlib.util.find_spec("executorch")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    root = Path(next(iter(spec.submodule_search_locations)))
    if not (root / "lib" / "libexecutorch.so").exists():
        pytest.skip("this executorch has no libexecutorch.so")
    program = tmp_path_factory.mktemp("probe") / "data_map_probe"
    portable = root / "include/executorch/runtime/core/portable_type/c10"
    includes = ["-DC10_USING_CUSTOM_GENERATED_MACROS", f"-I{root / 'include'}", f"-I{portable}"]
    libraries = [f"-L{root / 'lib'}", "-lexecutorch", f"-Wl,-rpath,{root / 'lib'}"]
    source = Path(__file__).with_name("data_map_probe.cpp")
    subprocess.run([compiler, "-std=c++17", *includes, source, "-o", program, *libraries], check=True)
    return program


@pytest.mark.parametrize("loader", ["file", "mmap"])
def test_its_cpp_runtime_reads_ours(our_path: Path, probe: Path, loader: str) -> None:
    bare = [source.name for source in EVERY_KIND if source.dtype not in SCALAR_TYPES] + ["penstock.json"]
    child = subprocess.run([probe, loader, our_path, *bare], capture_output=True, text=True, check=True)
    lines = [line.split("\t") for line in child.stdout.splitlines()]
    assert lines.pop()[0] == "penstock.json"
    expected = [
        [
            name,
            str(SCALAR_TYPES.get(source.dtype, "-")),
            ",".join(map(str, source.shape)) if source.dtype in SCALAR_TYPES else "",
            ",".join(map(str, source.dim_order)) if source.dtype in SCALAR_TYPES else "",
            payload(source).hex(),
        ]
        for source in WRITTEN
        for name in names_of(source)
    ]
    assert lines == expected


def test_its_cpp_runtime_refuses_a_truncated_file_as_we_do(our_path: Path, probe: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.ptd"
    path.write_bytes(our_path.read_bytes()[:-1])
    assert subprocess.run([probe, "file", path], capture_output=True, check=False).returncode == 3
    with pytest.raises(WeightsFileError, match="truncated"):
        read_index(path)


@pytest.fixture(scope="module")
def packed_index(tmp_path_factory: pytest.TempPathFactory) -> WeightsIndex:
    folder = tmp_path_factory.mktemp("packed")
    return pack(packable(folder / "model.ptd"), folder / "packed.ptd")


def test_its_python_reader_takes_packed_entries_for_bytes(packed_index: WeightsIndex) -> None:
    content = packed_index.path.read_bytes()
    theirs = FlatTensorSerializer().deserialize(Cord(content))
    for entry in packed_index:
        found = theirs.named_data[entry.name]
        assert (found.tensor_layout is None) == (entry.packing is not None)
        stored = content[entry.offset_bytes : entry.offset_bytes + entry.length_bytes]
        assert bytes(theirs.buffers[found.buffer_index]) == stored


def test_its_cpp_runtime_gives_no_tensor_of_a_packed_entry(packed_index: WeightsIndex, probe: Path) -> None:
    """Asked for bytes it gives them; asked for a tensor's layout it ends, before a number was taken for a weight."""
    names = [name for weight in PACKED for name in weight.names]
    asked = [probe, "file", packed_index.path, "penstock.json"]
    child = subprocess.run([*asked, *names], capture_output=True, text=True, check=True)
    lines = {line.split("\t")[0]: line.split("\t") for line in child.stdout.splitlines()}
    content = packed_index.path.read_bytes()
    for name in names:
        entry = packed_index[name]
        stored = content[entry.offset_bytes : entry.offset_bytes + entry.length_bytes]
        assert lines[name][1:] == ["-", "", "", stored.hex()]
    refused = subprocess.run([*asked, *names[1:]], capture_output=True, text=True, check=False)
    assert refused.returncode != 0 and stored.hex() not in refused.stdout


def serialized(tensors: dict[str, Any], alignment: int) -> bytes:
    """What ExecuTorch's own writer makes of tensors, a blob, and two names for one buffer."""
    buffers = [raw_bytes(tensor) for tensor in tensors.values()]
    entries = {
        name: DataEntry(buffer_index=number, alignment=1, tensor_layout=TensorLayout.from_tensor(tensor))
        for number, (name, tensor) in enumerate(tensors.items())
    }
    entries["tied"] = entries["float32"]
    entries["blob"] = DataEntry(buffer_index=len(buffers), alignment=1, tensor_layout=None)
    payload = DataPayload(buffers=[*buffers, b"packed by a backend"], named_data=entries)
    return bytes(FlatTensorSerializer(FlatTensorConfig(segment_alignment=alignment)).serialize(payload))


def raw_bytes(tensor: Any) -> bytes:
    order = TensorLayout.from_tensor(tensor).dim_order
    stored: bytes = tensor.permute(order).contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return stored


@pytest.mark.parametrize("alignment", [1, 128, 4096])
def test_we_read_what_its_writer_wrote(tmp_path: Path, alignment: int) -> None:
    tensors: dict[str, Any] = {}
    # Complex numbers are not in its schema, and its writer puts them down all the same.
    for dtype in (dtype for dtype in ITEM_BYTES if getattr(torch, dtype) in scalar_type_table):
        tensors[dtype] = torch.randint(0, 2, (2, 3, 4, 5), dtype=torch.uint8).to(getattr(torch, dtype))
        tensors[f"{dtype}.channels_last"] = tensors[dtype].clone().to(memory_format=torch.channels_last)
    tensors["scalar"] = torch.tensor([7.5]).reshape(())
    tensors["empty"] = torch.empty(3, 0)
    path = tmp_path / "theirs.ptd"
    path.write_bytes(serialized(tensors, alignment))
    index = read_index(path)

    assert index.identity is None
    assert [entry.name for entry in index.entries] == [*tensors, "tied", "blob"]
    content = path.read_bytes()
    for name, tensor in tensors.items():
        entry = index[name]
        raw = content[entry.offset_bytes : entry.offset_bytes + entry.length_bytes]
        assert (entry.kind, entry.checksum, entry.alias_of) == ("weight", None, None)
        assert getattr(torch, entry.dtype) == tensor.dtype
        assert entry.shape == tuple(tensor.shape)
        assert raw == raw_bytes(tensor)
        mine = tensor_from(raw, entry.dtype, entry.shape, entry.dim_order)
        assert torch.equal(mine.to(torch.complex128), tensor.to(torch.complex128))
    assert index["tied"].alias_of == "float32"
    blob = index["blob"]
    assert (blob.kind, blob.dtype, blob.shape) == ("blob", "uint8", (19,))
    assert content[blob.offset_bytes :] == b"packed by a backend"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, Path]:
    """A model, its program without constants, and the .ptd that ExecuTorch wrote for them."""
    torch.manual_seed(0)

    class Small(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)
            self.register_buffer("shift", torch.randn(8))

        def forward(self, x: Any) -> Any:
            return self.linear(x) + self.shift

    model = Small().eval()
    folder = tmp_path_factory.mktemp("exported")
    program = to_edge(torch.export.export(model, (torch.randn(2, 8),))).to_executorch(
        ExecutorchBackendConfig(external_constants=True)
    )
    (folder / "model.pte").write_bytes(program.buffer)
    program.write_tensor_data_to_file(str(folder))
    (data,) = folder.glob("*.ptd")
    return model, folder / "model.pte", data


def test_we_read_its_external_constants(exported: tuple[Any, Path, Path]) -> None:
    model, _, data = exported
    index = read_index(data)
    content = data.read_bytes()
    assert sorted(entry.name for entry in index.entries) == ["linear.bias", "linear.weight", "shift"]
    for name, tensor in model.state_dict().items():
        entry = index[name]
        raw = content[entry.offset_bytes : entry.offset_bytes + entry.length_bytes]
        assert torch.equal(tensor_from(raw, entry.dtype, entry.shape, entry.dim_order), tensor)


def test_its_runtime_runs_a_program_on_our_file(exported: tuple[Any, Path, Path], tmp_path: Path) -> None:
    model, program, data = exported
    doubled = {name: tensor * 2 for name, tensor in model.state_dict().items()}
    weights = [Weight(e.name, e.dtype, e.shape, e.dim_order) for e in read_index(data).entries]

    def chunks(source: Weight | State) -> Iterator[bytes]:
        yield doubled[source.name].permute(source.dim_order).contiguous().numpy().tobytes()

    path = tmp_path / "doubled.ptd"
    index: WeightsIndex = write_ptd(path, weights, chunks, identity=layout_identity(weights, ()))
    assert index.identity is not None
    x = torch.randn(2, 8)
    method = Runtime.get().load_program(program, data_path=path).load_method("forward")
    model.load_state_dict(doubled)
    with torch.no_grad():
        # Its kernels and torch's add in another order on some CPUs: the last bit may differ, other weights would not.
        torch.testing.assert_close(method.execute([x])[0], model(x))
