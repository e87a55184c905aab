"""What may be pinned, and where a file is cut for registration."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.budget import format_bytes
from penstock.errors import HostMemoryError, WeightsChangedError
from penstock.native import core
from penstock.runtime import session as session_file
from penstock.runtime.driver import open_soft_driver
from penstock.runtime.host_memory import memory_limit_bytes
from penstock.runtime.progress import Progress
from penstock.runtime.records import plan_numbers
from penstock.runtime.session import FileSource, Session
from tests.native.driver import DriverFailure, Failure
from tests.native.opening import bytes_to_pin, check_host_memory, chunk_ends, pinned, staging_sizes
from tests.runtime.fake_machine import limited, machine, v2
from tests.runtime.session_harness import chain, write_model

GIB, MIB = 1 << 30, 1 << 20
PAGE = os.sysconf("SC_PAGESIZE")


def test_the_machine_limits_where_no_cgroup_does(tmp_path: Path) -> None:
    root = machine(tmp_path, 8 * GIB)
    limit = memory_limit_bytes(root)
    assert limit.available_bytes == 8 * GIB and "MemAvailable" in limit.source


def test_cgroup_v2_counts_file_cache_as_available(tmp_path: Path) -> None:
    root = machine(tmp_path, 100 * GIB)
    v2(root / "sys/fs/cgroup", str(32 * GIB), 30 * GIB, inactive=15 * GIB, active=5 * GIB)
    limit = memory_limit_bytes(root)
    assert limit.available_bytes == 22 * GIB
    assert "memory.max" in limit.source and str(32 * GIB) in limit.source and str(10 * GIB) in limit.source


def test_pinned_file_cache_is_not_available(tmp_path: Path) -> None:
    root = machine(tmp_path, 100 * GIB)
    v2(root / "sys/fs/cgroup", str(32 * GIB), 30 * GIB, inactive=20 * GIB)
    assert memory_limit_bytes(root, pinned_file_bytes=20 * GIB).available_bytes == 2 * GIB
    assert memory_limit_bytes(root, pinned_file_bytes=99 * GIB).available_bytes == 1 * GIB


def test_the_smallest_limit_on_the_way_up_holds(tmp_path: Path) -> None:
    root = machine(tmp_path, 100 * GIB, "0::/outer/inner\n")
    v2(root / "sys/fs/cgroup/outer/inner", "max", 1 * GIB)
    v2(root / "sys/fs/cgroup/outer", str(16 * GIB), 6 * GIB, active=1 * GIB)
    (root / "sys/fs/cgroup/memory.stat").write_text("anon 1\n")
    limit = memory_limit_bytes(root)
    assert limit.available_bytes == 11 * GIB and "outer/memory.max" in limit.source
    v2(root / "sys/fs/cgroup/outer/inner", str(9 * GIB), 1 * GIB, high=str(4 * GIB))
    limit = memory_limit_bytes(root)
    assert limit.available_bytes == 3 * GIB and "inner/memory.high" in limit.source


@pytest.mark.parametrize("own", ["/system.slice/docker-abc.scope", "/../../abc", "//double", "/"])
def test_a_path_of_the_host_falls_back_to_what_is_visible(tmp_path: Path, own: str) -> None:
    root = machine(tmp_path, 100 * GIB, f"0::{own}\n")
    v2(root / "sys/fs/cgroup", str(4 * GIB), 1 * GIB)
    assert memory_limit_bytes(root).available_bytes == 3 * GIB


def test_a_cgroup_that_is_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    root = machine(tmp_path, 100 * GIB)
    v2(root / "sys/fs/cgroup", str(4 * GIB), 5 * GIB)
    assert memory_limit_bytes(root).available_bytes == 0


@pytest.mark.parametrize("line", ["4:memory:/docker/abc", "4:cpu,memory:/", "0::/\n4:memory:/job"])
def test_cgroup_v1(tmp_path: Path, line: str) -> None:
    root = machine(tmp_path, 100 * GIB, f"9:cpuset:/elsewhere\n{line}\n")
    folder = root / "sys/fs/cgroup/memory"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(f"{10 * GIB}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{8 * GIB}\n")
    stat = f"cache 7\nactive_file 1\ninactive_file 1\ntotal_inactive_file {2 * GIB}\ntotal_active_file {1 * GIB}\n"
    (folder / "memory.stat").write_text(stat)
    limit = memory_limit_bytes(root)
    assert limit.available_bytes == 5 * GIB and "memory.limit_in_bytes" in limit.source
    # Without a limit, v1 shows the largest number that is a multiple of the page.
    (folder / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert "MemAvailable" in memory_limit_bytes(root).source


def test_a_machine_that_tells_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(HostMemoryError, match="meminfo: No such file"):
        memory_limit_bytes(tmp_path)
    machine(tmp_path, GIB)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1 kB\n")
    with pytest.raises(HostMemoryError, match="no line MemAvailable"):
        memory_limit_bytes(tmp_path)


def test_this_machine_has_a_limit() -> None:
    total = os.sysconf("SC_PHYS_PAGES") * PAGE
    assert 0 < memory_limit_bytes().available_bytes <= total


def test_one_byte_too_many_is_refused(tmp_path: Path) -> None:
    root = machine(tmp_path, 100 * GIB)
    v2(root / "sys/fs/cgroup", str(4 * GIB), 1 * GIB)
    check_host_memory(3 * GIB, "weights file a.ptd", root)
    with pytest.raises(DriverFailure) as caught:
        check_host_memory(3 * GIB + 1, "weights file a.ptd", root)
    assert caught.value.failure == Failure.HOST_MEMORY
    for words in (
        str(3 * GIB + 1),
        f"and {3 * GIB} are",
        "for weights file a.ptd",
        "memory.max",
        "give a cap of host memory of at most",
    ):
        assert words in str(caught.value)


def test_a_file_is_pinned_once(tmp_path: Path) -> None:
    path = tmp_path / "a.ptd"
    path.write_bytes(bytes(5000))
    on_disk = machine(tmp_path / "root", GIB)
    assert bytes_to_pin(path, on_disk) == 5000
    with pinned(path):
        with pinned(path):
            assert bytes_to_pin(path, on_disk) == 0
        assert bytes_to_pin(path, on_disk) == 0
    assert bytes_to_pin(path, on_disk) == 5000


def test_what_is_pinned_lowers_the_limit(tmp_path: Path) -> None:
    """Unless it lies where files are memory: then it was never counted as available."""
    path = tmp_path / "a.ptd"
    path.write_bytes(bytes(5000))
    root = machine(tmp_path / "root", GIB)
    before = memory_limit_bytes(root).available_bytes
    is_memory = bytes_to_pin(path, Path("/")) == 0
    with pinned(path):
        assert before - memory_limit_bytes(root).available_bytes == (0 if is_memory else 5000)
    assert memory_limit_bytes(root).available_bytes == before


def test_a_file_that_is_memory_already_takes_none(tmp_path: Path) -> None:
    path = tmp_path / "a.ptd"
    path.write_bytes(bytes(5000))
    with path.open("ab") as handle:
        handle.truncate(10 * PAGE + 5000)
    os.sync()
    status = path.stat()
    root = machine(tmp_path / "root", GIB)
    line = f"36 35 {os.major(status.st_dev)}:{os.minor(status.st_dev)} / /x rw shared:1 - {{}} none rw\n"
    (root / "proc/self/mountinfo").write_text(line.format("ext4"))
    assert bytes_to_pin(path, root) == status.st_size
    (root / "proc/self/mountinfo").write_text(line.format("tmpfs"))
    assert bytes_to_pin(path, root) == max(0, status.st_size - status.st_blocks * 512)
    assert bytes_to_pin(path, root) < status.st_size


@contextmanager
def opened(path: Path, cap_bytes: int | None = None, extra_bytes: int = 0) -> Iterator[Session]:
    with closing(open_soft_driver(PAGE)) as driver:
        source = FileSource(path, ((0, 10),), cap_bytes, extra_bytes)
        with closing(Session.opened(driver, source, lru=False, device_index=0, poison=False)) as session:
            yield session


def refusal(path: Path, cap_bytes: int | None = None, extra_bytes: int = 0) -> str:
    with pytest.raises(HostMemoryError) as refused, opened(path, cap_bytes, extra_bytes):
        pass
    return str(refused.value)


@pytest.fixture
def two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Of 4 MiB, on a machine that has 6."""
    monkeypatch.setattr(session_file, "HOST_ROOT", limited(tmp_path / "root", 6 * MIB))
    for name in "ab":
        (tmp_path / name).write_bytes(bytes(4 * MIB))
    return tmp_path / "a", tmp_path / "b"


@pytest.mark.parametrize("cap_bytes", [None, 3 * MIB])
def test_two_loads_at_once_are_not_given_the_same_memory(
    two_files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, cap_bytes: int | None
) -> None:
    """The second begins when the first has been promised its memory, and before the machine knows of it."""
    first, second = two_files
    told: list[str] = []

    class Meanwhile(Progress):
        def show(self, nbytes: int) -> None:
            if self._path != first or told:
                return
            told.append(refusal(second, cap_bytes))
            with opened(first):  # its memory is taken already
                raise KeyboardInterrupt

    monkeypatch.setattr(session_file, "Progress", Meanwhile)
    with pytest.raises(KeyboardInterrupt), opened(first):
        pass
    assert told[0].startswith(f"{cap_bytes or 4 * MIB} bytes of host memory are needed for")
    assert f"and {2 * MIB} are available by" in told[0]
    assert f", less {4 * MIB} bytes for what is being loaded" in told[0]
    # The load that was given up holds nothing.
    with opened(second, cap_bytes):
        pass


@pytest.mark.parametrize("cap_bytes", [None, MIB])
def test_what_is_still_to_be_allocated_is_promised_to_nobody_else(
    two_files: tuple[Path, Path], tmp_path: Path, cap_bytes: int | None
) -> None:
    """A budget on a CPU, and what runs pass through, up to the first plan; with buffers for weights, if any."""
    first, second = two_files
    plan = write_model(tmp_path / "model", [chain("a")], {"a": 10}).plan(PAGE)
    with opened(first, cap_bytes, extra_bytes=MIB) as session:
        promised = MIB if cap_bytes is None else MIB + session.host_bytes
        assert f"and {6 * MIB - promised} are available" in refusal(second, extra_bytes=2 * MIB)
        session.install(plan_numbers(plan, ["a"]))
        with opened(second, extra_bytes=2 * MIB):
            pass


def test_chunks_end_between_weights() -> None:
    p = PAGE
    weights = [(p, 2 * p), (3 * p, 2 * p), (5 * p, p)]
    assert chunk_ends(weights, 6 * p) == (6 * p,)
    assert chunk_ends(weights, 6 * p, 5 * p) == (5 * p, 6 * p)
    assert chunk_ends(weights, 6 * p, 4 * p) == (3 * p, 6 * p)
    assert chunk_ends([*weights[:2], (5 * p, p - 7)], 6 * p - 7, 4 * p) == (3 * p, 6 * p)
    # A weight larger than the limit: the header before it, itself, and what follows.
    assert chunk_ends([(p, 9 * p), (10 * p, p)], 11 * p, 2 * p) == (p, 10 * p, 11 * p)
    # Two that share a page cannot be parted.
    assert chunk_ends([(p, 2 * p + 5), (3 * p + 64, 2 * p)], 6 * p, 3 * p) == (p, 6 * p)
    # What is no weight may be cut anywhere.
    assert chunk_ends([], 5 * p, 2 * p) == (2 * p, 4 * p, 5 * p)
    with pytest.raises(DriverFailure, match="smaller than a page"):
        chunk_ends([], 10, PAGE - 1)


@pytest.mark.parametrize("cap_bytes", [None, 1 << 20])
@pytest.mark.parametrize("extent", [(5, 6), (-1, 2), (5, -1), (11, 0), (5, 2**63 - 1)])
def test_what_does_not_lie_in_the_file_is_refused(
    tmp_path: Path, cap_bytes: int | None, extent: tuple[int, int]
) -> None:
    path = tmp_path / "a.ptd"
    path.write_bytes(bytes(10))
    with closing(open_soft_driver(PAGE)) as driver:
        source = FileSource(path, ((0, 10), extent), cap_bytes, 0)
        with pytest.raises(WeightsChangedError, match=f"weights file {path} is truncated: it has 10 bytes"):
            Session.opened(driver, source, lru=False, device_index=0, poison=False)


def test_chunks_are_of_the_systems_pages() -> None:
    """Of 64 KiB, on some."""
    large = 1 << 16
    assert chunk_ends([(4096, 8192), (large + 5, 10)], 2 * large, large, large) == (large, 2 * large)


def test_staging_sizes() -> None:
    assert staging_sizes(1 << 30, 64) == (16 << 20, 64, 8)
    assert staging_sizes(64 << 20, 2) == (16 << 20, 4, 1)
    assert staging_sizes(16384, 16) == (4096, 4, 4)
    assert staging_sizes(16384 + 5000, 16) == (4096, 5, 5)
    with pytest.raises(DriverFailure, match="staging needs at least 16384") as refused:
        staging_sizes(16383, 16)
    assert refused.value.failure == Failure.HOST_MEMORY


@given(
    st.one_of(
        st.integers(0, 2**63 - 1), st.builds(lambda n, b: (n << b) % 2**63, st.integers(1, 2000), st.integers(0, 50))
    )
)
def test_amounts_are_told_as_python_tells_them(nbytes: int) -> None:
    assert core().penstock_format_bytes(nbytes).decode() == format_bytes(nbytes)


@given(
    lengths=st.lists(st.tuples(st.integers(0, 5 * PAGE), st.integers(0, 2 * PAGE)), max_size=12),
    aligned=st.booleans(),
    limit_pages=st.integers(1, 12),
    tail=st.integers(1, 3 * PAGE),
)
def test_chunks_of_any_file(lengths: list[tuple[int, int]], aligned: bool, limit_pages: int, tail: int) -> None:
    weights, at = [], 100
    for length, gap in lengths:
        at += gap
        if aligned:
            at = -(-at // PAGE) * PAGE
        weights.append((at, length))
        at += length
    file_bytes = at + tail
    ends = chunk_ends(weights, file_bytes, limit_pages * PAGE)
    assert ends[-1] == -(-file_bytes // PAGE) * PAGE
    assert list(ends) == sorted(set(ends)) and all(end % PAGE == 0 for end in ends)
    for start, end in zip((0, *ends), ends, strict=False):
        inside = [w for w in weights if w[1] and start <= w[0] < end]
        assert all(offset + length <= end for offset, length in inside)
        if end - start > limit_pages * PAGE:
            # No page inside at which it could have been cut.
            for cut in range(start + PAGE, end, PAGE):
                pages = [(o // PAGE * PAGE, -(-(o + n) // PAGE) * PAGE) for o, n in inside]
                assert any(first < cut < last for first, last in pages)
