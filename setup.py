"""Builds the native core with a plain C++ compiler. Everything else stands in pyproject.toml.

The core is a C ABI library, not a Python extension: compiled programs call into it directly.
`python setup.py build_ext --inplace` puts it beside the sources, for use without installing.
"""

import os
import subprocess
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
FLAGS = ["-std=c++17", "-O2", "-g", "-fPIC", "-Wall", "-Wextra", "-Werror=return-type", "-pthread"]
# What each is called in the package, and what it takes beyond the flags. The probe is a program that the core starts.
FILES = {"core": "libpenstock.so", "probe": "penstock_probe"}
OWN_FLAGS = {"core": ["-shared"], "probe": []}
PROBE_SOURCES = ["csrc/probe/main.cpp"]
CORE_SOURCES = sorted({str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/*/*.cpp")} - {*PROBE_SOURCES})


class BuildCore(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        *folders, name = fullname.split(".")
        return str(Path(*folders) / FILES[name])

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        compiler = os.environ.get("CXX", "g++")
        # A new file each time: overwriting a library that a process has mapped would crash that process.
        partial = target.with_suffix(".partial")
        flags = [*FLAGS, *OWN_FLAGS[ext.name.split(".")[-1]]]
        command = [compiler, *flags, "-Icsrc", "-Isrc/penstock/include", *ext.sources, "-o", str(partial), "-ldl"]
        self.announce(" ".join(command), level=2)
        subprocess.run(command, cwd=ROOT, check=True)
        partial.replace(target)


class BuildWheel(bdist_wheel):
    """ctypes opens the core: any Python will do, but one platform only."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[Extension("penstock.core", CORE_SOURCES), Extension("penstock.probe", PROBE_SOURCES)],
    cmdclass={"build_ext": BuildCore, "bdist_wheel": BuildWheel},
)
