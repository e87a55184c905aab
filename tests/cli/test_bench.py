"""The suite gets its arguments as they are, and its exit code and result come back."""

from __future__ import annotations

from pathlib import Path

import pytest

import penstock.cli.bench as bench_file
from tests.cli.conftest import Cli

SUITE = """
import json, pathlib, sys
print("a table for people")
if "--die" in sys.argv:
    sys.exit(int(sys.argv[sys.argv.index("--die") + 1]))
out = pathlib.Path(next(a for a in (*sys.argv, *sys.argv[-1].split("=")) if pathlib.Path(a).is_dir()))
assert out.is_absolute() and pathlib.Path("bench/suite/__main__.py").exists()
(out / "result.json").write_text(json.dumps({"arguments": sys.argv[1:]}))
"""


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tree/bench/suite"
    folder.mkdir(parents=True)
    for name in ("bench/__init__.py", "bench/suite/__init__.py"):
        (tmp_path / "tree" / name).touch()
    (folder / "__main__.py").write_text(SUITE)
    monkeypatch.setattr(bench_file, "source_root", lambda: tmp_path / "tree")
    return tmp_path


def test_arguments_and_result(cli: Cli, suite: Path) -> None:
    told = cli("bench", "--out", suite, "--layers", "3", "--systems", "a,b", "--json")
    assert told.code == 0
    assert told.document == {"arguments": ["--out", str(suite), "--layers", "3", "--systems", "a,b"]}
    assert "a table for people" in told.stderr
    assert "a table for people" in cli("bench", "--out", suite).stdout


@pytest.mark.parametrize("written", [["--out", "results"], ["--out=results"]], ids=str)
def test_the_folder_is_meant_from_here(
    cli: Cli, suite: Path, monkeypatch: pytest.MonkeyPatch, written: list[str]
) -> None:
    (suite / "results").mkdir()
    monkeypatch.chdir(suite)
    assert cli("bench", *written, "--json").document["arguments"][-1].endswith(f"{suite}/results")
    assert (suite / "results/result.json").exists()


@pytest.mark.parametrize(("code", "ours"), [(2, 2), (1, 1), (7, 1)])
def test_codes(cli: Cli, suite: Path, code: int, ours: int) -> None:
    assert cli("bench", "--die", code).code == ours


def test_json_needs_a_folder(cli: Cli, suite: Path) -> None:
    assert cli("bench", "--small", "--json").code == 2


def test_an_installation_without_the_tree(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_file, "source_root", lambda: None)
    told = cli("bench", "--out", "x", "--json")
    assert told.code == 1 and "source tree" in told.document["error"]["message"]


def test_here_the_tree_is_found() -> None:
    root = bench_file.source_root()
    assert root == Path(__file__).parents[2]
