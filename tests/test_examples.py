"""Examples of properties are the same in every run, whatever a worker has done before."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

Example = tuple[int, float, bytes]


def examples() -> list[Example]:
    found: list[Example] = []

    @settings(derandomize=True, database=None)
    @given(st.tuples(st.integers(), st.floats(0, 1), st.binary(max_size=20)))
    def record(example: Example) -> None:
        found.append(example)

    record()
    return found


def test_they_do_not_depend_on_what_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if settings.get_current_profile_name() == "random":
        pytest.skip("with random examples, constants of our modules are among them")
    before = examples()
    module = ModuleType("constants_of_somebody")
    module.__file__ = str(tmp_path / "constants_of_somebody.py")
    Path(module.__file__).write_text("NUMBERS, PARTS, TEXT = (123456789, 987654321), (0.123, 0.321), b'somebody'\n")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert examples() == before
