"""The kernels that the core carries are those of their sources, as far as can be told without nvcc."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from bench import kernel_ptx


@pytest.mark.parametrize("source", kernel_ptx.SOURCES, ids=lambda source: source.name)
def test_the_ptx_names_the_sources_it_was_made_from(source: Path) -> None:
    """Else: python -m bench.kernel_ptx, and both files belong to one change."""
    assert kernel_ptx.target(source).read_text().startswith(kernel_ptx.head_of(source))


def test_whatever_is_compiled_is_in_the_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for comments, and how lines are indented."""
    folder = tmp_path / "csrc"
    shutil.copytree(kernel_ptx.CSRC, folder)
    monkeypatch.setattr(kernel_ptx, "CSRC", folder)
    source, header = folder / "experts/experts.cu", folder / "experts/expert_table.h"
    before = kernel_ptx.fingerprint(source)
    header.write_text(f"  // Other words.\n{header.read_text()}")
    assert kernel_ptx.fingerprint(source) == before
    for changed, old, new in (
        (header, "kHalvingCalls = 64", "kHalvingCalls = 65"),
        (source, "key < best", "key > best"),
    ):
        text = changed.read_text()
        assert old in text
        changed.write_text(text.replace(old, new, 1))
        assert kernel_ptx.fingerprint(source) != before
        changed.write_text(text)
    monkeypatch.setattr(kernel_ptx, "ARCHITECTURE", "compute_80")
    assert kernel_ptx.fingerprint(source) != before
