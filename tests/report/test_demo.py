"""The demo, with a decoder of a few hundred kilobytes: what it prints, what it writes, and when it exports again."""

from __future__ import annotations

import dataclasses
import re
import shutil
import sys
from pathlib import Path

import examples.demo as demo
import pytest

from tests.report.pages import Parsed
from tests.runtime.modules import DECODER


@pytest.fixture
def exported(decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as a first `make demo` leaves it."""
    monkeypatch.setattr(demo, "CONFIG", DECODER)
    for suffix in (".pt2", ".ptd"):
        shutil.copy(decoder.with_suffix(suffix), tmp_path / f"model{suffix}")
    path = tmp_path / "model.pt2"
    demo.remember(path, demo.export_key(DECODER, "cpu"))
    return path


def test_it_runs_in_every_budget_and_reports(
    exported: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "make", lambda *_: pytest.fail("it exported again"))
    monkeypatch.setattr(sys, "argv", ["demo", "--out", str(exported.parent), "--device", "cpu"])
    demo.main()
    said = capsys.readouterr().out
    rows = re.findall(r"^ +([\d.]+) MiB +(floor|\d+%) +([\d.]+) MiB +([\d.]+) MiB +[\d.]+ ms  (yes|NO)$", said, re.M)
    assert [(name, identical) for _, name, _, _, identical in rows] == [
        ("floor", "yes"),
        ("25%", "yes"),
        ("50%", "yes"),
        ("100%", "yes"),
    ]
    assert all(float(peak) <= float(budget) for budget, _, peak, _, _ in rows)
    assert float(rows[0][3]) > float(rows[3][3]) == 0
    assert "it is used again" in said and "tokens [" in said
    assert re.search(r"one byte below the floor: .* it needs at least (\d+) bytes", said)
    page = Parsed((exported.parent / "report.html").read_text(encoding="utf-8"))
    data = page.embedded("report-data")
    assert len(data["measured"]) == 4 and data["summary"]["identical"] is True
    assert data["summary"]["method"] == "decode"
    assert data["summary"]["weight_bytes"] == sum(weight["nbytes"] for weight in data["weights"])


def test_an_export_is_used_again_only_if_nothing_changed(exported: Path) -> None:
    key = demo.export_key(DECODER, "cpu")
    assert demo.is_current(exported, key)
    other = dataclasses.replace(DECODER, layers=DECODER.layers + 1)
    assert not demo.is_current(exported, demo.export_key(other, "cpu"))
    content = exported.read_bytes()
    exported.write_bytes(content + b"\0")
    assert not demo.is_current(exported, key)
    exported.write_bytes(content)
    assert demo.is_current(exported, key)
    exported.with_suffix(".ptd").unlink()
    assert not demo.is_current(exported, key)


def test_the_key_knows_sources_versions_and_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    key = demo.export_key(DECODER, "cpu")
    assert key == demo.export_key(DECODER, "cpu")
    with monkeypatch.context() as patch:
        patch.setattr(demo.torch, "__version__", "0.0.0")
        assert demo.export_key(DECODER, "cpu") != key
    with monkeypatch.context() as patch:
        patch.setattr(demo.platform, "machine", lambda: "another")
        assert demo.export_key(DECODER, "cpu") != key
    # A package with one source changed by a byte.
    package = tmp_path / "penstock"
    shutil.copytree(Path(demo.penstock.__file__).parent, package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    monkeypatch.setattr(demo.penstock, "__file__", str(package / "__init__.py"))
    before = demo.export_key(DECODER, "cpu")
    with (package / "export" / "offload.py").open("a") as source:
        source.write("#")
    assert demo.export_key(DECODER, "cpu") != before


def test_a_program_that_computes_something_else_is_not_shown_off(
    exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    methods = demo.methods
    monkeypatch.setattr(demo, "methods", lambda config: methods(config, seed=1))
    with pytest.raises(SystemExit, match="something else than the model"):
        demo.prove(exported, "cpu")
