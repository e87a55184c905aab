"""Asking, in a process of its own, whether a file can be registered with a device at all."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path

import pytest

from penstock.errors import RegistrationError
from penstock.runtime.driver import open_soft_driver
from penstock.runtime.interrupts import HeldInterrupts
from penstock.runtime.registration_probe import RegistrationProbe
from penstock.runtime.session import FileSource, Session
from tests.native.driver import DriverFailure, Failure, WrappedDriver, wrap
from tests.native.probing import Answers, Probe, shipped_program

PAGE = os.sysconf("SC_PAGESIZE")


@pytest.fixture
def answers() -> Iterator[Answers]:
    with closing(Answers()) as made:
        yield made


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "a.ptd"
    path.write_bytes(b"x" * PAGE)
    return path


def child(tmp_path: Path, body: str) -> Path:
    """A program that behaves like a probe would, and counts how often it was started."""
    script = tmp_path / "child.py"
    script.write_text(
        f"#!{sys.executable}\nimport os, signal, sys\nopen({str(tmp_path / 'starts')!r}, 'a').write('x')\n{body}\n"
    )
    script.chmod(0o755)
    return script


def starts(tmp_path: Path) -> int:
    return len((tmp_path / "starts").read_text())


def says_pid(pid_file: Path) -> str:
    return f"open({str(pid_file)!r}, 'w').write(str(os.getpid()))\n"


def is_gone(pid_file: Path) -> bool:
    """Ended, and reaped."""
    try:
        os.kill(int(pid_file.read_text()), 0)
    except ProcessLookupError:
        return True
    return False


def ask(answers: Answers, path: Path, device_index: int, program: Path, timeout_s: float = 30.0) -> None:
    with Probe(answers, path, device_index, program, timeout_s=timeout_s) as probe:
        probe.require()


def test_a_probe_that_passes_is_asked_once_per_device(tmp_path: Path, weights: Path, answers: Answers) -> None:
    program = child(tmp_path, f"assert sys.argv[1] == {str(weights)!r} and sys.argv[2] in '01'")
    other = tmp_path / "b.ptd"
    other.write_bytes(b"y")
    ask(answers, weights, 0, program)
    ask(answers, weights, 0, program)
    ask(answers, other, 0, program)
    assert starts(tmp_path) == 1
    ask(answers, weights, 1, program)
    assert starts(tmp_path) == 2


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("print('noise'); print('cuMemHostRegister_v2 failed: not supported (801)'); sys.exit(3)", ": cuMemHostReg"),
        ("raise RuntimeError('boom')", "ended with code 1: RuntimeError: boom"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "ended by signal 11 (Segmentation fault): it said nothing"),
        ("print('x' * 100_000); print('the end'); sys.exit(3)", ": the end;"),
        # It goes on after it has said all.
        ("print('late', flush=True); os.close(1); os.close(2); signal.sigtimedwait([], 0.2); os._exit(3)", ": late;"),
    ],
)
def test_a_probe_that_fails_says_why_and_what_to_do(
    tmp_path: Path, weights: Path, answers: Answers, body: str, words: str
) -> None:
    program = child(tmp_path, body)
    for _ in range(2):
        with pytest.raises(DriverFailure) as caught:
            ask(answers, weights, 3, program)
        assert caught.value.failure == Failure.REGISTRATION
        for part in (words, f"weights file {weights} ", "device 3", 'host_memory="1GiB"', "host_memory_cap for a .pte"):
            assert part in str(caught.value)
    assert starts(tmp_path) == 1


def test_a_probe_that_hangs_is_killed(tmp_path: Path, weights: Path, answers: Answers) -> None:
    pid_file = tmp_path / "pid"
    body = says_pid(pid_file) + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: signal.pause()"
    with pytest.raises(DriverFailure, match=r"did not return within 0\.5 s: the driver hangs .*was killed"):
        ask(answers, weights, 0, child(tmp_path, body), timeout_s=0.5)
    # Killed before it got that far, or killed and reaped.
    assert not pid_file.exists() or is_gone(pid_file)


def test_a_probe_is_begun_before_it_is_asked_and_goes_if_nobody_asks(
    tmp_path: Path, weights: Path, answers: Answers
) -> None:
    pid_file = tmp_path / "pid"

    def begun(name: str, then: str) -> Probe:
        """Once its child has begun; nobody has asked yet. Each has a pipe of its own: the other's end may be open."""
        pipe = tmp_path / name
        os.mkfifo(pipe)
        body = says_pid(pid_file) + f"open({str(pipe)!r}, 'w').close()\n"
        probe = Probe(answers, weights, 0, child(tmp_path, body + then))
        pipe.open().close()
        return probe

    with begun("first", "") as first, begun("second", "while True: signal.pause()") as second:
        first.require()
        second.require()  # has the first one's answer
    assert is_gone(pid_file) and starts(tmp_path) == 2
    ask(answers, weights, 0, child(tmp_path, "sys.exit(3)"))
    assert starts(tmp_path) == 2


def test_who_waits_can_give_up_which_leaves_no_process_and_no_answer(
    tmp_path: Path, weights: Path, answers: Answers
) -> None:
    pid_file = tmp_path / "pid"
    with (
        Probe(answers, weights, 0, child(tmp_path, says_pid(pid_file) + "while True: signal.pause()")) as probe,
        pytest.raises(DriverFailure, match="given up while") as caught,
    ):
        probe.require(lambda: pid_file.exists() and bool(pid_file.read_text()))
    assert caught.value.failure == Failure.USAGE and is_gone(pid_file)
    ask(answers, weights, 0, child(tmp_path, ""))


def test_no_descriptor_is_left(tmp_path: Path, weights: Path, answers: Answers) -> None:
    folder = Path("/proc/self/fd")
    gc.collect()  # what earlier tests have left goes now, and not while this one counts
    before = sorted(path.name for path in folder.iterdir())
    for device_index, body in enumerate(("", "sys.exit(3)", "while True: signal.pause()")):
        program = child(tmp_path, body)
        with Probe(answers, weights, device_index, program):
            pass  # nobody asks
        if device_index:
            with pytest.raises(DriverFailure):
                ask(answers, weights, device_index, program, timeout_s=0.2)
        else:
            ask(answers, weights, device_index, program)
    with pytest.raises(DriverFailure, match="cannot be started: No such file"):
        ask(answers, weights, 3, tmp_path / "absent")
    assert sorted(path.name for path in folder.iterdir()) == before


def test_a_process_that_ignores_its_children_goes_by_what_they_say(
    tmp_path: Path, weights: Path, answers: Answers
) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        ask(answers, weights, 0, child(tmp_path, "print('one page was registered and unregistered')"))
        with pytest.raises(DriverFailure, match=": no such device;"):
            ask(answers, weights, 1, child(tmp_path, "print('no such device'); sys.exit(3)"))
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_file_that_is_not_there(tmp_path: Path, answers: Answers) -> None:
    with pytest.raises(DriverFailure, match="cannot be examined: No such file") as caught:
        ask(answers, tmp_path / "absent", 0, child(tmp_path, ""))
    assert caught.value.failure == Failure.HOST_READ


FAKE_DRIVER = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static int say(const char* name) {
  fprintf(stderr, "%s\n", name);
  const char* fail = getenv("FAKE_FAIL");
  while (fail && !strcmp(fail, "hang")) pause();
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


def refused_by_the_shipped(answers: Answers, path: Path, device_index: int) -> str:
    with pytest.raises(DriverFailure) as caught:
        ask(answers, path, device_index, shipped_program())
    return str(caught.value)


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
def test_the_shipped_program_against_a_driver(
    weights: Path,
    answers: Answers,
    fake_driver: Path,
    monkeypatch: pytest.MonkeyPatch,
    setting: dict[str, str],
    words: str | None,
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fake_driver))
    for name, value in setting.items():
        monkeypatch.setenv(name, value)
    if words is None:
        ask(answers, weights, 2, shipped_program())
    else:
        assert f"{words};" in refused_by_the_shipped(answers, weights, 2)


def test_the_shipped_program_and_a_file_it_cannot_map(
    tmp_path: Path, answers: Answers, fake_driver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fake_driver))
    empty = tmp_path / "empty.ptd"
    empty.touch()
    assert ": one page of it could not be mapped: the file is empty;" in refused_by_the_shipped(answers, empty, 0)
    done = subprocess.run([shipped_program(), tmp_path / "absent", "0"], capture_output=True, text=True, check=False)
    assert done.returncode == 3 and done.stdout == "one page of it could not be mapped: No such file or directory\n"


@pytest.mark.parametrize(("device_index", "holds"), [(1001, False), (1002, True)])
def test_an_interrupt_gives_up_and_is_raised(
    weights: Path, fake_driver: Path, monkeypatch: pytest.MonkeyPatch, device_index: int, holds: bool
) -> None:
    """From Python, whether interrupts are held or not. The devices are such as no other test asks for: the process
    remembers."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fake_driver))
    monkeypatch.setenv("FAKE_FAIL", "hang")
    interrupt = threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT))
    with closing(RegistrationProbe(weights, device_index)) as probe, pytest.raises(KeyboardInterrupt):
        with HeldInterrupts() if holds else nullcontext():
            interrupt.start()
            probe.require()


def test_a_session_over_a_gpu_asks_first(weights: Path, fake_driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fake_driver))
    monkeypatch.setenv("FAKE_FAIL", "cuMemHostRegister_v2")
    source, staged = FileSource(weights, ((0, 1),), None, 0), FileSource(weights, ((0, 1),), 1 << 20, 0)

    def opened(device_index: int | None, source: FileSource, probe: RegistrationProbe | None = None) -> None:
        with closing(open_soft_driver(PAGE)) as driver:
            assert driver.handle is not None
            driver.handle = wrap(driver.handle)
            if device_index is not None:
                WrappedDriver(driver.handle).set_probed_device(device_index)
            Session.opened(driver, source, lru=False, device_index=0, poison=False, probe=probe).close()

    opened(None, source)
    opened(2, staged)
    with pytest.raises(RegistrationError, match=r"cannot be registered with device 2: cuMemHostRegister_v2 failed"):
        opened(2, source)
    with closing(RegistrationProbe(weights, 2)) as probe, pytest.raises(RegistrationError):
        opened(2, source, probe)
