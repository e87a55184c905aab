"""The same model compiled by AOTInductor as it is, every weight on the device: what our program costs beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
from torch import Tensor

from bench.suite.model import Decoder, ModelShape, inputs, load
from bench.suite.result import Traffic
from bench.suite.systems.system import Facts, Opened, Setting, System

_WARM_UP_RUNS = 3


def plain_program_path(folder: Path, tokens: int) -> Path:
    return folder / f"plain-t{tokens}.pt2"


def compile_plain(shape: ModelShape, tokens: int, device: str, weights: Path) -> None:
    model = load(shape, weights, lambda tensor: tensor.to(device))
    with torch.no_grad():
        program = torch.export.export(model, (inputs(shape, tokens, device),))
    path = plain_program_path(weights.parent, tokens)
    unfinished = path.with_name(f"unfinished-{path.name}")
    torch._inductor.aoti_compile_and_package(
        program,
        package_path=str(unfinished),
        # The weights are given at load: there is no second file of them all.
        inductor_configs={"aot_inductor.package_constants_in_so": False},
    )
    unfinished.rename(path)


def _open(*, cuda_graph: bool) -> Callable[[Setting], AbstractContextManager[Opened]]:
    @contextmanager
    def opened(setting: Setting) -> Iterator[Opened]:
        model: Decoder = load(setting.shape, setting.weights_path, lambda tensor: tensor.to(setting.device))
        # Single-threaded: without the waits of a pool of runners, and so that it can be captured.
        program = torch._inductor.aoti_load_package(
            str(plain_program_path(setting.folder, setting.tokens)), run_single_threaded=True
        )
        program.load_constants(dict(model.state_dict()), check_full_update=True, user_managed=True)
        facts = Facts(Traffic(0, "by construction"), weights_peak_bytes=sum(p.nbytes for p in model.parameters()))
        forward = _captured(program, setting) if cuda_graph else program
        yield Opened(forward, lambda: facts)

    return opened


def _captured(program: Callable[[Tensor], Tensor], setting: Setting) -> Callable[[Tensor], Tensor]:
    given = inputs(setting.shape, setting.tokens, setting.device)
    side = torch.cuda.Stream(setting.device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(setting.device))
    with torch.cuda.stream(side):
        for _ in range(_WARM_UP_RUNS):
            program(given)
    torch.cuda.current_stream(setting.device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # Of this thread alone: the one that samples the device's memory goes on.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        made = program(given)

    def forward(x: Tensor) -> Tensor:
        given.copy_(x)
        graph.replay()
        return made.clone()  # the next replay writes into it

    return forward


COMPILED = System(
    "aotinductor",
    "AOTInductor, resident",
    _open(cuda_graph=False),
    shares_process=True,
    asynchronous=True,
)
COMPILED_GRAPH = System(
    "aotinductor-graph",
    "AOTInductor, resident, graph",
    _open(cuda_graph=True),
    shares_process=True,
    asynchronous=True,
    needs_cuda="graphs are of CUDA",
)
