"""`make test` installs one version of everything: a release of today must not decide whether it passes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

# In Python 3.10 there is none.
tomllib = pytest.importorskip("tomllib")

ROOT = Path(__file__).parents[2]


def _name(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    assert found is not None, requirement
    return re.sub(r"[-_.]+", "-", found.group()).lower()


def test_everything_that_the_tests_need_has_one_version() -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [line for line in (ROOT / "tests/pins.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+(; .*)?", line) for line in lines)
    pinned = {_name(line) for line in lines}
    exact = {_name(one) for one in wanted["optional-dependencies"]["dev"] if "==" in one}
    loose = {_name(one) for one in (*wanted["dependencies"], *wanted["optional-dependencies"]["dev"])} - exact
    assert {"ruff", "mypy", "pytest"} <= loose
    assert sorted(loose - pinned) == []
    makefile = (ROOT / "Makefile").read_text()
    installs = [
        line for line in makefile.splitlines() if "$(BIN)/python -m pip install" in line and "--no-deps" not in line
    ]
    assert installs and all("-c $(PINS)" in line for line in installs)
