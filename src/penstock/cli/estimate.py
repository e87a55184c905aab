"""`penstock estimate`: what a checkpoint will take and how fast it can be, before anything is compiled."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.empty_gpu import GpuRow, empty_gpu
from penstock.cli.output import emit, facts, json_option, line, only_json_on_stdout, table
from penstock.cli.pretrained import DTYPES, check_folder, import_transformers
from penstock.cli.renamed import renamed_option
from penstock.cli.units import bytes_option, rate_option, short_bytes, short_rate
from penstock.errors import InputError

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from penstock.cli.checkpoint_size import CheckpointSize

_ASSUMED_LINK = 25e9
_ASSUMED = "assumed (--link sets it)"
_ASSUMED_DTYPE = "float32"
_DEFAULT_LENGTH = 4096
_SHORTEST_LENGTH, _LONGEST_LENGTH = 2048, 32768
# Activations are counted for a prompt that is read in pieces of this many tokens.
_PROMPT_PIECE = 512
# Outside this range, quotients no longer fit a float.
_COMMON_GPUS_GIB = (4, 6, 8, 10, 12, 16, 24, 32, 40, 48, 80, 96, 141, 192)


@dataclass(frozen=True)
class CacheRow:
    length: int
    nbytes: int


@dataclass(frozen=True)
class BudgetRow:
    what: str
    budget_bytes: int
    # Bytes that cross the link for each token.
    streamed_bytes: int
    # Upper bound. None: the link does not limit it, and the GPU's speed was not given.
    tokens_per_s: float | None
    # The same if only those experts cross the link that a token is routed to.
    routed_tokens_per_s: float | None


@dataclass(frozen=True)
class ExpertsRow:
    experts: int
    per_token: int
    nbytes: int
    # Counts all weights that one token is computed with.
    read_bytes_per_token: int


@dataclass(frozen=True)
class EstimateReport:
    folder: Path
    model: str
    parameters: int
    weight_bytes: int
    bytes_by_dtype: dict[str, int]
    read_bytes_per_token: int
    experts: ExpertsRow | None
    cache_length: int
    cache: tuple[CacheRow, ...]
    # An estimate, and the weights that set it.
    floor_bytes: int
    floor_weights: tuple[str, ...]
    link_bytes_per_s: float
    link_source: str
    memory_bytes_per_s: float | None
    gpu: GpuRow | None
    smallest_gpu_bytes: int
    budgets: tuple[BudgetRow, ...]
    notes: tuple[str, ...]


@click.command(short_help="Show what memory a checkpoint needs.")
@click.argument("folder", type=click.Path(path_type=Path))
@bytes_option("--gpu-memory", help="Memory of the GPU, which need not be in this machine: 12GiB.")
@click.option(
    "--cache-length",
    type=click.IntRange(min=1),
    help="Tokens in the KV cache. Default: 4096, or what the model was made for, if less.",
)
@rate_option(
    "--link", "link_rate", help="Rate of the host link: 12GB/s. Default: measured if there is a GPU, else 25GB/s."
)
@rate_option(
    "--compute-bandwidth", help="Rate of that GPU's memory: 1TB/s. Without it, only the link limits the speed."
)
@renamed_option("--link-gb-per-s")
@renamed_option("--memory-gb-per-s")
@click.option("--dtype", type=click.Choice(DTYPES), help="Default: the checkpoint's.")
@click.option("--trust-remote-code", is_flag=True, help="Run Python code that comes with the checkpoint.")
@json_option
def estimate(
    folder: Path,
    gpu_memory: int | None,
    cache_length: int | None,
    link_rate: float | None,
    compute_bandwidth: float | None,
    dtype: str | None,
    trust_remote_code: bool,
    as_json: bool,
) -> None:
    """Show what memory the transformers checkpoint in FOLDER needs, and how fast it can be. Nothing is compiled.

    Only config.json is needed: no weight is read. You get the bytes of weights and KV cache, the approximate floor, and
    the tokens per second that the link allows at a few budgets, for one conversation at a time.

    \b
    penstock estimate ./Llama-3.1-8B --gpu-memory 12GiB
    penstock estimate ./Llama-3.1-8B --gpu-memory 8GiB --cache-length 16384 --link 12GB/s --json
    """
    check_folder(folder)
    with only_json_on_stdout(as_json):
        transformers = import_transformers("estimate")
        import torch

        from penstock.cli.checkpoint_size import CheckpointSize, config_dtype, read_config

        config = read_config(transformers, folder, trust_remote_code)
        found = getattr(torch, dtype) if dtype else config_dtype(config)
        kind: torch.dtype = found or getattr(torch, _ASSUMED_DTYPE)
        notes = (
            []
            if found
            else [f"config.json names no dtype, so {_ASSUMED_DTYPE} is assumed; give another one with --dtype"]
        )
        if getattr(config, "quantization_config", None):
            notes.append(f"the checkpoint is quantized: weights are counted as {str(kind).removeprefix('torch.')}")
        notes += _refusals(config, transformers.__version__)
        size = CheckpointSize(transformers, config, kind, trust_remote_code=trust_remote_code)
        link, source = _link(link_rate)
        report = estimate_report(folder, size, gpu_memory, cache_length, link, source, compute_bandwidth, notes)
    emit(report, as_json, _show)


def _refusals(config: Any, transformers_version: str) -> list[str]:
    """Why from_pretrained would refuse it. The sizes are right all the same."""
    from penstock.errors import ModelError
    from penstock.models.families import check_family

    try:
        check_family(config.model_type, transformers_version)
    except ModelError as error:
        return [f"generate and chat refuse it: {error}"]
    return []


def estimate_report(
    folder: Path,
    size: CheckpointSize,
    gpu_memory: int | None,
    cache_length: int | None,
    link: float,
    link_source: str,
    memory: float | None,
    notes: list[str],
) -> EstimateReport:
    from penstock.plan.pages import CUDA_PAGE_BYTES

    length = cache_length or min(_DEFAULT_LENGTH, size.max_length or _DEFAULT_LENGTH)
    if size.max_length is not None and length > size.max_length:
        raise InputError(f"--cache-length is {length}; {size.class_name} goes up to {size.max_length} tokens")
    floor = size.floor(CUDA_PAGE_BYTES)
    cache_bytes, activation_bytes = size.cache_bytes(length), _activation_bytes(size, length)
    gpu = None
    if gpu_memory is not None:
        gpu, _ = empty_gpu(
            gpu_memory, activation_bytes=activation_bytes, state_bytes=cache_bytes, needed_bytes=floor.floor_bytes
        )
    experts = size.experts
    notes = [*notes, "the floor is an estimate: it depends on what the compiler makes of the model"]
    if experts is not None:
        notes.append(
            f"each token uses {experts.per_token} of {experts.experts} experts in each layer. Tokens/s is the lower "
            "figure, for a program that reads all experts. The figure for routed experts only assumes the hit rates "
            "that plans begin with"
        )
    return EstimateReport(
        folder=folder,
        model=size.class_name,
        parameters=size.parameters,
        weight_bytes=size.weight_bytes,
        bytes_by_dtype=size.bytes_by_dtype,
        read_bytes_per_token=size.read_bytes,
        experts=None
        if experts is None
        else ExpertsRow(
            experts.experts,
            experts.per_token,
            experts.nbytes,
            size.read_bytes - experts.nbytes + experts.routed_bytes,
        ),
        cache_length=length,
        cache=tuple(CacheRow(one, size.cache_bytes(one)) for one in _lengths(size.max_length, length)),
        floor_bytes=floor.floor_bytes,
        floor_weights=(*floor.pair, *(() if floor.next_copy is None else (floor.next_copy,))),
        link_bytes_per_s=link,
        link_source=link_source,
        memory_bytes_per_s=memory,
        gpu=gpu,
        smallest_gpu_bytes=_smallest_gpu_bytes(floor.floor_bytes + cache_bytes + activation_bytes),
        budgets=_budgets(size, floor.floor_bytes, gpu, link, memory),
        notes=tuple(notes),
    )


def _link(given: float | None) -> tuple[float, str]:
    import torch

    from penstock.cli.children import ChildFailure
    from penstock.cli.doctor_checks import measured_link_bytes_per_s

    if given is not None:
        return given, "as given"
    if not torch.cuda.is_available():
        return _ASSUMED_LINK, f"{_ASSUMED}: there is no GPU to measure it on"
    try:
        return measured_link_bytes_per_s(), "measured on this machine"
    except ChildFailure as failure:
        return _ASSUMED_LINK, f"{_ASSUMED}: measuring it failed: {failure}"


def _lengths(longest: int | None, wanted: int) -> list[int]:
    last = longest or _LONGEST_LENGTH
    found = {wanted, last}
    length = _SHORTEST_LENGTH
    while length < last:
        found.add(length)
        length *= 2
    return sorted(found)


def _activation_bytes(size: CheckpointSize, length: int) -> int:
    """What the widest layer and the logits take. The compiler finds the exact number."""
    config: Any = size.text_config
    hidden = getattr(config, "hidden_size", None) or 0
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    rows = min(length, _PROMPT_PIECE)
    return int(
        rows * (6 * hidden + 2 * inner) * size.dtype.itemsize + 2 * 4 * (getattr(config, "vocab_size", None) or 0)
    )


def _smallest_gpu_bytes(needed_bytes: int) -> int:
    """Iterates, because the reserve is a part of the total that is searched for."""
    import torch

    from penstock.runtime.automatic_budget import reserve_bytes

    total = needed_bytes
    while total < needed_bytes + reserve_bytes(torch.device("cuda"), total):
        total = needed_bytes + reserve_bytes(torch.device("cuda"), total)
    return total


def _budgets(
    size: CheckpointSize, floor_bytes: int, gpu: GpuRow | None, link: float, memory: float | None
) -> tuple[BudgetRow, ...]:
    read = size.read_bytes
    points = {"the floor": floor_bytes}
    points |= {f"{part}% of what is read": read * part // 100 for part in (25, 50, 75)}
    if gpu is not None and gpu.enough:
        points["what the GPU leaves"] = gpu.left_bytes
    points["all that is read"] = read
    rows = [(what, nbytes) for what, nbytes in points.items() if nbytes >= floor_bytes]
    return tuple(_budget(size, what, nbytes, link, memory) for what, nbytes in sorted(rows, key=lambda row: row[1]))


def _budget(size: CheckpointSize, what: str, budget_bytes: int, link: float, memory: float | None) -> BudgetRow:
    from penstock.plan.calibration import lower_bound_s
    from penstock.plan.experts import HitRates

    read, experts = size.read_bytes, size.experts
    resident_s = 0.0 if memory is None else read / memory
    seconds = lower_bound_s(weight_bytes=read, budget_bytes=budget_bytes, resident_s=resident_s, link_bytes_per_s=link)
    routed_s: float | None = None
    if experts is not None:
        dense = read - experts.nbytes
        # What every token reads is kept first. The rest of the budget holds some of the experts, in slots. These are
        # used more often than others: at the hit rate that plans assume if nothing was measured.
        missing_dense = max(0, dense - budget_bytes)
        slots = experts.experts * max(0, budget_bytes - dense) / experts.nbytes
        missing_part = 1 - HitRates.usual(experts.experts).at(slots)
        routed_resident_s = 0.0 if memory is None else (dense + experts.routed_bytes) / memory
        routed_s = max(routed_resident_s, (missing_dense + experts.routed_bytes * missing_part) / link)
    return BudgetRow(
        what=what,
        budget_bytes=budget_bytes,
        streamed_bytes=max(0, read - budget_bytes),
        tokens_per_s=1 / seconds if seconds > 0 else None,
        routed_tokens_per_s=1 / routed_s if routed_s else None,
    )


def _show(to: Console, report: EstimateReport) -> None:
    kinds = ", ".join(f"{short_bytes(nbytes)} of {dtype}" for dtype, nbytes in report.bytes_by_dtype.items())
    rows: list[tuple[str, object]] = [
        ("parameters", f"{report.parameters} ({report.parameters / 1e9:.2f} billion)"),
        ("weights", f"{report.weight_bytes} bytes: {kinds}"),
        ("read per token", f"{short_bytes(report.read_bytes_per_token)}, without tables of which only rows are read"),
    ]
    if report.experts is not None:
        read = short_bytes(report.experts.read_bytes_per_token)
        routed = f"{report.experts.per_token} of {report.experts.experts} experts"
        rows.append(("", f"{read} if only {routed} in each layer are read; the figure above is an upper bound"))
    rows += [
        ("floor", f"about {short_bytes(report.floor_bytes)} (an estimate), set by {', '.join(report.floor_weights)}"),
        ("link", f"{short_rate(report.link_bytes_per_s)}, {report.link_source}"),
    ]
    facts(to, f"{report.folder}: {report.model}", rows)
    table(
        to,
        "\nKV cache",
        (">tokens", ">bytes", ""),
        [(row.length, row.nbytes, short_bytes(row.nbytes)) for row in report.cache],
    )
    _show_budgets(to, report)
    _show_gpu(to, report)
    for note in report.notes:
        line(to, f"note: {note}")


def _show_budgets(to: Console, report: EstimateReport) -> None:
    routed = report.experts is not None
    columns = ("budget", ">bytes", ">streamed per token", ">tokens/s at most", *((">routed only",) if routed else ()))
    rows = [
        (
            row.what,
            short_bytes(row.budget_bytes),
            short_bytes(row.streamed_bytes),
            _rate(row.tokens_per_s),
            *((_rate(row.routed_tokens_per_s),) if routed else ()),
        )
        for row in report.budgets
    ]
    table(to, "\nspeed, one conversation", columns, rows)


def _rate(tokens_per_s: float | None) -> str:
    return "limited by the GPU" if tokens_per_s is None else f"{tokens_per_s:.2f}"


def _show_gpu(to: Console, report: EstimateReport) -> None:
    named = next((gib for gib in _COMMON_GPUS_GIB if gib << 30 >= report.smallest_gpu_bytes), None)
    common = "" if named is None else f": one of {named} GiB"
    smallest = f"about {short_bytes(report.smallest_gpu_bytes)}{common}, with a cache of {report.cache_length} tokens"
    rows: list[tuple[str, object]] = [("smallest GPU", smallest)]
    gpu = report.gpu
    if gpu is not None:
        left = (
            f"{short_bytes(gpu.left_bytes)} for weights, after KV cache {short_bytes(gpu.state_bytes)}, activations "
            f"{short_bytes(gpu.activation_bytes)} (an estimate) and reserve {short_bytes(gpu.reserve_bytes)}"
        )
        fits = "it fits" if gpu.enough else "it does not fit: the floor is larger than what is left"
        if gpu.enough and gpu.left_bytes >= report.read_bytes_per_token:
            fits = "it fits, with every weight resident"
        rows += [(f"{short_bytes(gpu.memory_bytes)} GPU", fits), ("leaves", left)]
    facts(to, "\nGPU", rows)
