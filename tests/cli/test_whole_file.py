from __future__ import annotations

from pathlib import Path

import pytest

from penstock.cli.whole_file import refuse_unwritable, whole_file, write_whole
from penstock.errors import DiskFullError, OutputPathError


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("old")
    with whole_file(path) as partial:
        partial.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ZeroDivisionError(), DiskFullError(28, "full")], ids=repr)
def test_what_was_there_stays_when_writing_fails(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "f"
    path.write_text("old")
    with pytest.raises(type(error)), whole_file(path) as partial:
        partial.write_text("half of the n")
        raise error
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(OutputPathError, match="cannot be written"):
        write_whole(tmp_path / "no/such/folder", b"")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "no/f", tmp_path / "folder"):
        with pytest.raises(OutputPathError, match="folder"):
            refuse_unwritable(None, path)
    refuse_unwritable(None, tmp_path / "f")
