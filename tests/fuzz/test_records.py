"""Hostile records: more than a hundred thousand, read by the core's and the delegate's readers under two sanitizers."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock.executorch.build import sources_folder
from tests.fuzz.seeds import CORPUS, STREAMED_SIZES, records
from tests.runtime.builds import COMPILER, HEADERS, SOURCES, WORKERS

CASES = 120_000
SEED = 18
READERS = [
    *(SOURCES / name for name in ("plan/plan_records.cpp", "plan/plan_check.cpp")),
    *(SOURCES / name for name in ("packed/packed_records.cpp", "packed/packed_block.cpp")),
    SOURCES / "records/checksum.cpp",
    *(sources_folder() / name for name in ("description.cpp", "load_error.cpp", "tensor_layout.cpp")),
    *(sources_folder() / name for name in ("payload.cpp", "packed_entry.cpp")),
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("records")
    flags = ["-std=c++20", "-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    includes = [f"-I{folder}" for folder in (SOURCES, HEADERS, sources_folder())]

    def run(*arguments: object) -> None:
        done = subprocess.run([COMPILER, *flags, *map(str, arguments)], capture_output=True, text=True)
        if "cannot find -lasan" in done.stderr or "cannot find -lubsan" in done.stderr:
            pytest.skip(f"{COMPILER} cannot build with sanitizers")
        assert done.returncode == 0, done.stderr

    def compiled(source: Path) -> Path:
        run(*includes, "-c", source, "-o", folder / f"{source.stem}.o")
        return folder / f"{source.stem}.o"

    with ThreadPoolExecutor(WORKERS) as workers:
        objects = list(workers.map(compiled, [Path(__file__).with_name("record_fuzz.cpp"), *READERS]))
    run(*objects, "-o", folder / "record_fuzz")
    return folder / "record_fuzz"


def test_every_mutant_is_refused_or_a_plan(program: Path) -> None:
    command = [str(program), str(CORPUS), str(CASES), str(SEED), *map(str, STREAMED_SIZES.values())]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found = {name: list(map(int, counts)) for name, *counts in map(str.split, done.stdout.splitlines())}
    assert found.keys() == records().keys()
    assert sum(map(sum, found.values())) >= CASES
    for name, (by_reader, by_check, accepted) in found.items():
        # Most are refused, and some are other records of that kind: the changes are neither all wild nor all tame.
        assert by_reader > accepted > CASES // 1000, (name, by_reader, by_check, accepted)
        assert bool(by_check) == name.startswith("plan-")


def test_the_corpus_is_what_is_written_today() -> None:
    assert {path.stem: path.read_bytes() for path in CORPUS.glob("*.record")} == records()
