"""The mapped weights file: what is refused, what is noticed, and what a truncated one does not do to the process."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
from pathlib import Path

import pytest

from tests.runtime.host_cases import (
    HOST_READ,
    PAGE,
    REGISTRATION,
    USAGE,
    CoreFailure,
    core,
    host,
    host_file,
    run_child,
    soft_device,
)

CONTENT = bytes(range(256)) * (5 * PAGE // 256) + b"tail"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "weights.ptd"
    path.write_bytes(CONTENT)
    return path


def test_the_bytes_are_the_files(path: Path) -> None:
    with host_file(path) as file:
        assert core.penstock_test_file_bytes(file) == len(CONTENT)
        assert ctypes.string_at(core.penstock_test_file_data(file), len(CONTENT)) == CONTENT


def test_a_file_that_cannot_be_mapped_is_refused_by_name(tmp_path: Path) -> None:
    empty = tmp_path / "empty.ptd"
    empty.touch()
    pipe = tmp_path / "pipe.ptd"
    os.mkfifo(pipe)
    for path, words in (
        (tmp_path / "absent.ptd", "No such file"),
        (tmp_path, "not a regular file"),
        (pipe, "not a regular file"),
        (empty, "0 bytes"),
    ):
        gc.collect()  # what earlier tests have left goes now, and not while this one counts
        before = len(list(Path("/proc/self/fd").iterdir()))
        with pytest.raises(CoreFailure, match=words) as caught:
            with host_file(path):
                pass
        assert str(path) in str(caught.value) and caught.value.code == HOST_READ
        assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_closing_gives_back_the_mapping_and_the_descriptor(path: Path) -> None:
    gc.collect()  # what earlier tests have left goes now, and not while this one counts
    before = len(list(Path("/proc/self/fd").iterdir()))
    with host_file(path):
        assert str(path) in Path("/proc/self/maps").read_text()
    assert str(path) not in Path("/proc/self/maps").read_text()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_file_that_changed_is_noticed(path: Path) -> None:
    with host_file(path) as file:
        host("file_check", file)
        modified_ns = path.stat().st_mtime_ns
        os.utime(path, ns=(modified_ns, modified_ns + 1_000_000))
        with pytest.raises(CoreFailure, match=r"modified at \d+\.\d{9} s since the epoch and now at") as caught:
            host("file_check", file)
        assert caught.value.code == HOST_READ and str(path) in str(caught.value)
        with path.open("ab") as handle:
            handle.write(b"x")
        with pytest.raises(CoreFailure, match=f"had {len(CONTENT)} bytes and now has {len(CONTENT) + 1} bytes"):
            host("file_check", file)


def test_a_file_that_was_replaced_is_still_the_one_that_was_opened(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"other")
    with host_file(path) as file:
        other.replace(path)
        host("file_check", file)
        assert ctypes.string_at(core.penstock_test_file_data(file), len(CONTENT)) == CONTENT


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("offset", "nbytes"), [(0, None), (5, 0), (PAGE + 7, (33 << 20) + 1)])
def test_prefault_touches_what_it_is_told(tmp_path: Path, threads: int, offset: int, nbytes: int | None) -> None:
    path = tmp_path / "sparse.ptd"
    with path.open("wb") as handle:
        handle.truncate((50 << 20) + 3)
    with host_file(path) as file:
        length = core.penstock_test_file_bytes(file) if nbytes is None else nbytes
        done = ctypes.c_int64()
        host("file_prefault", file, offset, length, threads, ctypes.byref(done))
        assert done.value == length


def test_prefault_refuses_what_does_not_lie_in_the_file(path: Path) -> None:
    with host_file(path) as file:
        done = ctypes.c_int64()
        for offset, nbytes, threads in ((1, len(CONTENT), 1), (len(CONTENT) + 1, 0, 1), (0, 1, 0)):
            with pytest.raises(CoreFailure) as caught:
                host("file_prefault", file, offset, nbytes, threads, ctypes.byref(done))
            assert caught.value.code == USAGE


# In the children below `file` is open, and everything from its third page on is cut off.
TRUNCATED = """
import faulthandler, signal, sys
BEFORE, AFTER = sys.argv[2] == "before", sys.argv[2] == "after"
if BEFORE: faulthandler.enable()
path = Path(sys.argv[1])
size = path.stat().st_size
scope = host_file(path)
file = scope.__enter__()
data = core.penstock_test_file_data(file)
os.truncate(path, 2 * PAGE)
if AFTER: faulthandler.enable()
target = ctypes.create_string_buffer(size)
"""


@pytest.mark.parametrize("handler", ["none", "before", "after"])
def test_a_guarded_read_of_a_truncated_file_returns(path: Path, handler: str) -> None:
    child = run_child(
        TRUNCATED
        + """
import threading
def reads():
    target = ctypes.create_string_buffer(size)
    for _ in range(3):
        assert core.penstock_test_guarded_copy(target, data, size) == 0
        assert core.penstock_test_guarded_copy(target, data, 2 * PAGE) == 1
        assert target.raw[:2 * PAGE] == path.read_bytes()
        assert core.penstock_test_guarded_touch(data, 2 * PAGE + 1) == 0
        assert core.penstock_test_guarded_touch(data + PAGE - 1, PAGE + 1) == 1
        assert core.penstock_test_guarded_touch(data + PAGE - 1, PAGE + 2) == 0
        assert core.penstock_test_guarded_touch(data + 2 * PAGE, 0) == 1
threads = [threading.Thread(target=reads) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
reads()
done = ctypes.c_int64()
try:
    host("file_prefault", file, 0, size, 2, ctypes.byref(done))
except CoreFailure as failure:
    assert failure.code == HOST_READ
    print(failure)
""",
        path,
        handler,
    )
    assert child.returncode == 0, child.stderr
    assert child.stderr == ""
    assert str(path) in child.stdout and f"had {len(CONTENT)} bytes and now has {2 * PAGE} bytes" in child.stdout


@pytest.mark.parametrize("handler", ["none", "before", "after"])
@pytest.mark.parametrize("guarded_first", [False, True])
def test_any_other_bus_error_is_told_and_ends_the_process(path: Path, handler: str, guarded_first: bool) -> None:
    child = run_child(
        TRUNCATED
        + """
if sys.argv[3] == "True": core.penstock_test_guarded_touch(data, size)
ctypes.string_at(data + 2 * PAGE, 1)
""",
        path,
        handler,
        guarded_first,
    )
    assert child.returncode == -signal.SIGBUS
    # faulthandler knows nothing of ours: where it came last and nothing was guarded since, it alone speaks up.
    heard = handler != "after" or guarded_first
    assert (f"in the mapping of weights file {path}: the file was truncated" in child.stderr) == heard
    assert child.stderr.count("penstock: SIGBUS at address 0x") == int(heard)
    assert ("Fatal Python error: Bus error" in child.stderr) == (handler != "none")


def test_a_bus_error_elsewhere_names_no_weights_file(path: Path) -> None:
    child = run_child(
        TRUNCATED
        + """
import mmap
other = path.with_name("other")
other.write_bytes(bytes(PAGE))
with other.open("r+b") as handle:
    view = mmap.mmap(handle.fileno(), PAGE)
os.truncate(other, 0)
core.penstock_test_guarded_copy(target, data, size)
view[0]
""",
        path,
        "none",
    )
    assert child.returncode == -signal.SIGBUS
    assert "penstock: SIGBUS at address 0x" in child.stderr and "weights file" not in child.stderr


def test_a_fault_in_the_target_of_a_guarded_copy_is_not_taken_for_the_sources(path: Path) -> None:
    child = run_child(
        TRUNCATED
        + """
import mmap
other = path.with_name("other")
other.write_bytes(bytes(PAGE))
with other.open("r+b") as handle:
    view = mmap.mmap(handle.fileno(), PAGE)
address = ctypes.addressof(ctypes.c_char.from_buffer(view))
os.truncate(other, 0)
core.penstock_test_guarded_copy(address, data, PAGE)
""",
        path,
        "none",
    )
    assert child.returncode == -signal.SIGBUS


def test_a_signal_that_was_sent_goes_to_the_handler_that_was_there(path: Path) -> None:
    child = run_child(
        """
import signal, sys
heard = []
signal.signal(signal.SIGBUS, lambda number, frame: heard.append(number))
with host_file(Path(sys.argv[1])):
    os.kill(os.getpid(), signal.SIGBUS)
    assert heard == [signal.SIGBUS]
signal.signal(signal.SIGBUS, signal.SIG_IGN)
with host_file(Path(sys.argv[1])):
    os.kill(os.getpid(), signal.SIGBUS)
assert heard == [signal.SIGBUS]
""",
        path,
    )
    assert child.returncode == 0, child.stderr
    assert child.stderr == ""


def test_more_files_than_can_be_told_apart_still_open(path: Path) -> None:
    from contextlib import ExitStack

    with ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(host_file(path))


def register(device: object, file: ctypes.c_void_p, ends: list[int]) -> ctypes.c_void_p:
    registration = ctypes.c_void_p()
    array = (ctypes.c_int64 * len(ends))(*ends)
    host("register", device, file, array, len(ends), ctypes.byref(registration))
    return registration


WHOLE = 6 * PAGE  # CONTENT in whole pages


def test_registration_in_chunks(path: Path) -> None:
    with soft_device(PAGE) as device, host_file(path) as file:
        registration = register(device.driver, file, [PAGE, 3 * PAGE, WHOLE])
        assert (device.counts().registrations, device.counts().registered_bytes) == (3, WHOLE)
        core.penstock_test_unregister(registration)
        assert device.counts().registrations == 0


@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_a_refused_chunk_gives_back_those_before_it(path: Path, chunk: int) -> None:
    ends = [PAGE, 3 * PAGE, WHOLE]
    with soft_device(PAGE) as device, host_file(path) as file:
        device.fail_at(chunk, "register_host")
        with pytest.raises(CoreFailure) as caught:
            register(device.driver, file, ends)
        assert caught.value.code == REGISTRATION
        assert device.counts().registrations == 0
        start, end = ([0, *ends][chunk - 1], ends[chunk - 1])
        for words in (
            str(path),
            f"({len(CONTENT)} bytes)",
            f"chunk {chunk} of 3, bytes {start} to {end}",
            "register_host failed",
            'host_memory="1GiB"',
            "ulimit -l",
        ):
            assert words in str(caught.value)


def test_unregistering_goes_on_after_a_failure(path: Path) -> None:
    with soft_device(PAGE) as device, host_file(path) as file:
        registration = register(device.driver, file, [PAGE, 3 * PAGE, WHOLE])
        device.fail_at(1, "unregister_host")
        core.penstock_test_unregister(registration)
        assert device.failed_call() == "unregister_host"
        assert device.counts().registrations == 0


@pytest.mark.parametrize(
    ("ends", "words"),
    [([], "end at 0"), ([PAGE], "end at"), ([PAGE + 1, WHOLE], "multiple"), ([PAGE, PAGE, WHOLE], "after")],
)
def test_chunks_that_do_not_cover_the_file_are_refused(path: Path, ends: list[int], words: str) -> None:
    with soft_device(PAGE) as device, host_file(path) as file:
        with pytest.raises(CoreFailure, match=words) as caught:
            register(device.driver, file, ends)
        assert caught.value.code == USAGE
        assert device.counts().registrations == 0
