"""DFloat11 as a peer: what is said where it is missing, and that its own loader and hooks read what we encode for it.

On the CPU, with a stand-in for its kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from bench.dfloat11_decoding import encoded_layer, measure
from bench.dfloat11_encoding import encoded_tensors
from bench.suite.children import Bench, Configuration
from bench.suite.model import inputs, load, small, write_weights
from bench.suite.progress import Progress
from bench.suite.result import MISSING
from bench.suite.systems.dfloat11_model import DFLOAT11, write_encoded
from bench.suite.systems.system import Setting

from tests.bench import cupy_stand_in


@pytest.fixture
def dfloat11(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.setitem(sys.modules, "cupy", cupy_stand_in.module())
    reason = DFLOAT11.missing("cuda:0")
    if reason:
        pytest.skip(f"DFloat11 is {reason}")
    import dfloat11

    yield dfloat11
    # It is tied to the stand-in.
    for name in [name for name in sys.modules if name.split(".")[0] == "dfloat11"]:
        del sys.modules[name]


# ---- where it is missing


def test_a_missing_dfloat11_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "dfloat11", None)
    monkeypatch.setitem(sys.modules, "cupy", cupy_stand_in.module())
    bench = Bench(tmp_path, "cuda:0", small(1), round_s=0.01, timeout_s=86_400)
    progress = Progress(tmp_path / "progress.json", bench, {"weight_bytes": 1, "environment": {}}, resume=False)
    progress.run(DFLOAT11, [Configuration(1)])
    (row,) = progress.rows
    assert row.status == MISSING and row.reason.startswith("not importable: dfloat11") and "cupy" not in row.reason
    assert capsys.readouterr().err == f"{DFLOAT11.title}, tokens 1: missing: {row.reason}\n"


def test_it_needs_a_gpu(dfloat11: ModuleType) -> None:
    assert DFLOAT11.missing("cpu") == "needs CUDA, and the device is cpu: its kernel decodes on a GPU"


def test_decoding_says_that_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(work: object) -> float:
        raise AssertionError("there is nothing to time")

    monkeypatch.setitem(sys.modules, "dahuffman", None)
    found = measure(seconds)
    assert "dahuffman" in found["missing"] and found["rows"] == []


# ---- what is encoded for it


@pytest.mark.parametrize("count", [7, 100, 255, 3_001, 12_500, 40_000])
@pytest.mark.parametrize("spread", [0, 50])
def test_the_encoding_is_dfloat11s(
    dfloat11: ModuleType, monkeypatch: pytest.MonkeyPatch, count: int, spread: int
) -> None:
    """With a spread of exponents there are codes of many bytes; short pieces have codes across their borders."""
    from dfloat11 import dfloat11_utils

    monkeypatch.setattr("bench.dfloat11_encoding.PIECE_VALUES", 1_000)
    generator = torch.Generator().manual_seed(count)
    powers = torch.randint(-spread, spread + 1, (count,), generator=generator)
    scale = torch.exp2(powers.float() * (torch.rand(count, generator=generator) < 0.01))
    weights = list((torch.randn(count, generator=generator) * 0.02 * scale).to(torch.bfloat16).split(2_000))
    _, counts = dfloat11_utils.get_codec(torch.cat(weights))
    codec, _, _ = dfloat11_utils.get_32bit_codec(counts)
    theirs = dfloat11_utils.encode_weights(weights, codec, 8, 512)
    ours = encoded_tensors(weights)
    names = ("encoded_exponent", "sign_mantissa", "output_positions", "gaps", "split_positions")
    assert ours.keys() == {"luts", *names}
    for name, tensor in zip(names, theirs, strict=True):
        stored = tensor.view(torch.uint8) if name == "output_positions" else tensor
        assert ours[name].dtype == stored.dtype and torch.equal(ours[name], stored), name


def test_a_layer_is_decoded_by_its_hook(dfloat11: ModuleType) -> None:
    weight = (torch.randn(96, 300, generator=torch.Generator().manual_seed(0)) * 0.02).to(torch.bfloat16)
    weight[0, :4] = torch.tensor([0.0, -0.0, 1e30, -1e-38])
    layer, encoded_bytes = encoded_layer(weight)
    assert torch.equal(layer(torch.empty(0)).view(torch.int16), weight.view(torch.int16))
    assert weight.numel() < encoded_bytes < 0.75 * weight.nbytes


def test_the_model_runs_as_the_eager_one_does(dfloat11: ModuleType, tmp_path: Path) -> None:
    shape = small(2)
    setting = Setting(tmp_path, "cpu", shape, tokens=3, weight_bytes=0, round_s=0.01)
    write_weights(shape, setting.weights_path)
    eager = load(shape, setting.weights_path, lambda tensor: tensor)
    write_encoded(setting)
    x = inputs(shape, setting.tokens, "cpu")
    with torch.no_grad(), DFLOAT11.open(setting) as opened:
        assert torch.equal(opened.forward(x), eager(x))
        # One buffer holds a block's weights at a time: the first block's are decoded again.
        assert torch.equal(opened.forward(x), eager(x))
        facts = opened.facts()
    raw_bytes = sum(parameter.nbytes for parameter in eager.parameters())
    assert facts.traffic.bytes_streamed == 0 and facts.weights_peak_bytes is not None
    # 0.7 of the weights, and one of the two blocks decoded.
    assert 1.1 * raw_bytes < facts.weights_peak_bytes < 1.25 * raw_bytes
