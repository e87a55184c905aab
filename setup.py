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
LIBRARY = "libpenstock.so"
FLAGS = ["-std=c++17", "-O2", "-g", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror=return-type", "-pthread"]


class BuildCore(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")[:-1]) / LIBRARY)

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        compiler = os.environ.get("CXX", "g++")
        # A new file each time: overwriting a library that a process has mapped would crash that process.
        partial = target.with_suffix(".partial")
        command = [compiler, *FLAGS, "-Icsrc", "-Isrc/penstock/include", *ext.sources, "-o", str(partial), "-ldl"]
        self.announce(" ".join(command), level=2)
        subprocess.run(command, cwd=ROOT, check=True)
        partial.replace(target)


class BuildWheel(bdist_wheel):
    """ctypes opens the core: any Python will do, but one platform only."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[Extension("penstock.core", sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("csrc/*/*.cpp")))],
    cmdclass={"build_ext": BuildCore, "bdist_wheel": BuildWheel},
)
