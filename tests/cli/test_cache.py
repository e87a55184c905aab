"""penstock cache: what it lists is there, what it clears is gone, and nobody is surprised."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.units import short_bytes
from penstock.store.store import Store
from tests.cli.conftest import Cli


def fill(store: Store, kind: str, key: dict[str, Any], nbytes: int) -> Path:
    return store.entry(kind, key, lambda folder: (folder / "file").write_bytes(bytes(nbytes)) and None, print)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """With two entries, which nobody uses. A command that is not told otherwise finds it."""
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))
    made = Store()
    program = fill(made, "programs", {"model": "Qwen3-0.6B", "torch": "2.13.0"}, 5000)
    weights = fill(made, "weights", {"model": "Qwen3-0.6B"}, 3 << 20)
    os.utime(program / "used", (86400 * 365, 86400 * 365))
    os.utime(weights / "used", (86400 * 730, 86400 * 730))
    made.close()
    yield made
    made.close()


def answer(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def kinds(store: Store) -> list[str]:
    return [entry.kind for entry in store.list()]


def test_list(cli: Cli, store: Store) -> None:
    told = cli("cache", "list", "--json")
    program, weights = store.list()
    assert told.code == 0 and told.document["folder"] == str(store.folder)
    assert [entry["key"] for entry in told.document["entries"]] == [program.key, weights.key]
    assert [entry["nbytes"] for entry in told.document["entries"]] == [program.nbytes, weights.nbytes]
    assert [entry["used_s"] for entry in told.document["entries"]] == [86400 * 365, 86400 * 730]
    assert told.document["nbytes"] == program.nbytes + weights.nbytes
    shown = cli("cache", "list")
    rows = [line.split() for line in shown.stdout.splitlines()]
    assert shown.code == 0 and ["kind", "model", "bytes", "last", "used"] in rows
    assert any(row[:2] == ["programs", "Qwen3-0.6B"] and row[-2].startswith("197") for row in rows)
    assert any(row[:4] == ["weights", "Qwen3-0.6B", *short_bytes(weights.nbytes).split()] for row in rows)


def test_another_folder(cli: Cli, store: Store, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    assert cli("cache", "list", "--cache-dir", tmp_path / "other", "--json").document["entries"] == []
    assert cli("cache", "list", "--cache-dir", tmp_path / "other").stdout == f"nothing in {tmp_path / 'other'}\n"
    assert len(cli("cache", "list", "--cache-dir", store.folder, "--json").document["entries"]) == 2
    wrong = cli("cache", "list", "--cache-dir", tmp_path / "none")
    assert wrong.code == 2 and "none is not a folder" in wrong.stderr


def test_without_a_cache(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "none"))
    assert cli("cache", "list").code == 0
    assert cli("cache", "clear", "--json").document["freed_bytes"] == 0, "and nobody is asked"
    assert not (tmp_path / "none").exists()


def test_clear(cli: Cli, store: Store) -> None:
    nbytes = sum(entry.nbytes for entry in store.list())
    told = cli("cache", "clear", "--yes", "--json")
    assert told.code == 0 and told.stderr == ""
    assert told.document == {"folder": str(store.folder), "cleared": True, "freed_bytes": nbytes, "kept": []}
    assert store.list() == []


@pytest.mark.parametrize(("option", "left"), [("--programs", "weights"), ("--weights", "programs")])
def test_clear_one_kind(cli: Cli, store: Store, option: str, left: str) -> None:
    told = cli("cache", "clear", option, "--yes")
    assert told.code == 0 and told.stdout.startswith("freed ") and kinds(store) == [left]


def test_one_kind_and_the_other_are_not_both(cli: Cli, store: Store) -> None:
    for options in (("--programs", "--weights"), ("--weights", "--programs")):
        assert cli("cache", "clear", "--yes", *options).code == 2
    assert kinds(store) == ["programs", "weights"]


def test_it_asks(cli: Cli, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("n\n", "\n", "perhaps\n"):
        answer(monkeypatch, text)
        told = cli("cache", "clear")
        assert told.code == 1 and told.stdout == f"nothing was removed in {store.folder}\n"
        assert told.stderr.startswith("Remove 2 entries (3.0") and f"from {store.folder}? [y/N]" in told.stderr
    answer(monkeypatch, "no\n")
    assert cli("cache", "clear", "--json").document["cleared"] is False
    assert len(store.list()) == 2
    answer(monkeypatch, "Y\n")
    assert cli("cache", "clear", "--weights").code == 0 and kinds(store) == ["programs"]


def test_nobody_answers(cli: Cli, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for stdin in (io.StringIO(""), None):
        monkeypatch.setattr(sys, "stdin", stdin)
        told = cli("cache", "clear")
        assert told.code == 2 and "Pass --yes" in told.stderr and len(store.list()) == 2


def test_what_is_in_use_stays_and_is_named(cli: Cli, store: Store) -> None:
    place = fill(store, "programs", {"model": "Qwen3-0.6B", "torch": "2.13.0"}, 5000)
    told = cli("cache", "clear", "--yes")
    assert told.code == 0 and place.exists() and kinds(store) == ["programs"]
    assert f"the program of Qwen3-0.6B in {place} is in use, and stays" in " ".join(told.stdout.split())
    assert len(cli("cache", "clear", "--yes", "--json").document["kept"]) == 1


def test_a_folder_that_others_may_write_to(cli: Cli, store: Store) -> None:
    store.folder.chmod(0o777)
    for command in ("list", "clear"):
        told = cli("cache", command)
        assert told.code == 9 and "others may write to it" in told.stderr and told.stderr.count("\n") == 1
        assert cli("cache", command, "--json").document["error"]["class"] == "OutputPathError"


def test_names_and_damage_are_shown_and_do_nothing(cli: Cli, store: Store) -> None:
    odd = fill(store, "programs", {"model": "\x1b[31m[red]a\nb"}, 1)
    (store.list()[-1].path / "key.json").write_text("{")
    os.utime(odd / "used", (10**17, 10**17))  # as far as the file system goes
    told = cli("cache", "list")
    assert told.code == 0 and "\x1b" not in told.stdout and "\\x1b[31m[red]a\\x0ab" in told.stdout
    assert any(line.split()[:2] == ["weights", "?"] for line in told.stdout.splitlines())
    found = cli("cache", "list", "--json").document["entries"]
    assert {entry["model"] for entry in found} == {"\x1b[31m[red]a\nb", "Qwen3-0.6B", None}
    assert cli("cache", "clear", "--yes").code == 0


def test_usage(cli: Cli) -> None:
    assert cli("cache").code == 2
    assert cli("cache", "nope", "--json").document["error"]["exit_code"] == 2
    for command in ("list", "clear"):
        told = cli("cache", command, "--help").stdout
        assert f"  penstock cache {command}\n" in told and "--json" in told and "--cache-dir" in told


def test_it_imports_no_torch(store: Store) -> None:
    code = "import sys; from penstock.cli.main import main; main(['cache', 'list']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False" and "Qwen3-0.6B" in done.stdout
