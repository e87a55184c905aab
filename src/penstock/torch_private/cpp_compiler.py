"""Which C++ compiler Inductor will call."""

from __future__ import annotations


def cpp_compiler() -> str:
    """The C++ compiler that Inductor will call. RuntimeError or OSError from Inductor's search if there is none.

    Inductor reads CXX once, when its configuration is imported: a later change of the variable has no effect.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler

    return get_cpp_compiler()
