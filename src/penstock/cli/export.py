"""`penstock export`: from a function that makes a model to a program file and a weights file."""

from __future__ import annotations

import importlib
import os
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.interrupt import private_temporary_files
from penstock.cli.output import console, emit, facts, json_option, line, only_json_on_stdout
from penstock.cli.units import budget_option, short_bytes, short_time
from penstock.errors import CheckpointError, OutputExistsError, PenstockError, ProgramError
from penstock.regular_file import open_regular

if TYPE_CHECKING:
    from rich.console import Console
    from torch.export import ExportedProgram


@dataclass(frozen=True)
class ExportReport:
    program_path: Path
    weights_path: Path
    program_bytes: int
    weights_bytes: int
    methods: tuple[str, ...]
    floor_bytes: int
    trace_s: float
    compile_s: float


@click.command(short_help="Compile a model into a program file and a weights file.")
@click.argument("target", metavar="[MODULE:FUNCTION]", required=False)
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="model.pt2, or model.pte.")
@click.option(
    "--method",
    "methods",
    multiple=True,
    metavar="NAME=MODULE:FUNCTION",
    help="A further method over the same weights; may be repeated.",
)
@click.option("--weights", type=click.Path(path_type=Path), help="Values: a .safetensors file, or a folder of them.")
@click.option("--device", help="cpu or cuda[:n], wherever the model sits. Default: cuda where there is a GPU.")
@budget_option(help="A default budget to bake in: 8GiB.")
@click.option("--overwrite", is_flag=True, help="Replace existing files.")
@click.option(
    "--split-linear",
    is_flag=True,
    help="Multiply bf16 and fp16 weights with Penstock's own kernel, which can read part of a weight in host memory.",
)
@click.option("--pack", is_flag=True, help="Write the weights packed, without loss: see penstock pack.")
@json_option
def export(
    target: str | None,
    output: Path,
    methods: tuple[str, ...],
    weights: Path | None,
    device: str | None,
    budget: int | None,
    overwrite: bool,
    split_linear: bool,
    pack: bool,
    as_json: bool,
) -> None:
    """Export what MODULE:FUNCTION returns, and compile it into OUTPUT and the .ptd beside it.

    FUNCTION takes no arguments and returns (model, args), (model, args, kwargs), or a torch.export.ExportedProgram. A
    model is put into eval mode and exported for these arguments; for dynamic shapes, return an ExportedProgram. The
    functions of several methods should return the same model. The current folder is searched for MODULE first.

    \b
    penstock export mymodel:small -o model.pt2
    penstock export mymodel:on_meta -o model.pt2 --weights checkpoint/ --device cuda
    penstock export --method prefill=mymodel:prefill --method decode=mymodel:decode -o model.pt2
    penstock export mymodel:on_meta -o model.pte --weights checkpoint/ --pack
    """
    from penstock.export.compile import output_paths
    from penstock.export.target import target_device

    if output.suffix not in (".pt2", ".pte"):
        raise click.BadParameter(f"{output} must end in .pt2 or .pte", param_hint="--output")
    named = _named(target, methods)
    try:
        output_paths(output, output.suffix, overwrite)
    except OutputExistsError as error:
        raise OutputExistsError(str(error).replace("overwrite=True", "--overwrite")) from error
    if weights is not None and not weights.is_dir():
        open_regular(weights, CheckpointError).close()
    target_device(device)
    options = {
        "device": device,
        "weights": weights,
        "weight_offload_budget": budget,
        "overwrite": overwrite,
        "split_linear": split_linear,
        "pack": pack,
    }
    with only_json_on_stdout(as_json), private_temporary_files(), warnings.catch_warnings():
        # Raised inside torch while it copies a program.
        warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
        report = _export(named, output, options)
    emit(report, as_json, _show)


def _named(target: str | None, methods: tuple[str, ...]) -> dict[str, str]:
    named = {} if target is None else {"forward": target}
    for text in methods:
        name, _, function = text.partition("=")
        if not name or not function:
            raise click.BadParameter(f"{text!r} is not NAME=MODULE:FUNCTION", param_hint="--method")
        if name in named:
            raise click.BadParameter(f"method {name!r} is given twice", param_hint="--method")
        named[name] = function
    if not named:
        raise click.UsageError("nothing to export: give MODULE:FUNCTION, or --method NAME=MODULE:FUNCTION")
    return named


def _export(named: dict[str, str], output: Path, options: dict[str, Any]) -> ExportReport:
    import penstock

    screen = console(stderr=True)
    began_s = time.perf_counter()
    programs: dict[str, ExportedProgram] = {}
    for number, (name, text) in enumerate(named.items(), 1):
        line(screen, f"[{number}/{len(named)}] exporting {name} from {text}")
        function = _function(text)
        with _users_code(text):
            returned = function()
        programs[name] = penstock.apply_weight_offload(_exported(returned, text))
    traced_s = time.perf_counter()
    line(screen, f"compiling {', '.join(programs)}; exporting took {short_time(traced_s - began_s)}")
    if output.suffix == ".pte":
        import penstock.executorch

        lowered = penstock.executorch.export(programs, output, **options)
        weights_path, floor_bytes = lowered.weights_path, lowered.floor_bytes
    else:
        compiled = penstock.compile(programs, output, **options)
        weights_path, floor_bytes = compiled.weights_path, compiled.program.floor_bytes
    return ExportReport(
        program_path=output,
        weights_path=weights_path,
        program_bytes=output.stat().st_size,
        weights_bytes=weights_path.stat().st_size,
        methods=tuple(programs),
        floor_bytes=floor_bytes,
        trace_s=traced_s - began_s,
        compile_s=time.perf_counter() - traced_s,
    )


def _function(text: str) -> Any:
    module_name, _, function_name = text.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), function_name)):
        raise click.BadParameter(f"{text!r} is not MODULE:FUNCTION, as in mymodel:small")
    if str(Path.cwd()) not in sys.path:
        # As `python -m` does; an installed command starts without it.
        sys.path.insert(0, str(Path.cwd()))
    with _users_code(text):
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise  # the module is there, and lacks something itself
            raise click.BadParameter(f"there is no module {module_name!r} in {Path.cwd()}, or installed") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise click.BadParameter(
            f"{module_name} ({getattr(module, '__file__', 'built in')}) has no function {function_name!r}"
        )
    return function


@contextmanager
def _users_code(text: str) -> Iterator[None]:
    """Reports whatever the user's code raises, sys.exit() included, as a fault of the model, with its place."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, (PenstockError, click.ClickException)):
            raise
        what = f"exits (sys.exit({error.code!r}))" if isinstance(error, SystemExit) else _raised_text(error)
        raise ProgramError(
            f"{text} cannot be exported: it {what}{_place(error)}; PENSTOCK_TRACEBACK=1 shows the whole traceback"
        ) from error


def _raised_text(error: Exception) -> str:
    first = next(iter(str(error).splitlines()), "")
    return f"raised {type(error).__name__}: {first:.400}" if first else f"raised {type(error).__name__}"


def _place(error: BaseException) -> str:
    """The innermost line that is neither ours nor of the libraries that we call."""
    import torch

    others = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent), str(Path(importlib.__file__).parent))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(others)]
    frames = [frame for frame in frames if not frame.filename.startswith("<")]
    return f" ({frames[-1].filename}, line {frames[-1].lineno}, in {frames[-1].name})" if frames else ""


def _exported(returned: Any, text: str) -> ExportedProgram:
    import torch

    from penstock.errors import NotAProgramError

    if isinstance(returned, torch.export.ExportedProgram):
        return returned
    is_call = isinstance(returned, tuple) and len(returned) in (2, 3) and isinstance(returned[0], torch.nn.Module)
    if not is_call or not isinstance(returned[1], (tuple, list)) or not isinstance((*returned, {})[2], dict):
        raise NotAProgramError(
            f"{text} returned {_shape_of(returned)}; it must return (model, args), (model, args, kwargs) with args a "
            "tuple and kwargs a dict, or a torch.export.ExportedProgram"
        )
    model, arguments, keywords = (*returned, {})[:3]
    with _users_code(text), torch.no_grad():
        return torch.export.export(model.eval().requires_grad_(False), tuple(arguments), dict(keywords))


def _shape_of(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(type(part).__name__ for part in value)})"
    return f"a {type(value).__name__}"


def _show(to: Console, report: ExportReport) -> None:
    facts(
        to,
        "",
        [
            ("program", f"{report.program_path}, {short_bytes(report.program_bytes)}: {', '.join(report.methods)}"),
            ("weights", f"{report.weights_path}, {short_bytes(report.weights_bytes)}"),
            ("floor", f"{report.floor_bytes} bytes ({short_bytes(report.floor_bytes)})"),
            ("exported in", short_time(report.trace_s)),
            ("compiled in", short_time(report.compile_s)),
            ("next", f"penstock inspect {os.fspath(report.program_path)}"),
        ],
    )
