"""The preflight of the C++ compiler: what it builds must load and run beside torch.

AOTInductor builds a shared library and loads it into the process. A compiler that links libstdc++ statically builds a
library with a second copy of the C++ runtime, which shares only some symbols with torch's copy: std::regex then ends in
std::bad_cast, and the process dies while the package loads. Found here, it is an error with a remedy.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ToolchainError
from penstock.temporary import TemporaryFolder
from penstock.torch_private.cpp_compiler import cpp_compiler

TIMEOUT_S = 120.0
_SHOWN_STDERR_LINES = 12
_REMEDY = (
    "Set CXX to a g++ or clang++ that links the C++ runtime dynamically and supports OpenMP (the system's own does, "
    "as in CXX=/usr/bin/g++), before Python starts: Inductor reads it once"
)

# The device string is parsed the way an AOTInductor package parses it when it loads.
_SOURCE = r"""
#include <iostream>
#include <regex>
#include <sstream>
#include <stdexcept>
#include <string>

extern "C" int penstock_probe(const char* text) {
  const std::string device(text);
  const std::regex pattern("(cpu|cuda|xpu|mps)(:([0-9]+))?");
  std::smatch match;
  try {
    if (!std::regex_match(device, match, pattern)) {
      throw std::runtime_error("invalid device: " + device);
    }
  } catch (const std::exception& error) {
    std::ostringstream message;
    message << error.what() << std::endl;
    return message.str().empty() ? -3 : -2;
  }
  int threads = 0;
#pragma omp parallel for reduction(+ : threads) num_threads(2)
  for (int i = 0; i < 2; ++i) {
    threads += 1;
  }
  std::cout << std::flush;
  return threads != 2 ? -4 : match[3].matched ? std::stoi(match[3].str()) : -1;
}
"""

# A process of its own, because a bad library kills the process that calls it. torch comes first, as it does in use.
_CHILD = """
import ctypes, resource, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
import torch
probe = ctypes.CDLL(sys.argv[1]).penstock_probe
answers = [probe(text) for text in (b"cuda:7", b"cpu", b"bogus")]
if answers != [7, -1, -2]:
    sys.exit(f"the library answers {answers}, not [7, -1, -2]")
"""


@dataclass(frozen=True)
class Toolchain:
    """A compiler whose libraries were built, loaded and called beside torch."""

    compiler: str
    version: str


@dataclass(frozen=True)
class _Outcome:
    command: tuple[str, ...]
    # As subprocess gives it: negative for a signal. None when the time ran out.
    status: int | None
    stdout: str
    stderr: str


# Successes only: after a failure the user repairs something, and the next call must see it.
_checked: dict[tuple[str, str | None, int], Toolchain] = {}


def check_toolchain() -> Toolchain:
    """The compiler that Inductor will use, after a trial; ToolchainError if it is missing or unusable."""
    compiler = _find_compiler()
    key = (compiler, os.environ.get("CXX"), Path(compiler).stat().st_mtime_ns)
    if key not in _checked:
        _checked[key] = _try_out(compiler)
    return _checked[key]


def _find_compiler() -> str:
    try:
        name = cpp_compiler()
    except (RuntimeError, OSError) as error:
        raise ToolchainError(
            f"no C++ compiler: Inductor found none that answers --version (CXX is {os.environ.get('CXX')!r}): "
            f"{error}. {_REMEDY}."
        ) from error
    path = shutil.which(name)
    if path is None:
        raise ToolchainError(f"no C++ compiler: {name!r} is not an executable on the PATH. {_REMEDY}.")
    return str(Path(path).absolute())


def _try_out(compiler: str) -> Toolchain:
    version = _run([compiler, "--version"])
    if version.status != 0:
        raise _failure(compiler, "does not answer --version", version)
    with TemporaryFolder("toolchain") as folder:
        source, library = folder / "probe.cpp", folder / "probe.so"
        source.write_text(_SOURCE)
        built = _run([compiler, "-std=c++17", "-fPIC", "-shared", "-fopenmp", str(source), "-o", str(library)])
        if built.status != 0:
            raise _failure(compiler, "cannot build a shared library", built)
        if not library.is_file():
            raise _failure(compiler, "reports success but builds nothing", built)
        _check_linkage(compiler, built, library)
        # The child must find the same torch as this process, wherever its path came from.
        path = os.pathsep.join(map(os.path.abspath, sys.path))
        called = _run([sys.executable, "-c", _CHILD, str(library)], PYTHONPATH=path)
        if called.status != 0:
            what = (
                f"builds a library that fails when it is loaded and called beside torch ({shlex.join(built.command)})"
            )
            raise _failure(compiler, what, called)
    return Toolchain(compiler, (version.stdout.splitlines() or [""])[0].strip())


def _check_linkage(compiler: str, built: _Outcome, library: Path) -> None:
    try:
        needed = needed_libraries(library)
    except ValueError as error:
        raise _failure(compiler, f"builds something that cannot be loaded: {error}", built) from error
    # Refused even if it happens not to crash: whether it does depends on which symbols the two copies share.
    if not any(name.startswith(("libstdc++.so", "libc++.so")) for name in needed):
        what = f"links the C++ runtime statically, which crashes beside torch's (the library needs only {needed})"
        raise _failure(compiler, what, built)


def needed_libraries(library: Path) -> list[str]:
    """The DT_NEEDED entries of a 64-bit ELF file; ValueError if it is not one."""
    data = library.read_bytes()
    if data[:5] != b"\x7fELF\x02" or data[5:6] not in (b"\x01", b"\x02"):
        raise ValueError(f"{library.name} is not a 64-bit ELF file")
    order = "<" if data[5] == 1 else ">"
    try:
        return _read_needed(data, order)
    except (struct.error, StopIteration, ValueError) as error:
        raise ValueError(f"{library.name} is a damaged ELF file, or has no dynamic section") from error


def _read_needed(data: bytes, order: str) -> list[str]:
    (table,) = struct.unpack_from(f"{order}Q", data, 0x20)
    entry_bytes, count = struct.unpack_from(f"{order}HH", data, 0x36)
    # For each program header: type, flags, file offset, address, physical address, bytes in the file.
    segments = [struct.unpack_from(f"{order}IIQQQQ", data, table + index * entry_bytes) for index in range(count)]
    loaded, dynamic = 1, 2
    begin, size = next((s[2], s[5]) for s in segments if s[0] == dynamic)
    entries = [struct.unpack_from(f"{order}qQ", data, at) for at in range(begin, begin + size, 16)]
    end_tag, needed_tag, strings_tag = 0, 1, 5
    entries = entries[: next(index for index, entry in enumerate(entries) if entry[0] == end_tag)]
    # The string table is given by its address in memory, which a loaded segment maps to a place in the file.
    address = next(value for tag, value in entries if tag == strings_tag)
    strings = next(address - s[3] + s[2] for s in segments if s[0] == loaded and s[3] <= address < s[3] + s[5])
    starts = [strings + value for tag, value in entries if tag == needed_tag]
    return [data[start : data.index(b"\0", start)].decode() for start in starts]


def _run(command: Sequence[str], **env: str) -> _Outcome:
    # A session of its own: a compiler is often a script, and on a timeout its children must go too. They would also
    # hold the pipes open, so that waiting for the end of the output would outlast the timeout.
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        env={**os.environ, **env},
        start_new_session=True,
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            _kill_group(process.pid)
            stdout, stderr = process.communicate()
            return _Outcome(tuple(command), None, stdout, stderr)
        except BaseException:
            _kill_group(process.pid)
            raise
    return _Outcome(tuple(command), process.returncode, stdout, stderr)


def _kill_group(pid: int) -> None:
    # An interrupt at the terminal may have ended it already.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _failure(compiler: str, what: str, outcome: _Outcome) -> ToolchainError:
    if outcome.status is None:
        status = f"no end within {TIMEOUT_S:g} s"
    elif outcome.status < 0:
        status = f"killed by signal {-outcome.status} ({signal.strsignal(-outcome.status)})"
    else:
        status = f"exit status {outcome.status}"
    lines = outcome.stderr.strip().splitlines()
    if len(lines) > _SHOWN_STDERR_LINES:
        lines = [*lines[:_SHOWN_STDERR_LINES], f"... {len(lines) - _SHOWN_STDERR_LINES} more lines"]
    stderr = "\n  ".join(lines) or "(empty)"
    return ToolchainError(
        f"the C++ compiler {compiler} {what}: {status}\n"
        f"command: {shlex.join(outcome.command)}\nstderr:\n  {stderr}\n{_REMEDY}."
    )
