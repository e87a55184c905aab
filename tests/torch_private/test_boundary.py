"""Private interfaces of torch are used in penstock.torch_private alone; C++ sources use what is listed there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from penstock.torch_private import c_abi

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src/penstock"
LIBRARY = Path(torch.__file__).parent

# Methods of named tuples, which have an underscore so that no field can have their name.
NAMED_TUPLES = {"_replace", "_asdict", "_fields", "_make"}
# executorch's own, whose version pyproject.toml bounds to one minor release. Each is tried by tests/executorch.
EXECUTORCH = {"_op", "_tensor_data"}
# Words of the text that Inductor writes, of its archives, and of specs as torch dumps them.
GENERATED = re.compile(
    r"AtenTensorHandle|aoti_torch_|AOTInductorModel|run_impl|constants_info_|wrapper\.cpp|data/aotinductor|treespec"
)


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def dotted(node: ast.AST) -> list[str]:
    """The parts of a.b.c; none where it does not begin with a name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [node.id, *reversed(parts)] if isinstance(node, ast.Name) else []


def own_names(tree: ast.Module) -> set[str]:
    """Private names that the module gives itself: methods, classes, fields, attributes of self."""
    own: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            own.add(node.target.id)
        elif isinstance(node, ast.Attribute) and dotted(node)[:1] in (["self"], ["cls"]):
            own.add(dotted(node)[1])
    return own


def docstrings(tree: ast.Module) -> set[int]:
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            found.add(id(node.value))
    return found


def uses(text: str) -> Iterator[tuple[int, str]]:
    """Line and words of what a module may not have."""
    tree = ast.parse(text)
    own, told = own_names(tree), docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                if parts[0] in ("torch", "functorch") and (parts[0] == "functorch" or any(map(is_private, parts))):
                    yield node.lineno, f"import {alias.name}"
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            parts = (node.module or "").split(".")
            for alias in node.names:
                whole = [*parts, alias.name]
                if parts[0] == "functorch" or (parts[0] == "torch" and any(map(is_private, whole))):
                    yield node.lineno, f"from {node.module} import {alias.name}"
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            parts = dotted(node)
            # The names of operators are registered; those with an underscore, too.
            if parts[:2] == ["torch", "ops"]:
                continue
            if parts[:1] in (["self"], ["cls"]) and len(parts) == 2:
                continue
            known = node.attr in own | NAMED_TUPLES | EXECUTORCH or parts[:1] == ["_ATEN"]  # torch.ops.aten
            if parts[:1] == ["torch"] or not known:
                yield node.lineno, ".".join(parts) or f"….{node.attr}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told:
            found = GENERATED.search(node.value)
            if found:
                yield node.lineno, repr(found.group())


# The one place for transformers' own; tests/models try each.
TRANSFORMERS = SOURCES / "models/transformers_private.py"


def modules() -> list[Path]:
    apart = SOURCES / "torch_private"
    found = [path for path in sorted(SOURCES.rglob("*.py")) if apart not in path.parents and path != TRANSFORMERS]
    assert len(found) > 100
    return found


def test_only_torch_private_uses_private_interfaces() -> None:
    broken = [f"{path.relative_to(ROOT)}:{line}: {what}" for path in modules() for line, what in uses(path.read_text())]
    assert not broken, "move it into penstock.torch_private:\n" + "\n".join(broken)


def test_transformers_private_uses_nothing_of_torch_s() -> None:
    words = [what for _, what in uses(TRANSFORMERS.read_text())]
    assert words and not [what for what in words if what.startswith(("torch", "import", "from"))]


@pytest.mark.parametrize(
    "code",
    [
        "import torch._inductor",
        "import torch.utils._pytree as p",
        "from torch import _C",
        "from torch._ops import OpOverload",
        "from torch.utils._pytree import tree_map",
        "from torch.export.pt2_archive import _package",
        "def f():\n    from torch.fx.experimental._config import x",
        "import functorch",
        "import torch\ntorch._C._aoti",
        "import torch\ntorch.utils._pytree.tree_map(1)",
        "import torch\ntorch.nn.Module._call_impl",
        "def name(op):\n    return op._schema.name",
        "def spec(module):\n    module._in_spec = 1",
        "def root(graph):\n    graph.nodes[0]._prev = None",
        "def key(tensor):\n    return tensor.untyped_storage()._cdata",
        'WORD = r"RAIIAtenTensorHandle\\s"',
        'def read(name):\n    return f"/data/aotinductor/{name}/"',
    ],
)
def test_the_scan_finds(code: str) -> None:
    assert list(uses(code))


@pytest.mark.parametrize(
    "code",
    [
        "import torch\ntorch.__version__",
        "import torch\ntorch.ops.aten._to_copy.default",
        "class A:\n    def _f(self):\n        return self._f\n    def g(self, other):\n        return other._f",
        "def f(row):\n    return row._replace(a=1)",
        '"""It reads aoti_torch_ names."""',
    ],
)
def test_the_scan_leaves_alone(code: str) -> None:
    assert not list(uses(code))


def test_the_core_uses_the_functions_that_are_listed() -> None:
    listed = {*c_abi.CORE_CPU_FUNCTIONS, *c_abi.CUDA_FUNCTIONS}
    named: set[str] = set()
    for path in (*(ROOT / "csrc").rglob("*.cpp"), *(SOURCES / "executorch/csrc").glob("*.cpp")):
        named |= set(re.findall(r'"(aoti_torch_\w+)"', path.read_text()))
    assert named == listed


def test_libtorch_has_the_functions_that_are_listed() -> None:
    # By the table of names: libtorch_cuda cannot be opened where there is no driver.
    for library, names in (("libtorch_cpu.so", c_abi.CORE_CPU_FUNCTIONS), ("libtorch_cuda.so", c_abi.CUDA_FUNCTIONS)):
        path = LIBRARY / "lib" / library
        if library == "libtorch_cuda.so" and not path.exists():
            continue
        data = path.read_bytes()
        missing = [name for name in names if b"\0" + name.encode() + b"\0" not in data]
        assert not missing, f"{library} lacks {missing}"


def test_the_delegate_includes_the_headers_that_are_listed() -> None:
    included: set[str] = set()
    for path in (SOURCES / "executorch/csrc").glob("*"):
        included |= set(re.findall(r"#include <((?:ATen|c10|torch)/[^>]+)>", path.read_text()))
    assert included == set(c_abi.DELEGATE_HEADERS)
    for path in (ROOT / "csrc").glob("*/*"):
        assert not re.search(r"#include <(?:ATen|c10|torch)/", path.read_text()), path


@pytest.mark.parametrize("header", sorted({*c_abi.DELEGATE_HEADERS, *c_abi.DELEGATE_NAMES}))
def test_torch_has_the_headers_that_are_listed(header: str) -> None:
    folders = (LIBRARY / "include", LIBRARY / "include/torch/csrc/api/include")
    text = next(folder / header for folder in folders if (folder / header).exists()).read_text()
    missing = [name for name in c_abi.DELEGATE_NAMES.get(header, ()) if name not in text]
    assert not missing, f"{header} has no {missing}"
