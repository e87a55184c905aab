"""The checks of `penstock doctor`. Whatever may crash or hang is tried in a child process."""

from __future__ import annotations

import platform
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from penstock.cli.children import ChildFailure, ask_child
from penstock.cli.units import short_bytes, short_rate
from penstock.torch_private.versions import TESTED, is_tested

Status = Literal["pass", "warn", "fail"]

_TIMEOUT_S = 120.0
_DRIVER_TIMEOUT_S = 60.0
_LEAST_FREE_BYTES = 1 << 30
_WITHOUT_GPU = "inspect, plan, export and run work for the CPU; programs for CUDA need a GPU to compile and to run"

_TORCH = """
import json, torch
torch_found = {"version": torch.__version__, "cuda": torch.version.cuda, "sees": torch.cuda.is_available()}
print(json.dumps({"torch": torch_found}))
"""

_DRIVER = """
import ctypes, json
def call(name, *arguments):
    code = getattr(cuda, name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        cuda.cuGetErrorString(code, ctypes.byref(text))
        raise SystemExit(f"{name} failed: {text.value.decode() if text.value else code}")
try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError as error:
    print(json.dumps({"missing": str(error)}))
    raise SystemExit(0)
call("cuInit", 0)
version, count = ctypes.c_int(), ctypes.c_int()
call("cuDriverGetVersion", ctypes.byref(version))
call("cuDeviceGetCount", ctypes.byref(count))
gpus = []
for index in range(count.value):
    device, name, total, maps = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_size_t(), ctypes.c_int()
    call("cuDeviceGet", ctypes.byref(device), index)
    call("cuDeviceGetName", name, 256, device)
    call("cuDeviceTotalMem_v2", ctypes.byref(total), device)
    call("cuDeviceGetAttribute", ctypes.byref(maps), 102, device)  # virtual memory management
    gpus.append({"name": name.value.decode(), "bytes": total.value, "maps": bool(maps.value)})
print(json.dumps({"version": version.value, "gpus": gpus}))
"""

_LINK = """
import json, time, torch
nbytes, copies = 256 << 20, 8
host = torch.ones(nbytes, dtype=torch.uint8).pin_memory()
there = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
rates = []
for _ in range(4):
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(copies):
        there.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    rates.append(nbytes * copies / (time.perf_counter() - began))
print(json.dumps({"bytes_per_s": max(rates[1:])}))
"""

# Importing torch takes seconds, so one process reports on both torch and the compiler.
_COMPILER = f"""{_TORCH}
from penstock.errors import ToolchainError
from penstock.export.toolchain import check_toolchain
try:
    found = check_toolchain()
    built = {{"compiler": found.compiler, "version": found.version}}
except ToolchainError as error:
    built = {{"problem": str(error).splitlines()[0], "all": str(error)}}
print(json.dumps({{"torch": torch_found, **built}}))
"""


@dataclass(frozen=True)
class Line:
    name: str
    status: Status
    finding: str
    # What to do about it, or what works all the same; None if everything is well.
    remedy: str | None = None


class Doctor:
    """Later checks build on earlier ones: without a driver, the link is not checked."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # The answer of the process that tried the compiler, or how that process failed.
        self._compiler: dict[str, Any] | ChildFailure | None = None
        self._gpus: list[dict[str, Any]] = []
        self._torch_sees_gpu = False

    def lines(self) -> Iterator[Line]:
        for check in (
            self.python,
            self.core,
            self.torch,
            self.compiler,
            self.driver,
            self.gpu,
            self.link,
            self.registration,
            self.host_memory,
            self.locked_memory,
            self.disk,
        ):
            yield check()

    def python(self) -> Line:
        found = f"{platform.python_version()} ({sys.executable}) on {platform.system()} {platform.machine()}"
        if platform.system() != "Linux":
            return Line("python", "fail", found, "Penstock runs on Linux only")
        return Line("python", "pass", found)

    def core(self) -> Line:
        from penstock.native import library_path

        code = "import json, penstock.native as n; n.core(); print(json.dumps({}))"
        remedy = "reinstall penstock, or build it beside the sources with `make native`"
        return _tried("native core", code, remedy, lambda _: Line("native core", "pass", str(library_path())))

    def torch(self) -> Line:
        try:
            self._compiler = ask_child(_COMPILER, timeout_s=_TIMEOUT_S)
        except ChildFailure as failure:
            self._compiler = failure

        def judge(answer: dict[str, Any]) -> Line:
            found = answer["torch"]
            self._torch_sees_gpu = found["sees"]
            text = f"{found['version']}, " + (f"CUDA {found['cuda']}" if found["cuda"] else "for the CPU only")
            if not is_tested(found["version"]):
                return Line("torch", "fail", text, f"install a release of torch {', '.join(TESTED)}")
            return Line("torch", "pass", text)

        if isinstance(self._compiler, dict):
            return judge(self._compiler)
        return _tried("torch", _TORCH, "pip install torch", judge)

    def compiler(self) -> Line:
        found = self._compiler
        if not isinstance(found, dict):
            return Line(
                "C++ compiler", "fail", str(found), "repair torch first, or set CXX to a working g++ or clang++"
            )
        if "problem" in found:
            return Line("C++ compiler", "fail", found["problem"], found["all"].splitlines()[-1])
        text = f"{found['compiler']}: {found['version']}; built, loaded and called a library"
        return Line("C++ compiler", "pass", text)

    def driver(self) -> Line:
        def judge(found: dict[str, Any]) -> Line:
            if "missing" in found:
                return Line("driver", "warn", f"no CUDA driver: {found['missing']}", _WITHOUT_GPU)
            self._gpus = found["gpus"]
            major, minor = found["version"] // 1000, found["version"] % 1000 // 10
            return Line("driver", "pass", f"libcuda.so.1, for CUDA up to {major}.{minor}")

        return _tried("driver", _DRIVER, "repair the NVIDIA driver; without it: " + _WITHOUT_GPU, judge, "warn")

    def gpu(self) -> Line:
        if not self._gpus:
            return Line("GPU", "warn", "none", _WITHOUT_GPU)
        found = ", ".join(f"{gpu['name']} ({short_bytes(gpu['bytes'])})" for gpu in self._gpus)
        if not all(gpu["maps"] for gpu in self._gpus):
            return Line("GPU", "fail", f"{found}: without virtual memory management", 'use placement="lru"')
        if not self._torch_sees_gpu:
            return Line("GPU", "warn", f"{found}; torch does not see it", "install a torch built for CUDA")
        return Line("GPU", "pass", found)

    def link(self) -> Line:
        if not self._torch_sees_gpu:
            return Line("link", "warn", "not measured: no GPU that torch sees", "give `penstock plan` a --link")
        return _tried(
            "link",
            _LINK,
            "run it again with nothing else on the GPU",
            lambda found: Line("link", "pass", f"{short_rate(found['bytes_per_s'])} from pinned memory"),
        )

    def registration(self) -> Line:
        from penstock.errors import RegistrationError
        from penstock.runtime.registration_probe import RegistrationProbe

        name = "registration"
        if not self._gpus:
            return Line(name, "warn", "not tried: no GPU", "programs for the CPU need none")
        try:
            with tempfile.NamedTemporaryFile(dir=self._folder, prefix=".penstock-doctor-") as file:
                file.write(bytes(1 << 16))
                file.flush()
                with closing(RegistrationProbe(file.name, 0)) as probe:
                    probe.require()
        except RegistrationError as error:
            return Line(name, "warn", str(error), 'use host_memory="1GiB"')
        except OSError as error:
            return Line(name, "fail", f"no file can be written to {self._folder}: {error}", "give another --folder")
        return Line(name, "pass", f"a mapped file in {self._folder} can be registered")

    def host_memory(self) -> Line:
        from penstock.errors import HostMemoryError
        from penstock.runtime.host_memory import memory_limit_bytes

        try:
            limit = memory_limit_bytes()
        except HostMemoryError as error:
            return Line("host memory", "fail", str(error), "mount /proc")
        found = f"{short_bytes(limit.available_bytes)} can be held, according to {limit.source}"
        if limit.available_bytes < _LEAST_FREE_BYTES:
            return Line("host memory", "warn", found, 'free memory, raise the limit, or use host_memory="1GiB"')
        return Line("host memory", "pass", found)

    def locked_memory(self) -> Line:
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        if soft == resource.RLIM_INFINITY:
            return Line("locked memory", "pass", "RLIMIT_MEMLOCK is unlimited")
        found = f"RLIMIT_MEMLOCK is {short_bytes(soft)}"
        if self._gpus:
            remedy = 'if loading is refused with RegistrationError: `ulimit -l unlimited`, or host_memory="1GiB"'
            return Line("locked memory", "warn", found, remedy)
        return Line("locked memory", "pass", f"{found}; without a GPU nothing is locked")

    def disk(self) -> Line:
        places = dict.fromkeys((self._folder, Path(tempfile.gettempdir())))
        free = {path: shutil.disk_usage(path).free for path in places}
        found = ", ".join(f"{short_bytes(nbytes)} free in {path}" for path, nbytes in free.items())
        if min(free.values()) < _LEAST_FREE_BYTES:
            return Line("disk", "warn", found, "free some: compiling takes 1 GiB, an export the size of the weights")
        return Line("disk", "pass", found)


def measured_link_bytes_per_s() -> float:
    """Measured from pinned memory, in a child process. Raises ChildFailure if that fails."""
    return float(ask_child(_LINK, timeout_s=_TIMEOUT_S)["bytes_per_s"])


def _tried(name: str, code: str, remedy: str, judge: Callable[[dict[str, Any]], Line], failed: Status = "fail") -> Line:
    try:
        return judge(ask_child(code, timeout_s=_DRIVER_TIMEOUT_S if name == "driver" else _TIMEOUT_S))
    except ChildFailure as failure:
        return Line(name, failed, str(failure), remedy)
