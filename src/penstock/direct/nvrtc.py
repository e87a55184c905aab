"""NVRTC, the compiler that torch's CUDA wheels bring along: found where they put it, called through ctypes."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import sys
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path

from penstock.direct.failures import KernelCompileError
from penstock.direct.source import Source


def nvrtc_candidates(cuda_major: int | None) -> Iterator[Path]:
    """Files that may be NVRTC, those of torch's own CUDA version first.

    CUDA 12 wheels: nvidia/cuda_nvrtc/lib/libnvrtc.so.12. CUDA 13 wheels: nvidia/cu13/lib/libnvrtc.so.13. Wheels with
    everything in them: torch/lib/libnvrtc-<hash>.so.<version>.
    """
    found: list[Path] = []
    nvidia = importlib.util.find_spec("nvidia")
    for folder in (nvidia.submodule_search_locations or ()) if nvidia else ():
        found += Path(folder).glob("cuda_nvrtc/lib/libnvrtc.so.*")
        found += Path(folder).glob("cu*/lib/libnvrtc.so.*")
    torch = importlib.util.find_spec("torch")
    for folder in (torch.submodule_search_locations or ()) if torch else ():
        found += Path(folder).glob("lib/libnvrtc*.so*")
    # NVRTC's own helper libraries have similar names.
    found = [path for path in found if "builtins" not in path.name and ".alt." not in path.name]
    yield from sorted(set(found), key=lambda path: (_major(path) != cuda_major, str(path)))


def _major(path: Path) -> int | None:
    match = re.search(r"\.so\.(\d+)", path.name)
    return int(match.group(1)) if match else None


class Nvrtc:
    """One loaded NVRTC."""

    def __init__(self, library: str | Path) -> None:
        self.path = str(library)
        # NVRTC opens its builtins by name while it compiles, and the loader does not look beside it. So open them
        # first, by path.
        for builtins in sorted(Path(library).parent.glob("libnvrtc-builtins*.so*")) if "/" in self.path else ():
            ctypes.CDLL(str(builtins))
        self._library = ctypes.CDLL(self.path)
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check("nvrtcVersion", self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        self.version = (major.value, minor.value)

    def compile(self, source: Source, architecture: str, options: tuple[str, ...]) -> tuple[bytes, str]:
        """The cubin and the compiler's log."""
        program = ctypes.c_void_p()
        count = len(source.headers)
        texts = (ctypes.c_char_p * count)(*(text.encode() for _, text in source.headers))
        names = (ctypes.c_char_p * count)(*(name.encode() for name, _ in source.headers))
        created = self._library.nvrtcCreateProgram(
            ctypes.byref(program), source.text.encode(), source.name.encode(), count, texts, names
        )
        self._check("nvrtcCreateProgram", created)
        try:
            every = (f"--gpu-architecture={architecture}", "--std=c++17", *options)
            arguments = (ctypes.c_char_p * len(every))(*(option.encode() for option in every))
            compiled = self._library.nvrtcCompileProgram(program, len(every), arguments)
            log = self._read(program, "ProgramLog").rstrip(b"\0").decode(errors="replace").strip()
            if compiled:
                raise KernelCompileError(
                    f"NVRTC {self.version[0]}.{self.version[1]} refused {source.name} for {architecture} "
                    f"({self._error(compiled)}):\n{log}"
                )
            return self._read(program, "CUBIN"), log
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _read(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(f"nvrtcGet{what}Size", getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(f"nvrtcGet{what}", getattr(self._library, f"nvrtcGet{what}")(program, buffer))
        return buffer.raw

    def _error(self, code: int) -> str:
        text: bytes = self._library.nvrtcGetErrorString(code)
        return text.decode()

    def _check(self, call: str, code: int) -> None:
        if code:
            raise KernelCompileError(f"{call} failed: {self._error(code)} ({code})")


@lru_cache
def load_nvrtc(cuda_major: int | None) -> Nvrtc:
    """The NVRTC of torch's CUDA version, else of another; from the loader's search path if no wheel has one."""
    tried: list[str] = []
    names = [f"libnvrtc.so.{cuda_major}"] if cuda_major else []
    candidates: list[str | Path] = [*nvrtc_candidates(cuda_major), *names, "libnvrtc.so"]
    for candidate in candidates:
        try:
            return Nvrtc(candidate)
        except OSError as error:
            tried.append(f"{candidate} ({error})")
    raise KernelCompileError(
        "NVRTC was not found. It comes with torch's CUDA wheels (nvidia-cuda-nvrtc); looked for: " + "; ".join(tried)
    )


@cache
def cubin_of(nvrtc: Nvrtc, source: Source, architecture: str, options: tuple[str, ...]) -> bytes:
    """Compiled once for each text, target and set of options."""
    return nvrtc.compile(source, architecture, options)[0]


def cuda_major_of_torch() -> int | None:
    """The CUDA major version of the loaded torch; None for a build without CUDA."""
    torch = sys.modules.get("torch")
    version = getattr(getattr(torch, "version", None), "cuda", None)
    return int(str(version).split(".")[0]) if version else None
