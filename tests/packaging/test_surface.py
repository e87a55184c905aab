"""What users import is typed and says what it does."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import penstock
import penstock.errors
from penstock.native import core, library_path

ROOT = Path(__file__).parents[2]


def public_classes() -> list[type]:
    found = [getattr(penstock, name) for name in penstock.__all__]
    errors = [value for _, value in inspect.getmembers(penstock.errors, inspect.isclass)]
    return [value for value in [*found, *errors] if inspect.isclass(value) and value.__module__.startswith("penstock")]


def public_functions() -> Iterator[tuple[str, Any]]:
    """Functions, and the methods and properties that a public class or a base of it among ours defines."""
    for name in penstock.__all__:
        value = getattr(penstock, name)
        if inspect.isfunction(value):
            yield name, value
    for kind in public_classes():
        ours = [base for base in reversed(kind.__mro__) if base.__module__.startswith("penstock")]
        for name, member in {name: member for base in ours for name, member in vars(base).items()}.items():
            if name.startswith("_") and name not in ("__call__", "__init__"):
                continue
            function = member.fget if isinstance(member, property) else getattr(member, "func", member)
            function = inspect.unwrap(function) if callable(function) else function
            # A dataclass writes its own __init__, of fields that say for themselves.
            if inspect.isfunction(function) and not (dataclasses.is_dataclass(kind) and name == "__init__"):
                yield f"{kind.__name__}.{name}", function


def test_everything_listed_is_there_and_listed_in_order() -> None:
    assert list(penstock.__all__) == sorted(penstock.__all__)
    for name in penstock.__all__:
        assert getattr(penstock, name) is not None
        assert name in dir(penstock)


def test_every_public_class_says_what_it_is() -> None:
    kinds = public_classes()
    assert [kind.__name__ for kind in kinds if not (vars(kind).get("__doc__") or "").strip()] == []
    assert penstock.Module in kinds and penstock.Compiled in kinds and penstock.errors.BelowFloorError in kinds


def test_every_public_function_is_typed() -> None:
    untyped = []
    for name, function in public_functions():
        signature = inspect.signature(function)
        named = [parameter for parameter in signature.parameters.values() if parameter.name not in ("self", "cls")]
        missing = [parameter.name for parameter in named if parameter.annotation is inspect.Parameter.empty]
        if signature.return_annotation is inspect.Signature.empty:
            missing.append("return")
        untyped += [f"{name}: {part}" for part in missing]
    assert not untyped


def test_every_public_function_says_what_it_does() -> None:
    """Of an __init__, the class speaks."""
    found = [(name, function) for name, function in public_functions() if not name.endswith(".__init__")]
    assert [name for name, function in found if not (function.__doc__ or "").strip()] == []
    assert {"compile", "apply_weight_offload", "Module.run_method", "Module.set_budget"} <= {name for name, _ in found}


def test_the_marker_for_type_checkers_is_packed() -> None:
    assert (ROOT / "src/penstock/py.typed").exists()
    assert '"py.typed"' in (ROOT / "pyproject.toml").read_text()


def test_the_core_has_nothing_that_only_tests_call() -> None:
    """They have a library of their own: tests/native/library.py."""
    for name in ("penstock_test_wrap", "penstock_soft_fail_at", "penstock_soft_counts", "penstock_soft_launch"):
        assert not hasattr(core(), name), name
    exported = set(re.findall(rb"\0(penstock_soft_\w+)\0", library_path().read_bytes()))
    assert exported == {b"penstock_soft_create", b"penstock_soft_error"}
