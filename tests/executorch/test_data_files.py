"""Weights in other files: a .pt2's, ExecuTorch's own, several at once. And how they get into one without passing
through memory."""

from __future__ import annotations

import json
import shutil
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.exir import ExecutorchBackendConfig, to_edge
from torch import nn

import penstock
from penstock.errors import OutputExistsError, WeightsFileError
from penstock.executorch import merge_weights
from penstock.executorch.backend import PenstockBackend
from penstock.executorch.data_files import weights_file
from penstock.executorch.segments import Segment
from penstock.weight import Weight
from penstock.weights import read_index, verify_checksums, write_ptd
from tests.executorch.programs import STOCK_PYTHON, WIDTH, child, seeded
from tests.executorch.test_module import CALLS
from tests.runtime.modules import EVERYTHING, Chain, play, same

Paths = Callable[[str], Path]
Opened = Callable[..., Any]


def part(source: Path, path: Path, names: set[str]) -> Path:
    """Some of a file's weights, as a file."""
    raw, index = source.read_bytes(), read_index(source)
    kept = [
        Weight(e.name, e.dtype, e.shape, e.dim_order, tuple(o.name for o in index if o.alias_of == e.name))
        for e in index.unique_entries
        if e.name in names
    ]
    places = {w.name: slice(index[w.name].offset_bytes, index[w.name].offset_bytes + w.nbytes) for w in kept}
    write_ptd(path, kept, lambda w: [raw[places[w.name]]], identity="part")
    return path


def test_weights_files_are_interchangeable(lowered: Paths, packaged: Path, opened: Opened, tmp_path: Path) -> None:
    program, script = lowered("decoder"), CALLS["decoder"]
    expected = play(opened(program, EVERYTHING).run_method, script)
    ours = opened(program, "300KiB", weights=[packaged.with_suffix(".ptd")])
    assert same(play(ours.run_method, script), expected)
    with penstock.Module(packaged, "300KiB", weights=program.with_suffix(".ptd")) as theirs:
        assert same(play(theirs.run_method, script), expected)
    # Elsewhere, under a name that needs care, and beside a second file that holds nothing for this program.
    moved = tmp_path / "a b\n.ptd"
    shutil.copy(program.with_suffix(".ptd"), moved)
    other = tmp_path / "other.ptd"
    write_ptd(other, [Weight("unknown", "uint8", (1,), (0,))], lambda _: [b"x"], identity="i")
    assert same(play(opened(program, EVERYTHING, weights=[other, moved]).run_method, script), expected)


class Plain(nn.Module):
    """The weights of the chain under their names, read by ExecuTorch's own kernels."""

    def __init__(self) -> None:
        super().__init__()
        chain = seeded(lambda: Chain(WIDTH))
        for name, child_module in chain.named_children():
            self.add_module(name, child_module)
        for name in ("scale", "shift", "gain"):
            self.register_parameter(name, getattr(chain, name))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [weight * x.sum() for weight in self.parameters()]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A program without a delegate, and what ExecuTorch writes for its constants: packed tight, without checksums."""
    folder = tmp_path_factory.mktemp("plain")
    ep = torch.export.export(Plain().eval().requires_grad_(False), (torch.ones(2),))
    program = to_edge(ep).to_executorch(ExecutorchBackendConfig(external_constants=True))
    program.save(str(folder / "plain.pte"))
    program.write_tensor_data_to_file(str(folder))
    (path,) = folder.glob("*.ptd")
    return folder / "plain.pte", path


def test_constants_that_executorch_wrote_are_weights_of_ours(
    lowered: Paths, opened: Opened, plain: tuple[Path, Path]
) -> None:
    index = read_index(plain[1])
    assert (index.identity, {entry.checksum for entry in index}) == (None, {None})
    assert any(entry.offset_bytes % 4096 for entry in index)
    # Of the two names of the tied weight it kept one, and not the one that the program goes by.
    assert "again.weight" in index and "first.weight" not in index
    expected = play(opened(lowered("chain"), EVERYTHING).run_method, CALLS["chain"])
    found = opened(lowered("chain"), "200KiB", weights=plain[1])
    assert same(play(found.run_method, CALLS["chain"]), expected)
    assert found.stats().bytes_streamed > 0
    with pytest.raises(WeightsFileError, match="has no checksum"):
        opened(lowered("chain"), "200KiB", weights=plain[1], verify=True)


@STOCK_PYTHON
def test_weights_of_ours_are_constants_for_executorch(
    lowered: Paths, packaged: Path, plain: tuple[Path, Path], tmp_path: Path
) -> None:
    script = """
import torch
from executorch.runtime import Runtime
program, first, second, outputs = arguments
answer = []
for data in (first, second):
    found = Runtime.get().load_program(program, data_path=data).load_method("forward").execute([torch.ones(2) / 2])
    torch.save(found, outputs + str(len(answer)))
    answer.append(len(found))
"""
    # One that ExecuTorch's writer wrote for us, one of our own writer.
    own = part(lowered("chain").with_suffix(".ptd"), tmp_path / "own.ptd", set(NAMES))
    answer, _ = child(script, plain[0], lowered("chain").with_suffix(".ptd"), own, tmp_path / "out")
    expected = list(Plain().parameters())
    assert answer == [len(expected)] * 2
    for number in range(2):
        for found, weight in zip(torch.load(tmp_path / f"out{number}"), expected, strict=True):
            assert torch.equal(found, weight)


NAMES = [name for name, _ in Plain().named_parameters()]


def test_weights_in_several_files(lowered: Paths, opened: Opened, tmp_path: Path) -> None:
    program, source = lowered("chain"), lowered("chain").with_suffix(".ptd")
    expected = play(opened(program, EVERYTHING).run_method, CALLS["chain"])
    some = {name for name in NAMES if "middle" in name}
    files = [part(source, tmp_path / "a.ptd", some), part(source, tmp_path / "b.ptd", set(NAMES) - some)]
    with pytest.raises(WeightsFileError, match=r"a.ptd and .*b.ptd were written by Penstock.*merge_weights"):
        opened(program, EVERYTHING, weights=files)
    with pytest.raises(WeightsFileError, match=r"lie in several files \(.*a.ptd has 5, .*b.ptd has 7\).*merge_weights"):
        weights_file([read_index(file) for file in files], [[name] for name in NAMES])
    merged = merge_weights(files, tmp_path / "merged.ptd")
    verify_checksums(merged)
    assert same(play(opened(program, "200KiB", weights=merged).run_method, CALLS["chain"]), expected)
    with pytest.raises(OutputExistsError, match="overwrite=True"):
        merge_weights(files, merged)
    with pytest.raises(WeightsFileError, match=r"is in .*a.ptd and in .*a.ptd"):
        merge_weights([files[0], files[0]], merged, overwrite=True)


def test_lowering_copies_no_weight_in_memory(lowered: Paths, tmp_path: Path) -> None:
    """Obstacle 7: deep copies for each partition, and weights as bytes in the store, took four times the model."""
    program = object()
    assert PenstockBackend.copy_exported_program_for_preprocess(program, []) is program  # type: ignore[arg-type]
    stored = dict(json.loads((lowered("decoder").parent / "data.json").read_text()))
    index = read_index(lowered("decoder").with_suffix(".ptd"))
    assert {stored[entry.name] for entry in index} == {"Segment"}
    # And a segment goes from file to file piece by piece.
    nbytes = 64 << 20
    with (tmp_path / "source").open("wb") as file:
        file.truncate(nbytes)
    folder = tempfile.TemporaryDirectory(dir=tmp_path)
    segment = Segment(tmp_path / "source", 4096, nbytes - 4096, folder)
    tracemalloc.start()
    try:
        segment.sha256()
        with (tmp_path / "target").open("wb") as file:
            segment.write_to_file(file)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (tmp_path / "target").stat().st_size == nbytes - 4096
    assert peak_bytes < nbytes // 2
