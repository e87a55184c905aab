from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ToolchainError
from penstock.export import toolchain
from penstock.export.toolchain import Toolchain, check_toolchain, needed_libraries
from penstock.torch_private import cpp_compiler as private_torch

GXX = shutil.which("g++")
pytestmark = pytest.mark.skipif(GXX is None, reason="needs g++ to wrap")

Install = Callable[[str], Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Makes Inductor find a compiler that is a shell script: it answers --version, then runs `body`."""
    monkeypatch.setattr(toolchain, "_checked", {})

    def install(body: str) -> Path:
        script = tmp_path / "c++"
        script.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo "test compiler 1.0"; exit 0; fi\n{body}\n')
        script.chmod(0o755)
        monkeypatch.setattr(toolchain, "cpp_compiler", lambda: str(script))
        return script

    return install


def instead(tmp_path: Path, code: str) -> str:
    """The body of a compiler that builds `code` whatever it is given; the last argument is the output."""
    source = tmp_path / "instead.cpp"
    source.write_text(f"#include <iostream>\n#include <cstdlib>\n{code}")
    return f'for output; do :; done\nexec {GXX} -shared -fPIC -Wl,--no-as-needed {source} -o "$output"'


def refused() -> str:
    with pytest.raises(ToolchainError) as caught:
        check_toolchain()
    return str(caught.value)


def test_inductor_still_has_get_cpp_compiler() -> None:
    from torch._inductor import cpp_builder

    assert "get_cpp_compiler" in vars(cpp_builder), "torch._inductor.cpp_builder.get_cpp_compiler is gone"
    assert not inspect.signature(cpp_builder.get_cpp_compiler).parameters
    assert isinstance(private_torch.cpp_compiler(), str)


def test_a_working_compiler_is_tried_once(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    script = install(f'exec {GXX} "$@"')
    commands: list[tuple[str, ...]] = []
    run = toolchain._run

    def counted(command: list[str], **env: str) -> object:
        commands.append(tuple(command))
        return run(command, **env)

    monkeypatch.setattr(toolchain, "_run", counted)
    assert check_toolchain() == Toolchain(str(script), "test compiler 1.0")
    assert len(commands) == 3  # version, build, call
    assert check_toolchain() == Toolchain(str(script), "test compiler 1.0")
    assert len(commands) == 3


def test_another_mtime_or_cxx_is_another_compiler(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    script = install("exit 1")
    tried: list[str] = []

    def try_out(compiler: str) -> Toolchain:
        tried.append(compiler)
        return Toolchain(compiler, "")

    monkeypatch.setattr(toolchain, "_try_out", try_out)
    monkeypatch.delenv("CXX", raising=False)
    check_toolchain()
    check_toolchain()
    assert len(tried) == 1
    os.utime(script, ns=(1, 1))
    check_toolchain()
    assert len(tried) == 2
    monkeypatch.setenv("CXX", str(script))
    check_toolchain()
    assert len(tried) == 3


def test_static_libstdcxx_is_refused(install: Install) -> None:
    archive = subprocess.run([str(GXX), "-print-file-name=libstdc++.a"], capture_output=True, text=True, check=True)
    if not Path(archive.stdout.strip()).is_absolute():
        pytest.skip("there is no libstdc++.a to link")
    script = install(f'exec {GXX} -static-libstdc++ "$@"')
    message = refused()
    assert message.startswith(f"the C++ compiler {script} links the C++ runtime statically")
    assert f"command: {script} -std=c++17" in message
    assert "Set CXX" in message


def test_a_crash_while_loading_is_an_error(install: Install, tmp_path: Path) -> None:
    code = 'static int crash = (std::cerr << "about to die" << std::endl, std::abort(), 0);'
    script = install(instead(tmp_path, code))
    message = refused()
    assert f"the C++ compiler {script} builds a library that fails when it is loaded and called beside torch" in message
    assert "killed by signal 6" in message
    assert "about to die" in message
    assert "Set CXX" in message


def test_wrong_answers_are_an_error(install: Install, tmp_path: Path) -> None:
    install(instead(tmp_path, 'extern "C" int penstock_probe(const char*) { std::cout << std::flush; return 5; }'))
    message = refused()
    assert "exit status 1" in message
    assert "the library answers [5, 5, 5], not [7, -1, -2]" in message


def test_a_failed_build_shows_the_first_lines_only(install: Install) -> None:
    script = install("for i in $(seq 100); do echo problem $i >&2; done; exit 3")
    message = refused()
    assert f"the C++ compiler {script} cannot build a shared library: exit status 3" in message
    assert "problem 1\n" in message and "problem 12\n" in message and "problem 13" not in message
    assert "88 more lines" in message


def test_a_build_that_leaves_nothing_or_no_library(install: Install) -> None:
    install("exit 0")
    assert "reports success but builds nothing: exit status 0" in refused()
    install('for output; do :; done; echo "not a library" > "$output"')
    assert "probe.so is not a 64-bit ELF file" in refused()


def test_a_build_that_never_ends_is_stopped_with_its_children(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The second cat is a child of the script and holds its pipes: were it left alone, this would wait for it.
    started, never = tmp_path / "started", tmp_path / "never"
    for pipe in (started, never):
        os.mkfifo(pipe)
    install(f"echo yes > {started}; cat {never}; exit 0")
    genuine = subprocess.Popen.communicate

    def hurried(self: Any, *arguments: Any, timeout: float | None = None) -> Any:
        """The time is up when the build has begun, however slow the machine is."""
        if timeout is not None and "--version" not in self.args:
            assert started.read_text() == "yes\n"
            raise subprocess.TimeoutExpired(self.args, timeout)
        return genuine(self, *arguments, timeout=None)

    monkeypatch.setattr(subprocess.Popen, "communicate", hurried)
    assert "cannot build a shared library: no end within 120 s" in refused()


def test_a_failure_is_not_remembered(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    script = install("exit 3")
    refused()
    monkeypatch.setattr(toolchain, "_try_out", lambda compiler: Toolchain(compiler, "repaired"))
    assert check_toolchain() == Toolchain(str(script), "repaired")


def test_a_compiler_that_cannot_be_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied() -> str:
        raise PermissionError(13, "Permission denied", "/some/folder")

    monkeypatch.setattr(toolchain, "cpp_compiler", denied)
    assert "/some/folder" in refused()
    monkeypatch.setattr(toolchain, "cpp_compiler", lambda: "no-such-compiler-anywhere")
    assert "'no-such-compiler-anywhere' is not an executable on the PATH" in refused()


def test_a_missing_compiler_through_inductor_itself() -> None:
    # In a process of its own: Inductor reads CXX once, when it is imported.
    code = "from penstock.export.toolchain import check_toolchain; check_toolchain()"
    env = {**os.environ, "CXX": "/nonexistent/g++", "PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert child.returncode == 1
    assert "penstock.errors.ToolchainError: no C++ compiler" in child.stderr
    assert "CXX is '/nonexistent/g++'" in child.stderr


def test_needed_libraries_are_those_readelf_lists() -> None:
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("needs readelf to compare with")
    library = Path(os.path.realpath(sys.executable))
    listing = subprocess.run([readelf, "-dW", str(library)], capture_output=True, text=True, check=True).stdout
    assert needed_libraries(library) == re.findall(r"\(NEEDED\)\s+Shared library: \[(.+)\]", listing)


@pytest.mark.parametrize("keep_bytes", [0, 3, 16, 63, 64, 200])
def test_a_cut_off_library_is_refused(tmp_path: Path, keep_bytes: int) -> None:
    cut = tmp_path / "cut.so"
    cut.write_bytes(Path(os.path.realpath(sys.executable)).read_bytes()[:keep_bytes])
    with pytest.raises(ValueError, match=r"cut\.so is"):
        needed_libraries(cut)
