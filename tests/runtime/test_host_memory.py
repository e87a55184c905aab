"""What may be pinned, where a file is cut for registration, and asking whether registration works at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.budget import format_bytes
from penstock.errors import HostMemoryError, RegistrationError
from penstock.runtime import registration_probe
from penstock.runtime.host_memory import memory_limit_bytes
from penstock.runtime.registration_probe import RegistrationProbe, probe_registration
from tests.native import opening
from tests.native.driver import DriverFailure, Failure
from tests.native.opening import bytes_to_pin, check_host_memory, chunk_ends, pinned, staging_sizes
from tests.runtime.fake_machine import machine, v2

GIB = 1 << 30
PAGE = os.sysconf("SC_PAGESIZE")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration_probe, "_answers", {})


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
    for extent in ((5, 6), (-1, 2), (5, -1), (11, 0), (5, 2**63 - 1)):
        with pytest.raises(DriverFailure, match="do not lie in a file of 10 bytes"):
            chunk_ends([extent], 10)
    with pytest.raises(DriverFailure, match="smaller than a page"):
        chunk_ends([], 10, PAGE - 1)


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
    assert opening.format_bytes(nbytes) == format_bytes(nbytes)


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


def child(tmp_path: Path, body: str) -> list[str]:
    """A command that behaves like a probe would, and counts how often it was started."""
    script = tmp_path / "child.py"
    script.write_text(f"import os, signal, sys, time\nopen({str(tmp_path / 'starts')!r}, 'a').write('x')\n{body}\n")
    return [sys.executable, str(script)]


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "a.ptd"
    path.write_bytes(b"x")
    return path


def starts(tmp_path: Path) -> int:
    return len((tmp_path / "starts").read_text())


def test_a_probe_that_passes_is_asked_once_per_device(tmp_path: Path, weights: Path) -> None:
    command = child(tmp_path, f"assert sys.argv[1] == {str(weights)!r} and sys.argv[2] in '01'")
    other = tmp_path / "b.ptd"
    other.write_bytes(b"y")
    probe_registration(weights, 0, command=command)
    probe_registration(weights, 0, command=command)
    probe_registration(other, 0, command=command)
    assert starts(tmp_path) == 1
    probe_registration(weights, 1, command=command)
    assert starts(tmp_path) == 2


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("print('noise'); print('cuMemHostRegister_v2 failed: not supported (801)'); sys.exit(4)", "not supported"),
        ("print('the device does not support it'); sys.exit(3)", "the device does not support it"),
        ("raise RuntimeError('boom')", "ended with code 1: RuntimeError: boom"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "ended by SIGSEGV: it said nothing"),
    ],
)
def test_a_probe_that_fails_says_why_and_what_to_do(tmp_path: Path, weights: Path, body: str, words: str) -> None:
    command = child(tmp_path, body)
    for _ in range(2):
        with pytest.raises(RegistrationError) as caught:
            probe_registration(weights, 3, command=command)
        for part in (words, str(weights), "device 3", 'host_memory="1GiB"'):
            assert part in str(caught.value)
    assert starts(tmp_path) == 1


def test_a_probe_that_hangs_is_killed(tmp_path: Path, weights: Path) -> None:
    pid_file = tmp_path / "pid"
    body = f"open({str(pid_file)!r}, 'w').write(str(os.getpid()))\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    command = child(tmp_path, body + "while True: signal.pause()")
    with pytest.raises(RegistrationError, match=r"did not return within 0\.5 s: the driver hangs .*was killed"):
        probe_registration(weights, 0, timeout_s=0.5, command=command)
    # Killed before it got that far, or killed and reaped.
    if pid_file.exists():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid_file.read_text()), 0)


def test_a_probe_is_begun_before_it_is_asked_and_goes_if_nobody_asks(tmp_path: Path, weights: Path) -> None:
    pid_file = tmp_path / "pid"

    def begun(name: str, then: str) -> RegistrationProbe:
        """Once its child has begun; nobody has asked yet. Each has a pipe of its own: the other's end may be open."""
        pipe = tmp_path / name
        os.mkfifo(pipe)
        body = f"open({str(pid_file)!r}, 'w').write(str(os.getpid()))\nopen({str(pipe)!r}, 'w').close()\n"
        probe = RegistrationProbe(weights, 0, command=child(tmp_path, body + then))
        pipe.open().close()
        return probe

    first, second = begun("first", ""), begun("second", "while True: signal.pause()")
    first.require()
    second.require()  # has the first one's answer
    second.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)
    assert starts(tmp_path) == 2
    RegistrationProbe(weights, 0, command=child(tmp_path, "sys.exit(4)")).require()
    assert starts(tmp_path) == 2


def test_an_interrupted_probe_leaves_no_process_and_no_answer(tmp_path: Path, weights: Path) -> None:
    pid_file = tmp_path / "pid"
    parent = os.getpid()
    said = f"open({str(pid_file)!r}, 'w').write(str(os.getpid()))\nos.kill({parent}, signal.SIGINT)\n"
    body = said + "while True: signal.pause()"
    with pytest.raises(KeyboardInterrupt):
        probe_registration(weights, 0, command=child(tmp_path, body))
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)
    probe_registration(weights, 0, command=child(tmp_path, ""))


def run_real_child(*arguments: str, source: str | None = None) -> subprocess.CompletedProcess[str]:
    root = Path(registration_probe.__file__).parents[2]
    how = ["-c", source] if source else ["-m", "penstock.runtime.registration_probe"]
    return subprocess.run(
        [sys.executable, *how, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )


def test_the_child_imports_nothing_heavy() -> None:
    source = (
        "import sys, penstock.runtime.registration_probe; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    assert run_real_child(source=source).stdout.strip() == "[]"


FAKE_DRIVER = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static int say(const char* name) {
  fprintf(stderr, "%s\n", name);
  const char* fail = getenv("FAKE_FAIL");
  return fail && !strcmp(fail, name) ? 801 : 0;
}
int cuInit(unsigned flags) { return flags ? 1 : say("cuInit"); }
int cuDeviceGet(int* device, int index) { *device = index + 40; return say("cuDeviceGet"); }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  const char* zero = getenv("FAKE_ZERO");
  *value = device == 42 && !(zero && atoi(zero) == attribute);
  return say("cuDeviceGetAttribute");
}
int cuDevicePrimaryCtxRetain(void** context, int device) { *context = (void*)(long)device; return say("retain"); }
int cuCtxSetCurrent(void* context) { return context == (void*)42 ? say("cuCtxSetCurrent") : 1; }
int cuMemHostRegister_v2(void* start, size_t bytes, unsigned flags) {
  if (flags != 8 || bytes < 4096 || ((const char*)start)[0] != 'x') return 1;
  return say("cuMemHostRegister_v2");
}
int cuMemHostUnregister(void* start) { return start ? say("cuMemHostUnregister") : 1; }
int cuGetErrorString(int code, const char** text) { *text = code == 801 ? "operation not supported" : 0; return 0; }
"""


@pytest.fixture(scope="module")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("driver")
    (folder / "fake.c").write_text(FAKE_DRIVER)
    compiler = os.environ.get("CXX", "g++").replace("g++", "gcc")
    subprocess.run([compiler, "-shared", "-fPIC", "fake.c", "-o", "libcuda.so.1"], cwd=folder, check=True)
    return folder


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({}, None),
        ({"FAKE_ZERO": "99"}, "does not support registering host memory (attribute 99 is 0)"),
        ({"FAKE_ZERO": "113"}, "does not support registering read-only host memory (attribute 113 is 0)"),
        ({"FAKE_FAIL": "cuInit"}, "cuInit failed: operation not supported (801)"),
        ({"FAKE_FAIL": "cuMemHostRegister_v2"}, "cuMemHostRegister_v2 failed: operation not supported (801)"),
        ({"FAKE_FAIL": "cuMemHostUnregister"}, "cuMemHostUnregister failed: operation not supported (801)"),
    ],
)
def test_the_real_child_against_a_driver(
    weights: Path, fake_driver: Path, monkeypatch: pytest.MonkeyPatch, setting: dict[str, str], words: str | None
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fake_driver))
    for name, value in setting.items():
        monkeypatch.setenv(name, value)
    if words is None:
        probe_registration(weights, 2)
        return
    with pytest.raises(RegistrationError) as caught:
        probe_registration(weights, 2)
    assert words in str(caught.value)


def test_the_real_child_and_a_file_it_cannot_map(tmp_path: Path) -> None:
    empty = tmp_path / "empty.ptd"
    empty.touch()
    result = run_real_child(str(empty), "0")
    assert result.returncode == registration_probe.UNREADABLE and "the file is empty" in result.stdout
    result = run_real_child(str(tmp_path / "absent"), "0")
    assert result.returncode == registration_probe.UNREADABLE and "No such file" in result.stdout
