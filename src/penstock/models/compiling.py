"""Compiles the methods of a program side by side, each in a process of its own.

Inductor's lowering and code generation run in one Python thread: two methods in one process take twice as long, while
most cores rest.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from penstock import errors
from penstock.errors import CompileError, PenstockError
from penstock.export.catalog import build_catalog, state_names
from penstock.export.compile import compile_program
from penstock.export.method import CompiledMethod, compile_method
from penstock.models.recipe import Recipe
from penstock.temporary import TemporaryFolder

# With fewer cores a second process would only wait for the first.
FEWEST_CORES = 4


def compile_recipe(recipe: Recipe, path: Path, say: Callable[[str], None]) -> None:
    names = recipe.methods.names
    with quiet_torch(), TemporaryFolder("methods") as folder:
        if len(names) < 2 or (os.cpu_count() or 1) < FEWEST_CORES:
            compile_program(recipe.exported(), path, device=recipe.device, inductor_configs=recipe.inductor_configs)
            return
        with _processes(recipe, names, folder) as processes:
            programs = recipe.exported()

            def compiled(name: str) -> CompiledMethod:
                made = _result(processes[name], folder, name)
                say(f"penstock: {name} is compiled")
                return made

            compile_program(
                programs, path, device=recipe.device, inductor_configs=recipe.inductor_configs, compile_with=compiled
            )


@contextmanager
def _processes(recipe: Recipe, names: tuple[str, ...], folder: Path) -> Iterator[Mapping[str, subprocess.Popen[bytes]]]:
    """One process for each method. Whatever ends this, no process outlives it."""
    started: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name in names:
            (folder / f"{name}.recipe").write_bytes(pickle.dumps((recipe, name)))
            command = [sys.executable, "-m", "penstock.models.compiling", str(folder), name]
            started[name] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        yield started
    finally:
        for process in started.values():
            process.kill()
            process.wait()


def _result(process: subprocess.Popen[bytes], folder: Path, name: str) -> CompiledMethod:
    code = process.wait()
    path = folder / f"{name}.result"
    if not path.exists():
        raise CompileError(f"method {name!r}: the process that compiled it ended with {code} and left no result")
    made = pickle.loads(path.read_bytes())
    if isinstance(made, CompiledMethod):
        return made
    kind, text = made
    raise getattr(errors, kind, CompileError)(text)


def main(folder: Path, name: str) -> None:
    """Runs in the process: leaves the compiled method, or what went wrong."""
    recipe, _ = pickle.loads((folder / f"{name}.recipe").read_bytes())
    try:
        with quiet_torch():
            programs = recipe.exported(name)
            catalog = build_catalog(programs)
            weight_names = {target: known for (_, target), known in catalog.name_of.items()}
            made: object = compile_method(
                name,
                programs[name],
                recipe.device,
                state_names(programs),
                weight_names,
                folder,
                recipe.inductor_configs,
                split_linear=False,
            )
    except PenstockError as error:
        made = (type(error).__name__, str(error))
    except Exception:
        made = ("CompileError", f"method {name!r}: {traceback.format_exc(limit=-3)}")
    scratch = folder / f"{name}.partial"
    scratch.write_bytes(pickle.dumps(made))
    scratch.rename(folder / f"{name}.result")


@contextmanager
def quiet_torch() -> Iterator[None]:
    with warnings.catch_warnings():
        # Raised inside torch while it copies a program.
        warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
        yield


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
